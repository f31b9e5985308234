"""Greedy tokens of `transformers`, and of a group for the same prompts."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from tests.runtime.model.equal import Stream
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE

NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 5, 8, 17, 40)


@cache
def prompts() -> list[list[int]]:
    """Returns random prompts of `PROMPT_LENGTHS`."""
    chance = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist() for size in PROMPT_LENGTHS]


@cache
def transformer(folder: Path, dtype: torch.dtype, attention: str = "eager") -> Any:
    """Returns the model of `transformers`."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    own_code = {"attn_implementation": attention, "experts_implementation": "eager"}  # other implementations lack float64
    return auto.from_pretrained(folder, dtype=dtype, **own_code).eval()


class _Ranked(TorchFunctionMode):
    """Chooses the first of equal keys, whatever their number, as the runtime does; `topk` chooses any."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk or kwargs != {"dim": -1}:
            return func(*args, **(kwargs or {}))
        scores, count = args
        order = scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((order.values[..., :count], order.indices[..., :count]))


def ranked(model: Any) -> AbstractContextManager[Any]:
    """Within it, queries of a model with indexed attention choose the first of equal keys."""
    return _Ranked() if hasattr(model.config, "index_topk") else nullcontext()


@torch.inference_mode()
def reference(
    folder: Path, outputs: list[list[int]], dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> list[Stream]:
    """Returns the greedy choices of transformers after each prefix of `outputs`, with their gaps.

    Up to the first difference, where a comparison ends, this is its own greedy run.
    """
    model = transformer(folder, dtype, attention)
    return [_chosen(model, prompt, output) for prompt, output in zip(prompts(), outputs, strict=True)]


@torch.inference_mode()
def chosen(folder: Path, number: int, output: list[int]) -> Stream:
    """Returns the greedy choices of transformers after prompt `number`, in turn, and each prefix of `output`."""
    return chosen_after(folder, prompts()[number % len(prompts())], output)


@torch.inference_mode()
def chosen_after(folder: Path, prompt: list[int], output: list[int]) -> Stream:
    """Returns the greedy choices of transformers after `prompt` and each prefix of `output`."""
    return _chosen(transformer(folder, torch.float32), prompt, output)


def _chosen(model: Any, prompt: list[int], output: list[int]) -> Stream:
    with ranked(model):
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.std(-1)
    return Stream(logits.argmax(-1).tolist(), gaps.tolist())


def generate(folder: Path, pods: list[int], build: Build, chunk: int = 1 << 20, lag: int = 0) -> list[list[int]]:
    """Returns the greedy tokens of a group after each of `prompts()`."""
    requests = [DriverRequest(prompt) for prompt in prompts()]
    return on_ranks(folder, pods, build, lambda runner: Driver(runner).generate(requests, NUM_TOKENS, chunk, lag))


def as_bf16(folder: Path) -> Path:
    """Rounds the checkpoint's weights to bf16."""
    for path in folder.glob("*.safetensors"):
        save_file({name: weight.bfloat16() for name, weight in load_file(path).items()}, path, {"format": "pt"})
    return folder
