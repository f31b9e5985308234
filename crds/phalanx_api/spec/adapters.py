"""`spec.adapters`: LoRA adapters that groups load when a request needs them."""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.config import JsonDict

from phalanx_api.schema import Record, rule, rules
from phalanx_api.spec.model import SOURCE_RULES, ModelName, SecretRef, Uri

MAX_ADAPTERS = 64
NEEDS_SLOTS = "adapters need engine.maxAdapters: the pods' memory for them is part of the revision"
BASE_NAME = "an adapter must not have a name of servedNames, by default the service's name"
SERVICE_NAME = "an adapter must not have the service's name, which is the model's without servedNames"
OTHER_CLAIM = "pvc:// is only allowed with the claim of model.uri; mount other volumes by podTemplate and use file://"
UNKNOWN_SECRET = "secretRef must name a Secret of engine.adapterSecrets: pods mount Secrets only when they start"


class ServiceAdapter(Record):
    """A LoRA adapter in PEFT's format; its name is a model name in requests."""

    model_config = Record.model_config | rules(*SOURCE_RULES)
    name: ModelName
    """Model name in requests; not a name of the served model."""
    uri: Uri = Field(min_length=1, max_length=512)
    """As `spec.model.uri`; `pvc://` with the claim of the model only."""
    revision: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit of `hf://`."""
    secret_ref: SecretRef | None = None
    """Credentials with the keys of `spec.model.secretRef`; a Secret of `engine.adapterSecrets`. Default: those of the model."""


def _distinct(adapters: tuple[ServiceAdapter, ...]) -> tuple[ServiceAdapter, ...]:
    if len({adapter.name for adapter in adapters}) < len(adapters):
        raise ValueError("names of adapters must be unique")
    return adapters


_KEYED: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
Adapters = Annotated[
    tuple[ServiceAdapter, ...], Field(max_length=MAX_ADAPTERS, json_schema_extra=_KEYED), AfterValidator(_distinct)
]
_ALL = "!has(self.adapters) || self.adapters.all"
RULES = (
    rule(
        "!has(self.adapters) || size(self.adapters) == 0 || (has(self.engine) && has(self.engine.maxAdapters))",
        NEEDS_SLOTS,
        ".adapters",
    ),
    rule(f"!has(self.servedNames) || {_ALL}(a, !(a.name in self.servedNames))", BASE_NAME, ".adapters"),
    # The operator compares the claims: the API server refuses rules that compare parts of texts, whose length it does not know.
    rule(f"{_ALL}(a, !a.uri.startsWith('pvc://') || self.model.uri.startsWith('pvc://'))", OTHER_CLAIM, ".adapters"),
    rule(
        f"{_ALL}(a, !has(a.secretRef) || (has(self.engine) && has(self.engine.adapterSecrets) && "
        "a.secretRef.name in self.engine.adapterSecrets))",
        UNKNOWN_SECRET,
        ".adapters",
    ),
)
"""Of the whole spec."""
BASE_NAME_RULE = rule(
    "has(self.spec.servedNames) || !has(self.spec.adapters) || self.spec.adapters.all(a, a.name != self.metadata.name)",
    SERVICE_NAME,
    ".spec.adapters",
)
"""Of the whole object."""


def adapters_obstacle(
    adapters: tuple[ServiceAdapter, ...],
    *,
    model_uri: str,
    served_names: tuple[str, ...],
    max_adapters: int | None,
    secrets: tuple[str, ...],
) -> str:
    """Returns why adapters do not fit the other fields of a spec; empty: they do. `served_names`: with the default one."""
    names = {adapter.name for adapter in adapters}
    if adapters and max_adapters is None:
        return NEEDS_SLOTS
    if names & set(served_names):
        return BASE_NAME
    claims = {adapter.uri.split("/")[2] for adapter in adapters if adapter.uri.startswith("pvc://")}
    if claims and (not model_uri.startswith("pvc://") or claims != {model_uri.split("/")[2]}):
        return OTHER_CLAIM
    named = {adapter.secret_ref.name for adapter in adapters if adapter.secret_ref is not None}
    return UNKNOWN_SECRET if named - set(secrets) else ""
