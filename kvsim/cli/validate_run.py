"""`kvsim validate-run`"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli import console
from kvsim.cli.options import Json, NoPlots, check_input, check_output

if TYPE_CHECKING:
    from kvsim.validate_run import Comparison


def command(
    run_dir: Annotated[
        Path, Argument(help="A recorded run: meta.json, requests.jsonl, timeseries.csv.", show_default=False)
    ],
    workload: Annotated[
        Path,
        Option("--workload", help="The requests of that run: JSONL with lengths and block ids.", show_default=False),
    ],
    gpu: Annotated[str | None, Option("--gpu", help="The GPU, where the run does not say.", show_default=False)] = None,
    profile: Annotated[
        str | None, Option("--profile", help="A cost profile; default: the GPU's.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, Option("--model", help="Another name or config.json of the model.", show_default=False)
    ] = None,
    fit: Annotated[
        bool, Option("--fit", help="Also fit the engine's overhead per step to this run, and show both.")
    ] = False,
    plot: Annotated[Path, Option("--plot", help="The picture: running, waiting and KV usage over time.")] = Path(
        "validate-run.png"
    ),
    no_plots: NoPlots = False,
    as_json: Json = False,
) -> None:
    """Simulate a recorded engine run and compare predicted with measured.

    Queue times come from the run, everything else is predicted with nothing fitted to it. The engine's arguments in
    meta.json that the simulation cannot follow are named in a warning.
    """
    from kvsim.validate_run import compare, fit_overhead, load_run, other_pool, predict, setting_of
    from kvsim.validate_run import plot as draw

    check_input(workload, "workload")
    wants_picture = not no_plots and not as_json
    if wants_picture:
        check_output(plot, "--plot", workload)
    run = load_run(run_dir)
    setting = setting_of(run, gpu=gpu, profile=profile, model=model)
    for text in setting.warnings:
        console.warn(text)
    prediction = predict(run, workload, setting)
    unfitted, pool_warnings = compare(run, prediction), other_pool(run, prediction)
    for text in (*unfitted.warnings, *pool_warnings):
        console.warn(text)
    is_drawn = wants_picture and draw(unfitted, plot)
    document = unfitted.as_dict()
    texts = ["\n".join(unfitted.notes), _text("unfitted: the profile as it is", unfitted)]
    if fit:
        overhead = fit_overhead(run_dir, workload, gpu=gpu, profile=profile, model=model)
        for text in overhead.doubts():
            # The pool is named once, by whichever prediction shows it.
            if not pool_warnings or text not in overhead.other_doubts:
                console.warn(text)
        prediction = predict(
            run,
            workload,
            setting,
            decode_overhead_us=overhead.decode_step_us,
            mixed_overhead_us=overhead.mixed_step_us,
            gemm_tiles=overhead.gemm_tiles,
        )
        fitted = compare(run, prediction)
        document |= {"fitted": fitted.as_dict(), "overhead": overhead.as_dict()}
        texts.append(_text(f"fitted to this very run: {overhead.short()}", fitted))
    if as_json:
        console.say_json(document)
        return
    for text in texts:
        console.say(text)
    if is_drawn:
        console.say(f"\nwrote {plot}")


_FORMS = (("predicted", "{:.6g}"), ("measured", "{:.6g}"), ("error_pct", "{:+.2f} %"))


def _figure(value: float, form: str) -> str:
    return form.format(value) if isfinite(value) else "-"


def _text(title: str, comparison: Comparison) -> str:
    rows = [
        (name, *(_figure(values[key], form) for key, form in _FORMS)) for name, values in comparison.metrics.items()
    ]
    lines = [f"\n{title}", console.table(rows, ("metric", "predicted", "measured", "error"))]
    if comparison.series_error:
        shown = ", ".join(f"{name} {value:g}" for name, value in comparison.series_error.items())
        lines.append(f"mean difference over the seconds: {shown}")
    return "\n".join(lines)
