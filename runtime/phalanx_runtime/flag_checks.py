"""Flags that contradict one another, or files of this machine: each check calls the parser's `error`."""

import argparse
from pathlib import Path
from urllib.parse import unquote, urlsplit


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Checks the flags of `serve` together, and that a local model exists."""
    stages = flags.pipeline_parallel_size
    if flags.tensor_parallel_size * stages % flags.nnodes:
        times = f" times --pipeline-parallel-size {stages}" if stages > 1 else ""
        size = f"--tensor-parallel-size {flags.tensor_parallel_size}{times}"
        parser.error(f"{size} cannot be split evenly over --nnodes {flags.nnodes}")
    if flags.node_rank >= flags.nnodes:
        parser.error(f"--node-rank {flags.node_rank} must be below --nnodes {flags.nnodes}")
    if flags.nnodes > 1 and flags.token_file is None:
        parser.error(f"--nnodes {flags.nnodes} needs --token-file: pods authenticate one another by the token")
    if flags.max_num_batched_tokens < flags.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens {flags.max_num_batched_tokens} must be at least --max-num-seqs {flags.max_num_seqs}: "
            "a step holds one token of each request"
        )
    _check_speculation(parser, flags)
    _check_loras(parser, flags)
    if (path := _local_path(flags.model)) is not None and not path.exists():
        parser.error(f"MODEL {flags.model}: no such file or folder")


def served_names(flags: argparse.Namespace) -> list[str]:
    """Returns the names of the model in requests: `--served-model-name`, else the last path element of the model."""
    return flags.served_model_name or [_last_element(flags.model)]


def _check_speculation(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    method = flags.speculative_method
    if method == "draft" and flags.speculative_draft_model is None:
        parser.error("--speculative-method draft needs --speculative-draft-model")
    methods = {
        "--speculative-draft-model": (flags.speculative_draft_model, "draft"),
        "--speculative-exit": (flags.speculative_exit, "self_draft"),
        "--speculative-ratio": (flags.speculative_ratio, "self_draft"),
    }
    for flag, (value, required) in methods.items():
        if value is not None and method != required:
            parser.error(f"{flag} {value} needs --speculative-method {required}, not {method}")


def _local_path(model: str) -> Path | None:
    """Returns the path of `model`, unless it may be a hub repository."""
    if model.startswith("file://"):
        return Path(unquote(urlsplit(model).path))
    if model.startswith(("/", ".", "~")) or (model.endswith(".gguf") and "://" not in model):
        return Path(model).expanduser()
    return None


def _last_element(model: str) -> str:
    path = _local_path(model)
    name = model if path is None else str(path.resolve())
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _check_loras(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    names = [name for name, _ in flags.lora_modules]
    if names and not flags.enable_lora:
        parser.error(f"--lora-modules {names[0]} needs --enable-lora")
    if flags.allow_runtime_lora_updating and not flags.enable_lora:
        parser.error("--allow-runtime-lora-updating needs --enable-lora")
    if flags.allow_runtime_lora_updating and not (flags.lora_dir and flags.lora_dir.is_dir()):
        parser.error("--allow-runtime-lora-updating needs --lora-dir: an existing folder that has all adapters to load")
    if flags.lora_dir and not flags.allow_runtime_lora_updating:
        parser.error("--lora-dir needs --allow-runtime-lora-updating")
    if len(names) > flags.max_loras:
        parser.error(f"--lora-modules names {len(names)} adapters, more than --max-loras {flags.max_loras}")
    for name in names:
        if names.count(name) > 1 or name in served_names(flags):
            parser.error(f"--lora-modules {name}: another model or adapter has this name")
