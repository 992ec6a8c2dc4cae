"""The roofline says what it is, and what it does not know of the model."""

from __future__ import annotations

import pytest

from kvsim.catalog import load_model
from kvsim.cost.kernels import KernelCost
from kvsim.cost.roofline import roofline_cost


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b", "llama-3.1-8b"])
def test_notes_on_the_model_are_those_of_the_kernels(name: str) -> None:
    model = load_model(name)
    first, *notes = roofline_cost(model, peak_tflops=989.4, memory_bandwidth_gb_s=3350).warnings()
    assert "not calibrated" in first
    shown = "\n".join(KernelCost.from_profile("h100", model).warnings())
    assert bool(notes) == (name != "llama-3.1-8b")
    for note in notes:
        assert note.removeprefix("cost model roofline: ") in shown
