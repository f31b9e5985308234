"""Creates a `transformers` model without memory and loads this rank's part of a checkpoint.

Checkpoints name and stack tensors differently from the models of `transformers` 5, which lists the conversions. Stacked experts
are read one by one into their places. For other conversions, all tensors of one parameter are read whole, then cut.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.generic.layers import PAGED
from phalanx_runtime.model.generic.split import Cut
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import Checkpoint

# Parameters that a checkpoint stores as one matrix per expert: each matrix is read directly into its place in the stack.
#     [experts, rows, columns]     kinds of matrices, such as gate and up, are concatenated along each expert's rows
# A rank's memory therefore holds only its part and the mapped part of one file.

Kinds = Sequence[Sequence[str]]
"""The checkpoint's tensors of each kind, by expert."""
Places = list[tuple[Span, int]]
"""Parts of a matrix, each with its offset in the loaded tensor."""


def kinds_of(converter: Any, sources: Sequence[tuple[str, str | None]]) -> Kinds | None:
    """The tensors that this `transformers` conversion stacks; None for another kind of conversion."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    stacks = type(first) is MergeModulelist and first.dim == 0
    joins = len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1
    kinds = [[source for source, pattern in sources if pattern == kind] for kind in converter.source_patterns]
    found = [kind for kind in kinds if kind]
    return found if stacks and (joins or (not others and len(found) == 1)) else None


def read_stack(kinds: Kinds, checkpoint: Checkpoint, shape: Sequence[int], dtype: torch.dtype, cut: Cut | None) -> Tensor | None:
    """This rank's part of a stack of this shape; None if these tensors do not form one."""
    if len(shape) != 3 or any(len(kind) != shape[0] for kind in kinds) or (cut is not None and cut.dim % 3 == 0):
        return None
    heights = [checkpoint.shape(kind[0])[0] for kind in kinds]
    if sum(heights) != shape[1]:
        return None
    rows, columns = _spans(cut, 1, shape[1]), _spans(cut, 2, shape[2])
    stack = torch.empty((shape[0], _joined(rows), _joined(columns)), dtype=dtype, device=checkpoint.device)
    tops = [sum(heights[:at]) for at in range(len(heights))]
    across = intersect_spans(columns, 0, shape[2])
    down = [intersect_spans(rows, top, top + height) for top, height in zip(tops, heights, strict=True)]
    for expert, matrix in enumerate(stack):
        for kind, parts in zip(kinds, down, strict=True):
            _read(kind[expert], checkpoint, matrix, parts, across)
    return stack


def intersect_spans(spans: Sequence[Span], start: int, stop: int) -> Places:
    """Parts of the spans inside [start, stop), relative to `start`, each with its offset in the joined spans."""
    found, at = [], 0
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            found.append((Span(low - start, high - start), at + low - span.start))
        at += span.size
    return found


def _read(name: str, checkpoint: Checkpoint, matrix: Tensor, down: Places, across: Places) -> None:
    """Reads these parts of a tensor into `matrix`."""
    for rows, row in down:
        for columns, column in across:
            part = checkpoint.part(name, partial(_window, rows=rows, columns=columns))
            target = matrix[row : row + rows.size, column : column + columns.size]
            if part.shape != target.shape:
                raise ModelError(f"tensor {name} has not the shape of the other experts'")
            target.copy_(part)


def _window(stored: Any, rows: Span, columns: Span) -> Tensor:
    window: Tensor = stored[rows.start : rows.stop, columns.start : columns.stop]
    return window


def _spans(cut: Cut | None, dim: int, size: int) -> tuple[Span, ...]:
    """This rank's spans of a dimension."""
    return cut.spans if cut is not None and cut.dim % 3 == dim else (Span(0, size),)


def _joined(spans: Sequence[Span]) -> int:
    return sum(span.size for span in spans)


_making = threading.Lock()


def make_empty(config: Any, dtype: torch.dtype, experts: str | None) -> Any:
    """The model of this config, with parameters on the meta device and computed buffers. Raises ModelError."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    options = {} if experts is None else {"experts_implementation": experts}
    # Patches torch's class and the default dtype, so one thread at a time.
    with _making, _parameters_on_meta():
        try:
            return auto.from_config(config, dtype=dtype, attn_implementation=PAGED, **options).eval()
        except KeyError as error:
            if error.args == (PAGED,):
                raise Unsupported("its attention does not go through AttentionInterface") from error
            raise ModelError(f"transformers cannot make this model: {error!r}") from error
        except Exception as error:
            raise ModelError(f"transformers cannot make this model: {type(error).__name__}: {error}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """New parameters use no memory and are not initialised."""
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


def fill(model: Any, checkpoint: Checkpoint, cuts: Mapping[str, Cut], unread: Collection[str] = ()) -> int:
    """Loads this rank's part of every parameter and stored buffer; those in `unread` become empty. Returns the loaded bytes.

    Raises ModelError.
    """
    wanted: dict[str, Tensor] = {name: tensor for name, tensor in model.state_dict().items() if name not in unread}
    for name in unread:
        shape, dtype = model.get_parameter(name).shape, model.get_parameter(name).dtype
        _set(model, name, torch.empty((0, *shape[1:]), dtype=dtype, device=checkpoint.device))
    filled: dict[str, Tensor] = {}
    for parts in _grouped(model, checkpoint, wanted):
        filled |= parts.tensors(model, checkpoint, cuts, wanted)
    for name, tensor in filled.items():
        _set(model, name, tensor)
    for name, buffer in list(model.named_buffers()):
        _set(model, name, buffer.to(checkpoint.device))
    _tie(model, filled)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(f"tensors are missing in the checkpoint: {', '.join(left[:5])}{' ...' if left[5:] else ''}")
    return sum(parameter.nbytes for parameter in model.parameters())


class _Parts:
    """The checkpoint's tensors for one parameter, or for several."""

    def __init__(self, name: str, converter: Any) -> None:
        self._name = name
        self._converter = converter
        self._sources: list[tuple[str, str | None]] = []

    def add(self, source: str, pattern: str | None) -> None:
        """Adds a tensor of the checkpoint, with the conversion pattern it matched."""
        self._sources.append((source, pattern))

    def tensors(
        self, model: Any, checkpoint: Checkpoint, cuts: Mapping[str, Cut], wanted: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """This rank's part of each wanted parameter, in its own memory."""
        if self._converter is None:
            part = checkpoint.part(self._sources[-1][0], cuts[self._name].of if self._name in cuts else None)
            return {self._name: _placed(part, wanted[self._name].dtype, checkpoint.device)}
        stack = self._stack(checkpoint, cuts.get(self._name), wanted[self._name])
        if stack is not None:
            return {self._name: stack}
        for source, pattern in self._sources:
            self._converter.add_tensor(self._name, source, pattern, checkpoint.part(source, None))
        made = self._converter.convert(self._name, model=model, config=model.config)
        whole = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        parts = {name: cuts[name].of(value) if name in cuts else value for name, value in whole.items() if name in wanted}
        return {name: _placed(part, wanted[name].dtype, checkpoint.device) for name, part in parts.items()}

    def _stack(self, checkpoint: Checkpoint, cut: Cut | None, wanted: Tensor) -> Tensor | None:
        """The parameter, if it is a stack of the tensors."""
        kinds = kinds_of(self._converter, self._sources)
        return None if kinds is None else read_stack(kinds, checkpoint, wanted.shape, wanted.dtype, cut)


def _grouped(model: Any, checkpoint: Checkpoint, wanted: dict[str, Tensor]) -> list[_Parts]:
    """The checkpoint's tensors grouped by parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, _Parts] = {}
    for source in sorted(checkpoint.names(), key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)
        if name not in wanted and source in wanted:
            name, pattern = source, None
        if name in wanted:
            converter = None if pattern is None else deepcopy(by_pattern[pattern])
            groups.setdefault(name, _Parts(name, converter)).add(source, pattern)
    return list(groups.values())


def _placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def _tie(model: Any, filled: Mapping[str, Tensor]) -> None:
    """Restores the model's tied parameters from the one in the checkpoint."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in dict(tied).items():
        first, second = (source, target) if source in filled else (target, source)
        if first in filled:
            path, _, leaf = second.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = model.get_parameter(first)
