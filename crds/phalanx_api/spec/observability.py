"""`spec.observability`: traces of requests. `spec.slo`: objectives that alerts watch."""

from typing import Literal

from pydantic import Field, model_validator

from phalanx_api.schema import Record, rule, rules

_ONE_OBJECTIVE = "give at least one of ttftP95Ms, itlP95Ms and availability"
_URL = r"^https?://[^\s/$.?#][^\s]*$"


class Tracing(Record):
    """Traces of requests, sent by OTLP. A change restarts the routers."""

    endpoint: str | None = Field(default=None, max_length=2048, pattern=_URL)
    """Collector, such as `http://otel-collector.monitoring:4318`; `/v1/traces` is appended for HTTP. Default: no traces."""
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    """Form of OTLP."""
    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """Share of the requests without a `traceparent` header whose trace is sent in any case. Traces of failed, slow, moved and
    replayed requests are always sent; a client with the header decides itself."""
    slow_first_token_seconds: int = Field(default=10, ge=1, le=86_400)
    """Time to the first token above which a request is slow."""


class Observability(Record):
    """What the service reports about itself, beyond metrics."""

    tracing: Tracing = Field(default_factory=Tracing)
    tenant_metrics: bool = False
    """Routers count tokens and responses by tenant, 32 of them by name. `/metrics` of a router needs no API key, so all clients
    that reach it may read the names. A change restarts the routers."""


class Slo(Record):
    """Service level objectives. With the Prometheus operator, alerts fire while a service spends the errors of 30 days too
    fast: see docs/monitoring.md. A change restarts nothing."""

    model_config = Record.model_config | rules(
        rule("has(self.ttftP95Ms) || has(self.itlP95Ms) || has(self.availability)", _ONE_OBJECTIVE)
    )
    ttft_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """Time to the first token that 95 % of the requests must meet, in ms. Default: no objective."""
    itl_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """Time between two tokens of a stream that 95 % of the tokens must meet, in ms. Default: no objective."""
    availability: float | None = Field(default=None, ge=95, le=99.999)
    """Percent of the requests that must get a complete response, such as 99.9. Errors of clients and disconnects do not count.
    Default: no objective."""

    @model_validator(mode="after")
    def _any(self) -> "Slo":
        if self.ttft_p95_ms is None and self.itl_p95_ms is None and self.availability is None:
            raise ValueError(_ONE_OBJECTIVE)
        return self
