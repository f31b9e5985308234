"""Files of a model folder: GGUF, safetensors with their index, config.json, and archives of an OCI image."""

import io
import json
import math
import shutil
import struct
import tarfile
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from bench.fuzz.mutations import INTEGERS, TEXTS, encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.folder import weight_files
from phalanx_runtime.checkpoint.gguf.convert import convert, link_once
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.checkpoint.pooling import read_embedding
from phalanx_runtime.checkpoint.sources.remote import select_files, unpack
from phalanx_runtime.checkpoint.sources.remote_file import DownloadControl, RemoteFile
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import parse_config, read_json
from phalanx_runtime.model.families import FAMILIES
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.rope import rope_frequencies
from phalanx_runtime.model.weights import Checkpoint
from tests.frontend.fakes import tiny_tokenizer_json
from tests.runtime.checkpoint.gguf_files import Kind, TinyGguf
from tests.runtime.model.integer_checkpoints import KINDS

MAX_INDEX = 2**31


class Ggufs(Target):
    """Mutated GGUF files: every count, length, type, shape and offset of the header may change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        kinds = (TinyGguf(), TinyGguf("qwen2", "qwen2", tied=False), TinyGguf("qwen3", "qwen2", Kind.Q8_0, add_bos=True))
        contents = [kind.write(folder / f"{number}.gguf").read_bytes() for number, kind in enumerate(kinds)]
        self._files = [(content, header_fields(content)) for content in contents]

    def run(self, draw: Random) -> Outcome:
        """Converts one file, opens the model that results, and reads the file as it is."""
        content, fields = draw.choice(self._files)
        path, out, linked = self._folder / "case.gguf", self._folder / "out", self._folder / "linked"
        path.write_bytes(_mutate_gguf(draw, content, fields))
        for folder in (out, linked):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            convert(path, out)
        except ModelError as error:
            if str(path) not in str(error):
                raise Defect(f"an error without the file: {error}") from error
            return "refused"
        json.loads((out / "config.json").read_text(), parse_constant=_refuse_constant)
        try:
            parse_config(read_json(out))
            read_assets(out, ["tiny"], None)
        except ModelError:
            return "refused"
        cpu = torch.device("cpu")
        with Checkpoint(out, torch.float32, cpu) as whole, Checkpoint(link_once(path, linked), torch.float32, cpu) as packed:
            for name in whole.names():
                if not torch.equal(whole.part(name, None).view(torch.int32), packed.part(name, None).view(torch.int32)):
                    raise Defect(f"{name} has other numbers in the file than converted")
        return "accepted"


def _refuse_constant(name: str) -> None:
    raise Defect(f"config.json has {name}, which is not JSON")


def _mutate_gguf(draw: Random, content: bytes, fields: list[tuple[int, int, str]]) -> bytes:
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at, size, kind = draw.choice(fields)
        if kind == "text":
            text = draw.choice(TEXTS).encode(errors="surrogatepass")
            data[at : at + size] = (text * size)[:size] if text and draw.random() < 0.7 else draw.randbytes(size)
        elif draw.random() < 0.6:
            data[at : at + size] = (draw.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, "little")
        else:
            old = int.from_bytes(data[at : at + size], "little")
            data[at : at + size] = ((old + draw.choice((-1, 1, 2, 32, -old))) % (1 << 8 * size)).to_bytes(size, "little")
    return mutate_bytes(draw, bytes(data)) if draw.random() < 0.15 else bytes(data)


def header_fields(content: bytes) -> list[tuple[int, int, str]]:
    """Returns offset, size and kind (text or number) of each field of a GGUF header; of long arrays the first items."""
    fields: list[tuple[int, int, str]] = []
    at = 0

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size, "number"))
        at += size
        return int.from_bytes(content[at - size : at], "little")

    def text() -> None:
        nonlocal at
        size = number(8)
        if size:
            fields.append((at, size, "text"))
        at += size

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            item, count = number(4), number(8)
            for position in range(count):
                known = len(fields)
                value(item)
                if position > 4:
                    del fields[known:]
        else:
            number(
                struct.calcsize({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])
            )

    number(4), number(4)
    num_tensors, num_keys = number(8), number(8)
    for _ in range(num_keys):
        text()
        value(number(4))
    for _ in range(num_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4), number(8)
    return fields


class Safetensors(Target):
    """Mutated safetensors files and indexes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "model"
        tensors = {"model.embed_tokens.weight": torch.zeros(8, 4), "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16)}
        content = save({**tensors, "x": torch.zeros(2, 2, 2, dtype=torch.float64)})
        size = int.from_bytes(content[:8], "little")
        self._header, self._data = json.loads(content[8 : 8 + size]), content[8 + size :]
        self._index = {"metadata": {"total_size": 200}, "weight_map": dict.fromkeys([*tensors, "x"], "model-1.safetensors")}

    def run(self, draw: Random) -> Outcome:
        """Reads every tensor of one folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / "config.json").write_text("{}")
        (self._folder / "tokenizer.json").write_text("{}")
        (self._folder / "model-1.safetensors").write_bytes(self._draw_file(draw))
        if draw.random() < 0.4:
            index = mutate_document(draw, deepcopy(self._index), draw.choice((0, 1, 1, 2)))
            content = encode_document(index)
            content = mutate_bytes(draw, content) if draw.random() < 0.2 else content
            (self._folder / "model.safetensors.index.json").write_bytes(content)
        try:
            for path in weight_files(self._folder):
                if path.parent != self._folder:
                    raise Defect(f"a weight file outside the model folder: {path}")
            model_hash(self._folder, "float32", None)
            return self._read()
        except ModelError:
            return "refused"

    def _draw_file(self, draw: Random) -> bytes:
        header = encode_document(mutate_document(draw, deepcopy(self._header), draw.choice((0, 1, 1, 1, 2, 4))))
        size = len(header) if draw.random() < 0.9 else draw.choice(INTEGERS) % 2**64
        content = size.to_bytes(8, "little") + header + self._data
        return mutate_bytes(draw, content) if draw.random() < 0.2 else content

    def _read(self) -> Outcome:
        with Checkpoint(self._folder, torch.float32, torch.device("cpu")) as checkpoint:
            for name in checkpoint.names():
                checkpoint.stored_dtype(name)
                shape = checkpoint.shape(name)
                checkpoint.part(name, None)
                match shape:
                    case [size]:
                        checkpoint.vector(name, size)
                    case [rows, columns]:
                        checkpoint.rows(name, (rows, columns), Span(0, rows // 2))
                    case _:
                        checkpoint.block(name, shape, [Span(0, size) for size in shape])
        return "accepted"


_CONFIG: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "hidden_activation": None, "dtype": "bfloat16", "eos_token_id": [1, 2],
    "sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True, "mlp_bias": False,
    "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "no_rope_layers": [1, 0, 1], "partial_rotary_factor": 1.0, "rope_local_base_freq": 10000.0,
}  # fmt: skip
_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
)
_QUANTIZATIONS: tuple[dict[str, Any] | None, ...] = (
    *(*(None,) * 9, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [64, 64]}}},
    },
    *(kind.config for kind in KINDS.values()),
)


class Configs(Target):
    """Mutated config.json of every family, with the files of sentence-transformers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "tokenizer.json").write_bytes(tiny_tokenizer_json())
        (folder / "1_Pooling").mkdir()

    def run(self, draw: Random) -> Outcome:
        """Reads one config."""
        config = {**_CONFIG, "architectures": [draw.choice(list(FAMILIES))], "rope_scaling": deepcopy(draw.choice(_ROPES))}
        config["quantization_config"] = deepcopy(draw.choice(_QUANTIZATIONS))
        for name in draw.sample(list(_CONFIG), draw.choice((0, 3, 10))):
            config.pop(name)
        self._write(draw, "config.json", deepcopy(config))
        self._write(draw, "generation_config.json", {"eos_token_id": [1], "temperature": 0.5})
        self._write(draw, "tokenizer_config.json", {"eos_token": {"content": "<eos>"}})
        self._write(
            draw, "modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Normalize"}]
        )
        self._write(draw, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8})
        try:
            read_assets(self._folder, ["tiny"], None, read_embedding(self._folder, 8, "auto"))
            parsed = parse_config(read_json(self._folder))
            frequencies = [rope_frequencies(rope, parsed.head_dim) for rope in set(parsed.ropes) if rope is not None]
        except ModelError:
            return "refused"
        values = (parsed.rms_norm_eps, parsed.scale, parsed.softcap, parsed.logit_softcap, parsed.embedding_scale)
        if any(value is not None and not math.isfinite(value) for value in values):
            raise Defect(f"a number that is not finite: {values}")
        if not all(bool(torch.isfinite(frequency).all()) for frequency in frequencies):
            raise Defect(f"rotary frequencies that are not finite: {parsed.ropes}")
        return "accepted"

    def _write(self, draw: Random, name: str, document: Any) -> None:
        times = draw.choice((1, 1, 2, 3)) if name == "config.json" else draw.choice((0, 0, 0, 1))
        content = encode_document(mutate_document(draw, document, times))
        (self._folder / name).write_bytes(mutate_bytes(draw, content) if draw.random() < 0.05 else content)


class Archives(Target):
    """Mutated tar archives of an image's layers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, draw: Random) -> Outcome:
        """Unpacks one archive; nothing may be written beside the folder."""
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        archive = out / "layer.tar"
        archive.write_bytes(_draw_archive(draw))
        try:
            unpack([archive], out, _selected, "oci://x", DownloadControl(progress=print, stop=threading.Event()))
        except ModelError as error:
            if "oci://x" not in str(error):
                raise Defect(f"an error without the source: {error}") from error
            return "refused"
        finally:
            if beside := [path for path in self._folder.iterdir() if path != out]:
                raise Defect(f"written outside of the folder: {beside}")
            if links := [path for path in out.rglob("*") if path.is_symlink()]:
                raise Defect(f"links: {links}")
        return "accepted"


def _selected(names: list[str]) -> list[str]:
    files = [RemoteFile(name=name, url="") for name in names]
    return [file.name for file in select_files(files, None, "oci://x", "oci://x")]


def _draw_archive(draw: Random) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode=draw.choice(("w", "w", "w:gz")), format=draw.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    ) as tar:
        for name in ("m/config.json", "m/tokenizer.json", "m/model.safetensors", "other/config.json"):
            info = tarfile.TarInfo(
                name if draw.random() < 0.8 else draw.choice(("..", "/", "m/..", ".", "m/", "m/../..")) + draw.choice(TEXTS[:14])
            )
            content = b"{}" * draw.choice((1, 300))
            info.size = len(content)
            if draw.random() < 0.15:
                info.type = draw.choice(
                    (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"S", b"?")
                )
                info.linkname = draw.choice(("/etc/passwd", "../x", "m/config.json"))
            try:
                tar.addfile(info, io.BytesIO(content))
            except (UnicodeError, ValueError):
                continue
    content = buffer.getvalue()
    return content if draw.random() < 0.3 else mutate_bytes(draw, content)


LOADERS: dict[str, Callable[[Path], Target]] = {
    "gguf": Ggufs, "safetensors": Safetensors, "config": Configs, "archive": Archives,
}  # fmt: skip
