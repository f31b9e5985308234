"""Creates folders atomically; checks model folders."""

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

from phalanx_runtime.errors import ModelError

_LOCK_POLL_S = 0.1
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""All weights in one file, or the file of each tensor. With both the former is read, as by `transformers`."""
GGUF_FILE = "weights.gguf"
"""A link to the GGUF file that a folder was made of, in place of safetensors."""
CALIBRATION_SUFFIX = ".kv"
"""Of the files of `calibrate-kv` that are downloaded with a model."""
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def make_once(target: Path, make: Callable[[Path], None], stop: threading.Event) -> Path:
    """Returns `target`; if absent, one process fills `<target>.part` with `make` and renames it, while others wait.

    After a killed process, `make` receives its partial folder and may resume it. Setting `stop` ends the wait. Raises ModelError.
    """
    if target.is_dir():
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(_lock_path(target), "a") as lock:
            _lock(lock, target, stop)
            if not target.is_dir():
                part.mkdir(exist_ok=True)
                make(part)
                part.rename(target)
    except OSError as error:
        raise ModelError(_reason(error, target)) from error
    return target


def remove_lock(target: Path) -> None:
    """Removes the lock that `make_once` leaves. No other process may wait for it: on a shared disk that one would fail."""
    _lock_path(target).unlink(missing_ok=True)


def _lock_path(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


def _lock(lock: IO[str], target: Path, stop: threading.Event) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if stop.wait(_LOCK_POLL_S):
                raise ModelError(f"stopped while another process makes {target}") from None


def _reason(error: OSError, target: Path) -> str:
    if error.errno in _DISK_FULL:
        free_bytes = shutil.disk_usage(target.parent).free
        return f"the disk of {target.parent} is full ({free_bytes / 1e9:.1f} GB free): free some space or use another folder"
    return f"cannot write {target}: {error.strerror or error}"


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def read_json(path: Path) -> dict[str, object]:
    """Returns the JSON object in a file. Raises ModelError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def check_model_folder(folder: Path) -> None:
    """Raises ModelError if configuration, weights or tokenizer are missing."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    names = [path.name for path in folder.iterdir() if path.is_file()]
    missing = missing_texts(names) + _missing_weights(folder)
    if missing:
        raise ModelError(
            f"{folder} is no model folder: it has no {' and no '.join(missing)}{_hint(folder)}{tokenizer_hint(names)}"
        )


def missing_texts(names: Collection[str]) -> list[str]:
    """Returns the files that a model to serve needs besides weights, and lacks."""
    return [name for name in ("config.json", "tokenizer.json") if name not in names]


def tokenizer_hint(names: Collection[str]) -> str:
    """Returns what to do if a model has its tokenizer in other files alone."""
    found = [name for name in names if name in _OTHER_TOKENIZERS or name.endswith(".tiktoken")]
    if "tokenizer.json" in names or not found:
        return ""
    return f"; {found[0]} is not read: add the tokenizer.json that AutoTokenizer of transformers saves"


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files sorted by name: the GGUF file, those of the index, `WHOLE` or all. Raises ModelError."""
    if (folder / GGUF_FILE).is_symlink():
        return [folder / GGUF_FILE]
    files = indexed_files(folder)
    if files is not None:
        return sorted(set(files.values()))
    return [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))


def indexed_files(folder: Path) -> dict[str, Path] | None:
    """Returns the file of each tensor by the index of the weights; none without it, or with `WHOLE` that it does not name.

    Raises ModelError.
    """
    files = read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    return None if files is None or ((folder / WHOLE).is_file() and folder / WHOLE not in files.values()) else files


def read_index(index: Path) -> dict[str, Path]:
    """Returns the file of each tensor. Raises ModelError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: weight_map must be an object")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable() or Path(name).name != name:
            raise ModelError(
                f"{index}: weight_map: tensor {tensor!r:.80} is in {name!r:.80}; expected a file *.safetensors of the folder"
            )
    return {tensor: index.with_name(name) for tensor, name in weight_map.items()}


def _missing_weights(folder: Path) -> list[str]:
    files = weight_files(folder)
    return [path.name for path in files if not path.is_file()] if files else ["*.safetensors"]


def _hint(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"; to serve the GGUF file in it, name the file: {ggufs[0]}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "; pickled weights are not loaded, convert them to safetensors"
    return ""
