"""An exit from a model folder: the model writes, its states are paired, the map is solved, and tried on texts held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.commands import FitSpec
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, ExitCard, exit_layers
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import Form
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.sampling.draw import Draw, draw
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape

# Text that a model writes itself, and its hidden states on the way.
# Rows write side by side, one token a step, each from a beginning to an end token or to the longest length; then the row
# begins another text. Tokens are drawn as everywhere, with noise that is keyed by seed and index: the same seed gives the
# same texts.

PAGE_SIZE = 16
ROWS = 32
"""Texts written at once. More read the weights less often, and need more memory for keys and values."""
LONGEST = 256
"""Tokens of a text."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of each of some texts.

    texts: the number of each text. early, late: [texts, hidden], states after the first layers and before the final norm.
    best: [texts], the token that the model finds most probable next.
    """

    texts: list[int]
    early: Tensor
    late: Tensor
    best: Tensor


@dataclass(slots=True)
class _Text:
    number: int
    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Writer:
    """Writes texts with a whole model on one rank. `beginnings` are taken in turn; `ends` are the tokens that end a text."""

    def __init__(
        self, model: Decoder, form_of: tuple[torch.dtype, torch.device], beginnings: Sequence[list[int]], ends: frozenset[int]
    ) -> None:
        dtype, device = form_of
        self._model = model
        self._beginnings = beginnings
        self._ends = ends
        self._longest = min(LONGEST, model.positions)
        self._pages = -(-self._longest // PAGE_SIZE)
        self._caches = make_caches(model.kv, ROWS * self._pages, PAGE_SIZE, dtype, device)
        self._builder = BatchBuilder(CacheShape(PAGE_SIZE, model.kv.kv_heads, 1 << 16), dtype, device)

    @torch.inference_mode()
    def steps(self, num_layers: int, seed: int, temperature: float) -> Iterator[Step]:
        """Step after step, for ever. `num_layers` says after which layer the early states are taken.

        The first token of a text is told in no step: its state is like no other's, and no draft begins there.
        """
        numbers = count()
        rows = [self._begin(next(numbers)) for _ in range(ROWS)]
        for step in count():
            drawn = [text.computed >= len(text.tokens) - 1 for text in rows]
            batch = self._builder.build(self._plan(step, rows))
            early, late = self._model.states(batch, self._caches, [num_layers, len(self._model.layers)])
            scores = self._model.state_scores(late)
            best = scores.argmax(-1)
            told = [at for at, text in enumerate(rows) if text.computed > 0]
            if told:
                at = torch.tensor(told, device=late.device)
                yield Step([rows[i].number for i in told], early[at], late[at], best[at])
            tokens = draw(scores, [Draw(_mixed(seed, text.number), len(text.tokens), temperature) for text in rows])
            for place, (text, token) in enumerate(zip(rows, tokens, strict=True)):
                text.computed += 1
                if drawn[place]:
                    text.tokens.append(token)
                if drawn[place] and (token in self._ends or len(text.tokens) >= self._longest):
                    rows[place] = self._begin(next(numbers))

    def _begin(self, number: int) -> _Text:
        return _Text(number, self._beginnings[number % len(self._beginnings)][: self._longest - 1])

    def _plan(self, step: int, rows: list[_Text]) -> StepPlan:
        """The next token of each text: drawn ones, or the next of its beginning."""
        fresh = [row for row, text in enumerate(rows) if text.computed == 0]
        return StepPlan(
            step,
            [NewRow(row, wire.Sampling(1, 0)) for row in fresh],
            list(range(len(rows))),
            [text.computed for text in rows],
            [1] * len(rows),
            [list(range(row * self._pages, (row + 1) * self._pages)) if row in fresh else [] for row in range(len(rows))],
            [text.tokens[text.computed] for text in rows],
            [(row, 0) for row in range(len(rows))],
        )


def _mixed(seed: int, text: int) -> int:
    return seed * 1_000_003 + text


# Ridge regression in one pass: the affine map from x to y with the least squared error, from sums that are kept in float64.
#     A = sum [x 1]^T [x 1]    B = sum [x 1]^T y    (A + penalty I) [W; b] = B
# The penalty is a share of the mean diagonal of A, and the bias has none.

PENALTY = 1e-4
"""Share of the mean square of a component of x. It only matters where there are few tokens for each component."""


class Ridge:
    """The sums over all pairs so far."""

    def __init__(self, width_in: int, width_out: int, device: torch.device) -> None:
        self.num_pairs = 0
        self._squares = torch.zeros((width_in + 1, width_in + 1), dtype=torch.float64, device=device)
        self._products = torch.zeros((width_in + 1, width_out), dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Takes in pairs: [n, in] and [n, out]."""
        wide = torch.cat((x.double(), torch.ones((len(x), 1), dtype=torch.float64, device=x.device)), 1)
        self._squares.addmm_(wide.t(), wide)
        self._products.addmm_(wide.t(), y.double())
        self.num_pairs += len(x)

    def solve(self, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
        """Weight [out, in] and bias [out], in float64. Raises torch.linalg.LinAlgError when there are no pairs."""
        diagonal = self._squares.diagonal()
        added = torch.full_like(diagonal, penalty * float(diagonal[:-1].mean()))
        added[-1] = 0.0
        solved: Tensor = torch.linalg.solve(self._squares + torch.diag(added), self._products)
        return solved[:-1].t().contiguous(), solved[-1].contiguous()


HELD_OUT = 8
"""Every so-manieth text is held out."""
MOST_HELD = 8192
"""Tokens of held-out texts that are kept to be tried; further ones are not looked at."""
_AT_ONCE = 256
_BEGINNINGS = 1024


@dataclass(slots=True)
class _Pairs:
    """What was written so far."""

    ridge: Ridge
    early: list[Tensor] = field(default_factory=list)
    best: list[Tensor] = field(default_factory=list)
    num_held: int = 0

    def add(self, step: Step) -> None:
        """Takes in one step; texts that are held out beside the others."""
        held = torch.tensor([number % HELD_OUT == 0 for number in step.texts], device=step.early.device)
        self.ridge.add(step.early[~held], step.late[~held])
        if self.num_held < MOST_HELD:
            self.early.append(step.early[held])
            self.best.append(step.best[held])
            self.num_held += int(held.sum())


@torch.inference_mode()
def fit(spec: FitSpec, device: torch.device, now: Callable[[], float]) -> Exit:
    """The exit. `now` gives seconds. Raises ModelError for a model that the fused decoder does not compute."""
    folder = Path(spec.model_dir)
    source = open_model(folder, "fused")
    processor = read_processor()
    dtype = choose_dtype(spec.dtype, source.dtype, device, processor)
    form = Form(dtype, device, choose_kernels(dtype, device, processor, 0, 1), source.max_position)
    model = source.load(SoloCollective(), form)
    if not isinstance(model, Decoder) or len(model.layers) < 2:
        raise ModelError(f"{folder}: a draft by the first layers needs a model of at least two")
    num_layers = exit_layers(spec.ratio, len(model.layers))
    writer = Writer(model, (dtype, device), *_edges(folder, model.vocab_size, spec.seed))
    pairs = _Pairs(Ridge(model.width, model.width, device))
    for step in _within(writer.steps(num_layers, spec.seed, spec.temperature), spec, now):
        pairs.add(step)
    if not pairs.ridge.num_pairs or not pairs.num_held:
        raise ModelError(f"{folder}: the model wrote nothing in {spec.seconds:g} s: raise --seconds")
    weight, bias = (part.to(dtype) for part in pairs.ridge.solve())
    blank = ExitCard(weights_hash(folder), num_layers, spec.ratio, pairs.ridge.num_pairs, 0.0, 0.0)
    made = Exit(blank, weight, bias)
    raw, fitted = (_agreement(model, pairs, through) for through in (None, made))
    card = ExitCard(blank.model_hash, num_layers, spec.ratio, blank.num_tokens, raw, fitted)
    return Exit(card, weight, bias)


def _within(steps: Iterator[Step], spec: FitSpec, now: Callable[[], float]) -> Iterator[Step]:
    """The steps until there are enough tokens, or the time is over."""
    end, told = now() + spec.seconds, 0
    for step in steps:
        yield step
        told += len(step.texts)
        if told >= spec.tokens or now() >= end:
            return


def _agreement(model: Decoder, pairs: _Pairs, through: Exit | None) -> float:
    """Share of held-out tokens for which the first layers' best token is the model's."""
    early, best = torch.cat(pairs.early), torch.cat(pairs.best)
    equal = 0
    for first in range(0, len(best), _AT_ONCE):
        some = early[first : first + _AT_ONCE]
        states = some if through is None else through(some)
        equal += int((model.state_scores(states).argmax(-1) == best[first : first + _AT_ONCE]).sum())
    return equal / len(best)


def _edges(folder: Path, vocab_size: int, seed: int) -> tuple[list[list[int]], frozenset[int]]:
    """With what texts begin, and the tokens that end them. A model without a token of beginning begins with any."""
    named = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        named |= {name: value for name, value in read_json(folder / "generation_config.json").items() if value is not None}
    begins, ends = _ids(named.get("bos_token_id")), frozenset(_ids(named.get("eos_token_id")))
    if not begins:
        chance = torch.Generator().manual_seed(seed)
        begins = torch.randint(0, vocab_size, (_BEGINNINGS,), generator=chance).tolist()
    return [[token] for token in begins], ends


def _ids(value: object) -> list[int]:
    """A token, several, or none."""
    found = value if isinstance(value, list) else [value]
    return [token for token in found if isinstance(token, int) and not isinstance(token, bool)]
