"""`spec.router`: number, policy and exposure of routers."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic.config import JsonDict

from phalanx_api import labels
from phalanx_api.schema import Record, rule, rules, with_rules
from phalanx_api.spec.pod_template import RouterPodTemplate
from phalanx_api.spec.quantities import Memory
from phalanx_api.summary import CacheScope, Routing

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_SET: JsonDict = {"x-kubernetes-list-type": "set"}
Host = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_HOST)]
_IMAGE_HOST = r"^(\*|(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?|[0-9a-f:.]+(/[0-9]{1,3})?)$"
ImageHost = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_IMAGE_HOST)]
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$"
Origin = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_ORIGIN)]
Note = Annotated[str, StringConstraints(max_length=1024)]
_NOT_INSIDE = "is only allowed with the types Ingress and HTTPRoute"
_INGRESS_ONLY = "is only allowed with type Ingress"
_GATEWAY = "gateway is required with type HTTPRoute and only allowed there"
_TLS_HOSTS = "tlsSecretName needs hosts, the names of the certificate"
_HTTPS = r"^https://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?(/[A-Za-z0-9._~%:@/+?=&-]*)?$"
_NOT_HTTPS = "must be an https URL without user and fragment"
_WORD = r"^[!-#%-~]+$"  # a kubelet replaces $(NAME) in the arguments of a container


def _https(url: str) -> str:
    if not re.fullmatch(_HTTPS, url):
        raise ValueError(_NOT_HTTPS)
    return url


HttpsUrl = Annotated[
    str,
    StringConstraints(min_length=1, max_length=512),
    AfterValidator(_https),
    Field(json_schema_extra=with_rules(rule(f"self.matches('{_HTTPS}')", _NOT_HTTPS))),
]
_CLAIM = r"^[A-Za-z0-9_.:/-]+$"
_NOT_CLAIM = "names of claims have letters, digits and _ . : / - only"
Claim = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=_CLAIM)]
Audience = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=_WORD)]
ClaimValue = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=_WORD)]


class ApiKeys(Record):
    """A Secret with the clients' API keys; changes apply without a restart."""

    name: str = Field(min_length=1, max_length=253, pattern=_NAME)
    key: str = Field(default="keys", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """Key in the Secret. Its value is a JSON array with an entry per API key, or a line `name key [priority] [field=value ...]`
    per key; hashes may replace keys (docs/security.md)."""


class OidcClaims(Record):
    """Names of claims, at the top level of a token. A token without a claim that is named here is refused."""

    tenant: Claim = "sub"
    """Text. The tenant is `oidc:` and its value, so that no token is the tenant of an API key by chance."""
    models: Claim | None = None
    """List of texts, or one text: names of `spec.model.servedNames` that requests may use. Default: all."""
    priority: Claim | None = None
    """Integer: most urgent priority that requests may ask for; lower numbers are more urgent. Default: any."""
    required: dict[str, ClaimValue] = Field(
        default_factory=dict,
        json_schema_extra={"maxProperties": 16} | with_rules(rule(f"self.all(name, name.matches('{_CLAIM}'))", _NOT_CLAIM)),
    )
    """Values that tokens must have, by claim; a list must contain the value."""

    @model_validator(mode="after")
    def _fits(self) -> "OidcClaims":
        if not all(re.fullmatch(_CLAIM, name) for name in self.required):
            raise ValueError(_NOT_CLAIM)
        return self


class Oidc(Record):
    """An issuer of JSON Web Tokens (OpenID Connect), which clients send as bearer tokens."""

    issuer: HttpsUrl
    """Claim `iss` of the tokens. Its keys come from `/.well-known/openid-configuration` below, unless `jwksUri` is set."""
    audiences: tuple[Audience, ...] = Field(min_length=1, max_length=8, json_schema_extra=_SET)
    """Tokens must have one of them in the claim `aud`."""
    jwks_uri: HttpsUrl | None = None
    """URL of the issuer's JSON Web Key Set. Default: by discovery."""
    claims: OidcClaims = Field(default_factory=OidcClaims)


class Gateway(Record):
    """A Gateway that allows routes of the service's namespace."""

    name: str = Field(min_length=1, max_length=253, pattern=_NAME)
    namespace: str | None = Field(default=None, min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """Namespace of the Gateway. Default: the service's."""
    section_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Listener of the Gateway. Default: all."""


_NOT_OWN = "must not begin with a path of the routers: v1, ui, tokenize, health, metrics, docs, phalanx and others"


def _not_own(path: str) -> str:
    if re.fullmatch(labels.OWN_PATH, path):
        raise ValueError(_NOT_OWN)
    return path


class Expose(Record):
    """Exposure of the routers to clients."""

    model_config = Record.model_config | rules(
        *(
            rule("(self.type == 'HTTPRoute') == has(self.gateway)", _GATEWAY, ".gateway"),
            rule("self.type == 'Ingress' || !has(self.className)", f"className {_INGRESS_ONLY}", ".className"),
            rule("self.type == 'Ingress' || !has(self.tlsSecretName)", f"tlsSecretName {_INGRESS_ONLY}", ".tlsSecretName"),
            rule("!has(self.tlsSecretName) || (has(self.hosts) && size(self.hosts) > 0)", _TLS_HOSTS, ".tlsSecretName"),
            rule("self.type != 'ClusterIP' || !has(self.hosts) || size(self.hosts) == 0", f"hosts {_NOT_INSIDE}", ".hosts"),
            rule(
                "self.type != 'ClusterIP' || !has(self.annotations) || size(self.annotations) == 0",
                f"annotations {_NOT_INSIDE}",
                ".annotations",
            ),
            rule("self.type != 'ClusterIP' || !has(self.path) || self.path == '/'", f"path {_NOT_INSIDE}", ".path"),
        ),
    )
    type: Literal["ClusterIP", "Ingress", "HTTPRoute"] = "ClusterIP"
    """ClusterIP: inside the cluster only. Ingress, HTTPRoute: the operator also creates one, for the cluster's controller."""
    hosts: tuple[Host, ...] = Field(default=(), max_length=8, json_schema_extra=_SET)
    """Host names of client requests. Default: any."""
    path: Annotated[str, AfterValidator(_not_own)] = Field(
        default="/",
        min_length=1,
        max_length=128,
        pattern=labels.ROOT_PATH,
        json_schema_extra=with_rules(rule(f"!self.matches('{labels.OWN_PATH}')", _NOT_OWN)),
    )
    """Path below which clients find the API, such as /team/chat, so that services share a host. A change restarts the routers,
    which serve the API without it too."""
    class_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Ingress: the IngressClass. Default: the cluster's."""
    tls_secret_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Ingress: Secret with certificate and key for `hosts`."""
    gateway: Gateway | None = None
    """HTTPRoute: the parent Gateway."""
    annotations: dict[str, Note] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Annotations of the Ingress or HTTPRoute. Timeouts must allow streams of any length that are silent for 10 s."""

    @model_validator(mode="after")
    def _fits(self) -> "Expose":
        if (self.type == "HTTPRoute") != (self.gateway is not None):
            raise ValueError(_GATEWAY)
        for name, value in {"className": self.class_name, "tlsSecretName": self.tls_secret_name}.items():
            if value is not None and self.type != "Ingress":
                raise ValueError(f"{name} {_INGRESS_ONLY}")
        if self.tls_secret_name is not None and not self.hosts:
            raise ValueError(_TLS_HOSTS)
        path = self.path.removesuffix("/")
        for name, values in {"hosts": self.hosts, "annotations": self.annotations, "path": path}.items():
            if values and self.type == "ClusterIP":
                raise ValueError(f"{name} {_NOT_INSIDE}")
        return self


class RouterTls(Record):
    """HTTPS between clients and routers."""

    secret_name: str = Field(min_length=1, max_length=253, pattern=_NAME)
    """Secret of type kubernetes.io/tls with `tls.crt` and `tls.key`, such as cert-manager writes. Routers load a renewed
    certificate without a restart; open connections continue."""


class ResponseCache(Record):
    """Stored responses of each router. Only deterministic requests with one choice, without tools and logprobs."""

    exact: bool = False
    """Answers equal requests with the stored tokens: equal prompt tokens and sampling parameters, temperature 0 or a seed."""
    semantic: bool = False
    """Answers a request with the response to a similar last message of the user; all else must be equal: the messages before it,
    the revision, the sampling parameters and the tenant."""
    similarity: float = Field(default=0.92, ge=0, le=1)
    """Semantic: lowest cosine similarity of the embeddings of both messages."""
    embedder: str | None = Field(default=None, min_length=1, max_length=63, pattern=_LABEL)
    """Semantic: another InferenceService of the namespace, without API keys, `oidc` and `router.tls`, that embeds the messages.
    Default: the service's own groups, if their model computes embeddings."""
    recheck_share: float = Field(default=0.01, ge=0, le=1)
    """Semantic: share of the hits that are also computed, after the response was sent, to measure how many answers differ."""
    ttl_seconds: int = Field(default=3600, ge=1, le=31_536_000)
    """Age at which a response is dropped."""
    max_entries: int = Field(default=10_000, ge=1, le=10_000_000)
    """Stored responses of each router; the least recently used is dropped first."""
    max_bytes: Memory = "64Mi"
    """Memory of the stored responses of each router, vectors included. With `exact` or `semantic` it raises the memory
    request of the pods, so that its change, or that from neither of them to one, restarts the routers."""
    scope: CacheScope = "tenant"
    """Requests that share responses: those of one tenant (API key), or all requests of the service."""

    @property
    def is_enabled(self) -> bool:
        """Whether routers store responses."""
        return self.exact or self.semantic


class Batches(Record):
    """The Batch API, `/v1/files` and `/v1/batches`. Its requests run at the lowest priority, in what the groups leave free."""

    enabled: bool = False
    """Serves the API. A change restarts the routers."""
    claim_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Claim with the files and batches, which all routers mount (ReadWriteMany for more than one). Default: the disk of the pod,
    so that batches end with it."""
    max_bytes: Memory = "4Gi"
    """Bytes of all files, with 4 KiB for each file and each batch. One API key or tenant gets half of them."""


_BATCHES = "batches.enabled with several routers needs batches.claimName: a client may reach any of them"


class Router(Record):
    """The routers, which clients connect to."""

    model_config = Record.model_config | rules(
        rule(
            "!(has(self.batches) && has(self.batches.enabled) && self.batches.enabled && !has(self.batches.claimName) && "
            "has(self.replicas) && self.replicas > 1)",
            _BATCHES,
            ".batches.claimName",
        )
    )

    replicas: int = Field(default=1, ge=1, le=32)
    api_keys: ApiKeys | None = None
    """API keys of clients, each a tenant; reloaded on change. Default: no authentication, unless `oidc` is set."""
    oidc: Oidc | None = None
    """Tokens of an issuer, beside API keys or in their place (docs/security.md). A change restarts the routers."""
    policy: Routing = "PrefixAware"
    """Choice of a group. PrefixAware: least predicted cost, with prefix caches. LeastLoad: without. RoundRobin: in turn. Full
    groups are excluded."""
    failure_mode: Literal["FailOpen", "FailClosed"] = "FailOpen"
    """Routing of new requests to connected groups without a load report for 2 s. FailOpen: if most groups lack one, routers use
    their own dispatch counts. FailClosed: such groups get no requests; without others clients get 503 with Retry-After.
    Started streams continue."""
    coalesce_requests: bool = True
    """Requests in flight at one router are computed once if tenant, tokens, sampling parameters and urgency are equal and the
    output is deterministic (temperature 0 or an equal seed). Each gets all tokens. Requests with logprobs are excluded."""
    response_cache: ResponseCache = Field(default_factory=ResponseCache)
    batches: Batches = Field(default_factory=Batches)
    console: bool = False
    """Serves the console at `/ui`: playground, fleet, requests, settings. Its data needs an API key, as the API does; a key with
    "console": "write" may drain groups and move requests. A change restarts the routers."""
    image_hosts: tuple[ImageHost, ...] = Field(default=(), max_length=64, json_schema_extra=_SET)
    """Hosts from which routers read images of requests by https: names, `*.suffix` or `*`, whose addresses must be public;
    addresses and networks allow others (docs/images.md). Default: only data: URLs. A change restarts the routers."""
    allowed_origins: tuple[Origin, ...] = Field(default=(), max_length=64, json_schema_extra=_SET)
    """Origins of web pages whose scripts may call the API from browsers (CORS), such as https://chat.example; `*`: all.
    Default: none. A change restarts the routers."""
    expose: Expose = Field(default_factory=Expose)
    tls: RouterTls | None = None
    """Serves HTTPS at port 443 of the Service, and no HTTP. Default: HTTP at port 80. A change restarts the routers."""
    pod_template: RouterPodTemplate | None = None
    """Overlay on the pods of routers. A change restarts the routers."""

    @model_validator(mode="after")
    def _shares_batches(self) -> "Router":
        if self.batches.enabled and self.batches.claim_name is None and self.replicas > 1:
            raise ValueError(_BATCHES)
        return self
