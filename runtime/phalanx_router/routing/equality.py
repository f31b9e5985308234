"""Equality of requests: those with equal output, and those that one computation may answer.

Tokens depend on prompt and sampling parameters alone (`wire.Sampling`). A request without a seed has a random one, so only greedy
requests and those with equal seeds are equal.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from phalanx_api import wire

_encode = msgspec.msgpack.Encoder().encode
DIGEST_BYTES = 32


def output_key(request: wire.Request, has_tenant: bool = True) -> bytes | None:
    """Returns a digest that requests with equal tokens share; null if the client needs details of tokens, or an embedding.

    `has_tenant`: whether requests of two tenants differ. Requests with another `cache_salt` always do.
    """
    sampling = request.sampling
    if request.pooling is not None:
        return None
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None or sampling.return_gaps:
        return None
    digest = hashlib.blake2b(_encode(_parameters(request, sampling, has_tenant)), digest_size=DIGEST_BYTES)
    digest.update(array("q", request.prompt).tobytes())
    return digest.digest()


def computation_key(request: wire.Request) -> bytes | None:
    """Returns a digest that requests share if one computation may answer both: equal tokens, tenant, urgency and speculation.

    With equal urgency the earlier request waits no longer than the later one would.
    """
    output = output_key(request)
    if output is None:
        return None
    urgency = (request.priority, request.ttft_target_ms, request.tpot_target_ms, request.deadline_ms)
    return hashlib.blake2b(output + _encode((urgency, request.speculation)), digest_size=DIGEST_BYTES).digest()


def response_key(request: wire.Request, ending: Sequence[str], revision: str, has_tenant: bool) -> bytes:
    """Returns a digest that requests share if one stored response answers both.

    `ending`: what decides how tokens become text, and where it ends; `revision`: of the groups; `has_tenant`: as in
    `output_key`. The request needs no details of tokens. Requests that share tokens may have any urgency.
    """
    output = output_key(request, has_tenant)
    assert output is not None, "such requests are not stored"
    return hashlib.blake2b(output + _encode((list(ending), revision)), digest_size=DIGEST_BYTES).digest()


def conversation_key(
    request: wire.Request, ending: Sequence[str], revision: str, has_tenant: bool, *, context: bytes, max_tokens: int, space: str
) -> bytes:
    """Returns a digest that requests share if they may differ by the last message alone.

    `context`: of all that the prompt has besides that message; `max_tokens`: the client's limit, 0 without one, as that of the
    request may depend on the length of its prompt; `space`: identity of the model that embeds messages. Others as in
    `response_key`.
    """
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
    fields = (_parameters(request, sampling, has_tenant), list(ending), revision, context, space)
    return hashlib.blake2b(_encode(fields), digest_size=DIGEST_BYTES, person=b"conversation").digest()


def _parameters(request: wire.Request, sampling: wire.Sampling, has_tenant: bool) -> tuple[object, ...]:
    """All that tokens depend on, without the prompt."""
    tenant = request.tenant if has_tenant else ""
    biases, marks = sorted(sampling.logit_bias.items()), request.page_marks
    return tenant, request.cache_salt, request.page_adapter, biases, _normalised(sampling), *([marks] if marks else [])


def _normalised(sampling: wire.Sampling) -> wire.Sampling:
    """Sampling parameters without what has no effect: the order of sets, and of greedy requests the seed and the filters."""
    allowed = sampling.allowed_token_ids
    sampling = msgspec.structs.replace(
        sampling,
        stop_token_ids=sorted(set(sampling.stop_token_ids)),
        allowed_token_ids=None if allowed is None else sorted(set(allowed)),
        bad_words=sorted(sampling.bad_words),
        logit_bias={},  # encoded by the caller, in order
    )
    if sampling.temperature > 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=0, top_p=1.0, top_k=None, min_p=0.0)
