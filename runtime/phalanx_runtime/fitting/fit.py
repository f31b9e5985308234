"""An exit from a model folder: the model writes, its states are paired, the map is solved, and tried on texts held out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.collective.solo import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.fit_spec import FitSpec
from phalanx_runtime.fitting.ridge import Ridge
from phalanx_runtime.fitting.writing import Step, Writer
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.decoder.exit import Exit, ExitCard, exit_layers
from phalanx_runtime.model.linear.linear import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import Form
from phalanx_runtime.model.source import open_model

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
