"""A collector of traces: receives spans by OTLP, over HTTP or gRPC, with OpenTelemetry's public protobufs."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

HAS_REMOTE_PARENT = 0x200
"""Flag of a span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as it arrived. Times are Unix seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    has_remote_parent: bool
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: list[tuple[str, float, dict[str, Any]]]
    error: str
    service: str
    instance: str


@dataclass(slots=True)
class Collector:
    """Spans in the order of their arrival."""

    endpoint: str
    protocol: str
    spans: list[ReceivedSpan] = field(default_factory=list)

    def environment(self, ratio: float) -> dict[str, str]:
        """Variables of a program that exports here."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_TRACES_SAMPLER_ARG": str(ratio),
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def named(self, name: str) -> list[ReceivedSpan]:
        """Spans with this name, by start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_s)

    def receive(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Adds the spans of a batch."""
        for resource in request.resource_spans:
            of_resource = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            has_remote_parent=bool(span.flags & HAS_REMOTE_PARENT),
                            start_s=span.start_time_unix_nano / 1e9,
                            end_s=span.end_time_unix_nano / 1e9,
                            attributes=_attributes(span.attributes),
                            events=[
                                (event.name, event.time_unix_nano / 1e9, _attributes(event.attributes)) for event in span.events
                            ],
                            error=span.status.message if span.status.code == 2 else "",
                            service=of_resource.get("service.name", ""),
                            instance=of_resource.get("service.instance.id", ""),
                        )
                    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Collects over HTTP."""
    collector = Collector("", "http/protobuf")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.receive(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Collects over gRPC."""
    collector = Collector("", "grpc")

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.receive(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
