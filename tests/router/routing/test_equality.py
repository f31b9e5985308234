"""Keys of equal requests."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.speculation import Speculation
from phalanx_router.routing.equality import computation_key, conversation_key, output_key, response_key

PROMPT = [5, 6, 7]


def request(prompt: list[int] = PROMPT, **fields: Any) -> wire.Request:
    """A greedy request; fields of the sampling parameters and of the request."""
    names = set(wire.Sampling.__struct_fields__)
    sampling = wire.Sampling(
        **({"max_tokens": 8, "seed": 1, "temperature": 0.0} | {n: v for n, v in fields.items() if n in names})
    )
    more = {name: value for name, value in fields.items() if name not in names}
    plain = wire.Request(id="a", epoch=0, prompt=prompt, delivered=[], sampling=sampling)
    return msgspec.structs.replace(plain, **more)


TOKENS = st.lists(st.integers(0, 2**31), max_size=6)
FIELDS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 0.5]),
        "seed": st.integers(0, 2),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(st.integers(0, 3), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 2), st.sampled_from([-1.0, 1.0]), max_size=2),
        "bad_words": st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=2),
        "grammar": st.sampled_from([None, wire.Grammar("regex", "a"), wire.Grammar("lark", "a")]),
        "tenant": st.sampled_from(["", "alice", "bob"]),
        "cache_salt": st.sampled_from(["", "x"]),
        "adapter": st.sampled_from([None, wire.Adapter("a", "1"), wire.Adapter("a", "2")]),
        "priority": st.integers(0, 1),
        "deadline_ms": st.sampled_from([None, 10.0]),
    }
)


def effect(prompt: list[int], fields: dict[str, Any]) -> object:
    """All fields, in a form that is equal if and only if the tokens are."""
    known = dict(fields, prompt=prompt, stop_token_ids=set(fields["stop_token_ids"]), bad_words=sorted(fields["bad_words"]))
    if fields["temperature"] == 0:
        known |= {"seed": 0, "top_p": 1.0}
    return known


@given(prompts=st.tuples(TOKENS, TOKENS), fields=st.tuples(FIELDS, FIELDS), is_same=st.booleans())
def test_keys_are_equal_exactly_for_equal_computations(
    prompts: tuple[list[int], list[int]], fields: tuple[dict[str, Any], dict[str, Any]], is_same: bool
) -> None:
    """Pairs: half of them differ in at most the fields without effect."""
    if is_same:
        ignored = {"stop_token_ids": fields[0]["stop_token_ids"][::-1], "bad_words": fields[0]["bad_words"][::-1]}
        greedy = {"seed": fields[1]["seed"], "top_p": fields[1]["top_p"]} if fields[0]["temperature"] == 0 else {}
        fields, prompts = (fields[0], fields[0] | ignored | greedy), (prompts[0], prompts[0])
    keys = [computation_key(request(prompt, **some)) for prompt, some in zip(prompts, fields, strict=True)]
    effects = [effect(prompt, some) for prompt, some in zip(prompts, fields, strict=True)]
    assert None not in keys and (keys[0] == keys[1]) == (effects[0] == effects[1])


@given(fields=FIELDS, other=st.sampled_from(["carol", "dave"]))
def test_tenants_share_no_key(fields: dict[str, Any], other: str) -> None:
    mine, theirs = request(**fields), request(**fields | {"tenant": other})
    assert computation_key(mine) != computation_key(theirs) and output_key(mine) != output_key(theirs)
    assert output_key(mine, has_tenant=False) == output_key(theirs, has_tenant=False), "unless the caller shares them"


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 1},
        {"ttft_target_ms": 5.0},
        {"tpot_target_ms": 5.0},
        {"deadline_ms": 5.0},
        {"speculation": Speculation("ngram")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_urgency_changes_the_computation_only(fields: dict[str, Any]) -> None:
    plain, urgent = request(), request(**fields)
    assert computation_key(plain) != computation_key(urgent)
    assert output_key(plain) == output_key(urgent)


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"prompt_logprobs": 1}, {"return_gaps": True}], ids=lambda f: next(iter(f)))
def test_request_for_token_details_has_no_key(fields: dict[str, Any]) -> None:
    assert computation_key(request(**fields)) is None and output_key(request(**fields)) is None


def test_identity_and_progress_leave_the_key() -> None:
    later = msgspec.structs.replace(request(), id="b", epoch=3, delivered=[1, 2], waited_ms=9.0, can_resume=True, alone=True)
    assert computation_key(later) == computation_key(request())


CONVERSATIONS = st.fixed_dictionaries(
    {
        "ending": st.sampled_from([(), ("other", "True", "a")]),
        "revision": st.sampled_from(["r1 ", "r2 "]),
        "context": st.sampled_from([b"", b"a"]),
        "max_tokens": st.integers(0, 1),
        "space": st.sampled_from(["r1  8", "r1  16"]),
    }
)


@given(
    prompts=st.tuples(TOKENS, TOKENS),
    fields=st.tuples(FIELDS, FIELDS),
    parts=st.tuples(CONVERSATIONS, CONVERSATIONS),
    same=st.tuples(st.booleans(), st.booleans()),
    has_tenant=st.booleans(),
)
def test_conversations_agree_in_all_but_the_last_message(
    prompts: tuple[list[int], list[int]],
    fields: tuple[dict[str, Any], dict[str, Any]],
    parts: tuple[dict[str, Any], dict[str, Any]],
    same: tuple[bool, bool],
    has_tenant: bool,
) -> None:
    """The limit of the request counts no more than its prompt: it may depend on its length."""
    free = {"priority", "deadline_ms", "max_tokens"} | (set() if has_tenant else {"tenant"})
    others = [fields[0], {name: fields[name in free or not same[0]][name] for name in fields[0]}]
    conversations = [parts[0], parts[not same[1]]]
    keys = [
        conversation_key(request(prompt, **one), has_tenant=has_tenant, **part)
        for prompt, one, part in zip(prompts, others, conversations, strict=True)
    ]
    effects = [effect([], {name: value for name, value in one.items() if name not in free}) for one in others]
    assert (keys[0] == keys[1]) == (effects[0] == effects[1] and conversations[0] == conversations[1])
    assert keys[0] != response_key(request(prompts[0], **fields[0]), (), "r1 ", has_tenant)
