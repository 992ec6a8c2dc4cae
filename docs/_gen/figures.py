"""Draw the pictures of the documentation into docs/img.

python docs/_gen/figures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvsim
from kvsim import plots

ROOT = Path(__file__).resolve().parents[2]
IMG = ROOT / "docs" / "img"
sys.path.insert(0, str(ROOT / "notebooks"))

import draw  # noqa: E402


def main() -> None:
    """Every picture, from the quickstart and from toy examples."""
    IMG.mkdir(exist_ok=True)
    figures = {
        "waste": draw.waste([("A", 3, 5, 8), ("B", 6, 7, 8)], 20, hole_is_lost=True),
        "tables": draw.block_tables({"A": [0, 2], "B": [0, 1]}, {"A": 7, "B": 7}, 6, 4),
        "rounds": draw.rounds(
            {"static": [("A", "B"), ("A",), ("A",), ("C",), ("C",)], "continuous": [("A", "B"), ("A", "C"), ("A", "C")]}
        ),
    }
    compared = kvsim.compare(ROOT / "scenarios" / "quickstart.yaml")
    figures["compare"] = plots.compare_memory(compared.table)
    figures["running"] = plots.compare_running(compared.table)
    for engine in ("paged", "orca-max"):
        figures[f"memory-{engine}"] = compared.runs[engine].plot.memory()
    swept = kvsim.sweep(
        ROOT / "scenarios" / "quickstart.yaml", {"allocator.block_size": [8, 16, 32, 64, 128]}, jobs=1, seeds=1
    )
    figures["block-size"] = plots.sweep_curves(swept.table, "allocator.block_size", "block_utilization")
    for name, figure in figures.items():
        plots.save(figure, IMG / f"{name}.png")


if __name__ == "__main__":
    main()
