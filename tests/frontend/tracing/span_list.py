"""Keeps exported spans."""

from phalanx_frontend.tracing.span import Span


class SpanList:
    """Implements `SpanExporter`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass
