"""`spec.engine`: settings of the runtime. Plain settings come from `phalanx_api.engine_config`; the others are declared here."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

from pydantic import AfterValidator, Field, StringConstraints, create_model, model_validator
from pydantic.alias_generators import to_snake

from phalanx_api.engine_config import SETTINGS, Setting
from phalanx_api.schema import Record, rule, rules, with_rules
from phalanx_api.spec.model import Uri
from phalanx_api.spec.quantities import Memory, parse_bytes
from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH

_OPERATOR_FLAGS = (
    *("--revision", "--served-model-name", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--host", "--port", "--token-file", "--shutdown-timeout"),
    *("--api-key", "--api-keys-file", "--download-dir", "--cached-only", "--speculative-draft-model", "--speculative-exit"),
)
RESERVED = (*_OPERATOR_FLAGS, *(word for setting in SETTINGS if setting.manifest for word in setting.spellings))
"""Flags that the operator or another field sets."""
WRONG = (
    "flags that the operator or another field sets cannot be given here, not even abbreviated; "
    "a flag and its value are two items, without ="
)


def is_allowed(word: str) -> bool:
    """Whether this item of the command line may be given."""
    return not word.startswith("-") or ("=" not in word and not any(flag.startswith(word) for flag in RESERVED))


def _allowed(words: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(is_allowed, words)):
        raise ValueError(WRONG)
    return words


_LISTED = ", ".join(f"'{flag}'" for flag in RESERVED)
_RULE = rule(f"self.all(a, !a.startsWith('-') || (!a.contains('=') && ![{_LISTED}].exists(r, r.startsWith(a))))", WRONG)
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ExtraArgs = Annotated[tuple[Word, ...], Field(max_length=64, json_schema_extra=with_rules(_RULE)), AfterValidator(_allowed)]
"""Items of a command line."""


class SpeculativeTree(Record):
    """Tree of draft tokens."""

    widths: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field(min_length=1, max_length=MAX_DEPTH)
    """Most draft tokens after each node, by tree level; deeper levels have one."""
    shape: Literal["BestFirst", "Static"] = "BestFirst"
    """BestFirst: the draft model chooses branches by its probabilities. Static: the scheduler chooses them by the acceptance
    rate. Both are the same for NGram."""


class Speculative(Record):
    """Speculative decoding: draft tokens that one step verifies. It changes times, never tokens."""

    model_config = Record.model_config | rules(
        rule(
            "(self.method == 'Draft') == has(self.draftModel)", "draftModel goes with method Draft, which needs it", ".draftModel"
        ),
        rule("self.method == 'SelfDraft' || !has(self.exit)", "exit goes with method SelfDraft only", ".exit"),
        rule("self.method == 'SelfDraft' || !has(self.ratio)", "ratio goes with method SelfDraft only", ".ratio"),
    )
    method: Literal["None", "NGram", "Draft", "SelfDraft"] = "None"
    """NGram: tokens that followed the last tokens earlier in prompt or output. Draft: tokens of a smaller model. SelfDraft:
    tokens of the model's own first layers. Groups serve without speculation if a draft model cannot be loaded; they refuse a
    draft model with another tokenizer and an exit of another model."""
    draft_model: Uri | None = Field(default=None, min_length=1, max_length=512)
    """Draft: URI of the smaller model, in the forms of `spec.model.uri`. It has the same tokenizer, and is fetched with the same
    secret."""
    exit: Uri | None = Field(default=None, min_length=1, max_length=512)
    """SelfDraft: URI of the exit that `phalanx-runtime fit-exit` made for this model, or of its folder, in the forms of
    `spec.model.uri`. Without an exit the acceptance rate is low."""
    ratio: str | None = Field(default=None, max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$")
    """SelfDraft: share of the layers that draft, such as "0.40". Default: the share that the exit was fitted for."""
    num_tokens: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    """Most draft tokens of a request in one step. The engine uses fewer, down to none under load, where more do not pay."""
    tree: SpeculativeTree | None = None
    """Draft tokens as a tree, where that pays more than a chain. Default: chains."""

    @model_validator(mode="after")
    def _fits(self) -> "Speculative":
        if (self.method == "Draft") != (self.draft_model is not None):
            raise ValueError("draftModel goes with method Draft, which needs it")
        for name, value in {"exit": self.exit, "ratio": self.ratio}.items():
            if value is not None and self.method != "SelfDraft":
                raise ValueError(f"{name} goes with method SelfDraft only")
        return self


class Probes(Record):
    """Bounds on the HTTP process of a pod. They exclude loading the model: see `spec.restartPolicy.startupSeconds`."""

    startup_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Longest time until the first answer, after the image is pulled; then the kubelet restarts the container. Default: 600."""
    liveness_seconds: int | None = Field(default=None, ge=6, le=3600)
    """Longest time without an answer; then the kubelet restarts the container. Default: 60."""


class _DeclaredEngine(Record):
    """Fields of `spec.engine` that are no plain setting."""

    image: str | None = Field(default=None, min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")
    """Image of the runtime. Default: the operator's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and KV cache; auto: the fastest of the device."""
    speculative: Speculative | None = None
    """Source of draft tokens for requests that name none. Default: no speculation."""
    extra_args: ExtraArgs = ()
    """Further flags of `phalanx-runtime serve`, one word per item; see docs/reference.md. A group with an unknown flag never
    starts, and the status says so."""
    probes: Probes | None = None
    """Bounds on the HTTP process, after which the kubelet restarts its container."""

    def given(self, name: str) -> Any:
        """Returns the value of a setting's field, or None if the manifest does not set it."""
        return getattr(self, name)


_SHARE = Annotated[str, Field(max_length=5, pattern=r"^0\.(0[1-9]|[1-9][0-9]?)$|^1(\.0{1,2})?$")]
"""A share above 0 and at most 1, such as "0.90": Kubernetes advises against floats."""
_PREFIX = "spec.engine."


def _plain_fields() -> dict[str, Any]:
    """Returns the optional fields of settings whose manifest field is directly in `spec.engine`, with their bounds."""
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        name = to_snake((setting.manifest or "").removeprefix(_PREFIX))
        if setting.manifest and "." not in name and name not in _DeclaredEngine.model_fields:
            found[name] = (_manifest_type(setting), Field(default=None, description=setting.help, **_bound(setting)))
    return found


def _manifest_type(setting: Setting) -> Any:
    if setting.is_quantity:
        return Optional[Memory]  # noqa: UP045
    return Optional[_SHARE if setting.type is float else setting.type]  # noqa: UP045


def _bound(setting: Setting) -> dict[str, Any]:
    return dict(setting.bound) if setting.type is int and not setting.is_quantity else {}


if TYPE_CHECKING:

    class Engine(_DeclaredEngine):
        """Settings of the runtime. Each is a flag of `phalanx-runtime serve`; unset fields keep the flag's default."""

else:
    Engine = create_model("Engine", __base__=_DeclaredEngine, __module__=__name__, **_plain_fields())
    Engine.__doc__ = "Settings of the runtime. Each is a flag of `phalanx-runtime serve`; unset fields keep the flag's default."


def flag_words(engine: Engine) -> list[str]:
    """Returns the words of the command line for the settings that `engine` sets."""
    words: list[str] = []
    for setting in SETTINGS:
        value: Any = engine if setting.manifest else None
        for name in (setting.manifest or "").removeprefix(_PREFIX).split("."):
            value = None if value is None else getattr(value, to_snake(name))
        words += setting.flag_words(parse_bytes(value) if setting.is_quantity and value is not None else value)
    return words
