"""Equal and similar requests while a rollout changes the tokenizer: equal ids of two tokenizers are different texts."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from tests.frontend.fakes import eos_id, tiny_assets
from tests.polling import until
from tests.router.cached_routers import SEMANTIC, CachedRouter, cached_router, printing_leader
from tests.router.fakes import FakeLeader
from tests.router.questions import ASKED, CHAT, COMMON, COMPLETION, SIMILAR, body, result_of, text_of

TOKEN_PROMPT: Mapping[str, Any] = {**COMMON, "prompt": [100, 101, 102]}


def permuted() -> wire.Assets:
    """The tiny model with a tokenizer whose ids mean other tokens, the special ones aside."""
    files = dict(tiny_assets().files)
    document = json.loads(files["tokenizer.json"])
    special, vocab = {token["content"] for token in document["added_tokens"]}, document["model"]["vocab"]
    words = sorted(vocab.keys() - special, key=lambda word: int(vocab[word]))
    moved = {word: vocab[other] for word, other in zip(words[37:] + words[:37], words, strict=True)}
    document["model"]["vocab"] = {**vocab, **moved}
    return wire.make_assets({**files, "tokenizer.json": json.dumps(document).encode()}, ["tiny"], 512, [eos_id()], None)


@asynccontextmanager
async def rolling_router(coalesces: bool = False, hold_at: int | None = None) -> AsyncIterator[tuple[CachedRouter, FakeLeader]]:
    """A router of the old revision, whose vectors come from another service, and a leader of the next one."""
    old, new, embedding = printing_leader("a", hold_at=hold_at), printing_leader("b", assets=permuted()), printing_leader("c")
    new.revision = "r2"
    await new.start()
    async with cached_router(embedding, cache=None, keys=()) as embedder:
        policy = msgspec.structs.replace(SEMANTIC, embedder=embedder.http.base_url.netloc.decode())
        async with cached_router(old, cache=policy, coalesces=coalesces) as router:
            yield router, new
    await new.stop()


async def roll(router: CachedRouter, new: FakeLeader) -> None:
    """Adds the new group, whose tokenizer is used from then on."""
    router.source.change(router.leaders[0].endpoint(), new.endpoint(created="9"))
    await until(lambda: router.fleet.links.num_ready == 2)
    assert router.fleet.links.revisions() == ["r2 ", "r1 "]


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [(CHAT, body(ASKED), body(SIMILAR)), (COMPLETION, TOKEN_PROMPT, TOKEN_PROMPT)],
    ids=["similar question", "equal token ids"],
)
async def test_tokens_of_another_tokenizer_answer_nothing(path: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    async with rolling_router() as (router, new):
        stored = await router.post(first, path)
        assert result_of(await router.post(second, path)) != "miss"
        await roll(router, new)
        computed, again = [await router.post(second, path) for _ in range(2)]
        assert (result_of(computed), result_of(again), len(new.submitted)) == ("miss", "exact", 1)
        assert text_of(again) == text_of(computed) != text_of(stored)


async def test_request_joins_none_of_another_tokenizer() -> None:
    async with rolling_router(coalesces=True, hold_at=5) as (router, new):
        asking = asyncio.create_task(router.post(TOKEN_PROMPT, COMPLETION))
        await until(lambda: router.num_computed == 1)
        await roll(router, new)
        text = text_of(await router.post(TOKEN_PROMPT, COMPLETION))
        assert len(new.submitted) == 1
        router.leaders[0].release()
        assert text_of(await asking) != text
