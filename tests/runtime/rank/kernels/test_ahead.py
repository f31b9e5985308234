"""Kernels of an image: compiled without a device, found at another place by the keys of a launch, without a compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx_runtime.model.kernels.cache import ModuleSource, module_path
from phalanx_runtime.model.kernels.folder import TOOLCHAIN, usable_folder, write_toolchain
from phalanx_runtime.model.kernels.target import TARGETS
from phalanx_runtime.rank.kernels.ahead import SHAPES, target_variants


def run(step: str, folder: Path, **variables: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.rank.kernels.built", step, str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def absent_driver(folder: Path, module: Path) -> Path:
    """Returns a folder with a libcuda.so.1 that has the functions of the driver that a module imports, which do nothing."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True).stdout
    names = [word for word in listed.split() if word.startswith("cu")]
    assert names
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("nm") is None, reason="builds C modules")
def test_a_pod_reads_its_kernels_and_calls_no_compiler(tmp_path: Path) -> None:
    """The folder is moved after the build; a kernel that it lacks is compiled into the writable cache, by Triton's ptxas."""
    made = run("make", tmp_path / "layer")
    assert made["compiled"] == len(TARGETS)
    assert {Path(name).suffix for name in made["files"]} == {".cubin", ".json", ".so"}
    folder = (tmp_path / "layer").rename(tmp_path / "image")
    (module,) = folder.glob("modules/*/cuda_utils*.so")
    before = sorted(folder.rglob("*"))
    written = tmp_path / "written"
    driver = absent_driver(tmp_path, module)
    found = run("use", folder, PATH=str(tmp_path), LD_LIBRARY_PATH=str(driver), TRITON_CACHE_DIR=str(written))
    assert found == {"read": 0, "sizes": [True] * len(TARGETS), "compiled": 1, "driver": True}
    assert sorted(folder.rglob("*")) == before
    assert {path.name for path in written.rglob("*.cubin")} == {"record_tokens.cubin"}


def test_a_folder_of_another_toolchain_is_not_used(tmp_path: Path) -> None:
    complete, other, broken = (tmp_path / name for name in ("complete", "other", "broken"))
    for folder in (complete, other, broken):
        folder.mkdir()
        write_toolchain(folder)
    (other / TOOLCHAIN).write_text(json.dumps({"triton": "1.0", "module_suffix": ".so"}))
    (broken / TOOLCHAIN).write_text("{")
    assert usable_folder(complete) == complete
    assert [usable_folder(folder) for folder in (other, broken, tmp_path)] == [None] * 3


def test_a_module_that_the_folder_lacks_is_compiled(tmp_path: Path) -> None:
    source = tmp_path / "own.c"
    source.write_text("int answer(void) { return 42; }\n")
    modules = ModuleSource(tmp_path / "built")
    compiled = Path(modules("own", str(source), str(tmp_path), [], [], []))
    assert compiled.parent == tmp_path and compiled.exists()
    kept = module_path(tmp_path / "built", "own", source.read_bytes())
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert modules("own", str(source), str(tmp_path), [], [], []) == str(kept)


EARLY = {"paged_attention", "merge_splits", "prepare_heads", "gate", "add_norm", "multiply_row"}


@pytest.mark.parametrize("name", SHAPES)
def test_common_shapes_have_layers_of_each_window(name: str) -> None:
    config = SHAPES[name].config()
    alternates = config.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
    assert len({window is None for window in config.windows}) == (2 if alternates else 1)
    assert {world_size for world_size, _ in SHAPES[name].shards()} >= {1, 2, 4}


def test_common_shapes_share_most_kernels() -> None:
    variants = target_variants("sm_90")
    assert len(variants) == len(set(variants))
    assert 800 < len(variants) < 1000
    assert {dict(variant.arguments)["DIM"] for variant in variants if variant.name == "paged_attention"} == {64, 96, 128, 256}


@pytest.mark.parametrize(("name", "is_early"), [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_kernels_of_an_image_start_early(name: str, is_early: bool) -> None:
    """As a launch on that GPU looks for them."""
    variants = target_variants(name, [SHAPES["Qwen3 0.6B"]])
    found = {variant.name: dict(variant.options).get("launch_pdl", False) for variant in variants}
    assert {kernel for kernel, has in found.items() if has} == (EARLY if is_early else set())
