"""Engines that `versus_transformers` compares: ours over HTTP and transformers in its own process."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.engine.serve import Load, run_load
from bench.frame.programs import Program, cpu_s, end

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one engine for a set of prompts. A server returns texts, transformers returns tokens."""

    speed: float  # tokens/s
    texts: list[str] | None = None
    tokens: list[list[int]] | None = None


class Engine(Protocol):
    """Generates greedily, past the end of sequence."""

    @property
    def name(self) -> str:
        """Program, optionally with a dash and the measured part."""
        ...

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        """Runs one turn. Raises RuntimeError if an answer is missing or short."""
        ...

    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Served:
    """A server over HTTP; it gets all prompts at once."""

    name: str
    program: Program
    model: str
    decode_only: bool = False  # measure one stream after its first token

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        bodies = [self._body(prompt, max_tokens) for prompt in prompts]
        answers, seconds = asyncio.run(run_load(Load(f"{self.program.base_url}/v1/completions", bodies, len(bodies))))
        for answer in answers:
            if answer.error is not None or answer.completion_tokens != max_tokens:
                raise RuntimeError(f"{self.name}: {answer.error or f'{answer.completion_tokens} tokens of {max_tokens}'}")
        tpot_s = answers[0].tpot_s
        if not self.decode_only or tpot_s is None:
            return Turn(len(prompts) * max_tokens / seconds, texts=[answer.text for answer in answers])
        return Turn(1 / tpot_s, texts=[answer.text for answer in answers])

    def cpu_s(self) -> float:
        return self.program.cpu_s()

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Worker:
    process: subprocess.Popen[str]

    def call(self, op: str, prompts: Prompts, max_tokens: int) -> dict[str, object]:
        """Executes one command. Raises RuntimeError if the process has exited."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, "prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers worker exited with {self.process.wait()} during {op}")
        answer: dict[str, object] = json.loads(line)
        return answer

    def gaps(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Returns for each token the gap of the two best logits before it, in standard deviations."""
        gaps = self.call("gaps", [prompt + tokens], len(tokens))["gaps"]
        assert isinstance(gaps, list)
        return gaps


@dataclass(frozen=True, slots=True)
class Generate:
    name: str
    worker: Worker
    op: str  # one_by_one, batch, or decode (one stream after its first token)

    def run(self, prompts: Prompts, max_tokens: int) -> Turn:
        answer = self.worker.call(self.op, prompts, max_tokens)
        tokens = answer["tokens"]
        assert isinstance(tokens, list)
        if self.op == "decode":
            return Turn(1 / float(str(answer["seconds_per_token"])), tokens=tokens)
        return Turn(len(prompts) * max_tokens / float(str(answer["seconds"])), tokens=tokens)

    def cpu_s(self) -> float:
        return cpu_s(self.worker.process.pid)


@contextmanager
def running_worker(folder: Path, dtype: str, threads: int, log: Path) -> Iterator[Worker]:
    """Runs the worker until the block ends; yields once its model is loaded. Raises RuntimeError if it exits first."""
    command = [sys.executable, "-m", "bench.engine.transformers_worker", str(folder), "--dtype", dtype, "--threads", str(threads)]
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the transformers worker exited with {process.wait()}:\n{log.read_text()[-3000:]}")
        yield Worker(process)
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
