"""Compiles kernels into the folder of an image, without a device: `python -m phalanx_runtime.rank.kernels.ahead FOLDER INCLUDE`.

INCLUDE has Python.h. Needs gcc or the program in CC. The layout of the folder is in `model.kernels.folder`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.kernels.cache import compile_module, module_path
from phalanx_runtime.model.kernels.folder import write_toolchain
from phalanx_runtime.model.kernels.target import TARGETS, compiling_for
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.model.partition import Shard, partition
from phalanx_runtime.rank.kernels.account import NO_WARMUP, WarmupAccount
from phalanx_runtime.rank.kernels.variants import KernelOptions, model_variants, step_variants, sum_variants
from phalanx_runtime.rank.kernels.warmup import CompileWatch, warm_up

WORLD_SIZES = (1, 2, 4, 8)
PAGE_SIZES = (16,)
PAGE_FORMATS = ((torch.bfloat16, (None, *FORMATS.values())), (torch.float16, (None,)))
"""Formats of pages by dtype. Others are compiled at start."""
MAX_PAGES = (64, 128, 256, 512)
"""Pages of the longest request, by size class of page tables: with pages of 16 up to 1,024 tokens, ..., and above 4,096."""
DRIVER_MODULE = "cuda_utils"
"""Triton's access to the driver."""


@dataclass(frozen=True, slots=True)
class CommonShape:
    """What kernels depend on in config.json."""

    architecture: str
    widths: tuple[int, int]
    """Of hidden states and of the MLP."""
    heads: tuple[int, int, int]
    """Query heads, KV heads, and their dimension."""
    vocab_size: int
    sliding_window: int | None = None

    def config(self) -> ModelConfig:
        """Returns the parsed config; with a layer of each kind of window."""
        (hidden, inner), (heads, kv_heads, dim) = self.widths, self.heads
        return parse_config(
            {
                "architectures": [self.architecture],
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": 6,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": dim,
                "vocab_size": self.vocab_size,
                "sliding_window": self.sliding_window,
                "max_position_embeddings": 8192,
            }
        )

    def shards(self) -> Iterator[tuple[int, Shard]]:
        """Yields number of ranks and part of each rank."""
        config = self.config()
        for world_size in WORLD_SIZES:
            try:
                yield from ((world_size, shard) for shard in partition(config, world_size))
            except ModelError:  # more ranks than heads
                return


SHAPES: dict[str, CommonShape] = {
    "SmolLM2 135M": CommonShape("LlamaForCausalLM", (576, 1536), (9, 3, 64), 49152),
    "SmolLM2 1.7B": CommonShape("LlamaForCausalLM", (2048, 8192), (32, 32, 64), 49152),
    "Llama 3.2 1B": CommonShape("LlamaForCausalLM", (2048, 8192), (32, 8, 64), 128256),
    "Llama 3.2 3B": CommonShape("LlamaForCausalLM", (3072, 8192), (24, 8, 128), 128256),
    "Llama 3.1 8B": CommonShape("LlamaForCausalLM", (4096, 14336), (32, 8, 128), 128256),
    "Llama 3.3 70B": CommonShape("LlamaForCausalLM", (8192, 28672), (64, 8, 128), 128256),
    "Mistral 7B v0.3": CommonShape("MistralForCausalLM", (4096, 14336), (32, 8, 128), 32768),
    "Qwen2.5 0.5B": CommonShape("Qwen2ForCausalLM", (896, 4864), (14, 2, 64), 151936),
    "Qwen2.5 1.5B": CommonShape("Qwen2ForCausalLM", (1536, 8960), (12, 2, 128), 151936),
    "Qwen2.5 7B": CommonShape("Qwen2ForCausalLM", (3584, 18944), (28, 4, 128), 152064),
    "Qwen2.5 32B": CommonShape("Qwen2ForCausalLM", (5120, 27648), (40, 8, 128), 152064),
    "Qwen3 0.6B": CommonShape("Qwen3ForCausalLM", (1024, 3072), (16, 8, 128), 151936),
    "Qwen3 8B": CommonShape("Qwen3ForCausalLM", (4096, 12288), (32, 8, 128), 151936),
    "Qwen3 32B": CommonShape("Qwen3ForCausalLM", (5120, 25600), (64, 8, 128), 151936),
    "Phi-3 mini": CommonShape("Phi3ForCausalLM", (3072, 8192), (32, 32, 96), 32064, 2047),
    "OLMo 2 7B": CommonShape("Olmo2ForCausalLM", (4096, 11008), (32, 32, 128), 100352),
    "Gemma 2 2B": CommonShape("Gemma2ForCausalLM", (2304, 9216), (8, 4, 256), 256000, 4096),
    "Gemma 2 9B": CommonShape("Gemma2ForCausalLM", (3584, 14336), (16, 8, 256), 256000, 4096),
    "Gemma 3 1B": CommonShape("Gemma3ForCausalLM", (1152, 6912), (4, 1, 256), 262144, 512),
}
"""By name."""


def target_variants(name: str, shapes: Iterable[CommonShape] = SHAPES.values()) -> list[KernelVariant]:
    """Returns the variants of the shapes for one of `TARGETS`, each once."""
    with compiling_for(TARGETS[name]):  # which decides whether kernels start early
        return _variants(TARGETS[name].arch // 10, shapes)


def _variants(capability: int, shapes: Iterable[CommonShape]) -> list[KernelVariant]:
    """Returns the variants for Triton's current target. `capability`: its major compute capability."""
    found: dict[KernelVariant, None] = {}
    for shape in shapes:
        config = shape.config()
        for dtype, formats in PAGE_FORMATS:
            for (world_size, shard), page_size, format in product(shape.shards(), PAGE_SIZES, formats):
                options = KernelOptions(
                    dtype=dtype, page_size=page_size, capability=capability, world_size=world_size, format=format
                )
                found |= dict.fromkeys([*model_variants(config, shard, options), *sum_variants(config, options)])
            for max_pages in MAX_PAGES:
                windows = {"has_window": set(config.windows) != {None}, "has_parts": len({w is None for w in config.windows}) > 1}
                found |= dict.fromkeys(step_variants(config.num_kv_heads, config.vocab_size, dtype, max_pages, **windows))
    return list(found)


def compile_into(folder: Path, variants: Mapping[str, Sequence[KernelVariant]]) -> WarmupAccount:
    """Compiles the variants of each of `TARGETS` into the folder. Raises the error of a variant that does not compile."""
    triton.knobs.cache.dir = str(folder / "triton")
    triton.knobs.compilation.store_binary_only = True
    watch, account = CompileWatch(), NO_WARMUP
    watch.install()
    for name, listed in variants.items():
        with compiling_for(TARGETS[name]):
            account += warm_up(listed, watch, has_device=False)
    for entry in (folder / "triton").iterdir():
        _keep_code(entry)
    return account


def _keep_code(entry: Path) -> None:
    """Deletes all but metadata and machine code, and makes the group independent of the folder's place."""
    for path in entry.iterdir():
        if path.name.startswith("__grp__"):
            names = [name for name in json.loads(path.read_text())["child_paths"] if name.endswith((".json", ".cubin"))]
            path.write_text(json.dumps({"child_paths": {name: name for name in names}}))
        elif path.suffix not in (".json", ".cubin"):
            path.unlink()


def build_driver_module(folder: Path, include: Path) -> None:
    """Compiles Triton's access to the driver. A machine without the driver can compile it, and not import it.

    Raises RuntimeError if this Triton (before 3.7) also compiles a launcher for each kernel.
    """
    if hasattr(nvidia, "make_launcher"):
        raise RuntimeError(f"Triton {triton.__version__} compiles a module for each kernel with gcc when it is launched")
    source = Path(nvidia.__file__).parent / "driver.c"
    target = module_path(folder, DRIVER_MODULE, source.read_bytes())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        library, nothing = Path(scratch) / "libcuda.so.1", Path(scratch) / "empty.c"
        nothing.touch()
        # The driver's library, as far as the linker needs it: its name.
        compile_module(nothing, library, [], ["-Wl,-soname,libcuda.so.1"])
        flags = ["-Wl,--no-as-needed", f"-L{scratch}", "-l:libcuda.so.1"]
        compile_module(source, target, [source.parent / "include", include], flags)


def main(words: Sequence[str]) -> None:
    """Fills the folder and prints what it has."""
    folder, include = map(Path, words)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_driver_module(folder, include)
    account = compile_into(folder, {name: target_variants(name) for name in TARGETS})
    write_toolchain(folder)
    print(f"{account.num_compiled} kernels for {', '.join(TARGETS)} in {account.seconds:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"gcc failed: {error}")
