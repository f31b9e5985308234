"""Kernels that an image brings: one for each kind of processor, chosen by what the processor at hand can do."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx_runtime.model.native.build import FLAGS, LEVELS, compile_to, ship, shipped, shipped_path, source_key
from phalanx_runtime.model.native.library import library

V3 = next(level for level in LEVELS if level.name == "x86-64-v3").flags
V4 = next(level for level in LEVELS if level.name == "x86-64-v4").flags
CHOICES = {
    "bf16": ("x86_64", V4 | {"avx512_bf16", "amx_bf16"}, "x86-64-v4-bf16"),
    "AVX-512": ("x86_64", V4 | {"avx512_vnni"}, "x86-64-v4"),
    "AVX2": ("x86_64", V3, "x86-64-v3"),
    "AVX-512 in part": ("x86_64", V4 - {"avx512vl"}, "x86-64-v3"),
    "neither": ("x86_64", V3 - {"avx2"}, None),
    "Arm": ("aarch64", frozenset({"asimd", "svebf16"}), "armv8-a"),
    "another": ("riscv64", V4, None),
}


@pytest.mark.parametrize(("machine", "flags", "wanted"), CHOICES.values(), ids=CHOICES.keys())
def test_a_processor_takes_the_best_that_it_can_run(
    tmp_path: Path, machine: str, flags: frozenset[str], wanted: str | None
) -> None:
    for level in LEVELS:
        shipped_path(tmp_path, level).touch()
    found = shipped(tmp_path, machine, flags)
    assert (None if found is None else found.name.removesuffix(found.name[-20:])) == wanted


def test_missing_kernel_file_is_not_loaded(tmp_path: Path) -> None:
    assert shipped(tmp_path, "x86_64", V4) is None
    (tmp_path / "x86-64-v4-0123456789abcdef.so").touch()
    assert shipped(tmp_path, "x86_64", V4) is None, "it was made from other sources"
    v3 = shipped_path(tmp_path, LEVELS[2])
    v3.touch()
    assert shipped(tmp_path, "x86_64", V4) == v3


def test_levels_differ_in_their_names_and_keys() -> None:
    keys = {source_key(*level.options) for level in LEVELS}
    assert len(keys) == len({level.name for level in LEVELS}) == len(LEVELS)
    assert "-fopenmp" in FLAGS, "threads are torch's"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of g++ that writes what it was told to compile for, and fails for Arm."""
    path = tmp_path / "bin/g++"
    path.parent.mkdir()
    path.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$*" in *armv8*) echo "unknown" >&2; exit 1;; esac\necho "$*" > "$last"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


@pytest.mark.usefixtures("compiler")
def test_an_image_is_given_every_level_of_its_architecture(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    assert ship(folder, "x86_64") == ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]
    assert sorted(folder.iterdir()) == sorted(shipped_path(folder, level) for level in LEVELS[:3])
    for level in LEVELS[:3]:
        assert all(option in shipped_path(folder, level).read_text() for option in level.options)
    assert ship(folder, "riscv64") == []


@pytest.mark.usefixtures("compiler")
def test_failed_compilation_leaves_no_file_and_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compile_to(tmp_path / "one.so", ("-march=armv8-a",))
    assert list(tmp_path.glob("*.so")) == []
    module = "phalanx_runtime.model.native.build"
    bad = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", module, str(tmp_path)], env=bad, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "there is no g++" in done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86")
def test_shipped_kernels_load_without_compiler_and_use_torch_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lowest level, so that every test machine has it."""
    level = LEVELS[2]
    compile_to(shipped_path(tmp_path, level), level.options)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    made = library(folder=tmp_path)
    assert made is not None and made.name == shipped_path(tmp_path, level).stem
    assert (made.lanes, made.has_runs) == (8, False)
    assert not (tmp_path / "cache").exists(), "nothing was compiled"
    threads = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(threads) == 1 and "torch" in threads.pop()
    assert library("haswell", tmp_path) is None, "what is not shipped needs a compiler"
