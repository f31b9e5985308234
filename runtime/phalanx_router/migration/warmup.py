"""Warm-up of a move without pages: the target computes the stream's tokens for its prefix cache."""

from collections.abc import Callable, Sequence

from phalanx_api import wire
from phalanx_router.links.leader_link import LeaderLink


class _WarmupSink:
    def __init__(self, computed: Callable[[], None], refused: Callable[[str, str], None]) -> None:
        self._computed = computed
        self._refused = refused

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        pass

    def prompt_details(self, details: wire.PromptDetails) -> None:
        pass

    def cached(self, frame: wire.Cached) -> None:
        pass

    def finished(self, end: wire.Finished) -> None:
        self._computed()

    def refused(self, refused: wire.Refused) -> None:
        self._refused(refused.code, refused.message)

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        self._refused("target_lost", why)


def pages_of_whole_images(images: Sequence[wire.Image], num_pages: int, page_size: int) -> int:
    """Returns how many of the first `num_pages` pages of a prompt, with one more token, can be a prompt: no image ends beyond it.

    `images`: in the order of the prompt.
    """
    for image in reversed(images):
        if image.start <= num_pages * page_size < image.stop - 1:
            num_pages = max(0, image.start - 1) // page_size
    return num_pages


def warmup_request(replay: wire.Request, tokens: list[int]) -> wire.Request:
    """Returns a request that leaves `tokens` in the prefix cache, with tenant, salt and adapter of `replay`.

    `tokens`: begin as those of `replay`, and end in none of its images.
    """
    return wire.Request(
        id=replay.id,
        epoch=0,
        prompt=tokens,
        delivered=[],
        sampling=wire.Sampling(max_tokens=1, seed=0, temperature=0.0),
        priority=replay.priority,
        tenant=replay.tenant,
        cache_salt=replay.cache_salt,
        adapter=replay.adapter,
        images=[image for image in replay.images if image.stop <= len(tokens)],
        alone=replay.alone,
    )


def submit_warmup(target: LeaderLink, request: wire.Request, move: str, hit_tokens: int) -> None:
    """Starts a request of `warmup_request` on the pages of a pull. Its output and failures are ignored."""
    target.submit(request, _WarmupSink(lambda: None, lambda code, why: None), move, hit_tokens)


class Warmups:
    """Warm-up requests and their results, by move."""

    def __init__(self, warmed: Callable[[str, str], None], refused: Callable[[str, str, str], None]) -> None:
        self._warmed = warmed
        self._refused = refused
        self._requests: dict[str, tuple[LeaderLink, int]] = {}  # link and handle of running requests
        self._cached_tokens: dict[str, int] = {}

    def start(self, move: str, replay: wire.Request, target: LeaderLink) -> None:
        """Submits prompt and output tokens of `replay` to the target."""
        tokens = replay.prompt + replay.delivered
        request = warmup_request(replay, tokens)

        def computed() -> None:
            page_size = target.group_report.page_size
            self._cached_tokens[move] = len(tokens) // page_size * page_size
            self._requests.pop(move, None)
            self._warmed(move, f"{len(tokens)} tokens are computed")

        def refused(code: str, why: str) -> None:
            self._requests.pop(move, None)
            self._refused(move, code, why)

        self._requests[move] = (target, target.submit(request, _WarmupSink(computed, refused)))

    def cached_tokens(self, move: str) -> int:
        """Tokens that the target has computed."""
        return self._cached_tokens.get(move, 0)

    def end(self, move: str) -> None:
        """Forgets a move and aborts its request."""
        self._cached_tokens.pop(move, None)
        request = self._requests.pop(move, None)
        if request is not None:
            link, handle = request
            link.abort(handle)
