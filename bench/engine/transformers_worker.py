"""Runs transformers: reads one JSON command per line from stdin, writes one JSON answer per line to stdout.

It blocks on stdin between commands, so it uses no CPU while another engine is measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TextIO

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Clock:
    """A streamer that records the time of each step's token. The first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


class Engine:
    """A causal language model of transformers, set to greedy decoding past the end of sequence."""

    def __init__(self, folder: str, dtype: str) -> None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
        model.train(False)
        self._model = model
        self._generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
        config = self._model.generation_config
        assert config is not None
        config.eos_token_id = None
        config.pad_token_id = 0
        config.do_sample = False
        config.temperature = config.top_p = config.top_k = None

    def generate(self, prompts: list[list[int]], max_tokens: int, clock: _Clock | None = None) -> list[list[int]]:
        """Returns greedy continuations of one left-padded batch."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, streamer=clock)
        return [row[longest:].tolist() for row in output]

    def one_by_one(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        started = time.perf_counter()
        tokens = [self.generate([prompt], max_tokens)[0] for prompt in prompts]
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        started = time.perf_counter()
        tokens = self.generate(prompts, max_tokens)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    def decode(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Decodes one stream; returns seconds per token after the first."""
        clock = _Clock()
        tokens = self.generate(prompts[:1], max_tokens, clock)
        first, last = clock.times[1], clock.times[-1]
        return {"seconds_per_token": (last - first) / (max_tokens - 1), "tokens": tokens}

    def gaps(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Returns the gap of the two best logits, in standard deviations, before each of the last `max_tokens` tokens."""
        ids = torch.tensor(prompts[:1])
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, -max_tokens - 1 : -1].double()
        best = logits.topk(2).values
        return {"gaps": ((best[:, 0] - best[:, 1]) / logits.std(dim=-1)).tolist()}


def serve(engine: Engine, commands: TextIO, answers: TextIO) -> None:
    operations = {"one_by_one": engine.one_by_one, "batch": engine.batch, "decode": engine.decode, "gaps": engine.gaps}
    for line in commands:
        command = json.loads(line)
        answer = operations[command["op"]](command["prompts"], command["max_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine(args.model, args.dtype)
    print(json.dumps({"ready": True}), flush=True)
    serve(engine, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
