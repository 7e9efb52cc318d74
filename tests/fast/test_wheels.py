"""Wheels with functions in C and without: what a machine has decides, unless the builder does."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dev_bus import ROOT

pytestmark = pytest.mark.slow

NO_COMPILER = {"CC": "no-such-compiler"}


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel into a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def modules(folder: Path) -> tuple[str, list[str]]:
    """Return the tag of the only wheel, and its compiled modules."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]
        assert "postbus/fast/_runs.pyx" in archive.namelist()
    return wheel.stem.split("-", 2)[2], compiled


@pytest.mark.parametrize(("choice", "more"), [("off", {}), ("auto", NO_COMPILER)])
def test_a_wheel_of_pure_python_fits_every_machine(
    tmp_path: Path, choice: str, more: dict[str, str]
) -> None:
    result = build(tmp_path, POSTBUS_ACCELERATE=choice, **more)
    assert result.returncode == 0, result.stderr
    assert modules(tmp_path) == ("py3-none-any", [])
    has_warned = "lacks a C compiler (no-such-compiler)" in result.stdout + result.stderr
    assert has_warned is (choice == "auto")


def test_a_wheel_that_must_be_compiled_is_not_made_without_a_compiler(tmp_path: Path) -> None:
    result = build(tmp_path, POSTBUS_ACCELERATE="require", **NO_COMPILER)
    assert result.returncode != 0
    assert "lacks a C compiler (no-such-compiler)" in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_compiled_wheel_is_of_its_platform(tmp_path: Path) -> None:
    result = build(tmp_path, POSTBUS_ACCELERATE="require")
    assert result.returncode == 0, result.stderr
    tag, compiled = modules(tmp_path)
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert tag.startswith(f"{version}-{version}-")
    assert [name.split(".")[0] for name in compiled] == ["postbus/fast/_runs"]
