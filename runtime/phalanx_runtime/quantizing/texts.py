"""Token sequences to calibrate on and to measure perplexity with, from a file or written by the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.fitting.fit import TextGenerator, prompts_and_eos
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

PAGE_SIZE = 16
MAX_LENGTH = 512
"""Tokens of a sequence from a file."""
HELD_OUT_EVERY = 4
"""One sequence of each four is held out."""
_BYTES_PER_TOKEN = 16
"""Of the file, at most; the rest is not read."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences of at least two tokens."""

    calibration: Sequence[list[int]]
    held_out: Sequence[list[int]]

    @property
    def num_held_out(self) -> int:
        """Held-out tokens that are predicted: all but the first of each sequence."""
        return sum(len(tokens) - 1 for tokens in self.held_out)


def read_texts(path: Path, folder: Path, num_tokens: int, max_length: int) -> Texts:
    """Returns the first tokens of a UTF-8 file, by the tokenizer of the model in `folder`. Raises ModelError."""
    try:
        with path.open("rb") as file:
            text = file.read(num_tokens * _BYTES_PER_TOKEN).decode(errors="ignore")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = tokenizer.encode("").ids[:1]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens]
    size = min(MAX_LENGTH, max_length) - len(start)
    return _split([start + tokens[first : first + size] for first in range(0, len(tokens), size)], str(path))


def write_texts(model: Decoder, form: LoadOptions, folder: Path, num_tokens: int) -> Iterator[tuple[int, Texts | None]]:
    """Lets the model write texts, as it samples them at temperature 1. Yields the tokens so far, and texts at the end.

    Raises ModelError.
    """
    generator = TextGenerator(model, form, *prompts_and_eos(folder, model.vocab_size, seed=1))
    for _ in generator.steps(1, seed=1, temperature=1.0):
        written = sum(map(len, generator.ended))
        yield written, None
        if written >= num_tokens:
            break
    yield written, _split(generator.ended, "the model's own text")


def _split(sequences: Sequence[list[int]], name: str) -> Texts:
    usable = [tokens for tokens in sequences if len(tokens) > 1]
    held_out = usable[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        expected = f"at least {HELD_OUT_EVERY} texts, one of them to measure perplexity"
        raise ModelError(f"{name}: {len(usable)} texts of up to {MAX_LENGTH} tokens; expected {expected}")
    return Texts([tokens for at, tokens in enumerate(usable) if at % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out)


class SequencePages:
    """KV pages for one sequence at a time."""

    def __init__(self, model: Decoder, form: LoadOptions, sequences: Sequence[list[int]]) -> None:
        pages = -(-max(map(len, sequences)) // PAGE_SIZE)
        self._sequences = sequences
        self._builder = BatchBuilder(CacheShape(PAGE_SIZE, model.kv.kv_heads, 1 << 16), form.dtype, form.device)
        self.caches: list[LayerCache] = make_caches(model.kv, pages, PAGE_SIZE, form.dtype, form.device)

    def batches(self) -> Iterator[StepBatch]:
        """Yields the prefill of each sequence."""
        for tokens in self._sequences:
            plan = StepPlan(
                step=0,
                admitted=[NewRow(0, wire.Sampling(max_tokens=1, seed=0))],
                rows=[0],
                starts=[0],
                counts=[len(tokens)],
                pages=[list(range(-(-len(tokens) // PAGE_SIZE)))],
                tokens=tokens,
                draws=[(0, 0)],
            )
            yield self._builder.build(plan)


def perplexity(model: Decoder, form: LoadOptions, sequences: Sequence[list[int]]) -> float:
    """Returns exp of the mean negative log-likelihood of all tokens but the first of each sequence."""
    pages, loss, count = SequencePages(model, form, sequences), 0.0, 0
    for batch in pages.batches():
        states = model.embed(batch)
        model.run_layers(states, batch, model.layers, pages.caches)
        logits = model.state_logits(states[:-1])[:, : model.vocab_size].float()
        loss += float(torch.nn.functional.cross_entropy(logits, batch.tokens[1:].long(), reduction="sum"))
        count += len(logits)
    return float(torch.tensor(loss / count, dtype=torch.float64).exp())
