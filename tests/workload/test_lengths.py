"""Length distributions: their moments, and how near a preset comes to the data it was measured on."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from hypothesis import given
from hypothesis import strategies as st

from kvsim.types import ScenarioError
from kvsim.workload.lengths import draw_lengths, preset, preset_names
from kvsim.workload.spec import LengthsSpec
from kvsim.workload.streams import stream

MEASURED = {
    "sharegpt": ("sharegpt_v3_lengths_paperlike.csv", "prompt_tokens", "output_tokens"),
    "sharegpt_vllm_filter": ("sharegpt_v3_lengths_vllmfilter.csv", "prompt_tokens", "output_tokens"),
    "alpaca": ("alpaca_subset_lengths.csv", "prompt_tokens", "output_tokens"),
    "azure_conv": ("azure2023/AzureLLMInferenceTrace_conv.csv", "ContextTokens", "GeneratedTokens"),
    "mooncake_conversation": ("mooncake/conversation_trace.jsonl", "input_length", "output_length"),
    "arxiv_summarization": (
        "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.every10th.csv",
        "num_prefill_tokens",
        "num_decode_tokens",
    ),
}


def draw(num: int = 40_000, seed: int = 1, **keys: object) -> tuple[np.ndarray, np.ndarray]:
    return draw_lengths(LengthsSpec(**keys), stream(seed, "lengths"), num)  # type: ignore[arg-type]


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(first, second)[0])


def measured_pairs(path: Path, prompt: str, output: str) -> np.ndarray:
    with path.open() as lines:
        rows = map(json.loads, lines) if path.suffix == ".jsonl" else csv.DictReader(lines)
        return np.array([(int(row[prompt]), int(row[output])) for row in rows])


def test_fixed_and_uniform() -> None:
    prompts, outputs = draw(10, type="fixed", prompt=100, output=7)
    assert set(prompts) == {100}
    assert set(outputs) == {7}
    prompts, outputs = draw(type="uniform", prompt=(3, 5), output=(1, 1))
    assert [int((prompts == length).sum()) for length in (3, 4, 5)] == pytest.approx([13_333] * 3, rel=0.05)
    assert set(outputs) == {1}


def test_the_benchmark_normal() -> None:
    prompts, outputs = draw(type="normal", prompt_mean=512, prompt_std=128, output_mean=256, output_std=64)
    assert (prompts.mean(), prompts.std()) == (pytest.approx(512, rel=0.01), pytest.approx(128, rel=0.02))
    assert (outputs.mean(), outputs.std()) == (pytest.approx(256, rel=0.01), pytest.approx(64, rel=0.02))
    clipped, _ = draw(type="normal", prompt_mean=2, prompt_std=50, output_mean=1)
    assert clipped.min() == 1


def test_lognormal_takes_the_moments_of_the_lengths() -> None:
    prompts, outputs = draw(type="lognormal", prompt_mean=161.31, prompt_std=180, output_mean=338, output_std=372)
    assert (prompts.mean(), prompts.std()) == (pytest.approx(161.31, rel=0.02), pytest.approx(180, rel=0.05))
    assert (outputs.mean(), outputs.std()) == (pytest.approx(338, rel=0.02), pytest.approx(372, rel=0.05))


@pytest.mark.parametrize("rho", [-0.8, -0.3, 0.5])
@pytest.mark.parametrize(
    "shape",
    [
        {"type": "lognormal", "prompt_mean": 900, "prompt_std": 900, "output_mean": 900, "output_std": 900},
        {"type": "uniform", "prompt": (1, 5000), "output": (1, 5000)},
    ],
)
def test_a_correlation_is_met(rho: float, shape: dict[str, object]) -> None:
    assert spearman(*draw(correlation=rho, **shape)) == pytest.approx(rho, abs=0.02)


def test_all_presets_are_there() -> None:
    assert preset_names() == sorted(MEASURED)


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_a_preset_gives_its_own_figures(name: str) -> None:
    table = preset(name)
    prompts, outputs = draw(200_000, type="preset", name=name)
    assert prompts.mean() == pytest.approx(table.prompt_mean, rel=0.01)
    assert outputs.mean() == pytest.approx(table.output_mean, rel=0.01)
    assert spearman(prompts, outputs) == pytest.approx(table.spearman, abs=0.01)
    assert int(table.copula.sum()) == table.num_pairs
    assert table.source


@needs_shared
@pytest.mark.parametrize("name", sorted(MEASURED))
def test_a_preset_is_near_the_data(name: str) -> None:
    """Means within 1 %, deviations within 2 %, the quantiles within 2 % or one token, the deviation of the sum 10 %."""
    path, *columns = MEASURED[name]
    data = measured_pairs(SHARED / "data/traces" / path, *columns)
    drawn = np.stack(draw(200_000, type="preset", name=name), axis=1)
    assert drawn.mean(axis=0) == pytest.approx(data.mean(axis=0), rel=0.01)
    assert drawn.std(axis=0) == pytest.approx(data.std(axis=0), rel=0.02)
    for level in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert np.quantile(drawn, level, axis=0) == pytest.approx(np.quantile(data, level, axis=0), rel=0.02, abs=1)
    assert drawn.sum(axis=1).std() == pytest.approx(data.sum(axis=1).std(), rel=0.10)
    assert spearman(drawn[:, 0], drawn[:, 1]) == pytest.approx(spearman(data[:, 0], data[:, 1]), abs=0.015)


def test_a_preset_can_be_rescaled() -> None:
    prompts, outputs = draw(200_000, type="preset", name="sharegpt", prompt_mean=161.31, output_mean=337.99)
    assert prompts.mean() == pytest.approx(161.31, rel=0.01)
    assert outputs.mean() == pytest.approx(337.99, rel=0.01)


def test_max_total_drops_long_pairs() -> None:
    prompts, outputs = draw(5000, type="preset", name="sharegpt", max_total=2048)
    assert len(prompts) == 5000
    assert (prompts + outputs).max() <= 2048


SPECS = [
    {"type": "preset", "name": "alpaca"},
    {"type": "preset", "name": "alpaca", "max_total": 60},
    {"type": "uniform", "prompt": (1, 9), "output": (1, 9)},
    {"type": "normal", "prompt_mean": 9, "prompt_std": 3, "output_mean": 9, "output_std": 3},
]


@given(spec=st.sampled_from(SPECS), short=st.integers(1, 60), more=st.integers(1, 60), seed=st.integers(0, 99))
def test_longer_runs_begin_like_shorter_ones(spec: dict[str, object], short: int, more: int, seed: int) -> None:
    few, many = draw(short, seed, **spec), draw(short + more, seed, **spec)
    assert all((a == b[:short]).all() for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        {"type": "fixed", "prompt": 0, "output": 1},
        {"type": "fixed", "output": 1},
        {"type": "fixed", "prompt": (1, 2)},
        {"type": "uniform", "prompt": (5, 3), "output": (1, 1)},
        {"type": "uniform", "prompt": 5, "output": (1, 1)},
        {"type": "normal", "prompt_mean": 5},
        {"type": "normal", "prompt_mean": float("nan"), "output_mean": 5},
        {"type": "normal", "prompt_mean": 5, "prompt_std": -1, "output_mean": 5},
        {"type": "preset", "name": "sharegtp"},
        {"type": "preset", "name": "alpaca", "correlation": 0.5},
        {"type": "preset", "name": "alpaca", "prompt_mean": 0},
        {"type": "preset", "max_total": 1},
        {"type": "other"},
        {"type": "lognormal", "prompt_mean": 5, "output_mean": 5, "correlation": 2},
    ],
)
def test_nonsense_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ScenarioError, match="lengths"):
        draw(10, **keys)


def test_a_misspelt_preset_is_recognised() -> None:
    with pytest.raises(ScenarioError, match="did you mean 'sharegpt'"):
        draw(1, type="preset", name="sharegtp")
