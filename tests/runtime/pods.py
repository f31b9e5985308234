"""Pods of a group in this process, with fake ranks."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.rank_spec import RankSpec
from tests.runtime.tiny import save_tokenizer


def make_model(folder: Path) -> Path:
    """Makes a model folder that passes all checks except those of a real rank."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 200, "vocab_size": 320}
    (folder / "config.json").write_text(json.dumps(config))
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    save_tokenizer(folder)
    return folder


def make_spec(folder: Path, rank: int = 0, world_size: int = 1, incarnation: int = 1) -> RankSpec:
    """Makes a spec with defaults, for one thread."""
    return RankSpec(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        local_rank=rank,
        incarnation=incarnation,
        hosts=["127.0.0.1"] * world_size,
        base_port=0,
        token="00",
        model_dir=str(folder),
        num_threads=1,
    )


def with_settings(spec: RankSpec, **changes: Any) -> RankSpec:
    """Returns the spec with changed fields, of its own or of its `EngineConfig`."""
    engine = {name: changes.pop(name) for name in list(changes) if name in {field.name for field in fields(EngineConfig)}}
    return msgspec.structs.replace(spec, **changes, engine=replace(spec.engine, **engine))


def mark_of(folder: Path, incarnation: int, rank: int) -> dict[str, Any]:
    """Returns the spec and process id that a fake rank recorded at its start."""
    mark: dict[str, Any] = json.loads((folder / "marks" / f"{incarnation}-{rank}.json").read_text())
    return mark


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
