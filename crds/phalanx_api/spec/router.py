"""The front door of a service: how many routers there are, how they choose groups, and who reaches them: `spec.router`."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic.config import JsonDict

from phalanx_api.schema import Record, rule, rules
from phalanx_api.summary import Routing

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_SET: JsonDict = {"x-kubernetes-list-type": "set"}
Host = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_HOST)]
Note = Annotated[str, StringConstraints(max_length=1024)]
_NOT_INSIDE = "goes with the types Ingress and HTTPRoute only"
_INGRESS_ONLY = "goes with type Ingress only"
_GATEWAY = "gateway goes with type HTTPRoute, which needs it"
_TLS_HOSTS = "tlsSecretName needs hosts: the names that the certificate is for"


class ApiKeys(Record):
    """A Secret with the keys of clients. One that is changed is read again."""

    name: str = Field(min_length=1, max_length=253, pattern=_NAME)
    key: str = Field(default="keys", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$")
    """Key in the Secret: JSON, or a line `name key [priority]` for each client."""


class Gateway(Record):
    """A Gateway of the Gateway API that the service is attached to. It must allow routes of the service's namespace."""

    name: str = Field(min_length=1, max_length=253, pattern=_NAME)
    namespace: str | None = Field(default=None, min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """Its own; that of the service otherwise."""
    section_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """One of its listeners; all of them otherwise."""


class Expose(Record):
    """Who reaches the routers."""

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
        ),
    )
    type: Literal["ClusterIP", "Ingress", "HTTPRoute"] = "ClusterIP"
    """ClusterIP: who is in the cluster, by the Service. Ingress, HTTPRoute: the operator makes one beside it, of the service's
    name, for a controller that the administrator runs."""
    hosts: tuple[Host, ...] = Field(default=(), max_length=8, json_schema_extra=_SET)
    """Names by which clients come; any name otherwise."""
    class_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Ingress: the IngressClass; the cluster's default otherwise."""
    tls_secret_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Ingress: a Secret with certificate and key for `hosts`."""
    gateway: Gateway | None = None
    """HTTPRoute: where clients come in."""
    annotations: dict[str, Note] = Field(default_factory=dict, json_schema_extra={"maxProperties": 32})
    """Of the Ingress or HTTPRoute: what its controller reads. Streams may be silent for 10 s, and last as long as they last."""

    @model_validator(mode="after")
    def _fits(self) -> "Expose":
        if (self.type == "HTTPRoute") != (self.gateway is not None):
            raise ValueError(_GATEWAY)
        for name, value in {"className": self.class_name, "tlsSecretName": self.tls_secret_name}.items():
            if value is not None and self.type != "Ingress":
                raise ValueError(f"{name} {_INGRESS_ONLY}")
        if self.tls_secret_name is not None and not self.hosts:
            raise ValueError(_TLS_HOSTS)
        for name, given in {"hosts": self.hosts, "annotations": self.annotations}.items():
            if given and self.type == "ClusterIP":
                raise ValueError(f"{name} {_NOT_INSIDE}")
        return self


class Router(Record):
    """The front door."""

    replicas: int = Field(default=1, ge=1, le=32)
    api_keys: ApiKeys | None = None
    """Who may ask, and as which tenant; without it anyone may."""
    policy: Routing = "PrefixAware"
    """Which group gets a new request. PrefixAware: where it costs least, with what caches hold of the prompt. LeastLoad:
    likewise, whatever caches hold. RoundRobin: one after another, whatever it costs. Groups that are full get none."""
    failure_mode: Literal["FailOpen", "FailClosed"] = "FailOpen"
    """What becomes of new requests while groups that are linked tell nothing of their load for 2 s and more. FailOpen: where most
    groups do, routers go by what they sent there themselves. FailClosed: such groups get none, and where no other is clients
    are told 503 with Retry-After. Streams that have begun go on in any case."""
    expose: Expose = Field(default_factory=Expose)
