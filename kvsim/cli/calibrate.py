"""`kvsim calibrate`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli import console
from kvsim.cli.options import Json, NoPlots, check_input, check_output
from kvsim.types import ScenarioError

if TYPE_CHECKING:
    from kvsim.cost.calibrate import Calibration, ErrorLine
    from kvsim.cost.profile import Profile


def command(
    measurements: Annotated[
        Path | None, Argument(help="Kernel measurements, CSV (see docs/accuracy.md).", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, Option("--out", help="The profile to write (YAML); a picture goes beside it.", show_default=False)
    ] = None,
    gpu: Annotated[str | None, Option("--gpu", help="One of several GPUs in the file.", show_default=False)] = None,
    framework: Annotated[str, Option("--framework", help="Whose rows to fit.")] = "vllm",
    version: Annotated[
        str | None, Option("--version", help="One version only; default: all, the newest is used.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, Option("--name", help="Name of the profile; default: the GPU.", show_default=False)
    ] = None,
    seed: Annotated[int, Option("--seed", help="Which rows are held out.")] = 0,
    hold_out: Annotated[float, Option("--hold-out", help="Share of the rows kept for the test.")] = 0.2,
    test: Annotated[
        Path | None, Option("--test", help="Predict these rows too: measurements made elsewhere.", show_default=False)
    ] = None,
    profile: Annotated[
        str | None,
        Option("--profile", help="An existing profile, instead of fitting measurements.", show_default=False),
    ] = None,
    from_run: Annotated[
        Path | None,
        Option(
            "--from-run",
            help="A recorded run, or `vllm bench serve --save-detailed` JSON: the engine's overhead "
            "per step is fitted to its gaps.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        Path | None, Option("--workload", help="The requests of that run (JSONL).", show_default=False)
    ] = None,
    model: Annotated[
        str | None, Option("--model", help="The model of that run, where it does not say.", show_default=False)
    ] = None,
    as_json: Json = False,
    no_plots: NoPlots = False,
) -> None:
    """Fit a cost profile to kernel measurements, or an engine's step overhead to a recorded run.

    Prints the error on rows that were held out, per operation, and writes a profile that a scenario names:
    cost: {type: kernels, profile: FILE.yaml}.
    """
    if (measurements is None) == (profile is None):
        raise ScenarioError("calibrate takes either MEASUREMENTS.csv or --profile NAME (with --from-run or --test)")
    check_input(measurements, "measurements")
    check_input(test, "measurements of --test")
    check_output(out, "--out", measurements, test, from_run, workload)
    _check_suffix(out)
    document: dict[str, object] = {}
    if measurements is not None:
        from kvsim.cost.calibrate import calibrate

        result = calibrate(
            measurements, gpu=gpu, framework=framework, version=version, name=name, seed=seed, hold_out=hold_out
        )
        fitted = result.profile
        document |= _tell(result, None if no_plots else out, as_json)
    else:
        from kvsim.cost.profile import load_profile

        assert profile is not None
        fitted = load_profile(profile)
    if test is not None:
        document["test"] = _test(fitted, test, gpu, as_json)
    if from_run is not None:
        fitted, document["overhead"] = _add_overhead(fitted, from_run, workload, model, gpu, as_json)
    if out is not None:
        from kvsim.cost.profile import save_profile

        save_profile(fitted, out)
        document["out"] = str(out)
        _show(as_json, f"wrote {out}: cost: {{type: kernels, profile: {out}}}")
    if as_json:
        console.say_json(document)


def _check_suffix(out: Path | None) -> None:
    from kvsim.cost.profile import SUFFIXES

    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ScenarioError(
            f"--out {out}: a scenario knows a profile's file by its suffix, {' or '.join(SUFFIXES)}: write {out}.yaml"
        )


def _show(as_json: bool, text: str) -> None:
    if not as_json:
        console.say(text)


def _tell(result: Calibration, draw_beside: Path | None, as_json: bool) -> dict[str, object]:
    """Print the errors and warnings of a calibration and draw its picture; what is told, as JSON has it."""
    from kvsim.cost.calibrate import calibration_dict

    _show(as_json, _errors_text(result))
    for text in result.warnings:
        console.warn(text)
    picture = {} if draw_beside is None else {"picture": str(_draw(result, draw_beside))}
    return calibration_dict(result) | picture


def _errors_text(result: Calibration) -> str:
    fitted = result.profile
    head = (
        f"{fitted.gpu}, {fitted.framework} {fitted.version}: {fitted.provenance['num_rows']} rows, seed "
        f"{fitted.provenance['seed']}; errors on held-out rows, per cent"
    )
    return f"{head}\n{error_table(result.errors)}"


def error_table(errors: tuple[ErrorLine, ...], rows_are: str = "held out") -> str:
    """The errors as columns of text; `rows_are` says what was done with the rows that they are of."""
    rows = [[form.format(line) for form in _ERROR_COLUMNS.values()] for line in errors]
    return console.table(rows, [rows_are if name == "held out" else name for name in _ERROR_COLUMNS])


_ERROR_COLUMNS = {
    "operation": "{0.op}",
    "kernel": "{0.kernel:.26}",
    "version": "{0.version}",
    "rows": "{0.num_rows}",
    "held out": "{0.num_held_out}",
    "mean abs": "{0.mape_pct:.1f}",
    "bias": "{0.bias_pct:+.1f}",
    "worst": "{0.worst_pct:.0f}",
    "within 15 %": "{0.within_15_pct:.0f}",
    "20 %": "{0.within_20_pct:.0f}",
    "25 %": "{0.within_25_pct:.0f}",
}


def _draw(result: Calibration, out: Path) -> Path:
    from kvsim.cost.calibrate import plot_held_out

    picture = out.with_suffix(".png")
    check_output(picture, "--out: the picture")
    plot_held_out(result.held_out, picture)
    return picture


def _test(fitted: Profile, path: Path, gpu: str | None, as_json: bool) -> list[dict[str, object]]:
    from kvsim.cost.calibrate import profile_errors, unpredicted_rows

    errors = profile_errors(fitted, path, gpu=gpu)
    _show(as_json, f"{path}: rows predicted by {fitted.name}, per cent\n{error_table(errors, 'predicted')}")
    for text in unpredicted_rows(fitted, path, gpu=gpu):
        console.warn(text)
    return [dict(line.__dict__) for line in errors]


def _add_overhead(
    fitted: Profile, run: Path, workload: Path | None, model: str | None, gpu: str | None, as_json: bool
) -> tuple[Profile, dict[str, object]]:
    from dataclasses import replace

    if run.is_file():
        from kvsim.catalog import load_model
        from kvsim.cost.bench_json import bench_overhead, read_bench
        from kvsim.cost.kernels import KernelCost, vllm_graph_sizes

        model = model or read_bench(run).get("model_id")
        if not model:
            raise ScenarioError(f"{run}: names no model_id: give --model")
        kernels = KernelCost.from_profile(
            fitted, load_model(str(model)), overhead_us=0.0, gemm_tiles=(), cuda_graph_sizes=vllm_graph_sizes()
        )
        overhead = bench_overhead(run, kernels)
    else:
        from kvsim.validate_run import fit_overhead, load_run, setting_of

        overhead = fit_overhead(run, workload, profile=fitted, model=model, gpu=gpu)
        # A benchmark's gaps without first tokens may hold pieces of prompts: only a run's are known.
        for text in (*setting_of(load_run(run), profile=fitted, model=model, gpu=gpu).warnings, *overhead.doubts()):
            console.warn(text)
    _show(as_json, overhead.text())
    return replace(fitted, overhead=overhead.as_dict()), overhead.as_dict()
