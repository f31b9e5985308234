"""Every engine setting, declared once: default, flag, help, bound, manifest field.

Flags, `RankSpec`, CRD, rendered arguments and the check of `extraArgs` follow from the fields of `EngineConfig`. A value goes:

    manifest -> `spec.engine` -> `phalanx_operator.render.pods` (flag) -> `phalanx_runtime.settings` -> `RankSpec.engine`
             -> `phalanx_runtime.rank.__main__` (`core.admission.Limits`, `SchedulerConfig`, caches)
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from phalanx_api.command_line.vllm import parse_count
from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH, METHOD_OF, SHAPE_OF, Method, TreeShape

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Quantization = Literal["int8", "int4", "fp8"]
ModelImpl = Literal["auto", "fused", "transformers"]
KvCacheDtype = Literal["auto", "fp8", "int8", "int4"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "w-tinylfu", "adaptive"]
SchedulingPolicy = Literal["fcfs", "priority", "deadline", "fair"]
SpeculativeControl = Literal["adaptive", "fixed"]
PoolingSetting = Literal["auto", "mean", "last", "cls"]
Reranker = Literal["none", "qwen3"]
ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "pythonic",
    "mistral",
    "qwen3_coder",
    "qwen3_xml",
    "deepseek_v3",
    "deepseek_v31",
    "openai",
    "phi4_mini_json",
    "granite",
    "glm45",
    "kimi_k2",
    "functiongemma",
    "gemma4",
]
ReasoningParser = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "granite", "mistral", "gemma4", "openai_gptoss"
]
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
    """Declaration of one field of `EngineConfig`."""

    name: str
    type: Any
    """Type of a non-null value."""
    default: Any
    help: str
    """Help text of the flag and description of the manifest field."""
    metavar: str | None = None
    short: str | None = None
    aliases: tuple[str, ...] = ()
    """Names of the flag in vLLM, where they differ."""
    bound: Mapping[str, Any] = field(default_factory=dict)
    """Pydantic constraints (ge, gt, le) of a value, or of each item of a list."""
    max_length: int | None = None
    manifest: str | None = None
    """Path of the field, such as `spec.engine.pageSize`; otherwise only `extraArgs` sets the flag."""
    is_quantity: bool = False
    """Whether the manifest has a quantity where the flag has bytes."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Flag values by manifest value, where they differ."""

    @property
    def flag(self) -> str:
        """Flag, such as `--page-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All forms of the flag."""
        negated = (f"--no-{self.flag[2:]}",) if self.type is bool else ()
        return (self.flag, *((self.short,) if self.short else ()), *self.aliases, *negated)

    @property
    def is_list(self) -> bool:
        """Whether a value is a comma-separated list."""
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Values of an enumeration; null for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else None

    def parse(self, text: str) -> Any:
        """Parses a command line value. Raises ValueError."""
        if not self.is_list:
            return self._parse_one(text)
        values = tuple(map(self._parse_one, text.split(",")))
        if self.max_length is not None and len(values) > self.max_length:
            raise ValueError(f"{text!r}: expected at most {self.max_length} items")
        return values

    def _parse_one(self, text: str) -> int | float | str:
        kind = get_args(self.type)[0] if self.is_list else self.type
        if kind is str:
            return text
        with suppress(ValueError):
            value: int | float = parse_count(text) if kind is int else kind(text)
            if math.isfinite(value) and all(_BOUNDS[name][0](value, limit) for name, limit in self.bound.items()):
                return value
        bounds = " and ".join(f"{_BOUNDS[name][1]} {limit}" for name, limit in self.bound.items())
        raise ValueError(f"{text!r}: expected a {'whole ' if kind is int else ''}number of {bounds}")

    def flag_words(self, value: Any) -> list[str]:
        """Returns the command line words for a manifest's value, if set."""
        if value is None:
            return []
        if self.type is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        word = ",".join(map(str, value)) if self.is_list else str(value)
        return [self.flag, self.words.get(word, word)]


def _setting(default: Default, help: str, manifest: str | None = None, **declared: Any) -> Default:
    """Declares a field. `declared`: fields of `Setting`, and its bound as ge, gt, le."""
    bound = {name: declared.pop(name) for name in ("ge", "gt", "le") if name in declared}
    declaration: Default = field(default=default, metadata=declared | {"help": help, "manifest": manifest, "bound": bound})
    return declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine, named as vLLM's. The operator renders flags in this order."""

    dtype: DType = _setting(
        "auto", "dtype of weights and KV cache; float16: on GPUs only; auto: the fastest of the device", "spec.engine.dtype"
    )
    max_model_len: int | None = _setting(
        None,
        "maximum prompt plus output tokens of a request; default: the smaller of the model's limit and the page pool",
        "spec.engine.maxModelLen",
        ge=1,
        le=16_777_216,
        metavar="N",
    )
    max_num_seqs: int = _setting(
        64,
        "maximum requests in a step; more need memory for their logits, further ones wait",
        "spec.engine.maxNumSeqs",
        ge=1,
        le=65_536,
        metavar="N",
    )
    max_num_batched_tokens: int = _setting(
        512,
        "maximum tokens in a step; more shorten prefill and lengthen the steps of running streams",
        "spec.engine.maxNumBatchedTokens",
        ge=1,
        le=1_048_576,
        metavar="N",
    )
    page_size: int = _setting(
        16,
        "tokens in a page of the KV cache, the unit of prefix sharing",
        "spec.engine.pageSize",
        ge=1,
        le=256,
        metavar="N",
        aliases=("--block-size",),
    )
    kv_cache_memory_bytes: int | None = _setting(
        None,
        "KV cache of each rank; default: the free memory of the device",
        "spec.engine.kvCacheMemory",
        ge=1,
        metavar="B",
        is_quantity=True,
    )
    kv_cache_dtype: KvCacheDtype = _setting(
        "auto",
        "dtype of keys and values; fp8 (e2m5), int8: with a scale per token and head; int4: with a scale and an offset per 64 "
        "dimensions; auto: the dtype of the weights",
        "spec.engine.kvCacheDtype",
    )
    kv_cache_calibration: str | None = _setting(
        None,
        "file of calibrate-kv for this model, which lowers the error of compressed keys and values: its name in the model's "
        "folder, or an absolute path; default: none",
        "spec.engine.kvCacheCalibration",
        metavar="FILE",
    )
    host_cache_memory: int | None = _setting(
        None,
        "host memory of each rank for pages that the KV cache evicts; prompts load them where that is faster than computing; "
        "default: none",
        "spec.engine.hostCacheMemory",
        ge=1,
        metavar="B",
        is_quantity=True,
    )
    host_cache_adaptive: bool = _setting(
        False,
        "let the host memory for pages grow to its limit, and shrink, by what its pages add to the hit rate",
        "spec.engine.hostCacheAdaptive",
    )
    host_cache_min_memory: int | None = _setting(
        None,
        "host memory for pages that an adaptive size keeps; default: an eighth of the limit",
        "spec.engine.hostCacheMinMemory",
        ge=1,
        metavar="B",
        is_quantity=True,
    )
    host_cache_min_gain: float = _setting(
        0.05,
        "hit rate that the whole limit of an adaptive size must add, and parts of it in proportion; more keeps it smaller",
        "spec.engine.hostCacheMinGain",
        gt=0,
        le=1,
        metavar="SHARE",
    )
    disk_cache_path: str | None = _setting(
        None,
        "folder on a local disk for the pages in host memory, of which a restart finds those that it has; default: none",
        "spec.engine.diskCachePath",
        metavar="PATH",
    )
    disk_cache_bytes: int | None = _setting(
        None,
        "disk space of each rank for pages; default: 16 GiB",
        "spec.engine.diskCacheBytes",
        ge=1,
        metavar="B",
        is_quantity=True,
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "share of a GPU's memory for weights, activations and KV cache; less memory holds fewer requests",
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
        "default source of draft tokens; it changes times, never tokens",
        "spec.engine.speculative.method",
        words=METHOD_OF,
    )
    speculative_tokens: int = _setting(
        4, "maximum draft tokens of a request in a step", "spec.engine.speculative.numTokens", ge=1, le=MAX_DEPTH, metavar="N"
    )
    speculative_ratio: float | None = _setting(
        None,
        "share of the layers that compute self-drafts; default: that of the exit, else 0.4",
        "spec.engine.speculative.ratio",
        gt=0,
        le=1,
        metavar="SHARE",
    )
    speculative_tree: tuple[int, ...] = _setting(
        (),
        "maximum draft tokens after each node, by tree level; deeper levels have 1; default: a chain",
        "spec.engine.speculative.tree.widths",
        ge=1,
        le=MAX_WIDTH,
        max_length=MAX_DEPTH,
        metavar="N,N",
    )
    speculative_tree_shape: TreeShape = _setting(
        "best_first",
        "choice of branches; best_first: by the draft model's probability; static: by acceptance rate",
        "spec.engine.speculative.tree.shape",
        words=SHAPE_OF,
    )
    enable_prefix_caching: bool = _setting(True, "share pages between requests with the same prefix", "spec.engine.prefixCaching")
    prefix_eviction_policy: EvictionPolicy = _setting("adaptive", "which cached page is evicted first")
    long_prefill_token_threshold: int = _setting(
        0, "maximum tokens of one prompt in a step; 0: half a step while other requests have tokens to compute", ge=0, metavar="N"
    )
    async_scheduling: bool = _setting(
        False,
        "plan a step before the tokens of the previous one are known, so that no device waits; no effect with draft tokens "
        "or pipeline stages",
        "spec.engine.asyncScheduling",
    )
    enforce_eager: bool = _setting(
        False,
        "on GPUs, launch and sample every step from the host instead of capturing decode steps as CUDA graphs",
        "spec.engine.enforceEager",
    )
    disable_custom_all_reduce: bool = _setting(
        False,
        "on GPUs, sum over ranks by NCCL alone; default: also by one kernel, for as many rows as it is measured to be faster",
    )
    enable_expert_parallel: bool = _setting(
        False,
        "give each rank whole experts of a mixture of experts, not columns of all experts",
        "spec.engine.enableExpertParallel",
        short="-ep",
    )
    enable_lora: bool = _setting(False, "reserve memory for LoRA adapters, which requests choose by their names")
    max_loras: int = _setting(8, "adapters that are loaded at once; each takes memory of the rank", ge=1, le=256, metavar="N")
    max_lora_rank: int = _setting(16, "largest rank of an adapter; each slot has memory for it", ge=1, le=512, metavar="R")
    lora_experts: bool = _setting(True, "give slots of adapters memory for the experts of a mixture of experts too")
    itl_target_ms: float | None = _setting(
        None, "maximum step time while streams run, kept by smaller prefill chunks; default: no target", gt=0, metavar="MS"
    )
    max_num_queued_reqs: int = _setting(1024, "maximum requests in the queue; further requests get 429", ge=1, metavar="N")
    max_num_queued_tokens: int | None = _setting(
        None, "maximum uncomputed tokens in the queue; further requests get 429; default: no limit", ge=1, metavar="N"
    )
    quantization: Quantization | None = _setting(
        None,
        "round weights of linear layers: int8 or fp8 (e4m3) with a scale per output channel, int4 with a scale and an offset per "
        "128 inputs; default: off",
        "spec.engine.quantization",
        short="-q",
    )
    batch_invariant: bool = _setting(False, "compute a request's tokens independently of the other requests in its steps; slower")
    pooling: PoolingSetting = _setting(
        "auto",
        "how /v1/embeddings makes a vector of hidden states: their mean, or that of the last or the first token; auto: as the "
        "checkpoint says (1_Pooling/config.json), else the mean",
        "spec.engine.pooling",
    )
    reranker: Reranker = _setting(
        "none",
        "how /v1/score and /v1/rerank score texts with a model that generates: qwen3: by yes and no after the prompt of "
        "Qwen3-Reranker; none: by the cosine of embeddings",
    )
    tool_call_parser: ToolCallParser = _setting(
        "auto", "format of tool calls (docs/tool-formats.md); auto: as the checkpoint's chat template says; none: no tools"
    )
    reasoning_parser: ReasoningParser = _setting(
        "auto", "format of reasoning; auto: as the checkpoint's chat template says; none: reasoning is content"
    )
    model_impl: ModelImpl = _setting(
        "auto", "fused: own decoder; transformers: its model with paged attention; auto: fused if it supports the architecture"
    )
    speculative_control: SpeculativeControl = _setting(
        "adaptive", "adaptive: only draft tokens that save time; fixed: all, for measurements"
    )


def _read_settings() -> Iterable[Setting]:
    hints = get_type_hints(EngineConfig)
    for declared in fields(EngineConfig):
        kinds = [kind for kind in get_args(hints[declared.name]) if kind is not NoneType]
        is_optional = NoneType in get_args(hints[declared.name])
        kind = kinds[0] if is_optional else hints[declared.name]
        yield Setting(name=declared.name, type=kind, default=declared.default, **declared.metadata)


SETTINGS: tuple[Setting, ...] = tuple(_read_settings())
"""Fields of `EngineConfig`, in order."""
