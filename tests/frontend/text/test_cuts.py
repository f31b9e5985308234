"""Words that are tokenized once: the tokens are those of the whole text."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers

from phalanx_api import wire
from phalanx_frontend.openai.question import RequestedModel
from phalanx_frontend.openai.served_model import LONG_TEXT, ServedModel, load_model
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_frontend.text.cuts import LLAMA_3, MAX_NEW, MAX_PART_CHARS, QWEN_2, RecentParts, has_cuts
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


def tokenize(text: str) -> list[int]:
    """Takes a letter for a token."""
    return list(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
async def test_prompt_and_question_have_the_tokens_of_the_whole(kind: str, texts: list[str]) -> None:
    """Of texts with words of one another, and of the texts that ask for their vectors; also of those that are sent again."""
    model, recent = served(kind), RecentEncodings()
    recalling = model.recalling(recent, "", "")
    request = wire.Request(id="a", epoch=0, prompt=[1], delivered=[], sampling=wire.Sampling(max_tokens=1, seed=0))
    for text in [*texts, *texts]:
        assert await recalling.encode(text, True, "prompt") == model.tokenizer.encode(text, True)
        assert await recalling.encode(text, False, "prompt") == model.tokenizer.encode(text, False)
        pooled = await RequestedModel(recalling, request).pooled(text, is_question=True)
        assert pooled.prompt == model.tokenizer.encode(prepare(text), True)
    assert len(recent.parts)


def test_known_words_are_not_tokenized_again() -> None:
    parts, tokenized = RecentParts(), list[str]()

    def counted(text: str) -> list[int]:
        tokenized.append(text)
        return tokenize(text)

    for text in ("what is the sea", "what is the sky", "what is the sea"):
        assert parts.encode((), text, counted) == tokenize(text)
    assert sorted(tokenized) == [" is", " sea", " sky", " the", *["what"] * 3]
    assert parts.encode(("other",), "what is", counted) and tokenized[7:] == [" is", "what"], "words of another tenant"
    parts.clear()
    assert not len(parts) and parts.encode((), "what is", counted) and tokenized[9:] == [" is", "what"]


def test_texts_of_many_new_words_are_tokenized_whole() -> None:
    parts, tokenized = RecentParts(), list[str]()
    text = " ".join(["what", *(f"{chr(97 + number)}word" for number in range(MAX_NEW + 1))])

    def counted(text: str) -> list[int]:
        tokenized.append(text)
        return tokenize(text)

    for num_tokenized, num_kept in ((MAX_NEW + 1, MAX_NEW), (2, MAX_NEW + 1), (1, MAX_NEW + 1)):
        assert parts.encode((), text, counted) == tokenize(text)
        assert (len(tokenized), len(parts)) == (num_tokenized, num_kept)
        tokenized.clear()


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, max_size=20))
def test_kept_words_are_bounded(texts: list[str]) -> None:
    parts = RecentParts(max_bytes=10_000)
    for number, text in enumerate(texts):
        assert parts.encode((f"{number % 3}",), text, tokenize) == tokenize(text)
        assert parts.num_bytes <= 10_000 and bool(parts.num_bytes) >= bool(len(parts))
    before, long = len(parts), "a " + "x" * (MAX_PART_CHARS + 1)
    assert parts.encode(("0",), long, tokenize) == tokenize(long) and len(parts) <= before


def test_owners_count_as_their_words() -> None:
    """A client without a key names its own tenant and salt."""
    parts, num_kept = RecentParts(max_bytes=100_000), 0
    for number in range(1000):
        assert parts.encode((str(number) * 100,), "one two", tokenize)
        num_kept = max(num_kept, len(parts))
    assert parts.num_bytes <= 100_000 and 50 < num_kept < 200


@pytest.mark.parametrize(("length", "is_cut"), [(LONG_TEXT - 1, True), (LONG_TEXT, False)])
async def test_only_texts_of_this_thread_are_cut(length: int, is_cut: bool) -> None:
    model, recent, text = served("GPT-2"), RecentEncodings(), ("one two " * LONG_TEXT)[:length]
    ids = await model.recalling(recent, "", "").encode(text, True, "prompt")
    assert ids == model.tokenizer.encode(text, True) and bool(len(recent.parts)) is is_cut


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
