"""Spans of a request at its group: queue, prefill, and decode."""

from phalanx_api.trace import PrefillTime
from phalanx_frontend.tracing.span import Value
from phalanx_frontend.tracing.tracer import RequestTrace


def add_prefill(
    trace: RequestTrace, *, times: PrefillTime, now: float, cached_tokens: int, group: str, epoch: int, is_again: bool = False
) -> None:
    """Records queue and prefill of a request whose first token arrived `now`; `is_again`: the next one after a preemption.

    A moved request with all its pages has no chunk.
    """
    submitted = now - times.submitted_ago_s
    started = now - times.chunks[0].started_ago_s if times.chunks else now
    place: dict[str, Value] = {"phalanx.group": group, "phalanx.epoch": epoch}
    if is_again:
        place["phalanx.preempted"] = True
    trace.add("queue", submitted, started, attributes=place, service=group)
    if times.chunks:
        chunks = [
            trace.event(
                "chunk",
                now - chunk.started_ago_s,
                {"phalanx.tokens": chunk.tokens, "phalanx.seconds": chunk.started_ago_s - chunk.ended_ago_s},
            )
            for chunk in times.chunks
        ]
        attributes = place | {
            "phalanx.chunks": len(chunks),
            "phalanx.tokens": sum(chunk.tokens for chunk in times.chunks),
            "phalanx.cached_tokens": cached_tokens,
        }
        trace.add("prefill", started, now - times.chunks[-1].ended_ago_s, attributes=attributes, events=chunks, service=group)
