"""Exports spans by OTLP, configured by OpenTelemetry's environment variables.

    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT    one of them turns tracing on
    OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL    http/protobuf (default) or grpc
    OTEL_TRACES_SAMPLER_ARG                                            share of requests that are traced in any case
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES                        in all spans
    OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none                       tracing is off

All others, such as headers, certificates and the size of batches, are those of the SDK. A thread of its own sends; with a full
queue spans are dropped, and the SDK logs that.

Source: OpenTelemetry specification, environment variables and OTLP exporter.
"""

import atexit
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from phalanx_frontend.tracing.span import Span
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter as SdkExporter

SCOPE = "phalanx"
NANOSECONDS = 1_000_000_000
MAX_RESOURCES = 256
"""Groups whose resource is kept: their names are random, and a router outlives them."""
GRPC, HTTP = "grpc", "http/protobuf"


class TracingSettingInvalid(Exception):
    """A variable has no valid value."""


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """How a process traces. The SDK reads the other variables itself."""

    protocol: str
    service: str
    rules: SamplingRules


def read_tracing(environment: Mapping[str, str], service: str, slow_s: float = SamplingRules().slow_s) -> TracingSettings | None:
    """Returns the settings of a process; null without an endpoint. Raises TracingSettingInvalid.

    `service`: default of OTEL_SERVICE_NAME; `slow_s`: see `SamplingRules`.
    """
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if is_off or not any(environment.get(name) for name in endpoints):
        return None
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environment[name] for name in protocols if environment.get(name)), HTTP)
    if protocol not in (GRPC, HTTP):
        raise TracingSettingInvalid(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: use {HTTP} or {GRPC}")
    rules = SamplingRules(_ratio(environment.get("OTEL_TRACES_SAMPLER_ARG", "")), slow_s)
    return TracingSettings(protocol, environment.get("OTEL_SERVICE_NAME") or service, rules)


def start_tracer(settings: TracingSettings | None) -> Tracer | None:
    """Returns the tracer of a process that traces, with a thread that exports until the process exits."""
    if settings is None:
        return None
    tracer = Tracer(OtlpExporter(_sdk_exporter(settings.protocol), settings.service), settings.rules)
    atexit.register(tracer.close)
    return tracer


def _ratio(text: str) -> float:
    if not text:
        return SamplingRules().ratio
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise TracingSettingInvalid(f"OTEL_TRACES_SAMPLER_ARG is {text!r}: use a share of 0 to 1")
    return ratio


def _sdk_exporter(protocol: str) -> "SdkExporter":
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


class OtlpExporter:
    """Implements `tracer.SpanExporter` over the SDK's batches. The SDK is imported by processes that trace."""

    def __init__(self, exporter: "SdkExporter", service: str) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._service = service
        self._processor = BatchSpanProcessor(exporter)

    def export(self, span: Span) -> None:
        """Queues a span."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        def context(span_id: str, is_remote: bool = False) -> SpanContext:
            return SpanContext(int(span.trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))

        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(span.parent_id, is_remote=span.kind == "server") if span.parent_id else None,
                resource=_resource(self._service, span.service),
                attributes=dict(span.attributes),
                events=[Event(event.name, dict(event.attributes), int(event.at_s * NANOSECONDS)) for event in span.events],
                kind=SpanKind.SERVER if span.kind == "server" else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=int(span.start_s * NANOSECONDS),
                end_time=int(span.end_s * NANOSECONDS),
                instrumentation_scope=InstrumentationScope(SCOPE),
            )
        )

    def close(self) -> None:
        """Sends what is queued."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=MAX_RESOURCES)
def _resource(service: str, group: str) -> "Resource":
    """The process, or the group whose time a span is."""
    from opentelemetry.sdk.resources import Resource

    if not group:
        return Resource.create({"service.name": service})
    return Resource.create({"service.name": f"{service}-engine", "service.instance.id": group})
