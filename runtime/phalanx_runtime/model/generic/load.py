"""Creates a `transformers` model without memory and loads this rank's part of a checkpoint.

`transformers` lists conversions to parameters. Stacked experts are read one by one into place; other converted tensors are read
whole, then cut.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.generic.split import Cut, Placements, intersect_spans
from phalanx_runtime.model.generic.stored import StoredWeights, weight_names
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import FLOATS, Checkpoint

ExpertTensors = Sequence[Sequence[str]]
"""Tensors by kind and expert; kinds (gate, up) are concatenated along the rows of [experts, rows, columns]."""


def stacked_experts(converter: Any, sources: Sequence[tuple[str, str | None]]) -> ExpertTensors | None:
    """Returns the tensors if the conversion stacks experts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    stacks = type(first) is MergeModulelist and first.dim == 0
    joins = len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1
    kinds = [[source for source, pattern in sources if pattern == kind] for kind in converter.source_patterns]
    present = [kind for kind in kinds if kind]
    return present if stacks and (joins or (not others and len(present) == 1)) else None


def read_stack(
    kinds: ExpertTensors, checkpoint: Checkpoint, shape: Sequence[int], dtype: torch.dtype, cut: Cut | None
) -> Tensor | None:
    """Returns this rank's part, if the tensors form a stack of this shape."""
    if len(shape) != 3 or any(len(kind) != shape[0] for kind in kinds) or (cut is not None and cut.dim % 3 == 0):
        return None
    heights = [checkpoint.shape(kind[0])[0] for kind in kinds]
    if sum(heights) != shape[1]:
        return None
    rows, columns = _spans(cut, 1, shape[1]), _spans(cut, 2, shape[2])
    stack = torch.empty((shape[0], _total_size(rows), _total_size(columns)), dtype=dtype, device=checkpoint.device)
    tops = [sum(heights[:index]) for index in range(len(heights))]
    column_parts = intersect_spans(columns, 0, shape[2])
    row_parts = [intersect_spans(rows, top, top + height) for top, height in zip(tops, heights, strict=True)]
    for expert, matrix in enumerate(stack):
        for kind, parts in zip(kinds, row_parts, strict=True):
            _read(kind[expert], checkpoint, matrix, parts, column_parts)
    return stack


def _read(name: str, checkpoint: Checkpoint, matrix: Tensor, row_parts: Placements, column_parts: Placements) -> None:
    for rows, row in row_parts:
        for columns, column in column_parts:
            part = _part(checkpoint, name, partial(_window, rows=rows, columns=columns), matrix.dtype)
            target = matrix[row : row + rows.size, column : column + columns.size]
            if part.shape != target.shape:
                raise ModelError(f"tensor {name} has another shape than those of the other experts")
            target.copy_(part)


def _part(checkpoint: Checkpoint, name: str, select: Callable[[Any], Tensor] | None, dtype: torch.dtype) -> Tensor:
    """Returns a tensor for a parameter of `dtype`, as stored. Raises ModelError for codes: they need their scales."""
    if dtype.is_floating_point and (stored := checkpoint.stored_dtype(name)) not in FLOATS:
        raise ModelError(f"tensor {name} is stored as {stored}: its quantisation is not supported")
    return checkpoint.part(name, select)


def _window(stored: Any, rows: Span, columns: Span) -> Tensor:
    window: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
    return window


def _spans(cut: Cut | None, dim: int, size: int) -> tuple[Span, ...]:
    return cut.spans if cut is not None and cut.dim % 3 == dim else (Span(0, size),)


def _total_size(spans: Sequence[Span]) -> int:
    return sum(span.size for span in spans)


def model_maker(config: Any) -> Callable[..., Any]:
    """Returns what makes the causal language model of a config. Raises Unsupported."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    auto: Any = transformers.AutoModelForCausalLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return partial(auto.from_config, trust_remote_code=False)
    # A text part of its own, saved with its class name; the mapping has the config of the whole model.
    for name in set(config.architectures or ()) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return getattr(transformers, name)._from_config  # type: ignore[no-any-return]
    raise Unsupported(f"model_type {config.model_type} is no causal language model of transformers")


_creation_lock = threading.Lock()


def make_empty_model(config: Any, dtype: torch.dtype, experts: str | None) -> Any:
    """Creates the model with parameters on the meta device. Raises ModelError."""
    options = {} if experts is None else {"experts_implementation": experts}
    make = model_maker(config)
    # Patches torch's class and default dtype: one thread at a time.
    with _creation_lock, _parameters_on_meta():
        try:
            return make(config, dtype=dtype, attn_implementation="eager", **options).eval()
        except Exception as error:
            raise ModelError(f"transformers cannot make this model: {type(error).__name__}: {error}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def load_parameters(
    model: Any,
    checkpoint: Checkpoint,
    cuts: Mapping[str, Cut],
    unused: Collection[str] = (),
    stored: StoredWeights | None = None,
) -> int:
    """Loads this rank's part of parameters and buffers; empties `unused` ones. Returns the bytes. Raises ModelError.

    `stored`: reads quantised weights.
    """
    targets: dict[str, Tensor] = {name: tensor for name, tensor in model.state_dict().items() if name not in unused}
    for name in unused:
        shape, dtype = model.get_parameter(name).shape, model.get_parameter(name).dtype
        _set(model, name, torch.empty((0, *shape[1:]), dtype=dtype, device=checkpoint.device))
    loaded: dict[str, Tensor] = {}
    for sources in _group_sources(model, checkpoint, targets):
        loaded |= sources.load(model, checkpoint, cuts, targets, stored)
    for name, tensor in loaded.items():
        _set(model, name, tensor)
    for name, buffer in list(model.named_buffers()):
        _set(model, name, buffer.to(checkpoint.device))
    _tie(model, loaded)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"tensors are missing in the checkpoint: {', '.join(missing[:5])}{' ...' if missing[5:] else ''}")
    num_bytes: int = sum(parameter.nbytes for parameter in model.parameters())
    return num_bytes + (0 if stored is None else stored.num_bytes)


class _ParameterSources:
    """The checkpoint's tensors of one conversion."""

    def __init__(self, name: str, converter: Any) -> None:
        self._name = name
        self._converter = converter
        self._sources: list[tuple[str, str | None]] = []

    def add(self, source: str, pattern: str | None) -> None:
        self._sources.append((source, pattern))

    def load(
        self,
        model: Any,
        checkpoint: Checkpoint,
        cuts: Mapping[str, Cut],
        targets: Mapping[str, Tensor],
        stored: StoredWeights | None,
    ) -> dict[str, Tensor]:
        if stored is not None and stored.has([source for source, _ in self._sources]):
            return self._load_stored(model, stored, cuts.get(self._name), targets[self._name].shape)
        dtype = targets[self._name].dtype
        if self._converter is None:
            part = _part(checkpoint, self._sources[-1][0], cuts[self._name].apply if self._name in cuts else None, dtype)
            return {self._name: _copy(part, dtype, checkpoint.device)}
        stack = self._stack(checkpoint, cuts.get(self._name), targets[self._name])
        if stack is not None:
            return {self._name: stack}
        for source, pattern in self._sources:
            self._converter.add_tensor(self._name, source, pattern, _part(checkpoint, source, None, dtype))
        converted = self._converter.convert(self._name, model=model, config=model.config)
        whole = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        parts = {name: cuts[name].apply(value) if name in cuts else value for name, value in whole.items() if name in targets}
        return {name: _copy(part, targets[name].dtype, checkpoint.device) for name, part in parts.items()}

    def _load_stored(self, model: Any, stored: StoredWeights, cut: Cut | None, shape: Sequence[int]) -> dict[str, Tensor]:
        if self._converter is None:
            return {self._name: stored.linear(model, self._name, self._sources[-1][0], shape, cut)}
        kinds = stacked_experts(self._converter, self._sources)
        if kinds is None:
            stored.refuse(self._name)
        else:
            stored.stack(model, self._name, kinds, shape, cut)
        return {}

    def _stack(self, checkpoint: Checkpoint, cut: Cut | None, target: Tensor) -> Tensor | None:
        kinds = stacked_experts(self._converter, self._sources)
        return None if kinds is None else read_stack(kinds, checkpoint, target.shape, target.dtype, cut)


def _group_sources(model: Any, checkpoint: Checkpoint, targets: dict[str, Tensor]) -> list[_ParameterSources]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, _ParameterSources] = {}
    for source in sorted(weight_names(checkpoint), key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, targets)
        if name not in targets and source in targets:
            name, pattern = source, None
        if name in targets:
            converter = None if pattern is None else deepcopy(by_pattern[pattern])
            groups.setdefault(name, _ParameterSources(name, converter)).add(source, pattern)
    return list(groups.values())


def _copy(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def _tie(model: Any, loaded: Mapping[str, Tensor]) -> None:
    """Shares parameters; not those that the checkpoint stores both, with other numbers each."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in dict(tied).items():
        if source in loaded and target in loaded and not torch.equal(loaded[source], loaded[target]):
            continue
        first, second = (source, target) if source in loaded else (target, source)
        if first in loaded:
            path, _, leaf = second.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = model.get_parameter(first)
