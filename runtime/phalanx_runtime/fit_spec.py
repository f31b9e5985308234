"""What the program that fits an exit is told, on stdin, and the flags of `phalanx-runtime fit-exit`. No torch here."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

RATIO = 0.4
"""Share of the layers that draft, where nothing else is said."""
TOKENS = 50_000
SECONDS = 300.0


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how: after which share of its layers, on how many tokens of its own, for at most how long."""

    model_dir: str
    out: str
    ratio: float = RATIO
    tokens: int = TOKENS
    seconds: float = SECONDS
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class FitSettings:
    """The flags: a model as `serve` takes it, the file to be written, and how to fit."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    out: Path
    ratio: float
    tokens: int
    seconds: float
    temperature: float
    seed: int
    dtype: str


def add_flags(
    add: Callable[..., object], share: Callable[[str], float], positive: Callable[[str], int], seconds: Callable[[str], float]
) -> None:
    """Adds the flags to the subcommand's parser; the others check numbers."""
    add("model", metavar="MODEL", help="as for serve: folder, .gguf file, org/name, or a URI")
    add("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write, for --speculative-exit")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--ratio", type=share, default=RATIO, metavar="SHARE", help="of the layers, which are to draft")
    add("--tokens", type=positive, default=TOKENS, metavar="N", help="that the model writes to be fitted on")
    add("--seconds", type=seconds, default=SECONDS, metavar="S", help="of writing at most")
    add("--temperature", type=seconds, default=1.0, metavar="T", help="at which it writes")
    add("--seed", type=positive, default=1, metavar="N", help="of what it writes: equal seeds give equal files")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default="auto", help="of weights while it writes")
    add("--download-dir", type=Path, metavar="DIR", help="where models are downloaded and converted to")


def fit_settings(flags: argparse.Namespace, download_dir: Path, hf_token: str | None) -> FitSettings:
    """What the flags say."""
    return FitSettings(
        model=flags.model,
        revision=flags.revision,
        download_dir=flags.download_dir or download_dir,
        hf_token=hf_token,
        out=flags.out,
        ratio=flags.ratio,
        tokens=flags.tokens,
        seconds=flags.seconds,
        temperature=flags.temperature,
        seed=flags.seed,
        dtype=flags.dtype,
    )
