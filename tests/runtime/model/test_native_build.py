"""Prebuilt kernels of an image: selection by CPU flags, compilation, and loading without a compiler."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx_runtime.model.native.build import (
    FLAGS,
    INSTRUCTION_SETS,
    compile_to,
    find_prebuilt,
    prebuild,
    prebuilt_path,
    source_key,
)
from phalanx_runtime.model.native.library import library

V3 = next(target for target in INSTRUCTION_SETS if target.name == "x86-64-v3").flags
V4 = next(target for target in INSTRUCTION_SETS if target.name == "x86-64-v4").flags
CHOICES = {
    "bf16": ("x86_64", V4 | {"avx512_bf16", "avx512_vnni", "amx_bf16"}, "x86-64-v4-bf16"),
    "VBMI": ("x86_64", V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}, "x86-64-v4-vbmi"),
    "AVX-512": ("x86_64", V4 | {"avx512_vnni"}, "x86-64-v4"),
    "AVX2": ("x86_64", V3, "x86-64-v3"),
    "AVX-512 in part": ("x86_64", V4 - {"avx512vl"}, "x86-64-v3"),
    "neither": ("x86_64", V3 - {"avx2"}, None),
    "Arm": ("aarch64", frozenset({"asimd", "svebf16"}), "armv8-a"),
    "another": ("riscv64", V4, None),
}


@pytest.mark.parametrize(("machine", "flags", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_a_processor_takes_the_best_that_it_can_run(
    tmp_path: Path, machine: str, flags: frozenset[str], expected: str | None
) -> None:
    for target in INSTRUCTION_SETS:
        prebuilt_path(tmp_path, target).touch()
    found = find_prebuilt(tmp_path, machine, flags)
    assert (None if found is None else found.name.removesuffix(found.name[-20:])) == expected


def test_missing_kernel_file_is_not_loaded(tmp_path: Path) -> None:
    assert find_prebuilt(tmp_path, "x86_64", V4) is None
    (tmp_path / "x86-64-v4-0123456789abcdef.so").touch()
    assert find_prebuilt(tmp_path, "x86_64", V4) is None, "it has other sources"
    v3 = prebuilt_path(tmp_path, INSTRUCTION_SETS[3])
    v3.touch()
    assert find_prebuilt(tmp_path, "x86_64", V4) == v3


def test_levels_differ_in_their_names_and_keys() -> None:
    keys = {source_key(*target.options) for target in INSTRUCTION_SETS}
    assert len(keys) == len({target.name for target in INSTRUCTION_SETS}) == len(INSTRUCTION_SETS)
    assert "-fopenmp" in FLAGS, "threads are torch's"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake g++ that writes its options to the output, and fails for Arm."""
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
    assert prebuild(folder, "x86_64") == ["x86-64-v4-vbmi", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]
    assert sorted(folder.iterdir()) == sorted(prebuilt_path(folder, target) for target in INSTRUCTION_SETS[:4])
    for target in INSTRUCTION_SETS[:4]:
        assert all(option in prebuilt_path(folder, target).read_text() for option in target.options)
    assert prebuild(folder, "riscv64") == []


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
def test_torchs_limit_holds_for_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    kernels, limited = library("x86-64-v3"), library(folder=tmp_path)
    assert kernels is not None and limited is not None
    assert (limited.name, limited.lanes) == (kernels.name, 8)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86")
def test_prebuilt_kernels_load_without_compiler_and_use_torch_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the lowest instruction set, which every test machine has."""
    target = INSTRUCTION_SETS[3]
    compile_to(prebuilt_path(tmp_path, target), target.options)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    kernels = library(folder=tmp_path)
    assert kernels is not None and kernels.name == prebuilt_path(tmp_path, target).stem
    assert (kernels.lanes, kernels.has_bf16_dot) == (8, False)
    assert not (tmp_path / "cache").exists(), "nothing was compiled"
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    threads = {path for path in loaded if "numkong" not in path}  # usearch's, which another test may have imported
    assert len(threads) == 1 and "torch" in threads.pop()
    assert library("haswell", tmp_path) is None, "other targets need a compiler"
