"""Parts of a text that are tokenized once: the tokens are those of the whole."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers

from phalanx_api import wire
from phalanx_frontend.openai.question import RequestedModel
from phalanx_frontend.openai.served_model import MAX_CHARACTERS, SHARED_CHARS, ServedModel, load_model
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_frontend.text.cuts import LLAMA_3, QWEN_2, cut_places, has_cuts
from phalanx_frontend.text.tokenizer import RecentEncodings
from tests.frontend.fakes import tiny_assets

PLAIN = "what is the colour of Water in 1234 towns? don't we'll say: naïve"
ODD = ' words\n\tof x9 a.b <|end|> 水 e\u0301 \u00a0 \' "quoted" ,'
WORDS = f"{PLAIN} {ODD}".split(" ")
TEXTS = st.lists(st.sampled_from([*WORDS, "", " ", "\n"]) | st.text(max_size=4), max_size=40).map(" ".join)


def trained(pre_tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with merges, a special token and one before each prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    special = ["<|begin|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def split(pattern: str) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS = {
    "GPT-2": trained(GPT_2),
    "SmolLM2": trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])),
    "Llama 3": trained(split(LLAMA_3)),
    "Qwen 2": {**trained(split(QWEN_2)), "normalizer": {"type": "NFC"}},
}
LLAMA_STEPS = KINDS["Llama 3"]["pre_tokenizer"]
BYTES_FIRST = {**LLAMA_STEPS, "pretokenizers": LLAMA_STEPS["pretokenizers"][::-1]}


@cache
def served(kind: str) -> ServedModel:
    files = {**tiny_assets().files, "tokenizer.json": json.dumps(KINDS[kind]).encode()}
    return load_model(wire.make_assets(files, ["tiny"], 10**6, [1]))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS, around=st.tuples(TEXTS, TEXTS))
async def test_prompt_and_question_have_the_tokens_of_the_whole(kind: str, text: str, around: tuple[str, str]) -> None:
    """Of a prompt around the question, and of the text that asks for its vector."""
    model, question = served(kind), text * (SHARED_CHARS // max(1, len(text)) + 1)
    prompt = question.join(around)
    ids, shared = await model.recalling(RecentEncodings(), "", "").encode_part(prompt, question, True, "prompt")
    assert ids == model.tokenizer.encode(prompt, True) and (shared is None) == (cut_places(question) is None)
    request = wire.Request(id="a", epoch=0, prompt=ids, delivered=[], sampling=wire.Sampling(max_tokens=1, seed=0))
    pooled, whole = [await RequestedModel(model, request, of).pooled(question, is_question=True) for of in (shared, None)]
    assert pooled.prompt == whole.prompt == model.tokenizer.encode(prepare(question), True)


@pytest.mark.parametrize(
    ("length", "is_cut"), [(SHARED_CHARS - 1, False), (SHARED_CHARS, True), (MAX_CHARACTERS, True), (MAX_CHARACTERS + 1, False)]
)
async def test_only_long_questions_are_cut(length: int, is_cut: bool) -> None:
    """Longer ones are not compared, and the search for cuts would delay other requests."""
    model, text = served("GPT-2").recalling(RecentEncodings(), "", ""), ("one two " * MAX_CHARACTERS)[:length]
    _, shared = await model.encode_part(text, text, True, "prompt")
    assert (shared is not None) is is_cut


@pytest.mark.parametrize(
    ("changed", "is_cut"),
    [
        ({}, True),
        ({"normalizer": {"type": "Lowercase"}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}}, False),
        ({"pre_tokenizer": None}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+ \w+"}, "behavior": "Isolated", "invert": False}}, False),
        ({"pre_tokenizer": BYTES_FIRST}, False),
        ({"added_tokens": [{"content": "of the", "rstrip": False}]}, False),
        ({"added_tokens": [{"content": "mask", "rstrip": True}]}, False),
        ({"model": {"type": "Unigram"}}, False),
    ],
)
def test_unknown_tokenizers_are_not_cut(changed: dict[str, Any], is_cut: bool) -> None:
    assert has_cuts({**KINDS["GPT-2"], **changed}) is is_cut


@pytest.mark.parametrize(
    ("text", "places"),
    [("", None), ("a b", None), ("one two three", (3, 7)), ("x 1 a b c , d", (5, 7)), ("a\u0301 b c d", (4, 6))],
)
def test_cuts_are_between_letters(text: str, places: tuple[int, int] | None) -> None:
    assert cut_places(text) == places
