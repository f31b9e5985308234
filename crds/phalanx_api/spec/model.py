"""`spec.model`: source and cache of weights and tokenizer."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from phalanx_api.schema import Record, rule, rules, with_rules
from phalanx_api.spec.quantities import Memory

_PATH = r"[A-Za-z0-9._/@+=:,~-]"
URI_PATTERN = (
    rf"^file:///{_PATH}+$"
    rf"|^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/{_PATH}*)?$"
    r"|^hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
    rf"|^(s3|gs)://[a-z0-9][a-z0-9._-]*[a-z0-9](/{_PATH}*)?$"
    r"|^oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})$"
)
URI_FORMS = (
    "must be file:///path, pvc://claim/path, hf://org/name, s3://bucket/prefix, gs://bucket/prefix, "
    "oci://registry/repository:tag or oci://registry/repository@sha256:..., with letters, digits and ._/@+=:,~- only"
)


def _known_uri(uri: str) -> str:
    if not re.search(URI_PATTERN, uri):
        raise ValueError(URI_FORMS)
    return uri


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]
"""Name of a model in requests."""


class SecretRef(Record):
    """A Secret in the service's namespace."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    key: str = Field(default="token", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """Key of the token for hf:// and gs://. Keys for s3:// and oci:// are fixed: see `secretRef`."""


class Cache(Record):
    """Storage of downloaded models, so that restarted pods need no download. Default: the pod's own disk."""

    model_config = Record.model_config | rules(
        rule(
            "(self.type == 'Shared') == has(self.claimName)",
            "claimName is required with type Shared and only allowed there",
            ".claimName",
        ),
        rule(
            "(self.type == 'NodeLocal') == has(self.size)", "size is required with type NodeLocal and only allowed there", ".size"
        ),
        rule("self.type == 'Shared' || !self.readOnly", "readOnly is only allowed with type Shared", ".readOnly"),
        rule(
            "self.type == 'NodeLocal' || !has(self.storageClassName)",
            "storageClassName is only allowed with type NodeLocal",
            ".storageClassName",
        ),
    )
    type: Literal["None", "NodeLocal", "Shared"]
    """NodeLocal: a claim per pod, deleted with it. Shared: one claim for all pods, mountable on all nodes. None: the pod's own
    disk."""
    claim_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """Shared: a PersistentVolumeClaim in the service's namespace."""
    read_only: bool = False
    """Shared: mounts the claim read-only (ReadOnlyMany) and downloads nothing. Fill it with `phalanx-runtime fetch`, or by a
    service that mounts it for writing."""
    storage_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
    )
    """NodeLocal: StorageClass of the claims. Default: the cluster's."""
    size: Memory | None = None
    """NodeLocal: size of each claim; the model must fit."""

    @model_validator(mode="after")
    def _fits(self) -> "Cache":
        if (self.type == "Shared") != (self.claim_name is not None):
            raise ValueError("claimName is required with type Shared and only allowed there")
        if (self.type == "NodeLocal") != (self.size is not None):
            raise ValueError("size is required with type NodeLocal and only allowed there")
        if self.type != "Shared" and self.read_only:
            raise ValueError("readOnly is only allowed with type Shared")
        if self.type != "NodeLocal" and self.storage_class_name is not None:
            raise ValueError("storageClassName is only allowed with type NodeLocal")
        return self


Uri = Annotated[
    str,
    AfterValidator(_known_uri),
    Field(
        json_schema_extra=with_rules(
            rule(f"self.matches('{URI_PATTERN}')", URI_FORMS),
            rule("!self.matches('/[.][.](/|$)')", "a path must not contain '..'"),
        )
    ),
]
"""URI of a model."""


SOURCE_RULES = (
    rule(
        "!has(self.revision) || self.uri.startsWith('hf://')",
        "revision is only allowed with hf://",
        ".revision",
    ),
    rule(
        "!has(self.secretRef) || self.uri.matches('^(hf|s3|gs|oci)://')",
        "secretRef is only allowed with hf://, s3://, gs:// and oci://",
        ".secretRef",
    ),
    rule(
        "!has(self.secretRef) || self.secretRef.key == 'token' || self.uri.matches('^(hf|gs)://')",
        "key is only allowed with hf:// and gs://; Secrets for s3:// and oci:// have fixed keys",
        ".secretRef.key",
    ),
)
"""Of the fields that describe a source: uri, revision, secretRef."""


class Model(Record):
    """Weights and tokenizer."""

    model_config = Record.model_config | rules(
        *SOURCE_RULES,
        rule(
            "!has(self.cache) || self.cache.type == 'None' || self.uri.matches('^(hf|s3|gs|oci)://')",
            "cache is only allowed with hf://, s3://, gs:// and oci://",
            ".cache",
        ),
    )
    uri: Uri = Field(min_length=1, max_length=512)
    """`file:///path` in the image or a mounted volume, `pvc://claim/path`, `hf://org/name`, `s3://bucket/prefix`,
    `gs://bucket/prefix`, `oci://registry/repository:tag` or `oci://registry/repository@sha256:...`."""
    revision: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit of `hf://`."""
    secret_ref: SecretRef | None = None
    """Credentials. hf://, gs://: the token under `key`. s3://: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally
    AWS_SESSION_TOKEN. oci://: .dockerconfigjson, as `kubectl create secret docker-registry` writes it."""
    cache: Cache | None = None
