"""Runs the layers with states of a `transformers` model for the packed requests of a step.

The model's own code computes each layer, with a cache of the rows' states instead of `transformers`' own.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.states.cache import RowCache, StateKey
from phalanx_runtime.model.states.step import StepRows, TokenGroup, divide_step
from phalanx_runtime.model.states.store import RowStates, StateShape

_CALLS = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
"""What modules call that keep a state."""
_CACHES = ("cache_params", "past_key_values")
"""Arguments for the cache."""


def has_state(module: nn.Module) -> bool:
    """Returns whether the code of a module sets a state of the cache."""
    kinds = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [inspect.unwrap(part) for kind in kinds for part in vars(kind).values() if inspect.isfunction(part)]
    return any(_CALLS & set(function.__code__.co_names) for function in functions)


class Mixer:
    """One layer with states."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Raises Unsupported if the layer takes no cache."""
        self.name = name
        self.takes_chunks = True
        """Whether it computes several tokens after computed ones at once."""
        self.shapes: dict[StateKey, StateShape] = {}
        """Its states, known after the first call."""
        self.sample: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None
        """Arguments and result of the latest call, if it is recorded."""
        self._forward: Callable[..., Any] = module.forward
        self.dropped_limit = _drop_limit(module)
        """Whether the code of the layer limits time steps of whole prompts and not of single tokens. The limit is removed."""
        self._signature = inspect.signature(module.forward)
        self._arguments = self._signature.bind
        caches = [cache for cache in _CACHES if cache in self._signature.parameters]
        if not caches:
            raise Unsupported(f"its layer {name} keeps a state, and takes no cache")
        self._cache = caches[0]

    def compute(self, groups: list[TokenGroup], states: RowStates | None, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Computes the groups of a step. Without `states`, of rows that have none, it only learns the shapes."""
        bound = self._arguments(*args, **options)
        outputs = [(group, self._compute_group(group, states, bound)) for group in groups]
        return _packed(outputs)

    def _compute_group(self, group: TokenGroup, states: RowStates | None, bound: inspect.BoundArguments) -> Any:
        known: dict[StateKey, Tensor] = {}
        if not group.is_first:
            assert states is not None, "rows without states start at 0"
            known = states.gather(list(self.shapes), group.rows)
        cache = RowCache(known)
        size = next(iter(bound.arguments.values())).shape[1]
        part = tree_map(lambda value: _take(group, value, size), dict(bound.arguments))
        variadic = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        more = part.pop(variadic, {})
        output = self._forward(**{**part, **more, self._cache: cache})
        if len(set(cache.updated)) != len(cache.updated):
            raise Unsupported(f"its layer {self.name} sets a state twice")
        if states is None:
            self.shapes = {key: StateShape(tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()}
        else:
            states.scatter(cache.states, group.rows, group.ends)
        return output


def _drop_limit(module: Any) -> bool:
    """Removes the limits of Mamba 2's time steps, which `transformers` applies to prompts and not to single tokens: the state
    would depend on how a request is computed."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return False
    module.time_step_limit = (0.0, math.inf)
    return True


def _take(group: TokenGroup, value: Any, size: int) -> Any:
    """Returns the group's part of an argument, if that has the tokens of the step."""
    is_packed = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, size)
    return group.take(value) if is_packed else value


def _packed(outputs: list[tuple[TokenGroup, Any]]) -> Any:
    """Returns the outputs in packed order. What has no tokens is None."""
    groups = [group for group, _ in outputs]
    size = sum(len(group.rows) * group.count for group in groups)
    flat = [tree_flatten(output)[0] for _, output in outputs]
    structure = tree_flatten(outputs[0][1])[1]
    return tree_unflatten([_merged(groups, parts, size) for parts in zip(*flat, strict=True)], structure)


def _merged(groups: list[TokenGroup], parts: tuple[Any, ...], size: int) -> Tensor | None:
    pairs = list(zip(groups, parts, strict=True))
    if not all(isinstance(part, Tensor) and part.shape[:2] == (len(group.rows), group.count) for group, part in pairs):
        return None
    packed: Tensor = parts[0].new_empty((1, size, *parts[0].shape[2:]))
    for group, part in pairs:
        packed[0, group.tokens] = part.reshape(-1, *part.shape[2:])
    return packed


class Mixers:
    """The layers with states of one model part."""

    def __init__(self, model: nn.Module) -> None:
        """Replaces their forward passes. Raises Unsupported."""
        self.mixers: list[Mixer] = []
        self.states: RowStates | None = None
        """Of the rows, after `reserve`."""
        self.records = False
        """Whether layers keep a `sample` of their calls."""
        self._groups: dict[bool, list[TokenGroup]] | None = None
        for name, module in model.named_modules():  # a layer before its parts, which get its cache
            if has_state(module) and not any(name.startswith(f"{outer.name}.") for outer in self.mixers):
                mixer = Mixer(name, module)
                module.forward = self._wrap(mixer, module.forward)
                self.mixers.append(mixer)

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one row."""
        return sum(part.num_bytes for mixer in self.mixers for part in mixer.shapes.values())

    def reserve(self, num_rows: int, device: torch.device, num_snapshots: int = 0) -> None:
        """Allocates the states of rows, of the shapes that a forward pass has shown, and of snapshots."""
        shapes = {key: part for mixer in self.mixers for key, part in mixer.shapes.items()}
        self.states = RowStates(shapes, num_rows, device, num_snapshots) if shapes else None

    @contextmanager
    def step(self, rows: StepRows | None) -> Iterator[None]:
        """Computes the layers for these rows. Without any they have the model's own forward pass, without a cache."""
        if rows is None or not self.mixers:
            yield
            return
        if self.states is not None:
            self.states.begin(rows)
        self._groups = {takes_chunks: divide_step(rows, takes_chunks) for takes_chunks in (False, True)}
        try:
            yield
        finally:
            self._groups = None

    def _wrap(self, mixer: Mixer, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **options: Any) -> Any:
            if self._groups is None:
                return forward(*args, **options)
            output = mixer.compute(self._groups[mixer.takes_chunks], self.states, args, options)
            if self.records:
                mixer.sample = (args, options, output)
            return output

        return compute


@runtime_checkable
class StatefulModel(Protocol):
    """A model that may have layers with states."""

    @property
    def mixers(self) -> Mixers:
        """These layers."""
        ...


def mixers_of(model: object) -> Mixers | None:
    """Returns the layers with states of a model, if it has any."""
    return model.mixers if isinstance(model, StatefulModel) and model.mixers.mixers else None


def states_of(model: object) -> RowStates | None:
    """Returns the states of a model's rows, if it has any."""
    mixers = mixers_of(model)
    return None if mixers is None else mixers.states


def discard_step(model: object) -> None:
    """Drops what the latest step has written to states, if the model has any: its plan is taken back."""
    states = states_of(model)
    if states is not None:
        states.discard()
