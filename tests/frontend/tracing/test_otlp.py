"""Export of spans to a collector, configured by OpenTelemetry's variables."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from phalanx_frontend.tracing.otlp import TracingSettingInvalid, read_tracing, start_tracer
from tests.otlp import Collector, grpc_collector, http_collector

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize("collecting", [http_collector, grpc_collector])
def test_collector_receives_spans_with_times_and_attributes(
    collecting: Callable[[], AbstractContextManager[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        environment = collector.environment(ratio=1.0) | {"OTEL_RESOURCE_ATTRIBUTES": "k8s.namespace.name=models"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracer = start_tracer(read_tracing(environment, "chat"))
        assert tracer is not None
        trace = tracer.open(f"00-{'a' * 32}-{'b' * 16}-01", "chat tiny")
        trace.attributes["gen_ai.usage.input_tokens"] = 7
        now = tracer.clock()
        trace.add("prefill", now - 2, now - 1, events=[trace.event("chunk", now - 2, {"phalanx.tokens": 7})], service="group-a")
        trace.fail("groups_died")
        trace.end()
        tracer.close()
    prefill, root = collector.spans
    assert (prefill.parent_id, prefill.trace_id, root.parent_id) == (root.span_id, root.trace_id, "b" * 16)
    assert (prefill.has_remote_parent, root.has_remote_parent) == (False, True)
    assert (prefill.service, prefill.instance, root.service) == ("chat-engine", "group-a", "chat")
    assert prefill.end_s - prefill.start_s == pytest.approx(1.0, abs=1e-3)
    [(name, at_s, attributes)] = prefill.events
    assert (name, attributes) == ("chunk", {"phalanx.tokens": 7}) and at_s == pytest.approx(prefill.start_s, abs=1e-3)
    assert root.attributes == {"gen_ai.usage.input_tokens": 7} and root.error == "groups_died"


@pytest.mark.parametrize("off", [{}, ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}])
def test_tracing_is_off_without_endpoint_or_by_variable(off: dict[str, str]) -> None:
    assert read_tracing(off, "chat") is None and start_tracer(None) is None


def test_settings_come_from_the_variables() -> None:
    settings = read_tracing(ENDPOINT | {"OTEL_TRACES_SAMPLER_ARG": "0.5", "OTEL_SERVICE_NAME": "own"}, "chat", slow_s=3.0)
    assert settings is not None
    assert (settings.protocol, settings.service, settings.rules.ratio, settings.rules.slow_s) == (
        "http/protobuf",
        "own",
        0.5,
        3.0,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_TRACES_SAMPLER_ARG", "2"), ("OTEL_TRACES_SAMPLER_ARG", "all")],
)
def test_invalid_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(TracingSettingInvalid, match=name):
        read_tracing(ENDPOINT | {name: value}, "chat")
