"""Folders of LoRA adapters: adapter_config.json, and the names, types, shapes and sizes of adapter_model.safetensors."""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.fuzz.mutations import INTEGERS, TEXTS, encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_runtime.checkpoint.adapter import CONFIG_FILE, JOINED, LINEARS, WEIGHTS_FILE, adapter_hash
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.load import ModelAdapters, places
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.config import ModelConfig, parse_config
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.partition import Shard, Span, partition
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.server.http.adapters import AdapterFolders

RANK, MAX_RANK = 2, 8
MAX_TENSOR_BYTES = 1 << 20
"""Of a tensor whose size a case changes together with its bytes."""
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8,
    "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
}  # fmt: skip
_BASE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 2,
    "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 12,
}  # fmt: skip
_OPTIONAL: dict[str, Any] = {
    "modules_to_save": None, "use_dora": False, "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
    "fan_in_fan_out": False, "layer_replication": None, "trainable_token_indices": None, "use_rslora": True,
    "init_lora_weights": "gaussian", "lora_dropout": 0.05, "layers_to_transform": [0], "target_parameters": None,
}  # fmt: skip
_MODULES = ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.down_proj", "mlp.experts.1.w2", "mlp.experts.base_layer")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file. The file may state other sizes than `content` has."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True, slots=True)
class Rank:
    """The slots of one rank, and the places of its linears."""

    adapters: ModelAdapters
    config: ModelConfig
    shard: Shard


def _factors(config: ModelConfig, *, is_joined: bool) -> dict[str, Tensor]:
    """Returns factors of all linears of a model. `is_joined`: of all experts in one, as PEFT stores those of parameters."""
    sizes: dict[str, tuple[int, int, int]] = {}
    for layer in range(config.num_layers):
        found, stem = places(config, partition(config, 1)[0], layer, has_experts=True), f"base_model.model.model.layers.{layer}"
        for name, place in found.linears.items():
            part = "self_attn" if name in LINEARS[:4] else "mlp"
            sizes[f"{stem}.{part}.{name}"] = place.inputs, place.outputs, RANK
        if is_joined and found.expert:
            rank, up, down = RANK * found.experts.size, found.expert["up_proj"], found.expert["down_proj"]
            sizes[f"{stem}.mlp.experts.base_layer"] = up.inputs, 2 * up.outputs, rank
            sizes[f"{stem}.mlp.experts"] = down.inputs, down.outputs, rank
            continue
        for number in range(found.experts.size):
            for name, place in found.expert.items():
                sizes[f"{stem}.mlp.experts.{number}.{name}"] = place.inputs, place.outputs, RANK
    chance = torch.Generator().manual_seed(1)
    factors = {f"{stem}.lora_A.weight": torch.randn(rank, inputs, generator=chance) for stem, (inputs, _, rank) in sizes.items()}
    return factors | {
        f"{stem}.lora_B.weight": torch.randn(outputs, rank, generator=chance) for stem, (_, outputs, rank) in sizes.items()
    }


class Adapters(Target):
    """Mutated adapters of a dense model and of two with experts. Two ranks load each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "adapters"
        self._folders = AdapterFolders(self._folder, MAX_RANK)
        self._bases: list[tuple[list[Rank], Path, dict[str, Any], dict[str, Stored]]] = []
        for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"):
            config = parse_config({**_BASE, "architectures": [architecture]})
            good = folder / architecture
            good.mkdir()
            save_file(_factors(config, is_joined=architecture == "MixtralForCausalLM"), good / WEIGHTS_FILE)
            described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
            described["base_model_name_or_path"] = "tiny"
            (good / CONFIG_FILE).write_text(json.dumps(described))
            options = LoadOptions(
                dtype=torch.float32,
                device=torch.device("cpu"),
                kernels=Kernels(),
                positions=config.max_position,
                max_loras=1,
                max_lora_rank=MAX_RANK,
            )
            layers = Span(0, config.num_layers)
            ranks = [Rank(ModelAdapters(config, shard, layers, options), config, shard) for shard in partition(config, 2)]
            for rank in ranks:
                rank.adapters.load(1, good)
            self._bases.append((ranks, good, described, read_file(good / WEIGHTS_FILE)))

    def run(self, draw: Random) -> Outcome:
        """Reads one folder as the API server does, then into the slot of each rank, which had another adapter."""
        ranks, good, config, tensors = draw.choice(self._bases)
        shutil.rmtree(self._folder, ignore_errors=True)
        case = self._folder / "case"
        case.mkdir(parents=True)
        (case / CONFIG_FILE).write_bytes(_draw_config(draw, config))
        if draw.random() < 0.99:
            (case / WEIGHTS_FILE).write_bytes(_draw_weights(draw, tensors))
        try:
            local = self._folders.read("tiny", "case")
        except ModelError as error:
            return _checked(error, case)
        if local.adapter.content_hash != adapter_hash(case):
            raise Defect("another hash")
        loaded = [rank for rank in ranks if _load(rank, case)]
        for rank in loaded:
            rank.adapters.load(1, good)
        return "accepted" if len(loaded) == len(ranks) else "refused"


def _load(rank: Rank, case: Path) -> bool:
    """Returns whether the adapter is in the slot. Raises Defect if one that was refused changed it."""
    before = _outputs(rank)
    try:
        rank.adapters.load(1, case)
    except ModelError as error:
        _checked(error, case)
        if not all(torch.equal(one, other) for one, other in zip(before, _outputs(rank), strict=True)):
            raise Defect(f"a refused adapter changed the slot: {error}") from error
        return False
    _outputs(rank)
    return True


def _checked(error: ModelError, case: Path) -> Outcome:
    """Raises Defect unless the message names the file and can be sent."""
    if str(case) not in str(error):
        raise Defect(f"an error without the file: {error}") from error
    str(error).encode()
    return "refused"


def _outputs(rank: Rank) -> list[Tensor]:
    """Returns what the slot's adapter adds to the attention of each layer, for a token of ones."""
    piece, zero = [(0, 0, 1)], torch.zeros(1, dtype=torch.int64)
    step = StepAdapters(rows=zero, pieces=piece, table=torch.tensor(piece), slots=zero)
    outputs = []
    for layer, deltas in enumerate(rank.adapters.of_step(step)):
        linears = places(rank.config, rank.shard, layer, has_experts=True).linears
        for added, names in ((deltas.qkv, LINEARS[:3]), (deltas.o, LINEARS[3:4])):
            output = torch.zeros(1, sum(linears[name].own_outputs.size for name in names))
            added.add(output, torch.ones(1, linears[names[0]].own_inputs.size) * 1e-3)
            outputs.append(output)
    return outputs


def read_file(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def _draw_config(draw: Random, config: dict[str, Any]) -> bytes:
    document = deepcopy(config)
    for name in draw.sample(sorted(_OPTIONAL), draw.choice((0, 0, 2, 5))):
        document[name] = deepcopy(_OPTIONAL[name])
    for name in draw.sample(("r", "lora_alpha"), draw.choice((0, 0, 0, 1, 2))):
        document[name] = draw.choice((0, 1, 2, 3, 8, 9, 1e-300, 1e38, 1e300, draw.choice(INTEGERS)))
    content = encode_document(mutate_document(draw, document, draw.choice((0, 0, 1, 1, 2))))
    return mutate_bytes(draw, content) if draw.random() < 0.05 else content


def _draw_weights(draw: Random, tensors: dict[str, Stored]) -> bytes:
    """Returns a file with renamed, retyped, reshaped and missing tensors, a mutated header, and mutated bytes."""
    changed = dict(tensors)
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        name = draw.choice(sorted(changed))
        match draw.randrange(5):
            case 0:
                changed[_draw_name(draw, name)] = changed[name] if draw.random() < 0.3 else changed.pop(name)
            case 1:
                changed[name] = _resized(changed[name], draw.choice(sorted(_BITS)), changed[name].shape)
            case 2:
                changed[name] = _resized(changed[name], changed[name].dtype, _draw_shape(draw, changed[name].shape))
            case 3:
                changed[name] = replace(changed[name], content=draw.randbytes(len(changed[name].content)))
            case _:
                for other in sorted(changed)[1:] if draw.random() < 0.1 else [name]:
                    del changed[other]
        if not changed:
            break
    header, at = dict[str, Any](), 0
    for name, tensor in changed.items():
        header[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": [at, at + len(tensor.content)]}
        at += len(tensor.content)
    text = encode_document(mutate_document(draw, header, draw.choice((0, 0, 0, 0, 1, 2))))
    size = len(text) if draw.random() < 0.97 else draw.choice(INTEGERS) % 2**64
    content = size.to_bytes(8, "little") + text + b"".join(tensor.content for tensor in changed.values())
    return mutate_bytes(draw, content) if draw.random() < 0.1 else content


def _draw_name(draw: Random, name: str) -> str:
    """Returns the name with another layer, expert, module or factor, or another name."""
    number = draw.choice(("0", "00", "2", "7", "-1", "٣", "9" * 30, "1" * 5000, str(draw.choice(INTEGERS[:12]))))
    parts = name.split(".")
    match draw.randrange(5):
        case 0:
            parts[4] = number
        case 1:
            parts[-3:-2] = [parts[-3], number] if draw.random() < 0.5 else [number]
        case 2:
            parts[5:-2] = draw.choice((*_MODULES, *JOINED, f"mlp.experts.{number}.w1")).split(".")
        case 3:
            parts[-2] = draw.choice(("lora_A", "lora_B", "lora_C", "lora_embedding_A", "lora_A.default"))
        case _:
            parts[draw.randrange(len(parts))] = draw.choice(TEXTS).encode(errors="replace").decode()
    return ".".join(parts)


def _draw_shape(draw: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    match draw.randrange(4):
        case 0:
            sizes.reverse()
        case 1:
            sizes[draw.randrange(len(sizes))] = draw.choice((0, 1, 3, 8, 64, 1000))
        case 2:
            sizes.insert(draw.randrange(len(sizes) + 1), draw.choice((0, 1, 1, 2)))
        case _:
            sizes = [] if draw.random() < 0.3 else [math.prod(sizes)]
    return tuple(sizes)


def _resized(tensor: Stored, dtype: str, shape: tuple[int, ...]) -> Stored:
    """Returns the tensor with as many bytes as dtype and shape need, up to a bound."""
    num_bytes = min(-(-math.prod(shape) * _BITS[dtype] // 8), MAX_TENSOR_BYTES)
    repeated = tensor.content * (num_bytes // max(1, len(tensor.content)) + 1)
    return Stored(dtype, shape, (repeated + bytes(num_bytes))[:num_bytes])
