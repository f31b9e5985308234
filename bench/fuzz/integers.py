"""Checkpoints in integer codes: mutated headers and configs of each layout."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from bench.fuzz.mutations import INTEGERS, encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_runtime.checkpoint.quantization import parse_quantization
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import read_json
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.weights import Checkpoint
from tests.runtime.model.integer_checkpoints import KINDS, quantise, stored_tensors

SHAPE = (24, 72)


class Integers(Target):
    """Mutated checkpoints of one linear."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "model"
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        self._kinds: list[tuple[dict[str, Any], dict[str, Any], bytes]] = []
        for kind in KINDS.values():
            content = save(stored_tensors("w", quantise(weight, kind), kind))
            size = int.from_bytes(content[:8], "little")
            self._kinds.append((kind.config, json.loads(content[8 : 8 + size]), content[8 + size :]))

    def run(self, draw: Random) -> Outcome:
        """Reads outputs and inputs of one linear, and multiplies with them."""
        config, header, data = draw.choice(self._kinds)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / "model.safetensors").write_bytes(_draw_file(draw, header, data))
        document = mutate_document(draw, {"quantization_config": deepcopy(config)}, draw.choice((0, 0, 1, 2)))
        (self._folder / "config.json").write_bytes(encode_document(document))
        axis = draw.randrange(2)
        start = draw.randrange(SHAPE[axis])
        span = Span(start, draw.randrange(start, SHAPE[axis]) + 1)
        try:
            scheme = parse_quantization(read_json(self._folder))
            with Checkpoint(self._folder, torch.float32, torch.device("cpu")) as checkpoint:
                reader = MatrixReader(checkpoint, scheme)
                part = reader.columns("w", SHAPE, span) if axis else reader.rows([("w", SHAPE[0], span)], SHAPE[1])
        except ModelError:
            return "refused"
        inputs = span.size if axis else SHAPE[1]
        y = make_linear(part, None, Kernels(compiled=True))(torch.ones(1, inputs))
        if y.shape != (1, SHAPE[0] if axis else span.size):
            raise Defect(f"a linear of another shape: {tuple(y.shape)}")
        return "accepted"


def _draw_file(draw: Random, header: dict[str, Any], data: bytes) -> bytes:
    """Returns the file with mutated shapes, dtypes, offsets, names and bytes."""
    changed = deepcopy(header)
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        entry = changed[draw.choice(sorted(changed))]
        if draw.random() < 0.5 and entry["shape"]:
            entry["shape"][draw.randrange(len(entry["shape"]))] = draw.choice((0, 1, 2, 3, 9, 24, 72, draw.choice(INTEGERS)))
        else:
            entry["dtype"] = draw.choice(("I8", "U8", "I32", "I64", "F16", "BF16", "F32", "F64", "BOOL", "F8_E4M3"))
    if draw.random() < 0.3:
        changed.pop(draw.choice(sorted(changed)))
    content = encode_document(mutate_document(draw, changed, draw.choice((0, 0, 0, 1))))
    content = len(content).to_bytes(8, "little") + content + data
    return mutate_bytes(draw, content) if draw.random() < 0.2 else content
