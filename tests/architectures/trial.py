"""Compares a tiny random model of an architecture with `transformers`: on one rank, two pipeline stages, and two ranks of tensor
parallelism."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.load import make_empty_model
from phalanx_runtime.model.generic.source import check_config
from tests.architectures.tiny import CHANGES, VOCAB_SIZE, save_model
from tests.runtime.model.equal import Equality, Stream, compare
from tests.runtime.model.reference import ranked
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks

Status = Literal["works", "refused", "failed"]
NUM_TOKENS = 12
LENGTHS = (1, 6, 40)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one class."""

    status: Status
    reason: str
    """Why the class, two stages or two ranks of it do not work."""
    stages: Status | None = None
    """Outcome on two pipeline stages, if the class works."""
    ranks: Status | None = None
    """Outcome on two ranks of tensor parallelism, if the class works."""


def try_model(model_type: str) -> Outcome:
    """Compares greedy tokens with `transformers`, with mixed requests and chunks of 7 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(Path(folder), model_type)
        except ImportError as error:
            return Outcome("refused", f"transformers cannot make this model here: {_line(error)}")
        except Exception as error:
            return _judge_by_config(model_type, error)
        status, reason = _try(Path(folder))
        if status != "works":
            return Outcome(status, reason)
        stages, no_stages = _try(Path(folder), stages=2)
        ranks, no_ranks = try_ranks(Path(folder))
        return Outcome(status, "; ".join(dict.fromkeys(filter(None, (no_stages, no_ranks)))), stages, ranks)


def try_ranks(folder: Path) -> tuple[Status, str]:
    """Returns the outcome on two ranks of tensor parallelism, with the reason if it does not work."""
    return _try(folder, ranks=2)


def _judge_by_config(model_type: str, error: Exception) -> Outcome:
    """Checks the default config and an empty model, where no tiny model can be made."""
    try:
        config = transformers.CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {}))
        check_config(config)
        make_empty_model(config, torch.float32, "eager")
    except ModelError as refusal:
        return Outcome("refused", _line(refusal))
    except Exception as failure:
        return Outcome("failed", _line(failure))
    return Outcome("failed", f"no tiny model: {_line(error)}")


def _try(folder: Path, *, stages: int = 1, ranks: int = 1) -> tuple[Status, str]:
    """Returns the outcome on stages of ranks, with the reason if it does not work."""
    try:
        outcome = _compare(folder, stages, ranks)
    except ModelError as error:
        return "refused", _line(error)
    except Exception as error:
        return "failed", _line(error)
    return ("works", "") if outcome.holds else ("failed", f"other tokens than transformers: {outcome}")


def _compare(folder: Path, stages: int, ranks: int) -> Equality:
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS]
    requests = [DriverRequest(prompt) for prompt in prompts]
    build = Build(level="transformers", stages=stages)
    outputs = on_ranks(folder, [stages * ranks], build, lambda runner: Driver(runner).generate(requests, NUM_TOKENS, chunk=7))
    own_class: Any = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = own_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return compare([_chosen(model, *pair) for pair in zip(prompts, outputs, strict=True)], outputs)


@torch.inference_mode()
def _chosen(model: torch.nn.Module, prompt: list[int], output: list[int]) -> Stream:
    """Returns the greedy choices of transformers after each prefix."""
    with ranked(model):
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    return Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist())


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, ModelError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else text[:197] + "..."
