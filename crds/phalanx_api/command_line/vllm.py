"""Flags of `vllm serve` that are not ours, and values that have another name here: what `phalanx-runtime serve` makes of each.

A flag that changes only times, memory, logs or random seeds is accepted without effect; one that changes answers otherwise, or
limits, is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
Kind = Literal["switch", "value", "values"]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag without a counterpart."""

    names: tuple[str, ...]
    reason: str
    """Why it has no effect, or what to do instead."""
    kind: Kind
    harmless: tuple[str, ...] | None
    """Values that are accepted, without effect; null: all."""

    @property
    def dest(self) -> str:
        """Attribute of the parsed flags, which no Phalanx flag uses."""
        return f"vllm {self.names[0]}"

    @property
    def note(self) -> str:
        """Why an accepted value has no effect."""
        return self.reason if self.harmless is None else "this is always so"

    def is_refused(self, value: object) -> bool:
        """Whether the value would have an effect. `value`: a text, texts, or whether a switch is on."""
        values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        return self.harmless is not None and not all(item in self.harmless for item in values)


def parse_count(text: str) -> int:
    """Parses a whole number; k, m, g, t are powers of 1000, K, M, G, T of 1024. Raises ValueError."""
    found = _COUNT.fullmatch(text)
    if found is None:
        return int(text)
    unit = found[2]
    power = "kmgt".index(unit.lower()) + 1
    value = Fraction(found[1]) * int((1000 if unit.islower() else 1024) ** power)
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not whole")
    return value.numerator


def _flags(kind: Kind, harmless: tuple[str, ...] | None, reasons: Mapping[str, str]) -> Iterable[ForeignFlag]:
    """Returns the flags of each reason. Names are separated by spaces, names of one flag by /."""
    for reason, flags in reasons.items():
        for names in flags.split():
            yield ForeignFlag(tuple(names.split("/")), reason, kind, harmless)


_SWITCHES = {
    "tools are offered to every model whose format of calls is known; --tool-call-parser none turns them off": (
        "--enable-auto-tool-choice"
    ),
    "reasoning is separated for every model whose format is known; --reasoning-parser none turns it off": "--enable-reasoning",
    "prompts are always computed in chunks; --max-num-batched-tokens bounds them": "--enable-chunked-prefill",
    "prompts and answers are never logged": "--disable-log-requests --enable-log-requests --enable-log-outputs",
    "metrics are at /metrics, not in the log": "--disable-log-stats --aggregate-engine-logging",
    "the log has no line per request": "--disable-uvicorn-access-log --enable-log-deltas",
    "code of a checkpoint is never run: a model is served if our decoder or transformers has its architecture": (
        "--trust-remote-code"
    ),
    "a server has one HTTP process, and ranks are processes of their own": (
        "--disable-frontend-multiprocessing --worker-use-ray --engine-use-ray"
    ),
    "the scheduler has one form": (
        "--use-v2-block-manager --disable-async-output-proc --multi-step-stream-outputs --enable-multi-step "
        "--disable-hybrid-kv-cache-manager --disable-cascade-attn --enable-dbo"
    ),
    "usage always has the cached tokens": "--enable-prompt-tokens-details",
    "responses always have X-Request-Id": "--enable-request-id-headers",
    "/openapi.json is always served": "--disable-fastapi-docs --enable-offline-docs",
    "the load of a group is in its metrics and reports": "--enable-server-load-tracking",
    "adapters are split over ranks as the layers are": "--fully-sharded-loras",
    "images are processed once for each request": "--disable-mm-preprocessor-cache",
    "progress is shown on a terminal only": "--use-tqdm-on-load",
}
_VALUES = {
    "with --host-cache-memory evicted pages go to host memory, and preempted requests load theirs where that beats computing": (
        "--swap-space"
    ),
    "decode steps are captured up to --max-num-seqs; --enforce-eager turns captures off": (
        "--max-seq-len-to-capture --max-cudagraph-capture-size"
    ),
    "kernels are chosen by the device; --enforce-eager turns captures off": (
        "--compilation-config/-O/-cc --optimization-level --attention-backend --all2all-backend --moe-backend"
    ),
    "ranks are always processes of the group's pods": "--distributed-executor-backend --api-server-count/-asc",
    "the log has the levels info and above; --log-format sets its form": "--uvicorn-log-level --log-config-file",
    "prompts are never logged": "--max-log-len",
    "requests carry their seed; those without one stay random": "--seed",
    "weights are read in parallel, without a setting": "--max-parallel-loading-workers --safetensors-load-strategy",
    "only files that serving needs are downloaded, and code is never run": "--code-revision",
    "a model answers every kind of request that it can": "--task --runner --convert",
    "grammars have one engine": "--guided-decoding-backend --structured-outputs-config",
    "the form of content is found by trying the template": "--chat-template-content-format",
    "the scheduler has one form": (
        "--num-scheduler-steps --num-lookahead-slots --scheduler-delay-factor --preemption-mode --max-num-partial-prefills "
        "--max-long-partial-prefills --scheduler-cls"
    ),
    "pages have a key of their own": "--prefix-caching-hash-algo",
    "images are processed once for each request": "--mm-processor-cache-gb",
    "adapters that are not loaded are read again from their folder": "--max-cpu-loras",
}
_LISTS = {
    "decode steps are captured up to --max-num-seqs; --enforce-eager turns captures off": (
        "--cuda-graph-sizes --cudagraph-capture-sizes"
    ),
    "only files that serving needs are downloaded": "--ignore-patterns",
}
_REFUSED_SWITCHES = {
    "not supported: a usage is sent to a stream that asks for it by stream_options": "--enable-force-include-usage",
    "not supported: delete groups or scale to zero (spec.autoscaling)": "--enable-sleep-mode",
    "not supported: a model's own window is used": "--disable-sliding-window",
    "not supported: the model's tokenizer.json is needed": "--skip-tokenizer-init",
    "not supported: start each pod with --nnodes, --node-rank and --master-addr": "--headless",
    "not supported: experts are split by --enable-expert-parallel, without copies": "--enable-eplb",
    "not supported": "--allow-credentials --return-tokens-as-token-ids --enable-prompt-embeds --enable-prompt-adapter",
}
_REFUSED_VALUES = {
    "not supported: the tokenizer.json in the model's folder is used": "--tokenizer --tokenizer-revision",
    "not supported: the config.json in the model's folder is used": "--hf-config-path",
    "use --speculative-method with --speculative-tokens, and --speculative-draft-model for a draft model": (
        "--speculative-config --speculative-model --num-speculative-tokens"
    ),
    "use --kv-cache-memory-bytes": "--num-gpu-blocks-override",
    "use --hf-overrides": "--rope-scaling --rope-theta",
    "use --host-cache-memory, in bytes for each rank": "--kv-offloading-size --kv-offloading-backend",
    "not supported: groups move and share pages through a router (docs/balancing.md)": "--kv-transfer-config --kv-events-config",
    "use --pooling": "--pooler-config --override-pooler-config",
    "set OTEL_EXPORTER_OTLP_ENDPOINT (docs/tracing.md)": "--otlp-traces-endpoint",
    "not supported: TLS is the router's (docs/tls.md), or a proxy's": (
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs"
    ),
    "not supported: let a proxy remove the prefix of paths": "--root-path",
    "not supported: origins may use all methods and headers": "--allowed-methods --allowed-headers",
    "not supported: code is not loaded": (
        "--middleware --tool-parser-plugin --reasoning-parser-plugin --logits-processors --worker-cls --worker-extension-cls"
    ),
    "not supported: images come in requests, or from --allowed-media-domains": "--allowed-local-media-path --media-io-kwargs",
    "not supported: a request may have 16 images": "--limit-mm-per-prompt",
    "not supported: the device is that of the machine; CUDA_VISIBLE_DEVICES hides GPUs": "--device",
    "not supported": (
        "--mm-processor-kwargs --logprobs-mode --uds --model-loader-extra-config --additional-config --quantization-param-path "
        "--lora-extra-vocab-size"
    ),
}
_MORE_GROUPS = "set spec.replicas, or start one runtime per group and phalanx-router with --leaders"
FOREIGN: tuple[ForeignFlag, ...] = (
    *_flags("switch", None, _SWITCHES),
    *_flags("value", None, _VALUES),
    *_flags("values", None, _LISTS),
    *_flags("switch", ("False",), _REFUSED_SWITCHES),
    *_flags("value", (), _REFUSED_VALUES),
    *_flags("value", ("1",), {_MORE_GROUPS: "--data-parallel-size/-dp --data-parallel-size-local/-dpl"}),
    *_flags("value", ("0",), {_MORE_GROUPS: "--data-parallel-rank/-dpn --data-parallel-start-rank/-dpr"}),
    *_flags(
        "value", (), {_MORE_GROUPS: "--data-parallel-address/-dpa --data-parallel-rpc-port/-dpp --data-parallel-backend/-dpb"}
    ),
    *_flags("value", ("1",), {"not supported: use --tensor-parallel-size": "--decode-context-parallel-size/-dcp"}),
    *_flags("value", ("0", "0.0"), {"not supported: weights stay on the device; use --quantization": "--cpu-offload-gb"}),
    *_flags("value", ("20",), {"not supported: an answer may have 20 logprobs per token": "--max-logprobs"}),
    *_flags("value", ("assistant",), {"not supported: answers have the role assistant": "--response-role"}),
    *_flags(
        "value", ("auto", "hf"), {"not supported: tokenizer.json and config.json are read": "--tokenizer-mode --config-format"}
    ),
    *_flags(
        "value",
        ("auto", "safetensors", "gguf", "bitsandbytes", "hf"),
        {"not supported: weights are read from safetensors or a GGUF file": "--load-format"},
    ),
    *_flags("value", ("auto",), {"not supported: adapters have the dtype of the model": "--lora-dtype"}),
)
"""All of them; a name occurs once."""

_Value = tuple[str | None, str]
_OF_CHECKPOINT: _Value = (None, "the quantisation of a checkpoint is read from its config.json")
_OF_BITSANDBYTES: _Value = (
    None,
    "a checkpoint of bitsandbytes is read as it is; another one is rounded by --quantization int4",
)
VALUES: Mapping[str, Mapping[object, _Value]] = {
    "dtype": {"half": ("float16", ""), "float": ("float32", "")},
    "max_model_len": {"auto": (None, ""), "-1": (None, "")},
    "model_impl": {"vllm": ("fused", "")},
    "quantization": {
        "bitsandbytes": _OF_BITSANDBYTES,
        **dict.fromkeys(
            (
                *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4"),
                *("modelopt", "modelopt_fp4", "auto-round"),
            ),
            _OF_CHECKPOINT,
        ),
    },
}
"""By the name of a setting: the Phalanx value for a vLLM value, or why the value has no effect."""


def dashed(word: str) -> str:
    """Returns a word of a command line with the dashes of a flag for underscores: vLLM accepts both."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def own_words(words: Iterable[str]) -> list[str]:
    """Returns the words of a command line of `vllm serve` with the model of `--model` as the first argument."""
    model, rest, is_model = [], [], False
    for word in map(dashed, words):
        if is_model or word.startswith("--model="):
            model.append(word if is_model else word.partition("=")[2])
            is_model = False
        elif word == "--model":
            is_model = True
        else:
            rest.append(word)
    return [*model, *rest] if not is_model else [*rest, "--model"]
