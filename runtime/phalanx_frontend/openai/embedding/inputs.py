"""Token ids of the inputs of pooled requests, and the backend's request for each."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import invalid
from phalanx_frontend.fields import Prompt
from phalanx_frontend.openai.schemas import PooledRequest
from phalanx_frontend.openai.served_model import LONG_TEXT, ServedModel

Item = TypeVar("Item")
POOLED = wire.Sampling(max_tokens=0, seed=0)
ITEM_LENGTH = 64
"""Counted for each input beside its characters: short inputs cost time too."""


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """One input."""

    tokens: list[int]
    pair_start: int = 0
    """See `wire.Request`."""
    next_token: int | None = None
    """Asks for the logprob of this token after the input, instead of a vector."""


async def tokenized_inputs(
    body: PooledRequest, inputs: Sequence[Prompt], model: ServedModel, field: str = "input"
) -> list[TokenizedInput]:
    """Returns token ids per input. Only text gets special tokens. Raises ApiError 400 for the `field` of the inputs."""
    limit, found = kept_tokens(body, model), list[TokenizedInput]()
    async for text in in_turns(inputs, len):
        if isinstance(text, str):
            one = await _tokenized((text, None), body, model, limit, field) if text else TokenizedInput([])
        else:
            ids = model.checked_ids(text, field)
            one = TokenizedInput(ids[-limit:] if limit and body.truncation_side == "left" else ids[:limit])
        check_length(one.tokens, len(found), model.assets.max_model_len, field)
        found.append(one)
    return found


async def tokenized_pairs(
    body: PooledRequest, pairs: Sequence[tuple[str, str]], model: ServedModel, field: str
) -> list[TokenizedInput]:
    """Returns token ids per pair of texts, joined as the tokenizer joins them. Raises ApiError 400.

    A first text that several pairs share is tokenized once.
    """
    limit, found = kept_tokens(body, model), list[TokenizedInput]()
    asked, known = None, None
    async for pair in in_turns(pairs, pair_length):
        if pair[0] != asked:
            asked, known = pair[0], await model.encode(pair[0], False, field)
        found.append(await _tokenized(pair, body, model, limit, field, known=known))
        check_length(found[-1].tokens, len(found) - 1, model.assets.max_model_len, field)
    return found


async def in_turns(items: Sequence[Item], length: Callable[[Item], int]) -> AsyncIterator[Item]:
    """Yields the inputs of a request. Other requests run after each `LONG_TEXT` characters of them."""
    done = 0
    for item in items:
        yield item
        done += ITEM_LENGTH + length(item)
        if done >= LONG_TEXT:
            done = 0
            await asyncio.sleep(0)


def pair_length(pair: tuple[str, str]) -> int:
    """Returns the characters of both texts."""
    return len(pair[0]) + len(pair[1])


def pooled_requests(
    id: str,
    inputs: Sequence[TokenizedInput],
    pooling: wire.Pooling,
    body: PooledRequest,
    caller: Caller,
    *,
    adapter: wire.Adapter | None = None,
) -> list[wire.Request]:
    """Returns the backend's request for each input. Raises ApiError 403 for its priority."""
    priority, tenant = caller.priority(body.priority), caller.tenant(body.tenant, body.user)
    return [
        wire.Request(
            id=id if len(inputs) == 1 else f"{id}-{index}",
            epoch=0,
            prompt=one.tokens,
            delivered=[],
            sampling=POOLED if one.next_token is None else _only(one.next_token),
            priority=priority,
            tenant=tenant,
            cache_salt=body.cache_salt or "",
            pooling=pooling if one.next_token is None else None,
            trace=None if caller.trace is None else caller.trace.identity,
            adapter=adapter,
            pair_start=one.pair_start,
        )
        for index, one in enumerate(inputs)
    ]


def _only(token: int) -> wire.Sampling:
    return wire.Sampling(max_tokens=1, seed=0, temperature=0.0, allowed_token_ids=[token], logprobs=0)


def kept_tokens(body: PooledRequest, model: ServedModel) -> int | None:
    """Returns the tokens to keep of each input, if longer ones are cut. Raises ApiError 400."""
    longest, kept = model.assets.max_model_len, body.truncate_prompt_tokens
    if kept is not None and (kept == 0 or kept > longest):
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens must be -1, or between 1 and {longest}")
    return longest if kept == -1 else kept


async def _tokenized(
    texts: tuple[str, str | None],
    body: PooledRequest,
    model: ServedModel,
    limit: int | None,
    field: str,
    *,
    known: list[int] | None = None,
) -> TokenizedInput:
    """Returns the token ids of one text or two. A cut keeps special tokens, at the left side only those at the end."""
    has_special, is_left = body.add_special_tokens is not False, body.truncation_side == "left"
    if texts[1] is None and (is_left or not model.is_encoder):
        ids = await model.encode(texts[0], has_special, field)
        if limit is None or len(ids) <= limit:
            return TokenizedInput(ids)
        if is_left:
            return TokenizedInput(ids[-limit:])
    ids, pair_start = await model.encode_texts(texts, has_special, limit, field, known)
    if limit is not None and len(ids) > limit:
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens must be at least {len(ids)}, for the special tokens")
    return TokenizedInput(ids, pair_start)


def check_length(tokens: Sequence[int], index: int, limit: int, field: str) -> None:
    """Raises ApiError 400 for an input without tokens, or with more than `limit`."""
    count = len(tokens)
    if not count:
        raise invalid(field, f"input {index} is empty")
    if count > limit:
        message = f"This model's maximum context length is {limit} tokens. However, input {index} has {count} tokens."
        raise invalid(field, f"{message} Please shorten it.", "context_length_exceeded")
