"""Fits a self-draft exit by ridge regression between hidden states of text that the model generates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.commands import CalibrationSpec, FitSpec
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, ExitCard, exit_layers
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.sampling.filters import Draw
from phalanx_runtime.rank.sampling.gumbel import sample
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape

PAGE_SIZE = 16
ROWS = 32
"""Texts generated concurrently."""
MAX_TEXT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FitStep:
    """One token of each text."""

    texts: list[int]
    """Text numbers."""
    early: Tensor
    """[texts, hidden]: states after the first layers."""
    late: Tensor
    """[texts, hidden]: states before the final norm."""
    argmax: Tensor
    """[texts]: tokens with the highest logit."""


@dataclass(slots=True)
class _Text:
    number: int
    tokens: list[int]
    num_computed: int = 0


class TextGenerator:
    """Generates texts that start with `prompts` and end at `eos_token_ids`."""

    def __init__(
        self,
        model: Decoder,
        form: LoadOptions,
        prompts: Sequence[list[int]],
        eos_token_ids: frozenset[int],
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> None:
        self.ended: list[list[int]] = []
        """Tokens of each text that has ended."""
        self._model = model
        self._prompts = prompts
        self._eos_token_ids = eos_token_ids
        self._max_tokens = min(max_tokens, model.positions)
        self._pages = -(-self._max_tokens // PAGE_SIZE)
        self._caches = make_caches(model.kv, ROWS * self._pages, PAGE_SIZE, form.dtype, form.device)
        self._builder = BatchBuilder(CacheShape(PAGE_SIZE, model.kv.kv_heads, 1 << 16), form.dtype, form.device)

    @torch.inference_mode()
    def steps(self, num_layers: int, seed: int, temperature: float) -> Iterator[FitStep]:
        """Yields steps endlessly, without first tokens: their states are outliers."""
        numbers = count()
        rows = [self._start_text(next(numbers)) for _ in range(ROWS)]
        for step in count():
            is_sampled = [text.num_computed >= len(text.tokens) - 1 for text in rows]
            batch = self._builder.build(self._plan(step, rows))
            early, late = self._model.states(batch, self._caches, [num_layers, len(self._model.layers)])
            logits = self._model.state_logits(late)
            argmax = logits.argmax(-1)
            later = [row for row, text in enumerate(rows) if text.num_computed > 0]
            if later:
                index = torch.tensor(later, device=late.device)
                yield FitStep([rows[row].number for row in later], early[index], late[index], argmax[index])
            tokens = sample(
                logits,
                [Draw(seed=_text_seed(seed, text.number), index=len(text.tokens), temperature=temperature) for text in rows],
            )
            for row, (text, token) in enumerate(zip(rows, tokens, strict=True)):
                text.num_computed += 1
                if is_sampled[row]:
                    text.tokens.append(token)
                if is_sampled[row] and (token in self._eos_token_ids or len(text.tokens) >= self._max_tokens):
                    self.ended.append(text.tokens)
                    rows[row] = self._start_text(next(numbers))

    def _start_text(self, number: int) -> _Text:
        return _Text(number, self._prompts[number % len(self._prompts)][: self._max_tokens - 1])

    def _plan(self, step: int, rows: list[_Text]) -> StepPlan:
        new_rows = [row for row, text in enumerate(rows) if text.num_computed == 0]
        return StepPlan(
            step=step,
            admitted=[NewRow(row, wire.Sampling(max_tokens=1, seed=0)) for row in new_rows],
            rows=list(range(len(rows))),
            starts=[text.num_computed for text in rows],
            counts=[1] * len(rows),
            pages=[
                list(range(row * self._pages, (row + 1) * self._pages)) if row in new_rows else [] for row in range(len(rows))
            ],
            tokens=[text.tokens[text.num_computed] for text in rows],
            draws=[(row, 0) for row in range(len(rows))],
        )


def _text_seed(seed: int, text: int) -> int:
    return seed * 1_000_003 + text


PENALTY = 1e-4
"""Ridge penalty, relative to the mean diagonal of A."""


class Ridge:
    """One-pass ridge regression: (A + penalty I) [W; b] = B with A = sum [x 1]^T [x 1], B = sum [x 1]^T y. b has no penalty."""

    def __init__(self, width_in: int, width_out: int, device: torch.device) -> None:
        self.num_pairs = 0
        self._squares = torch.zeros((width_in + 1, width_in + 1), dtype=torch.float64, device=device)
        self._products = torch.zeros((width_in + 1, width_out), dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """x: [n, in], y: [n, out]."""
        inputs = torch.cat((x.double(), torch.ones((len(x), 1), dtype=torch.float64, device=x.device)), 1)
        self._squares.addmm_(inputs.t(), inputs)
        self._products.addmm_(inputs.t(), y.double())
        self.num_pairs += len(x)

    def solve(self, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
        """Returns weight [out, in] and bias [out]. Raises torch.linalg.LinAlgError without pairs."""
        diagonal = self._squares.diagonal()
        penalties = torch.full_like(diagonal, penalty * float(diagonal[:-1].mean()))
        penalties[-1] = 0.0
        solution: Tensor = torch.linalg.solve(self._squares + torch.diag(penalties), self._products)
        return solution[:-1].t().contiguous(), solution[-1].contiguous()


HELD_OUT_EVERY = 8
MAX_HELD_OUT_TOKENS = 8192
_BATCH = 256
_NUM_PROMPTS = 1024


@dataclass(slots=True)
class _Pairs:
    ridge: Ridge
    early: list[Tensor] = field(default_factory=list)
    argmax: list[Tensor] = field(default_factory=list)
    num_held_out: int = 0

    def add(self, step: FitStep) -> None:
        held_out = torch.tensor([number % HELD_OUT_EVERY == 0 for number in step.texts], device=step.early.device)
        self.ridge.add(step.early[~held_out], step.late[~held_out])
        if self.num_held_out < MAX_HELD_OUT_TOKENS:
            self.early.append(step.early[held_out])
            self.argmax.append(step.argmax[held_out])
            self.num_held_out += int(held_out.sum())


@torch.inference_mode()
def fit(spec: FitSpec, device: torch.device, now: Callable[[], float]) -> Exit:
    """Fits the exit of a fused decoder. `now`: clock in seconds. Raises ModelError."""
    folder = Path(spec.model_dir)
    source = open_model(folder, "fused")
    processor = read_processor()
    dtype = choose_dtype(spec.dtype, source.dtype, device, processor)
    form = LoadOptions(
        dtype=dtype, device=device, kernels=choose_kernels(dtype, device, processor, 0, 1), positions=source.max_position
    )
    model = source.load(SoloCollective(), form)
    if not isinstance(model, Decoder) or len(model.layers) < 2:
        raise ModelError(f"{folder}: a draft by the first layers needs a model of at least two")
    num_layers = exit_layers(spec.ratio, len(model.layers))
    generator = TextGenerator(model, form, *prompts_and_eos(folder, model.vocab_size, spec.seed))
    pairs = _Pairs(Ridge(model.width, model.width, device))
    for step in within(generator.steps(num_layers, spec.seed, spec.temperature), spec, now):
        pairs.add(step)
    if not pairs.ridge.num_pairs or not pairs.num_held_out:
        raise ModelError(f"{folder}: the model generated no text in {spec.seconds:g} s: raise --seconds")
    weight, bias = (part.to(dtype) for part in pairs.ridge.solve())
    card = ExitCard(
        model_hash=weights_hash(folder),
        num_layers=num_layers,
        ratio=spec.ratio,
        num_tokens=pairs.ridge.num_pairs,
        agreement_raw=0.0,
        agreement_fitted=0.0,
    )
    fitted = Exit(card, weight, bias)
    agreement_raw, agreement_fitted = (_agreement(model, pairs, transform) for transform in (_identity, fitted))
    return Exit(replace(card, agreement_raw=agreement_raw, agreement_fitted=agreement_fitted), weight, bias)


def within(steps: Iterator[FitStep], spec: FitSpec | CalibrationSpec, now: Callable[[], float]) -> Iterator[FitStep]:
    """Yields steps up to the tokens and the time of the spec. `now`: clock in seconds."""
    end, num_tokens = now() + spec.seconds, 0
    for step in steps:
        yield step
        num_tokens += len(step.texts)
        if num_tokens >= spec.tokens or now() >= end:
            return


def _identity(states: Tensor) -> Tensor:
    return states


def _agreement(model: Decoder, pairs: _Pairs, transform: Callable[[Tensor], Tensor]) -> float:
    """Returns the fraction of held-out tokens with equal argmax."""
    early, argmax = torch.cat(pairs.early), torch.cat(pairs.argmax)
    num_equal = 0
    for start in range(0, len(argmax), _BATCH):
        part = slice(start, start + _BATCH)
        num_equal += int((model.state_logits(transform(early[part])).argmax(-1) == argmax[part]).sum())
    return num_equal / len(argmax)


def prompts_and_eos(folder: Path, vocab_size: int, seed: int) -> tuple[list[list[int]], frozenset[int]]:
    """Returns one-token prompts (BOS, else random) and end tokens."""
    config = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        config |= {name: value for name, value in read_json(folder / "generation_config.json").items() if value is not None}
    first_tokens, eos_token_ids = _ids(config.get("bos_token_id")), frozenset(_ids(config.get("eos_token_id")))
    if not first_tokens:
        generator = torch.Generator().manual_seed(seed)
        first_tokens = torch.randint(0, vocab_size, (_NUM_PROMPTS,), generator=generator).tolist()
    return [[token] for token in first_tokens], eos_token_ids


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]
