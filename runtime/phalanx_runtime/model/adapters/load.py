"""The adapters of a model: this rank's part of each, read into slots.

Outputs of q, k, v, gate and up are split over ranks, so A is whole and B has this rank's outputs. Inputs of o and down are split,
so A has this rank's inputs, B is whole, and the sum over ranks of the base linear's outputs also sums the adapter's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx_runtime.checkpoint.adapter import JOINED, LINEARS, WEIGHTS_FILE, AdapterConfig, read_adapter_config
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.adapters.slots import AdapterSlots, Factors, LayerDeltas, LayerPlaces, Place
from phalanx_runtime.model.adapters.targets import ALL_EXPERTS, JoinedFactors, Target, joined_factors, read_target
from phalanx_runtime.model.attention.step_inputs import StepAdapters
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.partition import Shard, Span
from phalanx_runtime.model.protocol import LoadOptions

FACTOR_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors, as safetensors names them, that adapters are saved in."""


def _experts_obstacle(options: LoadOptions) -> str:
    """Returns why slots have no memory for experts; empty if they have."""
    return "" if options.has_lora_experts else "--no-lora-experts leaves slots no memory for them"


def places(config: ModelConfig, shard: Shard, layer: int, *, has_experts: bool) -> LayerPlaces:
    """Returns this rank's part of each linear of a layer. `has_experts`: also of its experts."""
    hidden, dim, whole = config.hidden_size, config.head_dim, Span(0, config.hidden_size)
    q, kv = (Span(heads.start * dim, heads.stop * dim) for heads in (shard.heads, shard.kv_heads))
    attention, keys = config.num_heads * dim, config.num_kv_heads * dim
    linears = {
        "q_proj": Place(hidden, attention, whole, q),
        "k_proj": Place(hidden, keys, whole, kv),
        "v_proj": Place(hidden, keys, whole, kv),
        "o_proj": Place(attention, hidden, q, whole),
    }
    mixture = config.mixture
    if mixture is None or not mixture.layers[layer]:
        return LayerPlaces(linears=linears | _mlp(hidden, config.intermediate_size, shard.mlp))
    expert = _mlp(hidden, mixture.intermediate_size, shard.expert_mlp)
    return LayerPlaces(linears=linears, expert=expert, experts=shard.experts) if has_experts else LayerPlaces(linears=linears)


def _mlp(hidden: int, inner: int, own: Span) -> dict[str, Place]:
    whole = Span(0, hidden)
    into = Place(hidden, inner, whole, own)
    return {"gate_proj": into, "up_proj": into, "down_proj": Place(inner, hidden, own, whole)}


class ModelAdapters:
    """The adapters of the layers of this rank, in slots from 1."""

    def __init__(self, config: ModelConfig, shard: Shard, layers: Span, options: LoadOptions) -> None:
        self._experts_obstacle = _experts_obstacle(options)
        has_experts = not self._experts_obstacle
        self._places = [places(config, shard, layer, has_experts=has_experts) for layer in range(config.num_layers)]
        own = self._places[layers.start : layers.stop]
        self._slots = AdapterSlots(
            own, options.max_loras, options.max_lora_rank, options.dtype, options.device, kernels=options.kernels
        )
        self._config = config
        self._layers = layers

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._slots.num_bytes

    @property
    def has_experts(self) -> bool:
        """Whether slots have memory for experts."""
        return self._slots.has_experts

    def load(self, slot: int, folder: Path) -> None:
        """Reads an adapter into a slot, in place of another one. Raises ModelError, and then leaves the slot as it was."""
        adapter, path = read_adapter_config(folder, self._slots.rank), folder / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                reader = _Reader(
                    *(path, file, adapter, self._config),
                    places=self._places,
                    slots=self._slots,
                    experts_obstacle=self._experts_obstacle,
                )
                read = reader.read(self._layers)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: {error}") from error
        self._slots.write(slot - 1, read)

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


class _Reader:
    """The open weights of an adapter."""

    def __init__(
        self,
        path: Path,
        file: Any,
        adapter: AdapterConfig,
        config: ModelConfig,
        *,
        places: Sequence[LayerPlaces],
        slots: AdapterSlots,
        experts_obstacle: str,
    ) -> None:
        self._path = path
        self._file = file
        self._adapter = adapter
        self._config = config
        self._places = places
        self._slots = slots
        self._experts_obstacle = experts_obstacle

    def read(self, layers: Span) -> list[dict[str, Factors]]:
        """Returns the factors of each of these layers. All tensors are checked, also those of other ranks. Raises ModelError."""
        targets = self._targets()
        for target in targets:
            self._check(target)
        read: list[dict[str, Factors]] = [{} for _ in range(layers.size)]
        for target in targets:
            if layers.start <= target.layer < layers.stop:
                known, factors = read[target.layer - layers.start], self._factors(target)
                if twice := sorted(known.keys() & factors.keys()):
                    raise ModelError(f"{self._path}: several tensors adapt {twice[0]} of layer {target.layer}")
                known.update(factors)
        return read

    def _targets(self) -> list[Target]:
        """Returns what the tensors adapt. Raises ModelError for a tensor that is no factor of a supported linear."""
        factors: dict[Target, set[str]] = {}
        for name in sorted(self._file.keys()):
            found = read_target(name)
            if found is None:
                raise ModelError(f"{self._path}: tensor {name:.200} is not supported: expected factors of {', '.join(LINEARS)}")
            if (stored := self._file.get_slice(name).get_dtype()) not in FACTOR_TYPES:
                raise ModelError(f"{self._path}: tensor {name} has type {stored}: expected {', '.join(FACTOR_TYPES)}")
            factors.setdefault(found[0], set()).add(found[1])
        for target, present in factors.items():
            if len(present) < 2:
                raise ModelError(f"{self._path}: tensor {target.name('B' if present == {'A'} else 'A')} is missing")
        if not factors:
            raise ModelError(f"{self._path} has no tensors")
        return list(factors)

    def _check(self, target: Target) -> None:
        """Raises ModelError unless the base model has the linear, with the sizes of both factors."""
        layer, module = target.layer, target.module
        if layer >= self._config.num_layers:
            raise ModelError(f"{self._path}: layer {layer} is not in the base model{self._other_base()}")
        if module == ALL_EXPERTS or "." in module:
            self._check_experts(target)
        if module == ALL_EXPERTS:
            self._joined(target)
            return
        found = self._linears(target.layer, module)
        if not found:
            raise ModelError(f"{self._path}: {module} of layer {layer} is no linear of the base model, whose layer has experts")
        rank, outputs = self._adapter.rank, sum(place.outputs for place in found.values())
        for factor, expected in (("A", (rank, next(iter(found.values())).inputs)), ("B", (outputs, rank))):
            shape = self._shape(target, factor)
            if shape != expected:
                raise ModelError(
                    f"{self._path}: tensor {target.name(factor)} has shape {list(shape)}; the base model and r imply "
                    f"{list(expected)}{self._other_base()}"
                )

    def _check_experts(self, target: Target) -> None:
        """Raises ModelError unless the layer has the expert, with memory for adapters."""
        mixture, number = self._config.mixture, target.module.partition(".")[0]
        if mixture is None or not mixture.layers[target.layer]:
            raise ModelError(
                f"{self._path}: {target.stem} is not in the base model, whose layer has no experts{self._other_base()}"
            )
        if target.module != ALL_EXPERTS and int(number) >= mixture.num_experts:
            raise ModelError(f"{self._path}: {target.stem} is not in the base model of {mixture.num_experts} experts")
        if self._experts_obstacle:
            raise ModelError(f"{self._path}: {target.stem} is not supported: it adapts experts; {self._experts_obstacle}")

    def _joined(self, target: Target) -> JoinedFactors:
        """Returns the layout of factors of all experts; that of others says what their sizes do not. Raises ModelError."""
        found = self._layouts(target)
        if not found:
            shapes = " and ".join(str(list(self._shape(target, factor))) for factor in "AB")
            raise ModelError(
                f"{self._path}: factors of {target.stem} have shapes {shapes}, which fit neither gate_up_proj nor down_proj "
                f"of the base model's experts with r {self._adapter.rank}{self._other_base()}"
            )
        if len(found) > 1:
            others = [self._layouts(other) for other in self._targets() if other.module == ALL_EXPERTS]
            swapped = {one[0].is_swapped for one in others if len(one) == 1}
            found = [one for one in found if {one.is_swapped} == swapped]
        if not found:
            raise ModelError(f"{self._path}: factors of {target.stem} fit two layouts of PEFT: adapt gate_up_proj and down_proj")
        return found[0]

    def _layouts(self, target: Target) -> Sequence[JoinedFactors]:
        mixture, (a, b) = self._config.mixture, (self._shape(target, factor) for factor in "AB")
        assert mixture is not None
        if len(a) != 2 or len(b) != 2 or {a[0], b[1]} != {self._adapter.rank * mixture.num_experts}:
            return []
        found = joined_factors(a[1], b[0], self._config.hidden_size, mixture.intermediate_size)
        # Interleaved experts are [experts, in, out], as PEFT expects.
        return [one for one in found if not (mixture.tensors.is_interleaved and one.is_swapped)]

    def _factors(self, target: Target) -> dict[str, Factors]:
        """Reads this rank's part of both factors, by linear. Raises ModelError."""
        a, b = (self._file.get_slice(target.name(factor)) for factor in "AB")
        if target.module != ALL_EXPERTS:
            return self._parts(target.layer, target.module, a, b)
        layout, mixture, experts = self._joined(target), self._config.mixture, self._places[target.layer].experts
        assert mixture is not None
        whole_a, whole_b, read = a[:], b[:], dict[str, Factors]()
        for number in range(experts.start, experts.stop):
            own_a, own_b = layout.of_expert(whole_a, whole_b, number, mixture.num_experts)
            if mixture.tensors.is_interleaved and layout.linear in JOINED:
                own_b = torch.cat((own_b[::2], own_b[1::2]))
            read |= self._parts(target.layer, f"{number}.{layout.linear}", own_a, own_b)
        return read

    def _parts(self, layer: int, module: str, a: Any, b: Any) -> dict[str, Factors]:
        """Returns this rank's part of the factors of a module, [rank, in] and [out, rank], by linear. Raises ModelError."""
        number, dot, _ = module.rpartition(".")
        experts = self._places[layer].experts
        if dot and not experts.start <= int(number) < experts.stop:
            return {}
        read, start = {}, 0
        for name, place in self._linears(layer, module).items():
            own_a = a[:, place.own_inputs.start : place.own_inputs.stop]
            own_b = b[start + place.own_outputs.start : start + place.own_outputs.stop]
            scaled = (own_b.to(torch.promote_types(own_b.dtype, torch.float32)) * self._adapter.scale).t()
            read[name] = Factors(self._stored(own_a, layer, module), self._stored(scaled, layer, module))
            start += place.outputs
        return read

    def _stored(self, part: Tensor, layer: int, module: str) -> Tensor:
        """Returns the tensor in the slots' dtype, on the host until all are read; its values must be finite."""
        stored = part.to(self._slots.dtype)
        if not bool(stored.isfinite().all()):
            raise ModelError(f"{self._path}: factors of {module} of layer {layer} are not finite in {self._slots.dtype}")
        return stored

    def _linears(self, layer: int, module: str) -> Mapping[str, Place]:
        """Returns the places of a module's linears, by the names of `LayerSlots`."""
        number, dot, name = module.rpartition(".")
        known = self._places[layer].expert if dot else self._places[layer].linears
        return {f"{number}{dot}{one}": known[one] for one in JOINED.get(name, (name,)) if one in known}

    def _shape(self, target: Target, factor: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(target.name(factor)).get_shape())

    def _other_base(self) -> str:
        name = self._adapter.base_model
        return f": the adapter is for another base model ({name})" if name else ": the adapter is for another base model"
