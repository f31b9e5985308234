"""One architecture tried: a tiny random model of it through level 0, in one stage and in two, against `transformers` itself."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.load import make_empty
from phalanx_runtime.model.generic.source import check_config
from tests.architectures.tiny import CHANGES, VOCAB_SIZE, save_model
from tests.runtime.model.equal import Equality, Stream, compare
from tests.runtime.ranks import Asked, Build, Driver, on_ranks

Status = Literal["works", "refused", "failed"]
NUM_TOKENS = 12
LENGTHS = (1, 6, 40)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one class, and of two pipeline stages of it where it works. `why`: the reason of what does not work."""

    status: Status
    why: str
    stages: Status | None = None


def try_model(model_type: str) -> Outcome:
    """Whether level 0 gives the greedy tokens of `transformers`, requests mixed and prompts in chunks of 7 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(Path(folder), model_type)
        except ImportError as error:
            return Outcome("refused", f"transformers cannot make this model here: {_line(error)}")
        except Exception as error:
            return _judge_by_config(model_type, error)
        status, why = _try(Path(folder), 1)
        if status != "works":
            return Outcome(status, why)
        stages, why = _try(Path(folder), 2)
        return Outcome(status, why, stages)


def _judge_by_config(model_type: str, error: Exception) -> Outcome:
    """What its default config tells, and the empty model of it, where no tiny model can be made."""
    try:
        config = transformers.CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {}))
        check_config(config)
        make_empty(config, torch.float32, "eager")
    except ModelError as reason:
        return Outcome("refused", _line(reason))
    except Exception as other:
        return Outcome("failed", _line(other))
    return Outcome("failed", f"no tiny model: {_line(error)}")


def _try(folder: Path, stages: int) -> tuple[Status, str]:
    """What becomes of the model in this folder in so many stages, and why it does not work."""
    try:
        outcome = _compare(folder, stages)
    except ModelError as error:
        return "refused", _line(error)
    except Exception as error:
        return "failed", _line(error)
    return ("works", "") if outcome.holds else ("failed", f"other tokens than transformers: {outcome}")


def _compare(folder: Path, stages: int) -> Equality:
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS]
    asked = [Asked(prompt) for prompt in prompts]
    build = Build(level="transformers", stages=stages)
    outputs = on_ranks(folder, [stages], build, lambda runner: Driver(runner).generate(asked, NUM_TOKENS, chunk=7))
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return compare([_chosen(model, *pair) for pair in zip(prompts, outputs, strict=True)], outputs)


@torch.inference_mode()
def _chosen(model: torch.nn.Module, prompt: list[int], output: list[int]) -> Stream:
    """What transformers chooses after each prefix."""
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    return Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist())


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, ModelError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else text[:197] + "..."
