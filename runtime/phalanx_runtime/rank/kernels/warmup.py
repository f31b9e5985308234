"""Compiles or loads the kernels of a rank before it serves, and reports each kernel that a step still waits for."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import torch
import triton

from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.experts.gpu import GroupedExperts
from phalanx_runtime.model.experts.sparse import ExpertLayouts, SparseMlp
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated, StackedLinear
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.kernels.account import NO_WARMUP, WarmupAccount
from phalanx_runtime.rank.kernels.variants import KernelOptions, model_variants, step_variants

log = logging.getLogger(__name__)

MAX_THREADS = 16
"""Triton compiles outside Python's lock for the most part."""


class CompileWatch:
    """Listener of Triton's compiler: counts compilations, and warns of those that a step waits for."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.late: list[str] = []
        """Kernels that were compiled, or read from a cache, after `start_serving`."""
        self._is_serving = False

    def install(self) -> None:
        """Listens to all compilations of this process from now on."""
        triton.knobs.compilation.listener = self

    def start_serving(self) -> None:
        """From now on every compilation delays a step."""
        self._is_serving = True

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """Called by Triton after each compilation, and after each read of its cache."""
        self.num_compiled += not cache_hit
        if self._is_serving:
            self.late.append(str(src.name))
            how = "read from the cache" if cache_hit else "compiled"
            log.warning("a step waited for a kernel that the warm-up does not list", extra={"kernel": src.name, "how": how})


def warm_up(
    variants: Sequence[KernelVariant], watch: CompileWatch, *, has_device: bool, clock: Callable[[], float] = time.perf_counter
) -> WarmupAccount:
    """Compiles the variants in threads, for Triton's current target. `has_device`: also loads them into it.

    With a device a variant that fails is logged, because the model may not need it; without one it raises.
    """
    start, before = clock(), watch.num_compiled
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads, ignore_errors=has_device):
        for variant in variants:
            variant.compile()
    for variant in variants if has_device else ():
        try:
            variant.compile()[(1, 1, 1)]  # loads the machine code, and launches nothing
        except Exception as error:
            log.warning("a kernel cannot be loaded", extra={"kernel": variant.name, "why": str(error)})
    return WarmupAccount(num_variants=len(variants), num_compiled=watch.num_compiled - before, seconds=round(clock() - start, 3))


def _has_adapters(model: Model) -> bool:
    return isinstance(model, Decoder) and model.adapters is not None


def _expert_layouts(model: Decoder) -> tuple[ExpertLayouts | None, ...]:
    """Returns how the experts of each layer that has some are packed, each way once."""
    mlps = (layer.down for layer in model.layers)
    experts = (mlp.experts for mlp in mlps if isinstance(mlp, SparseMlp))
    return tuple(dict.fromkeys(one.layouts for one in experts if isinstance(one, GroupedExperts)))


class RankKernels:
    """`KernelLoader` of one rank and device."""

    def __init__(
        self, dtype: torch.dtype, page_size: int, capability: int, *, kv_cache_dtype: str = "auto", has_device: bool = True
    ) -> None:
        """`capability`: major compute capability of the device."""
        self.account = NO_WARMUP
        self.watch = CompileWatch()
        self.watch.install()
        self._dtype, self._page_size, self._capability = dtype, page_size, capability
        self._format = FORMATS.get(kv_cache_dtype)
        self._has_device = has_device

    def load_models(self, target: Model, world_size: int, draft: Model | None) -> None:
        """See `KernelLoader`. Models of `transformers` have no list: their kernels compile in their first steps."""
        for model, size in ((target, world_size), (draft, 1)):
            if isinstance(model, Decoder):
                options = KernelOptions(
                    dtype=self._dtype,
                    page_size=self._page_size,
                    capability=self._capability,
                    world_size=size,
                    format=self._format,
                    is_calibrated=bool(model.kv.roundings),
                    has_dense_layers=any(isinstance(layer.qkv, DenseLinear) for layer in model.layers),
                    has_dense_head=isinstance(getattr(model, "head", None), DenseLinear),
                    has_adapters=_has_adapters(model),
                    has_expert_adapters=model.adapters is not None and model.adapters.has_experts,
                    expert_layouts=_expert_layouts(model),
                )
                quantized = quantized_variants(model, self._dtype, size)
                self._load([*model_variants(model.config, model.shard, options), *quantized])

    def load_steps(self, model: Model, max_pages: int, has_window: bool = False, has_parts: bool = False) -> None:
        """See `KernelLoader`."""
        if max_pages:
            features = {"has_window": has_window, "has_parts": has_parts, "has_adapters": _has_adapters(model)}
            self._load(step_variants(model.kv.kv_heads, model.vocab_size, self._dtype, max_pages, **features))

    def start_serving(self) -> None:
        """See `KernelLoader`."""
        account = self.account
        log.info(
            "kernels loaded", extra={"kernels": account.num_variants, "compiled": account.num_compiled, "s": account.seconds}
        )
        self.watch.start_serving()

    def _load(self, variants: Sequence[KernelVariant]) -> None:
        self.account += warm_up(variants, self.watch, has_device=self._has_device)


@runtime_checkable
class ListedLinear(Protocol):
    """A linear or a table of rows with kernels of its own."""

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """Returns the variants of any number of rows. `add`: those that add to a residual."""
        ...


def quantized_variants(model: Decoder, dtype: torch.dtype, world_size: int) -> list[KernelVariant]:
    """Returns the variants of all layers and the head, each once. `world_size`: ranks that share a layer."""
    found: dict[KernelVariant, None] = {}
    for linear, add in dict.fromkeys(_linears(model, world_size)):
        for part in linear.linears if isinstance(linear, StackedLinear) else [linear]:
            if isinstance(part, ListedLinear):
                found |= dict.fromkeys(part.variants(dtype, add=add and part is linear))
    return list(found)


def _linears(model: Decoder, world_size: int) -> Iterator[tuple[object, bool]]:
    """Yields all linears, and whether each adds to the residual."""
    yield getattr(getattr(model, "embedding", None), "weight", None), False
    for layer in model.layers:
        yield layer.qkv, False
        yield layer.o, world_size == 1 and layer.attention_out is None
        if isinstance(layer.gate_up, PlainGated):
            yield layer.gate_up.linear, False
            yield layer.down, world_size == 1 and layer.mlp_out is None
    yield getattr(model, "head", None), False
