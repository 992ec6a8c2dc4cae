"""What advice writes: a page, its pictures, every run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvsim.advise.advise import Advice
from kvsim.advise.report import markdown
from kvsim.metrics.export import write_json, write_records
from kvsim.metrics.outdir import output_dir
from kvsim.scenario.resolve import ResolvedScenario


def write_advice(advice: Advice, base: ResolvedScenario, out: Path, *, plots: bool, force: bool = False) -> Advice:
    """advice.md, advice.json, runs.csv, scenario.yaml and pictures: all of it, or nothing. Raises ScenarioError."""
    with output_dir(out, "advise", force=force) as folder:
        pictures: dict[str, str] = {}
        if plots:
            from kvsim.advise.pictures import draw

            pictures = draw(advice, folder)
        (folder / "advice.md").write_text(markdown(advice, pictures), encoding="utf-8")
        write_json(folder / "advice.json", advice.as_dict())
        write_records(folder / "runs.csv", _records(advice))
        (folder / "scenario.yaml").write_text(base.to_yaml(), encoding="utf-8")
    return replace(advice, out=out)


def _records(advice: Advice) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for run in advice.runs:
        changed = ", ".join(f"{name}={value}" for name, value in run.values.items())
        first: dict[str, object] = {"run": run.number, "topic": run.topic, "changed": changed, "seed": run.seed}
        first |= {"meet_slo": run.attainment, "error": run.error}
        records.append(first | {name: value for name, value in run.summary.items() if name not in first})
    return records
