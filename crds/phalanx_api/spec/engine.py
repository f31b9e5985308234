"""`spec.engine`: plain settings from `phalanx_api.engine_config`, and others."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

from pydantic import AfterValidator, Field, StringConstraints, create_model, model_validator
from pydantic.alias_generators import to_snake as _to_snake

from phalanx_api.engine_config import SETTINGS, EngineConfig, Setting
from phalanx_api.labels import MAX_ADAPTER_SECRETS
from phalanx_api.schema import Record, rule, rules, with_rules
from phalanx_api.spec.model import Uri
from phalanx_api.spec.quantities import Memory, parse_bytes
from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH

to_snake = functools.cache(_to_snake)
"""Settings have few names, and each manifest is checked for all of them."""
_OPERATOR_FLAGS = (
    *("--revision", "--served-model-name", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--host", "--port", "--token-file", "--shutdown-timeout"),
    *("--oidc-issuer", "--oidc-audience", "--oidc-jwks-uri", "--oidc-tenant-claim", "--oidc-models-claim"),
    *("--oidc-priority-claim", "--oidc-required-claim"),
    *("--api-key", "--api-keys-file", "--download-dir", "--cached-only", "--speculative-draft-model", "--speculative-exit"),
    *("--config", "--model"),  # a file may set any of the others
    *("--lora-secrets-dir", "--chat-template"),
    *("--allow-runtime-lora-updating", "--lora-dir"),  # groups have no API keys: any client in the network could load adapters
)
RESERVED = (*_OPERATOR_FLAGS, *(word for setting in SETTINGS if setting.manifest for word in setting.spellings))
"""Flags that `extraArgs` must not contain."""
_NOT_ALLOWED = (
    "flags that the operator or another field sets are not allowed, not even abbreviated; "
    "a flag and its value are two items, without = or _"
)


def is_allowed(word: str) -> bool:
    """Whether `extraArgs` may contain `word`."""
    return not word.startswith("-") or ({"=", "_"}.isdisjoint(word) and not any(flag.startswith(word) for flag in RESERVED))


def _allowed(words: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(is_allowed, words)):
        raise ValueError(_NOT_ALLOWED)
    return words


_LISTED = ", ".join(f"'{flag}'" for flag in RESERVED)
_WORD = f"!a.contains('=') && !a.contains('_') && ![{_LISTED}].exists(r, r.startsWith(a))"
_RULE = rule(f"self.all(a, !a.startsWith('-') || ({_WORD}))", _NOT_ALLOWED)
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ExtraArgs = Annotated[tuple[Word, ...], Field(max_length=64, json_schema_extra=with_rules(_RULE)), AfterValidator(_allowed)]
"""Words of a command line."""
SecretName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class SpeculativeTree(Record):
    """Tree of draft tokens."""

    widths: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field(min_length=1, max_length=MAX_DEPTH)
    """Maximum draft tokens after each node, by tree level; 1 at deeper levels."""
    shape: Literal["BestFirst", "Static"] = "BestFirst"
    """BestFirst: the draft model chooses branches by probability. Static: the scheduler chooses by acceptance rate."""


class Speculative(Record):
    """Speculative decoding. It changes times, never tokens."""

    model_config = Record.model_config | rules(
        rule(
            "(self.method == 'Draft') == has(self.draftModel)",
            "draftModel is required with method Draft and only allowed there",
            ".draftModel",
        ),
        rule("self.method == 'SelfDraft' || !has(self.exit)", "exit is only allowed with method SelfDraft", ".exit"),
        rule("self.method == 'SelfDraft' || !has(self.ratio)", "ratio is only allowed with method SelfDraft", ".ratio"),
    )
    method: Literal["None", "NGram", "Draft", "SelfDraft"] = "None"
    """Default source of draft tokens. NGram: what followed the last tokens earlier in the request. Draft: a smaller model.
    SelfDraft: the model's own first layers. Groups serve without speculation if the draft model fails to load."""
    draft_model: Uri | None = Field(default=None, min_length=1, max_length=512)
    """Draft: URI of the smaller model, as `spec.model.uri`, with the same `secretRef`. Groups refuse another tokenizer."""
    exit: Uri | None = Field(default=None, min_length=1, max_length=512)
    """SelfDraft: URI of the exit that `phalanx-runtime fit-exit` wrote for this model, or its folder. Without it the acceptance
    rate is low."""
    ratio: str | None = Field(default=None, max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$")
    """SelfDraft: share of the layers that draft, such as "0.40". Default: that of the exit, else 0.40."""
    num_tokens: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    """Maximum draft tokens of a request in a step; the engine uses fewer where they do not pay. Default: 4."""
    tree: SpeculativeTree | None = None
    """Tree of draft tokens, where it pays more than a chain. Default: chains."""

    @model_validator(mode="after")
    def _fits(self) -> "Speculative":
        if (self.method == "Draft") != (self.draft_model is not None):
            raise ValueError("draftModel is required with method Draft and only allowed there")
        for name, value in {"exit": self.exit, "ratio": self.ratio}.items():
            if value is not None and self.method != "SelfDraft":
                raise ValueError(f"{name} is only allowed with method SelfDraft")
        return self


class ConfigMapKey(Record):
    """A key of a ConfigMap in the namespace of the service."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    key: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")


class ChatTemplateSource(Record):
    """Chat template in place of the model's."""

    config_map_key_ref: ConfigMapKey
    """A Jinja template. Groups read it when they start: for other content give the ConfigMap another name."""


class Probes(Record):
    """Probes of a pod's HTTP process, without loading the model (`spec.restartPolicy.startupSeconds`)."""

    startup_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Time until the first response, then the container restarts. Default: 600."""
    liveness_seconds: int | None = Field(default=None, ge=6, le=3600)
    """Time without a response, then the container restarts. Default: 60."""


_NEEDS = {
    "kvCacheCalibration": "kvCacheDtype",
    "diskCachePath": "hostCacheMemory",
    "diskCacheBytes": "diskCachePath",
    "hostCacheAdaptive": "hostCacheMemory",
    "hostCacheMinMemory": "hostCacheAdaptive",
    "hostCacheMinGain": "hostCacheAdaptive",
    "maxLoraRank": "maxAdapters",
    "adapterSecrets": "maxAdapters",
}
"""Fields that have no effect without another one, which must be set and not off."""
_OFF: Mapping[str, str] = {"hostCacheAdaptive": "false", "kvCacheDtype": "'auto'"}
"""CEL: the values that switch off."""


_DEFAULT_SEQS, _DEFAULT_TOKENS = EngineConfig().max_num_seqs, EngineConfig().max_num_batched_tokens
_TOO_FEW_TOKENS = (
    f"maxNumBatchedTokens (default {_DEFAULT_TOKENS}) must be at least maxNumSeqs (default {_DEFAULT_SEQS}): "
    "a step holds one token of each request"
)


def _or_default(field: str, default: int) -> str:
    """CEL: the field's value."""
    return f"(has(self.{field}) ? self.{field} : {default})"


def _is_on(field: str) -> str:
    """CEL: the field is set and not off."""
    return f"has(self.{field})" + (f" && self.{field} != {_OFF[field]}" if field in _OFF else "")


ADAPTER_FLAGS = ("--enable-lora", "--max-loras", "--max-lora-rank")
_ADAPTER_FLAGS = ", ".join(f"'{flag}'" for flag in ADAPTER_FLAGS)
_TWICE = f"maxAdapters excludes {', '.join(ADAPTER_FLAGS)} in extraArgs"


class _DeclaredEngine(Record):
    """Fields other than plain settings."""

    model_config = Record.model_config | rules(
        *(rule(f"!({_is_on(one)}) || ({_is_on(other)})", f"{one} needs {other}", f".{one}") for one, other in _NEEDS.items()),
        rule(
            f"{_or_default('maxNumBatchedTokens', _DEFAULT_TOKENS)} >= {_or_default('maxNumSeqs', _DEFAULT_SEQS)}",
            _TOO_FEW_TOKENS,
            ".maxNumBatchedTokens",
        ),
        rule(
            "!has(self.maxAdapters) || "
            f"!self.extraArgs.exists(a, a.startsWith('--') && [{_ADAPTER_FLAGS}].exists(f, f.startsWith(a)))",
            _TWICE,
            ".maxAdapters",
        ),
    )

    image: str | None = Field(default=None, min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")
    """Image of the runtime. Default: the operator's setting."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache; float16: on GPUs only; auto: the fastest of the device."""
    speculative: Speculative | None = None
    """Speculative decoding. Default: off."""
    chat_template: ChatTemplateSource | None = None
    """Chat template in place of the model's, in the language of the model's own. Default: the model's."""
    max_adapters: int | None = Field(default=None, ge=1, le=256)
    """Adapters of `spec.adapters` that a group holds at once; each takes memory of the ranks. Default: none."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Largest rank of an adapter; each of `maxAdapters` takes memory for it. Default: 16."""
    adapter_secrets: tuple[SecretName, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_ADAPTER_SECRETS, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Secrets that `spec.adapters` may name. They are mounted, so a change of their content needs no restart."""
    extra_args: ExtraArgs = ()
    """Further flags of `phalanx-runtime serve` (docs/reference.md), one word per item. With an unknown flag no group starts."""
    probes: Probes | None = None
    """Probes of the HTTP process."""

    @model_validator(mode="after")
    def _fits_together(self) -> "_DeclaredEngine":
        for one, other in _NEEDS.items():
            if self.get_setting(to_snake(one)) and self.get_setting(to_snake(other)) in (None, False, "auto"):
                raise ValueError(f"{one} needs {other}")
        if (self.get_setting("max_num_batched_tokens") or _DEFAULT_TOKENS) < (self.get_setting("max_num_seqs") or _DEFAULT_SEQS):
            raise ValueError(_TOO_FEW_TOKENS)
        words = [word for word in self.extra_args if word.startswith("--")]
        if self.max_adapters is not None and any(flag.startswith(word) for flag in ADAPTER_FLAGS for word in words):
            raise ValueError(_TWICE)
        return self

    def get_setting(self, name: str) -> Any:
        """Returns the value of a field, if set."""
        return getattr(self, name)


_SHARE = Annotated[str, Field(max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$|^1(\.0{1,2})?$")]
"""A share as text: Kubernetes advises against floats."""
_PREFIX = "spec.engine."


def _plain_fields() -> dict[str, Any]:
    """Returns the optional fields of plain settings."""
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        name = to_snake((setting.manifest or "").removeprefix(_PREFIX))
        if setting.manifest and "." not in name and name not in _DeclaredEngine.model_fields:
            found[name] = (_manifest_type(setting), Field(default=None, description=_description(setting), **_bound(setting)))
    return found


def _description(setting: Setting) -> str:
    default = "" if setting.default is None else f"; default: {str(setting.default).lower()}"
    return f"{setting.help[0].upper()}{setting.help[1:]}{default}."


def _manifest_type(setting: Setting) -> Any:
    if setting.is_quantity:
        return Optional[Memory]  # noqa: UP045
    if setting.type is str:
        return Optional[Word]  # noqa: UP045
    return Optional[_SHARE if setting.type is float else setting.type]  # noqa: UP045


def _bound(setting: Setting) -> dict[str, Any]:
    return dict(setting.bound) if setting.type is int and not setting.is_quantity else {}


if TYPE_CHECKING:

    class Engine(_DeclaredEngine):
        """Settings of the runtime."""

else:
    Engine = create_model("Engine", __base__=_DeclaredEngine, __module__=__name__, **_plain_fields())
    Engine.__doc__ = "Settings of the runtime, each a flag of `phalanx-runtime serve`."


def flag_words(engine: Engine) -> list[str]:
    """Returns the command line words for the settings that `engine` sets."""
    words: list[str] = []
    if engine.max_adapters is not None:
        words += ["--enable-lora", "--max-loras", str(engine.max_adapters)]
        words += ["--max-lora-rank", str(engine.max_lora_rank)] if engine.max_lora_rank is not None else []
    for setting in SETTINGS:
        value: Any = engine if setting.manifest else None
        for name in (setting.manifest or "").removeprefix(_PREFIX).split("."):
            value = None if value is None else getattr(value, to_snake(name))
        words += setting.flag_words(parse_bytes(value) if setting.is_quantity and value is not None else value)
    return words
