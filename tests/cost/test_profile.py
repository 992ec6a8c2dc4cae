"""Profile files that were changed by hand."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

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
