"""Where the tests run: at full size on a GPU, or the same code with tiny sizes on a CPU, in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.rank.device.device_step import DeviceStep
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.requests import FIELDS, requests
from tests.runtime.ranks import Build
from tests.runtime.tiny import Family, save_tiny

LAYERED: tuple[Family, ...] = ("gemma3_text", "smollm3")
"""Families with a config of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A device and the sizes of its tests."""

    device: str
    num_tokens: int
    """Output tokens of a request."""
    rows: int
    """Of the device path."""
    modes: Sequence[str]
    """Sampling modes of `FIELDS`."""
    heads: tuple[int, int, int]
    """KV heads, query heads of each, and dimension of the kernels' tests."""
    contexts: Sequence[int]
    chunk: int
    """Tokens of a prompt."""
    hidden: int
    vocab_size: int
    dtype: torch.dtype
    num_layers: int
    """Of the tiny models, but of those whose layers differ."""

    def host(self, num_pages: int = 200, dtype: torch.dtype = torch.float32) -> Build:
        """Builds a rank whose host launches and samples each step."""
        return Build(dtype, num_pages=num_pages, device=self.device)

    def device_path(self, num_pages: int = 200, **changes: Any) -> Build:
        """Builds a rank with the device path."""
        return Build(torch.float32, num_pages=num_pages, device=self.device, device_rows=self.rows, **changes)

    def save_model(self, folder: Path, family: Family = "llama") -> Path:
        """Writes a tiny model of this family and returns its folder."""
        changes = {} if family in LAYERED else {"num_hidden_layers": self.num_layers}
        return save_tiny(folder, family, **changes)

    @property
    def limits(self) -> Limits:
        """Limits under which prompts are split into chunks."""
        return Limits(max_model_len=120, max_num_seqs=self.rows, max_num_batched_tokens=24)

    def requests(self, modes: Sequence[str] = ()) -> list[wire.Request]:
        """Returns a request of each sampling mode, without logprobs."""
        by_name = dict(zip(FIELDS, requests(logprobs=None), strict=True))
        return [limited(by_name[name], self.num_tokens) for name in modes or self.modes]


GPU = Place(
    device="cuda",
    num_tokens=24,
    rows=8,
    modes=[name for name in FIELDS if name not in ("grammar", "bias and words")],
    heads=(8, 4, 128),
    contexts=(1, 15, 16, 500, 4000, 9000),
    chunk=700,
    hidden=4096,
    vocab_size=128256,
    dtype=torch.bfloat16,
    num_layers=3,
)
CPU = Place(
    device="cpu",
    num_tokens=3,
    rows=2,
    modes=["filters", "penalties"],
    heads=(2, 2, 32),
    contexts=(1, 20, 50),
    chunk=9,
    hidden=96,
    vocab_size=1000,
    dtype=torch.float32,
    num_layers=1,
)


def limited(request: wire.Request, max_tokens: int) -> wire.Request:
    """Returns the request with another length."""
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def device_step(runner: ModelRunner) -> DeviceStep:
    """Returns the device path of a runner that has one."""
    step = runner.device_step
    assert isinstance(step, DeviceStep)
    return step
