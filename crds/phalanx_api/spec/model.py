"""`spec.model`: where weights and tokenizer come from, and where they are cached."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

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


class SecretRef(Record):
    """A Secret in the namespace of the service."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    key: str = Field(default="token", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """Key in the Secret that holds the token, for hf:// and gs://. Other sources have keys of their own: see `secretRef`."""


class Cache(Record):
    """Where downloaded models are kept, so that a pod that starts again need not fetch them."""

    model_config = Record.model_config | rules(
        rule("(self.type == 'Shared') == has(self.claimName)", "claimName goes with type Shared, which needs it", ".claimName"),
        rule("(self.type == 'NodeLocal') == has(self.size)", "size goes with type NodeLocal, which needs it", ".size"),
        rule("self.type == 'Shared' || !self.readOnly", "readOnly goes with type Shared only", ".readOnly"),
        rule(
            "self.type == 'NodeLocal' || !has(self.storageClassName)",
            "storageClassName goes with type NodeLocal only",
            ".storageClassName",
        ),
    )
    type: Literal["None", "NodeLocal", "Shared"]
    """NodeLocal: a claim of its own for each pod, as long as the pod lives. Shared: one claim for all pods, which all nodes can
    mount. None: the pod's own disk, as long as the pod lives."""
    claim_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """Shared: a PersistentVolumeClaim in the namespace of the service."""
    read_only: bool = False
    """Shared: the claim is mounted for reading only (ReadOnlyMany). What is in it is served, and nothing is downloaded:
    `phalanx-runtime fetch` fills it, or a service that had it for writing."""
    storage_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
    )
    """NodeLocal: the StorageClass of each pod's claim; the cluster's default otherwise."""
    size: Memory | None = None
    """NodeLocal: how large each pod's claim is."""

    @model_validator(mode="after")
    def _fits(self) -> "Cache":
        if (self.type == "Shared") != (self.claim_name is not None):
            raise ValueError("claimName goes with type Shared, which needs it")
        if (self.type == "NodeLocal") != (self.size is not None):
            raise ValueError("size goes with type NodeLocal, which needs it")
        if self.type != "Shared" and self.read_only:
            raise ValueError("readOnly goes with type Shared only")
        if self.type != "NodeLocal" and self.storage_class_name is not None:
            raise ValueError("storageClassName goes with type NodeLocal only")
        return self


Uri = Annotated[
    str,
    AfterValidator(_known_uri),
    Field(
        json_schema_extra=with_rules(
            rule(f"self.matches('{URI_PATTERN}')", URI_FORMS), rule("!self.matches('/[.][.](/|$)')", "a path must not hold '..'")
        )
    ),
]
"""Where a model is."""


class Model(Record):
    """Where the weights and the tokenizer come from."""

    model_config = Record.model_config | rules(
        rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "revision pins a commit of a hub: it goes with hf:// only",
            ".revision",
        ),
        rule(
            "!has(self.secretRef) || self.uri.matches('^(hf|s3|gs|oci)://')",
            "secretRef proves who asks: it goes with hf://, s3://, gs:// and oci:// only",
            ".secretRef",
        ),
        rule(
            "!has(self.secretRef) || self.secretRef.key == 'token' || self.uri.matches('^(hf|gs)://')",
            "key names a token: it goes with hf:// and gs:// only; Secrets for s3:// and oci:// have keys of their own",
            ".secretRef.key",
        ),
        rule(
            "!has(self.cache) || self.cache.type == 'None' || self.uri.matches('^(hf|s3|gs|oci)://')",
            "cache keeps what is downloaded: it goes with hf://, s3://, gs:// and oci:// only",
            ".cache",
        ),
    )
    uri: Uri = Field(min_length=1, max_length=512)
    """`file:///path` in the image or a mounted volume, `pvc://claim/path` in a claim, `hf://org/name` on a hub,
    `s3://bucket/prefix` or `gs://bucket/prefix` in a bucket, or `oci://registry/repository:tag` (or `@sha256:...`) in a
    registry of images."""
    revision: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit on the hub."""
    secret_ref: SecretRef | None = None
    """Who asks. For hf:// and gs:// the token under `key`; for s3:// the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if
    there is one, AWS_SESSION_TOKEN; for oci:// the key .dockerconfigjson, as `kubectl create secret docker-registry` makes it."""
    cache: Cache | None = None
