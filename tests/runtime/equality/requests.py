"""Requests of every sampling mode, limits of step sizes, and the comparison of answers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from tests.runtime.served import Served
from tests.runtime.tiny import EOS_ID, VOCAB_SIZE

NUM_TOKENS = 24
ROOMY = Limits(max_model_len=120, max_num_seqs=8, max_num_batched_tokens=512)
SHAPES: dict[str, Limits] = {
    "together": ROOMY,
    "chunks of 7": Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=7),
    "one by one": Limits(max_model_len=120, max_num_seqs=1, max_num_batched_tokens=11),
}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "filters": {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0},
    "bias and words": {"temperature": 0.9, "logit_bias": {3: 5.0, 9: -100.0}, "bad_words": [[3, 3], [11], [7, 3, 12]]},
    "allowed, min tokens": {"allowed_token_ids": [*range(60), EOS_ID], "min_tokens": 9, "logit_bias": {EOS_ID: 6.0}},
    "grammar": {"temperature": 1.0, "grammar": wire.Grammar("regex", "([a-p]{3} ){20}")},
}
"""Sampling fields of each mode."""
REPEATING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded, few tokens allowed": {"temperature": 0.5, "allowed_token_ids": [3, 4, 5]},
    "bias": {"temperature": 0.7, "logit_bias": {7: 14.0, 8: 14.0}},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.3, "allowed_token_ids": [3, 4]},
    "grammar": {"temperature": 1.0, "grammar": wire.Grammar("regex", "(ab|abc){20}")},
    "filters": {"temperature": 0.6, "top_k": 3, "min_p": 0.05},
}


def requests(**more: Any) -> list[wire.Request]:
    """Returns one request for each of `FIELDS`."""
    rng = torch.Generator().manual_seed(3)
    submitted = []
    for number, fields in enumerate(FIELDS.values()):
        prompt = torch.randint(0, VOCAB_SIZE, (3 + 5 * number,), generator=rng).tolist()
        both: dict[str, Any] = {"stop_token_ids": [EOS_ID], "logprobs": 2, **fields, **more}
        submitted.append(
            wire.Request(
                id=str(number),
                epoch=1,
                prompt=prompt,
                delivered=[],
                sampling=wire.Sampling(max_tokens=NUM_TOKENS, seed=7 + number, **both),
            )
        )
    return submitted


def assert_equal(answers: list[Served], plain: list[Served], names: Sequence[str] = tuple(FIELDS)) -> None:
    """Compares tokens, finish reasons and logprobs."""
    for name, one, other in zip(names, answers, plain, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish), name
        for detail, same in zip(one.details, other.details, strict=True):
            assert detail is not None and same is not None
            assert detail.logprob == pytest.approx(same.logprob, abs=1e-9) and detail.top_ids == same.top_ids, name


def repeating() -> list[wire.Request]:
    """Returns one request for each of `REPEATING`, with prompts that n-gram lookups continue."""
    prompts = [[(7 * at + 3) % 40 for at in range(9)] * 3 for _ in REPEATING]
    return [
        wire.Request(
            id=str(n),
            epoch=0,
            prompt=prompts[n],
            delivered=[],
            sampling=wire.Sampling(max_tokens=40, seed=n, **{"stop_token_ids": [EOS_ID], "logprobs": 1, **fields}),
        )
        for n, fields in enumerate(REPEATING.values())
    ]
