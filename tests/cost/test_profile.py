"""Profile files that were changed by hand."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import kvsim
from kvsim.cost.profile import Profile, load_profile, profile_names, profile_path
from kvsim.types import ScenarioError


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    shutil.copy(profile_path("rtx4090"), path)
    return path


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_load(name: str) -> None:
    assert load_profile(name).fits


@pytest.mark.parametrize("value", ["1e400", ".inf", ".nan", "-.inf", "true", "fast", "[1, x]", "{a: .nan}"])
@pytest.mark.parametrize("place", ["params", "scales", "overhead"])
def test_what_is_no_finite_number_is_refused(profile: Path, place: str, value: str) -> None:
    data = yaml.safe_load(profile.read_text())
    fit = data["fits"][0]
    if place == "params":
        fit["params"]["launch_us"] = yaml.safe_load(value)
    elif place == "scales":
        fit["correction"]["scales"][0] = yaml.safe_load(value)
    else:
        data["overhead"] = {"decode_step_us": yaml.safe_load(value)}
    profile.write_text(yaml.safe_dump(data))
    with pytest.raises(ScenarioError, match=r"mine\.yaml: not a kvsim cost profile .*must be a finite number"):
        load_profile(profile)


@pytest.mark.parametrize(("first", "again"), [("gpu:", "gpu: other\n"), ("    launch_us:", "    launch_us: 1.0\n")])
def test_a_key_stands_once(profile: Path, first: str, again: str) -> None:
    lines = profile.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.startswith(first))
    profile.write_text("".join([*lines[: at + 1], again, *lines[at + 1 :]]))
    name = "fits[0].params.launch_us" if first[0] == " " else "gpu"
    column = 1 + len(first) - len(first.lstrip())
    message = f"{profile}:{at + 2}:{column}: {name}: given twice (first on line {at + 1}); keep one"
    with pytest.raises(ScenarioError, match=f"^{re.escape(message)}$"):
        load_profile(profile)


@pytest.mark.parametrize("value", ["1e400", "nan", "-inf"])
def test_points_of_a_correction_are_finite(profile: Path, value: str) -> None:
    data = yaml.safe_load(profile.read_text())
    correction = data["fits"][0]["correction"]
    correction["points"] = value + "," + correction["points"].split(",", 1)[1]
    profile.write_text(yaml.safe_dump(data))
    with pytest.raises(ScenarioError, match="no finite number"):
        load_profile(profile)


def test_the_newest_version_is_the_one_with_the_largest_numbers() -> None:
    fit = load_profile("rtx4090").find("decode_attention")
    assert fit is not None
    fits = tuple(replace(fit, version=version) for version in ("0.9.0", "0.14.0", "0.10.0rc1"))
    found = Profile("mine", "X1", fit.framework, "0.20.0", fits).find("decode_attention")
    assert found is not None
    assert found.version == "0.14.0"


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("params.gbps", 0, "params.gbps is 0; it must be a number above 0"),
        ("params.gbps", -1.0, "params.gbps is -1.0; it must be a number above 0"),
        ("params.launch_us", -1, "params.launch_us is -1; it must be a number of at least 0"),
        ("correction.basis", "gauss", "correction.basis is 'gauss'; it must be one of exponential, matern32"),
        ("kernel", 5, "kernel is 5; it must be a text"),
        ("overhead", {"decode_step_us": -1}, "overhead.decode_step_us is -1; it must be a number of at least 0"),
        ("gpu", 4090, "gpu is 4090; it must be a text"),
    ],
)
def test_values_of_no_profile_are_named(profile: Path, place: str, value: object, problem: str) -> None:
    data = yaml.safe_load(profile.read_text())
    entry = data if place in data else data["fits"][0]
    *folders, key = place.split(".")
    for folder in folders:
        entry = entry[folder]
    entry[key] = value
    profile.write_text(yaml.safe_dump(data))
    with pytest.raises(ScenarioError, match=r"mine\.yaml: ") as caught:
        load_profile(profile)
    assert problem in str(caught.value)


def changed(profile: Path, *keys: str | int, value: object = None, drop: bool = False) -> Path:
    """The file with the value behind `keys` replaced, or taken out."""
    data = yaml.safe_load(profile.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if drop:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    profile.write_text(yaml.safe_dump(data))
    return profile


@pytest.mark.parametrize("name", ["provenance", "overhead"])
def test_blocks_that_say_nothing_may_be_null(profile: Path, name: str) -> None:
    assert load_profile(changed(profile, name)).fits


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("provenance",), "x", r"provenance is 'x'; it must be a mapping"),
        (("provenance", "block_size"), "x", r"provenance\.block_size is 'x'; it must be a whole number from 1 to"),
        (("provenance", "block_size"), 0, r"provenance\.block_size is 0; it must be a whole number"),
        (("overhead",), [1], r"overhead is \[1\]; it must be a mapping"),
        (("overhead",), {"gemm_tiles": [3]}, r"overhead\.gemm_tiles is \[3\]; it must be a list of pairs"),
        (("fits",), None, r"fits is None; it must be a list"),
        (("fits", 0), 7, r"fits\[0\] is 7; it must be a mapping"),
        (("fits", 0, "op"), "gem", r"fits\[0\]: op is 'gem'; it must be one of gemm, "),
        (("fits", 0, "params"), None, r"params is None; it must be a mapping"),
        (("fits", 0, "correction"), [], r"correction is \[\]; it must be a mapping"),
        (("fits", 0, "correction", "columns"), "a,b", r"correction\.columns is 'a,b'; decode_attention has batch,"),
        (("fits", 0, "correction", "scales"), [1.0], r"correction\.scales is \[1\.0\]; it must be a list of 5 numbers"),
        (("fits", 0, "correction", "points"), [1], r"correction\.points is \[1\]; it must be a text"),
        (("fits", 0, "correction", "points"), "1,2\n", r"correction\.points: line '1,2' must have 6 numbers"),
    ],
)
def test_what_a_profile_cannot_hold_is_named(
    profile: Path, keys: tuple[str | int, ...], value: object, said: str
) -> None:
    with pytest.raises(ScenarioError, match=rf"mine\.yaml: .*{said}"):
        load_profile(changed(profile, *keys, value=value))


@pytest.mark.parametrize("keys", [("fits",), ("gpu",), ("fits", 0, "kernel"), ("fits", 0, "correction", "scales")])
def test_a_missing_key_is_named(profile: Path, keys: tuple[str | int, ...]) -> None:
    with pytest.raises(ScenarioError, match=rf"mine\.yaml: .*{keys[-1]} is missing"):
        load_profile(changed(profile, *keys, drop=True))


@pytest.mark.parametrize("name", profile_names())
def test_a_missing_parameter_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    shutil.copy(profile_path(name), path)
    fits = yaml.safe_load(path.read_text())["fits"]
    optional = {"per_gpu_limits", "multimem_us", "multimem_gbps"}
    seen = {(fit["op"], tuple(fit["params"])): index for index, fit in enumerate(fits)}
    for (op, params), index in seen.items():
        # One parameter of each shape: reading a whole profile takes a while.
        dropped = sorted({*params} - optional)[index % 3]
        with pytest.raises(ScenarioError, match=rf"fit of {op}/.*: params\.{dropped} is missing; {op} takes"):
            load_profile(changed(path, "fits", index, "params", dropped, drop=True))
        shutil.copy(profile_path(name), path)


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a100-80gb", "a100"),
        ("A100-SXM4-40GB", "a100"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("my H100", "h100"),
    ],
)
def test_a_long_name_finds_its_profile(gpu: str, profile: str) -> None:
    assert profile_path(gpu).stem == profile


@pytest.mark.parametrize("gpu", ["RTX A1000", "RTX 40900", "GH100", "H1000"])
def test_a_name_that_holds_another_in_it_is_no_such_gpu(gpu: str) -> None:
    with pytest.raises(ScenarioError, match="no cost profile"):
        profile_path(gpu)


@pytest.mark.parametrize(
    ("gpu", "cost", "said"),
    [
        ("a100-80gb", "{type: kernels}", None),
        ("a100-40gb", "{type: kernels}", r"a100: measured on a100-80gb \(2,039 GB/s .* gpu is a100-40gb \(1,555 GB/s"),
        ("t4", "{type: kernels, profile: h200}", "h200: measured on h200 .* the scenario's gpu is t4"),
        ("{memory: 24GiB, name: my H100}", "{type: kernels}", r"gpu is my H100 \(unknown rates\)"),
        ("{memory: 24GiB, name: RTX 4090}", "{type: kernels}", None),
        ("{memory: 24GiB}", "{type: kernels, profile: h100}", None),
        ("h100-80gb", "{type: linear}", None),
    ],
)
def test_a_profile_of_another_gpu_is_said_to_be(gpu: str, cost: str, said: str | None) -> None:
    text = f"gpu: {gpu}\nmodel: llama-3.1-8b\ncost: {cost}\nmemory: {{num_gpu_blocks_override: 500}}\n"
    text += "workload: {num_requests: 1, lengths: {type: fixed, prompt: 20, output: 2}}\n"
    warnings = kvsim.run(yaml.safe_load(text)).summary["warnings"]
    found = [warning for warning in warnings if "measured on" in warning]
    assert bool(found) == (said is not None)
    assert said is None or re.search(said, found[0])
