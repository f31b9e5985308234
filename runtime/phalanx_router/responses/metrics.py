"""Prometheus metrics of the response cache."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

NAME = "phalanx_router_response_cache"
SIMILARITY_BOUNDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)


class ResponseCacheMetrics:
    """Metrics of the response cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hits = Counter(f"{NAME}_hits", "Requests answered from the response cache, by kind.", ["kind"], registry=registry)
        self._misses = Counter(f"{NAME}_misses", "Requests that the response cache could not answer.", registry=registry)
        self._entries = Gauge(f"{NAME}_entries", "Stored responses.", registry=registry)
        self._bytes = Gauge(f"{NAME}_bytes", "Memory of the stored responses, vectors included.", registry=registry)
        self._tokens = Counter(f"{NAME}_tokens_saved", "Tokens of hits, which no group computed.", ["kind"], registry=registry)
        self._seconds = Counter(f"{NAME}_seconds_saved", "Time that the computation of hits took.", registry=registry)
        self._dissimilar = Counter(
            f"{NAME}_semantic_misses", "Requests without a similar stored question, by reason.", ["why"], registry=registry
        )
        self._similarity = Histogram(
            f"{NAME}_similarity",
            "Similarity of the nearest stored question, by result.",
            ["result"],
            buckets=SIMILARITY_BOUNDS,
            registry=registry,
        )
        self._no_embeddings = Gauge(
            f"{NAME}_embedder_failed", "1 while questions get no embeddings, by reason.", ["why"], registry=registry
        )
        self._rechecks = Counter(
            f"{NAME}_rechecks", "Semantic hits that were also computed, by outcome.", ["outcome"], registry=registry
        )
        self._shared = Counter(
            f"{NAME}_shared", "Stored responses exchanged with other routers, by direction.", ["direction"], registry=registry
        )

    def hit(self, kind: str, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """Counts a hit."""
        self._hits.labels(kind).inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("output").inc(output_tokens)
        self._seconds.inc(seconds)

    def missed(self) -> None:
        """Counts a miss."""
        self._misses.inc()

    def compared(self, nearest: float | None, is_hit: bool) -> None:
        """Records the similarity of the nearest question, if there is one."""
        if nearest is not None:
            self._similarity.labels("hit" if is_hit else "miss").observe(nearest)

    def not_similar(self, why: str) -> None:
        """Counts a request without a similar question. `why`: a code."""
        self._dissimilar.labels(why).inc()

    def show_embedder(self, failure: str) -> None:
        """Shows why questions get no embeddings; empty if they do."""
        self._no_embeddings.clear()
        if failure:
            self._no_embeddings.labels(failure).set(1)

    def rechecked(self, outcome: str) -> None:
        """Counts a re-check: agreed, disagreed or failed."""
        self._rechecks.labels(outcome).inc()

    def shared(self, direction: str, count: int) -> None:
        """Counts responses that were sent or received."""
        self._shared.labels(direction).inc(count)

    def show(self, entries: int, num_bytes: int) -> None:
        """Shows the size."""
        self._entries.set(entries)
        self._bytes.set(num_bytes)
