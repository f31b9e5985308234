"""The adapters of a model: this rank's part of each, read into slots.

Outputs of q, k, v, gate and up are split over ranks, so A is whole and B has this rank's outputs. Inputs of o and down are split,
so A has this rank's inputs, B is whole, and the sum over ranks of the base linear's outputs also sums the adapter's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx_runtime.checkpoint.adapter import JOINED, LINEARS, WEIGHTS_FILE, AdapterConfig, read_adapter_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.slots import AdapterSlots, Factors, LayerDeltas, Place
from phalanx_runtime.model.attention.step_adapters import StepAdapters
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.partition import Shard, Span
from phalanx_runtime.model.protocol import LoadOptions

_FACTOR = re.compile(
    r"base_model\.model\.model\.layers\.(?P<layer>\d+)\.(?P<block>self_attn|mlp)\.(?P<module>\w+)\.lora_(?P<factor>[AB])\.weight"
)
_BLOCKS = {"self_attn": (*LINEARS[:4], "qkv_proj"), "mlp": (*LINEARS[4:], "gate_up_proj")}

_NO_EXPERTS = "in layers with experts only q_proj, k_proj, v_proj and o_proj may be adapted"

Key = tuple[int, str]
"""Layer and module."""


def places(config: ModelConfig, shard: Shard, layer: int) -> dict[str, Place]:
    """Returns this rank's part of each linear of a layer, by name."""
    hidden, dim, whole = config.hidden_size, config.head_dim, Span(0, config.hidden_size)
    q, kv = (Span(heads.start * dim, heads.stop * dim) for heads in (shard.heads, shard.kv_heads))
    attention, keys = config.num_heads * dim, config.num_kv_heads * dim
    found = {
        "q_proj": Place(hidden, attention, whole, q),
        "k_proj": Place(hidden, keys, whole, kv),
        "v_proj": Place(hidden, keys, whole, kv),
        "o_proj": Place(attention, hidden, q, whole),
    }
    if config.mixture is None or not config.mixture.layers[layer]:
        mlp = config.intermediate_size
        found |= dict.fromkeys(("gate_proj", "up_proj"), Place(hidden, mlp, whole, shard.mlp))
        found["down_proj"] = Place(mlp, hidden, shard.mlp, whole)
    return found


class ModelAdapters:
    """The adapters of the layers of this rank, in slots from 1."""

    def __init__(self, config: ModelConfig, shard: Shard, layers: Span, options: LoadOptions) -> None:
        own = [places(config, shard, layer) for layer in range(layers.start, layers.stop)]
        self._slots = AdapterSlots(
            own, options.max_loras, options.max_lora_rank, options.dtype, options.device, kernels=options.kernels
        )
        self._config = config
        self._shard = shard
        self._layers = layers

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._slots.num_bytes

    def load(self, slot: int, folder: Path) -> None:
        """Reads an adapter into a slot, in place of another one. Raises ModelError, and then leaves the slot as it was."""
        self._slots.write(slot - 1, _read(folder, self._config, self._shard, self._layers, self._slots))

    @contextmanager
    def held(self, slot: int) -> Iterator[None]:
        """Computes an empty slot as if it had an adapter, to measure steps."""
        self._slots.hold(slot - 1, True)
        try:
            yield
        finally:
            self._slots.hold(slot - 1, False)

    def of_step(self, step: StepAdapters) -> list[LayerDeltas]:
        """Returns what the adapters of a step add to each layer of this rank."""
        return self._slots.of_step(step)


def _read(folder: Path, config: ModelConfig, shard: Shard, layers: Span, slots: AdapterSlots) -> list[dict[str, Factors]]:
    """Returns the factors of each layer of this rank. All tensors are checked, also those of other ranks. Raises ModelError."""
    adapter, path = read_adapter_config(folder, slots.rank), folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            reader = _Reader(path, file, adapter, config, shard)
            keys = reader.keys()
            for key in sorted(keys):
                reader.check(key)
            read: list[dict[str, Factors]] = [{} for _ in range(layers.size)]
            for layer, module in keys:
                if layers.start <= layer < layers.stop:
                    read[layer - layers.start] |= reader.factors((layer, module), slots)
            return read
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: {error}") from error


class _Reader:
    """The open weights of an adapter."""

    def __init__(self, path: Path, file: Any, adapter: AdapterConfig, config: ModelConfig, shard: Shard) -> None:
        self._path = path
        self._file = file
        self._adapter = adapter
        self._config = config
        self._shard = shard

    def keys(self) -> set[Key]:
        """Returns what the tensors adapt. Raises ModelError for a tensor that is no factor of a supported linear."""
        factors: dict[Key, set[str]] = {}
        for name in self._file.keys():
            match = _FACTOR.fullmatch(name)
            if ".experts." in name:
                raise ModelError(f"{self._path}: tensor {name} is not supported: it adapts an expert; {_NO_EXPERTS}")
            if match is None or match["module"] not in _BLOCKS[match["block"]]:
                raise ModelError(f"{self._path}: tensor {name} is not supported: expected factors of {', '.join(LINEARS)}")
            factors.setdefault((int(match["layer"]), match["module"]), set()).add(match["factor"])
        for key, found in factors.items():
            if len(found) < 2:
                raise ModelError(f"{self._path}: tensor {_name(key, 'B' if found == {'A'} else 'A')} is missing")
        if not factors:
            raise ModelError(f"{self._path} has no tensors")
        return set(factors)

    def check(self, key: Key) -> None:
        """Raises ModelError unless the base model has the linear, with the sizes of both factors."""
        layer, module = key
        if layer >= self._config.num_layers:
            raise ModelError(f"{self._path}: layer {layer} is not in the base model{self._other_base()}")
        found = self._places(key)
        if not found:
            raise ModelError(f"{self._path}: {module} of layer {layer} is no linear of the base model, whose layer has experts")
        rank, outputs = self._adapter.rank, sum(place.outputs for place in found.values())
        for factor, expected in (("A", (rank, next(iter(found.values())).inputs)), ("B", (outputs, rank))):
            shape = tuple(self._file.get_slice(_name(key, factor)).get_shape())
            if shape != expected:
                raise ModelError(
                    f"{self._path}: tensor {_name(key, factor)} has shape {list(shape)}; the base model and r imply "
                    f"{list(expected)}{self._other_base()}"
                )

    def factors(self, key: Key, slots: AdapterSlots) -> dict[str, Factors]:
        """Reads this rank's part of both factors, by linear. Raises ModelError."""
        a, b = (self._file.get_slice(_name(key, factor)) for factor in "AB")
        read, start = {}, 0
        for name, place in self._places(key).items():
            own_a = a[:, place.own_inputs.start : place.own_inputs.stop]
            own_b = b[start + place.own_outputs.start : start + place.own_outputs.stop]
            scaled = (own_b.to(torch.promote_types(own_b.dtype, torch.float32)) * self._adapter.scale).t()
            read[name] = Factors(self._stored(own_a, key, slots), self._stored(scaled, key, slots))
            start += place.outputs
        return read

    def _stored(self, part: Tensor, key: Key, slots: AdapterSlots) -> Tensor:
        """Returns the tensor in the slots' dtype, whose values must be finite."""
        stored = part.to(slots.device, slots.dtype)
        if not bool(stored.isfinite().all()):
            raise ModelError(f"{self._path}: factors of {key[1]} of layer {key[0]} are not finite in {slots.dtype}")
        return stored

    def _places(self, key: Key) -> Mapping[str, Place]:
        layer, module = key
        found, names = places(self._config, self._shard, layer), JOINED.get(module, (module,))
        return {name: found[name] for name in names if name in found}

    def _other_base(self) -> str:
        name = self._adapter.base_model
        return f": the adapter is for another base model ({name})" if name else ": the adapter is for another base model"


def _name(key: Key, factor: str) -> str:
    layer, module = key
    names: Sequence[str] = _BLOCKS["mlp"]
    block = "mlp" if module in names else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{factor}.weight"
