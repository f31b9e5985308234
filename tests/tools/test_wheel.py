"""The wheel that `make wheel` builds: its files, and its programs in a fresh environment with the pinned requirements."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from tools.bootstrap import ROOT, uv

PROGRAMS = ("phalanx-runtime", "phalanx-router", "phalanx-operator", "kubectl-phalanx")
ROOTS = ("crds", "operator", "runtime")


def wheel_in(folder: Path) -> Path:
    """Builds the wheel from a copy of the sources."""
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir()
    wheels.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    for name in ROOTS:
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__", "built"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    return wheel


def test_wheel_contains_the_files_of_the_programs(tmp_path: Path) -> None:
    wheel, wanted = wheel_in(tmp_path), set[str]()
    for root in ROOTS:
        files = [*(ROOT / root).glob("phalanx_*/**/static/*"), *(ROOT / root).glob("phalanx_*/**/native/*.[ch]*")]
        wanted |= {path.relative_to(ROOT / root).as_posix() for path in files}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "/static/" in name or name.endswith((".cpp", ".h"))}
    assert packed == wanted and any(name.endswith(".html") for name in packed)
    assert wheel.name.startswith("phalanx-")


@pytest.mark.slow
@pytest.mark.system
def test_programs_of_the_wheel_start_in_a_fresh_environment(tmp_path: Path) -> None:
    wheel, environment, program = wheel_in(tmp_path), tmp_path / "environment", str(uv())
    subprocess.run([program, "venv", "-q", "--python", sys.executable, environment], check=True)
    python = str(environment / "bin/python")
    install = [program, "pip", "install", "-q", "--python", python, "--no-deps"]
    pins = [flag for extra in ("runtime", "router", "operator") for flag in ("-r", f"{ROOT}/requirements/{extra}.txt")]
    subprocess.run([*install, "--require-hashes", *pins], check=True)
    subprocess.run([*install, str(wheel)], check=True)
    subprocess.run([program, "pip", "check", "-q", "--python", python], check=True)
    for name in PROGRAMS:
        shown = subprocess.run([environment / "bin" / name, "--help"], cwd=tmp_path, env={}, capture_output=True, text=True)
        assert shown.returncode == 0 and "usage:" in shown.stdout, shown.stderr
