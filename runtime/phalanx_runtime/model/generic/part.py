"""One pipeline stage of a `transformers` model.

The model's own code runs, with placeholders for layers of other stages. The first layer receives the previous stage's hidden
states; an exception exits after the last.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.generic.families import NO_NEEDS, FamilyNeeds
from phalanx_runtime.model.partition import Span, Stage
from phalanx_runtime.model.states.mixers import Mixers
from phalanx_runtime.model.states.step import StepRows

_NAME = "hidden_states"
_INDEXER_KINDS = "indexer_types"
"""Field of configs, by layer: whether it chooses keys itself."""


class _StageExit(Exception):
    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__("the stage ends here")
        self.next_args = args
        self.next_options = options


class _Placeholder(nn.Module):
    """Replaces another stage's layer; returns its input, in a pair if layers return tuples."""

    def __init__(self, layer: nn.Module, is_exit: bool) -> None:
        super().__init__()
        attributes = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}
        self.__dict__.update(attributes)  # models read some, such as the attention type
        self._is_exit = is_exit
        self.returns_tuple = False

    def forward(self, *args: Any, **options: Any) -> object:
        if self._is_exit:
            raise _StageExit(args, options)
        hidden = args[0] if args else options.get(_NAME)
        return (hidden, None) if self.returns_tuple else hidden


class Part:
    """The computation of one stage."""

    def __init__(self, model: Any, stage: Stage, width: int, needs: FamilyNeeds = NO_NEEDS) -> None:
        """Raises ModelError for a model without a single list of layers, and Unsupported."""
        self.model = model
        self.stage = stage
        self.width = width
        self.first_position = needs.first_position(model.config.get_text_config())
        self.implementation = needs.implementation
        """Of attention in `transformers`, within steps."""
        self.unused: frozenset[str] = frozenset()
        """Parameters of other stages."""
        self.other_inputs: list[Tensor] = []
        """Other inputs of the next stage in the last forward pass."""
        self.hidden: Tensor | None = None
        """[tokens, hidden] after the final norm, in the last forward pass with `keeps_hidden`."""
        self.keeps_hidden = False
        self._slices_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._positions: Tensor | None = None
        self._stage_input: Tensor | None = None
        self._placeholders: list[_Placeholder] = []
        if stage.count > 1:
            self._replace_layers(_layers_of(model))
        self.mixers = Mixers(model)
        """Its layers with a state per request."""
        for module in model.modules():
            if type(module).__name__ == needs.positions:
                module.register_forward_pre_hook(self._give_positions, with_kwargs=True)
        if self.has_hidden:
            model.base_model.register_forward_hook(self._keep_hidden)

    @property
    def has_hidden(self) -> bool:
        """Whether the model has a base model, whose output is the input of the head, of the hidden size. Equal on all stages."""
        base = getattr(self.model, "base_model", self.model)
        return base is not self.model and getattr(base.config, "word_embed_proj_dim", self.width) == self.width

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        stage_input: Tensor | None = None,
        embeds: Tensor | None = None,
        rows: StepRows | None = None,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """Returns logits, or hidden states before the last stage. Raises Unsupported.

        `positions`: by default the model's own. `embeds` replaces the unused token embeddings of later stages. `rows`: the
        requests, for layers with states; by default the model computes these layers without any. `logits_indices`: tokens whose
        logits are needed, by default all.
        tokens, positions: [tokens]; stage_input, embeds: [tokens, hidden]. Returns [logits, vocabulary] or [tokens, hidden].
        """
        options: dict[str, Any] = {"logits_to_keep": logits_indices} if logits_indices is not None and self._slices_logits else {}
        self._positions = None if positions is None else positions + self.first_position
        if self._positions is not None:
            options["position_ids"] = self._positions[None]
        if stage_input is None:
            options["input_ids"] = tokens[None]
        else:
            self._stage_input = stage_input[None]
            options["inputs_embeds"] = (stage_input if embeds is None else embeds)[None].clone()  # some models scale it in place
        try:
            with self.mixers.step(rows):
                out: Tensor = self.model(use_cache=False, return_dict=True, **options).logits
        except _StageExit as stage_exit:
            out = self._hidden_of(stage_exit.next_args, stage_exit.next_options, len(tokens))
            options = {name: value for name, value in stage_exit.next_options.items() if name != _NAME}
            self.other_inputs = [leaf for leaf in tree_leaves((stage_exit.next_args[1:], options)) if isinstance(leaf, Tensor)]
            return out[0]
        return out[0] if logits_indices is None or self._slices_logits else out[0].index_select(0, logits_indices)

    def _give_positions(self, _: nn.Module, args: object, options: dict[str, Any]) -> tuple[object, dict[str, Any]] | None:
        return None if self._positions is None else (args, {**options, "position_ids": self._positions})

    def _keep_hidden(self, _: nn.Module, args: object, output: Any) -> None:
        self.hidden = output.last_hidden_state[0] if self.keeps_hidden else None

    def return_tuples(self) -> None:
        """Makes placeholders return tuples."""
        for placeholder in self._placeholders:
            placeholder.returns_tuple = True

    def _replace_layers(self, layers: nn.ModuleList) -> None:
        span = stage_layers(self.stage, len(layers), getattr(self.model.config.get_text_config(), _INDEXER_KINDS, None) or ())
        self.unused = _unused_parameters(self.model, self.stage)
        for index in (*range(span.start), *range(span.stop, len(layers))):
            placeholder = _Placeholder(layers[index], is_exit=index == span.stop)
            layers[index] = placeholder
            self._placeholders.append(placeholder)
        if span.start:
            layers[span.start].register_forward_pre_hook(self._inject_hidden, with_kwargs=True)

    def _inject_hidden(
        self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._stage_input is not None, "set by forward"
        self._hidden_of(args, options, self._stage_input.shape[1])
        return ((self._stage_input, *args[1:]), options) if args else (args, {**options, _NAME: self._stage_input})

    def _hidden_of(self, args: tuple[Any, ...], options: dict[str, Any], count: int) -> Tensor:
        """Returns the hidden states of a layer's inputs. Raises Unsupported."""
        hidden = args[0] if args else options.get(_NAME)
        if not isinstance(hidden, Tensor) or hidden.shape != (1, count, self.width):
            raise Unsupported("pipeline parallel: its layers do not pass hidden states")
        return hidden


def stage_layers(stage: Stage, count: int, indexer_kinds: Sequence[str] = ()) -> Span:
    """Returns the layers of a stage. Each begins where it would otherwise, or at the nearest layer with keys of its own choice.

    indexer_kinds: by layer; "shared" ones use the choice of an earlier layer. Raises ModelError.
    """
    if indexer_kinds and indexer_kinds[0] == "shared":
        raise ModelError(
            f"config.json: {_INDEXER_KINDS} begins with shared, and there is no earlier layer with keys of its own choice"
        )
    starts = [Stage(index, stage.count).layers(count).start for index in range(stage.count)]
    possible = [index for index in range(count) if index >= len(indexer_kinds) or indexer_kinds[index] != "shared"]
    aligned = [min(possible, key=lambda layer: abs(layer - start)) for start in starts] + [count]
    if len(set(aligned)) <= stage.count:
        raise ModelError(f"pipeline-parallel size {stage.count}: stages begin at layers that choose keys, here {possible}")
    return Span(aligned[stage.index], aligned[stage.index + 1])


def _layers_of(model: Any) -> nn.ModuleList:
    """Returns the only list with the number of layers in the config, of the decoder if the model has encoders of pictures."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = _lists_in(model, count)
    if len(lists) > 1 and hasattr(model, "get_decoder"):
        lists = _lists_in(model.get_decoder(), count)
    if len(lists) != 1:
        raise ModelError(f"pipeline parallel: the model's {count} layers are not one list; use one stage")
    return lists[0]


def _lists_in(module: nn.Module, count: int | None) -> list[nn.ModuleList]:
    """Returns the outermost lists of `count` modules."""
    outer_names: set[str] = set()
    lists = []
    for name, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in outer_names):
            outer_names.add(name)
            lists += [inner] if len(inner) == count else []
    return lists


def _unused_parameters(model: Any, stage: Stage) -> frozenset[str]:
    """Embedding after the first stage and head before the last; both need a tied table."""
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # each stage loads all
        return frozenset()
    unused = set()
    if not stage.is_first:
        unused |= _parameter_names(model, first)
    if not stage.is_last:
        unused |= _parameter_names(model, last)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if stage.is_last:
        unused -= {name for pair in tied.items() for name in pair}
    return frozenset(unused)


def _parameter_names(model: nn.Module, part: nn.Module | None) -> set[str]:
    if part is None:
        return set()
    paths = [name for name, module in model.named_modules(remove_duplicate=False) if module is part]
    return {f"{path}.{leaf}" for path in paths for leaf, _ in part.named_parameters(recurse=True)}
