"""Scores of Qwen3-Reranker: the probability of yes against no, after a prompt that asks whether a document fits a query.

    score = p(yes) / (p(yes) + p(no)) = sigmoid(logprob(yes) - logprob(no))

Each pair is two requests for one token that only may be yes, or no. They share the pages of their prompt, and all pairs those of
its beginning. A checkpoint that was converted to a classifier of one label computes the difference of both logits itself: there
each pair is one pooled request.
"""

import math
from collections.abc import Sequence

from phalanx_frontend.errors import invalid
from phalanx_frontend.openai.embedding.embeddings import Vector
from phalanx_frontend.openai.embedding.inputs import TokenizedInput, check_length, in_turns, kept_tokens, pair_length
from phalanx_frontend.openai.schemas import PooledRequest
from phalanx_frontend.openai.served_model import ServedModel

ANSWERS = ("yes", "no")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The model was trained with this prompt, and with the instruction for searches.

Its tokenizer never joins the colon before the document with the space and the text behind it: the ids of both parts are those of
the whole.
"""


async def judged_inputs(
    body: PooledRequest, pairs: Sequence[tuple[str, str]], model: ServedModel, field: str
) -> list[TokenizedInput]:
    """Returns two inputs per pair, for a classifier one. Raises ApiError 400.

    `truncate_prompt_tokens` cuts the end of the document alone. A query that several pairs share is tokenized once.
    """
    is_classifier = model.classification() is not None
    answers: list[int | None] = [None] if is_classifier else [await _answer(word, model) for word in ANSWERS]
    before, after = [await model.encode(text, False, field) for text in (BEFORE, AFTER)]
    limit, kept, found = model.assets.max_model_len - (not is_classifier), kept_tokens(body, model), list[TokenizedInput]()
    asked, head = None, list[int]()
    async for query, document in in_turns(pairs, pair_length):
        if query != asked:
            question = await model.encode(f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>:", False, field)
            asked, head = query, [*before, *question]
        room = None if kept is None else _room(kept, limit, len(head) + len(after))
        tokens = [*head, *(await model.encode(f" {document}", False, field))[:room], *after]
        check_length(tokens, len(found) // len(answers), limit, field)
        found += [TokenizedInput(tokens, next_token=answer) for answer in answers]
    return found


def judged_scores(vectors: Sequence[Vector], *, is_raw: bool = False) -> list[float]:
    """Returns the score of each pair, of the logprobs of its two answers; `is_raw`: their difference, that of the logits."""
    differences = [yes[0] - no[0] for yes, no in zip(vectors[::2], vectors[1::2], strict=True)]
    return differences if is_raw else [1 / (1 + math.exp(min(700.0, -difference))) for difference in differences]


def _room(kept: int, limit: int, rest: int) -> int | None:
    """Returns the tokens of a document to keep beside the `rest`; null if the rest alone reaches `limit`. Raises ApiError 400."""
    if rest >= limit:
        return None
    if rest >= kept:
        message = (
            f"truncate_prompt_tokens must be at least {rest + 1}: it cuts the document, not the query and the model's prompt"
        )
        raise invalid("truncate_prompt_tokens", message)
    return min(kept, limit) - rest


async def _answer(word: str, model: ServedModel) -> int:
    ids = await model.encode(word, False, "model")
    if len(ids) != 1:
        raise invalid("model", f"this model gives no scores: {word!r} is not one token of its tokenizer", "no_scores")
    return ids[0]
