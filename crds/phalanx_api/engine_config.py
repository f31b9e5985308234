"""Every engine setting, declared once: its default, flag, help, bound and the `InferenceService` field that sets it.

`phalanx-runtime serve` takes its flags from `SETTINGS`, each rank receives the `EngineConfig` in its `RankSpec`, and the CRD, the
operator's rendering and the check of `extraArgs` read the same table. A new setting is one field of `EngineConfig`.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH, METHOD_OF, SHAPE_OF, Method, TreeShape

DType = Literal["auto", "float32", "bfloat16", "float64"]
Quantization = Literal["int8"]
ModelImpl = Literal["auto", "fused", "transformers"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "w-tinylfu", "adaptive"]
SchedulingPolicy = Literal["fcfs", "priority", "deadline", "fair"]
SpeculativeControl = Literal["adaptive", "fixed"]
_BOUNDS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
}
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: an `EngineConfig` field with its flag, bound and manifest field."""

    name: str
    type: Any
    """Type of a value; for an optional setting without its `None`."""
    default: Any
    help: str
    """Help text of the flag and description of the manifest field."""
    metavar: str | None = None
    short: str | None = None
    bound: Mapping[str, Any] = field(default_factory=dict)
    """Constraints of a value, or of each item of a list, in the words of pydantic: ge, gt, le."""
    max_length: int | None = None
    manifest: str | None = None
    """Path of the `InferenceService` field, such as `spec.engine.pageSize`; without one only `extraArgs` sets the flag."""
    is_quantity: bool = False
    """Whether the manifest has a Kubernetes quantity, such as 8Gi, where the flag has bytes."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Values of the flag by the manifest's names for them, where the names differ."""

    @property
    def flag(self) -> str:
        """The flag, such as `--page-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every form in which the flag may be written."""
        negated = (f"--no-{self.flag[2:]}",) if self.type is bool and self.default else ()
        return (self.flag, *((self.short,) if self.short else ()), *negated)

    @property
    def is_list(self) -> bool:
        """Whether a value is a list, written with commas."""
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The values of an enumeration; None for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else None

    def parse(self, text: str) -> Any:
        """Returns the value that `text` is on the command line. Raises ValueError with the value and what is expected."""
        if not self.is_list:
            return self._parse_one(text)
        values = tuple(map(self._parse_one, text.split(",")))
        if self.max_length is not None and len(values) > self.max_length:
            raise ValueError(f"{text!r}: expected at most {self.max_length} items")
        return values

    def _parse_one(self, text: str) -> int | float:
        kind = get_args(self.type)[0] if self.is_list else self.type
        with suppress(ValueError):
            value: int | float = kind(text)
            if math.isfinite(value) and all(_BOUNDS[name][0](value, limit) for name, limit in self.bound.items()):
                return value
        bounds = " and ".join(f"{_BOUNDS[name][1]} {limit}" for name, limit in self.bound.items())
        raise ValueError(f"{text!r}: expected a {'whole ' if kind is int else ''}number of {bounds}")

    def flag_words(self, value: Any) -> list[str]:
        """Returns the words of the command line that set this value, as a manifest has it; none for an unset field."""
        if value is None:
            return []
        if self.type is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        word = ",".join(map(str, value)) if self.is_list else str(value)
        return [self.flag, self.words.get(word, word)]


def _setting(default: Default, help: str, manifest: str | None = None, **declared: Any) -> Default:
    """A field of `EngineConfig`; `declared` are fields of `Setting`, and ge, gt and le of its bound."""
    bound = {name: declared.pop(name) for name in ("ge", "gt", "le") if name in declared}
    made: Default = field(default=default, metadata=declared | {"help": help, "manifest": manifest, "bound": bound})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine, named as vLLM's where the meaning is the same. The operator renders flags in this order."""

    dtype: DType = _setting("auto", "dtype of weights and KV cache; auto: the fastest of the device", "spec.engine.dtype")
    max_model_len: int | None = _setting(
        None,
        "prompt and output tokens of one request; default: the smaller of the model's limit and the page pool",
        "spec.engine.maxModelLen",
        ge=1,
        le=16_777_216,
        metavar="N",
    )
    max_num_seqs: int = _setting(
        64, "requests in one step; each needs memory for its logits", "spec.engine.maxNumSeqs", ge=1, le=65_536, metavar="N"
    )
    max_num_batched_tokens: int = _setting(
        512,
        "tokens in one step; more shorten prefill and lengthen the steps of running streams",
        "spec.engine.maxNumBatchedTokens",
        ge=1,
        le=1_048_576,
        metavar="N",
    )
    page_size: int = _setting(16, "tokens in a page of the KV cache", "spec.engine.pageSize", ge=1, le=256, metavar="N")
    kv_cache_memory_bytes: int | None = _setting(
        None,
        "KV cache of each rank; default: the free memory of the device",
        "spec.engine.kvCacheMemory",
        ge=1,
        metavar="B",
        is_quantity=True,
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of a GPU's memory for weights, activations and KV cache",
        "spec.engine.gpuMemoryUtilization",
        gt=0,
        le=1,
        metavar="SHARE",
    )
    scheduling_policy: SchedulingPolicy = _setting(
        "fcfs", "order in which requests are scheduled; the last one is preempted first", "spec.engine.schedulingPolicy"
    )
    speculative_method: Method = _setting(
        "none",
        "source of draft tokens for requests that name none; it changes times, never tokens",
        "spec.engine.speculative.method",
        words=METHOD_OF,
    )
    speculative_tokens: int = _setting(
        4, "most draft tokens of a request in one step", "spec.engine.speculative.numTokens", ge=1, le=MAX_DEPTH, metavar="N"
    )
    speculative_ratio: float | None = _setting(
        None,
        "share of the layers that compute self-drafts; default: the exit's, else 0.4",
        "spec.engine.speculative.ratio",
        gt=0,
        le=1,
        metavar="SHARE",
    )
    speculative_tree: tuple[int, ...] = _setting(
        (),
        "most draft tokens after each node, by tree level; deeper levels have one; default: a chain",
        "spec.engine.speculative.tree.widths",
        ge=1,
        le=MAX_WIDTH,
        max_length=MAX_DEPTH,
        metavar="N,N",
    )
    speculative_tree_shape: TreeShape = _setting(
        "best_first",
        "best_first: the draft model chooses branches by probability; static: the scheduler does, by acceptance rate",
        "spec.engine.speculative.tree.shape",
        words=SHAPE_OF,
    )
    enable_prefix_caching: bool = _setting(
        True, "keep pages of prompts and outputs for requests with the same prefix", "spec.engine.prefixCaching"
    )
    prefix_eviction_policy: EvictionPolicy = _setting("adaptive", "which cached page is evicted first")
    long_prefill_token_threshold: int = _setting(
        0, "most tokens of one prompt in a step; 0: half a step while other requests have tokens to compute", ge=0, metavar="N"
    )
    itl_target_ms: float | None = _setting(
        None, "longest step while streams run, kept by smaller prefill chunks; default: no target", gt=0, metavar="MS"
    )
    max_num_queued_reqs: int = _setting(1024, "requests in the queue; further requests get 429", ge=1, metavar="N")
    max_num_queued_tokens: int | None = _setting(
        None, "uncomputed tokens in the queue; further requests get 429; default: no limit", ge=1, metavar="N"
    )
    quantization: Quantization | None = _setting(
        None, "round weights of linear layers to int8 with a scale per output channel; default: as they are", short="-q"
    )
    batch_invariant: bool = _setting(False, "compute a request's tokens alike whatever else is in its steps; slower")
    model_impl: ModelImpl = _setting(
        "auto", "fused: own decoder; transformers: its model with paged attention; auto: fused where it knows the architecture"
    )
    speculative_control: SpeculativeControl = _setting(
        "adaptive", "adaptive: only draft tokens that pay, none under load; fixed: all, for measurements"
    )


def _read_settings() -> Iterable[Setting]:
    hints = get_type_hints(EngineConfig)
    for declared in fields(EngineConfig):
        kinds = [kind for kind in get_args(hints[declared.name]) if kind is not NoneType]
        is_optional = NoneType in get_args(hints[declared.name])
        kind = kinds[0] if is_optional else hints[declared.name]
        yield Setting(name=declared.name, type=kind, default=declared.default, **declared.metadata)


SETTINGS: tuple[Setting, ...] = tuple(_read_settings())
"""The declarations of `EngineConfig`, in its order."""
