"""Greedy fp32 output of `transformers`, with the margin of each choice."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "To make a good cup of coffee, you first",
    "The three primary colors are",
    "Water boils at a temperature of",
    "In 1969, the first humans",
    "The quick brown fox",
    "A list of healthy breakfast foods: 1.",
    "def fibonacci(n):\n    ",
    "The difference between weather and climate is",
    "My favourite book is about a dragon who",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\nI am writing to",
    "The largest planet in the solar system is",
    "If you want to learn a new language, you should",
    "Gravity is a force that",
]


@dataclass(frozen=True, slots=True)
class Reference:
    """A greedy run."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    """Difference of the two largest logits before each token, in standard deviations."""


def greedy(model_dir: Path, prompts: list[str], max_tokens: int) -> list[Reference]:
    """Returns a greedy run of each prompt, which ignores end-of-sequence tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return [_run(model, prompt, max_tokens) for prompt in ids]


@torch.inference_mode()
def _run(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> Reference:
    tokens: list[int] = []
    gaps: list[float] = []
    step = model(torch.tensor([prompt]), use_cache=True)
    for _ in range(max_tokens):
        logits = step.logits[0, -1].double()
        best = logits.topk(2).values
        tokens.append(int(logits.argmax()))
        gaps.append(float((best[0] - best[1]) / logits.std()))
        step = model(torch.tensor([[tokens[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    return Reference(prompt, tokens, gaps)
