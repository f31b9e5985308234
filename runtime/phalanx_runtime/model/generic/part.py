"""Part of a `transformers` model that one pipeline stage computes.

The model's own code runs in every stage. Placeholders replace the layers of other stages, which preserves layer numbers. The
stage's first layer receives the hidden states of the previous stage instead of the model's embeddings; after the last layer an
exception leaves the model. `check` verifies that layers exchange only hidden states.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.partition import Stage

_NAME = "hidden_states"


class _Left(Exception):
    """Leaves the model after the stage's last layer."""

    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__("the stage ends here")
        self.args_of_next = args
        self.options_of_next = options


class _Elsewhere(nn.Module):
    """Placeholder of another stage's layer: returns its input as the model's layers do, plain or in a tuple."""

    def __init__(self, layer: nn.Module, leaves: bool) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}
        self.__dict__.update(plain)  # attributes that the model reads from its layers, such as their attention type
        self._leaves = leaves
        self.gives_tuple = False

    def forward(self, *args: Any, **options: Any) -> object:
        """Returns the hidden states unchanged; raises _Left where the stage ends."""
        if self._leaves:
            raise _Left(args, options)
        hidden = args[0] if args else options.get(_NAME)
        return (hidden,) if self.gives_tuple else hidden


class Part:
    """Layers of one stage, with the model's code before them in the first stage and after them in the last."""

    def __init__(self, model: Any, stage: Stage, width: int) -> None:
        """The model may be on the meta device. Raises ModelError when its layers are not one list."""
        self.model = model
        self.stage = stage
        self.width = width
        self.unread: frozenset[str] = frozenset()
        """Parameters that the stage does not use."""
        self.others: list[Tensor] = []
        """Inputs other than hidden states of the layer after the stage, in the last forward pass."""
        self._before: Tensor | None = None
        self._places: list[_Elsewhere] = []
        if stage.count > 1:
            self._cut(_layers_of(model))

    def forward(
        self, tokens: Tensor, positions: Tensor | None, before: Tensor | None = None, embeds: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Logits of the packed tokens, [tokens kept, vocabulary]; hidden states in stages other than the last.

        positions: None lets the model number the tokens. before: [tokens, width], from the previous stage. embeds: replacement
        for the token embeddings then, which must only affect the first stage. Raises Unsupported.
        """
        if positions is not None:
            options["position_ids"] = positions[None]
        if before is None:
            options["input_ids"] = tokens[None]
        else:
            self._before = before[None]
            options["inputs_embeds"] = (before if embeds is None else embeds)[None]
        try:
            out: Tensor = self.model(use_cache=False, return_dict=True, **options).logits
        except _Left as left:
            out = self._checked(left.args_of_next, left.options_of_next, len(tokens))
            told = (left.args_of_next[1:], {name: value for name, value in left.options_of_next.items() if name != _NAME})
            self.others = [leaf for leaf in tree_leaves(told) if isinstance(leaf, Tensor)]
        return out[0]

    def give_tuples(self) -> None:
        """Makes placeholders return tuples."""
        for place in self._places:
            place.gives_tuple = True

    def _cut(self, layers: nn.ModuleList) -> None:
        own = self.stage.layers(len(layers))
        self.unread = _unread(self.model, self.stage)
        for index in (*range(own.start), *range(own.stop, len(layers))):
            place = _Elsewhere(layers[index], leaves=index == own.stop)
            layers[index] = place
            self._places.append(place)
        if own.start:
            layers[own.start].register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Passes the previous stage's hidden states to the stage's first layer."""
        assert self._before is not None, "forward keeps it"
        self._checked(args, options, self._before.shape[1])
        return ((self._before, *args[1:]), options) if args else (args, {**options, _NAME: self._before})

    def _checked(self, args: tuple[Any, ...], options: dict[str, Any], count: int) -> Tensor:
        """The hidden states among a layer's inputs. Raises Unsupported."""
        hidden = args[0] if args else options.get(_NAME)
        if not isinstance(hidden, Tensor) or hidden.shape != (1, count, self.width):
            raise Unsupported("pipeline parallel: its layers hand on something else than hidden states")
        return hidden


def _layers_of(model: Any) -> nn.ModuleList:
    """The model's list of layers: the only one with the length in its config."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    inside: set[str] = set()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.add(name)
            found += [module] if len(module) == count else []
    if len(found) != 1:
        raise ModelError(f"pipeline parallel: the model's {count} layers are not one list that can be cut; use one stage")
    return found[0]


def _unread(model: Any, stage: Stage) -> frozenset[str]:
    """Parameters that the stage does not use: the embedding outside the first stage, the head outside the last.

    Both stages read a tied table."""
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # every stage reads all parameters
        return frozenset()
    unread = set()
    if not stage.is_first:
        unread |= _names(model, first)
    if not stage.is_last:
        unread |= _names(model, last)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if stage.is_last:
        unread -= {name for pair in tied.items() for name in pair}
    return frozenset(unread)


def _names(model: nn.Module, part: nn.Module | None) -> set[str]:
    """Names of a module's parameters within the model."""
    if part is None:
        return set()
    inner = [name for name, module in model.named_modules(remove_duplicate=False) if module is part]
    return {f"{name}.{leaf}" for name in inner for leaf, _ in part.named_parameters(recurse=True)}
