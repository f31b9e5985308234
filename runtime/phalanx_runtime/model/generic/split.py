"""Splits a `transformers` model over ranks as its `tp_plan` says, and layers with states as `mixer_cuts` says.

Dimensions are cut by KV head, so that query heads stay with theirs; equal dimensions are cut equally.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic.mixer_cuts import MixerCut, cut_mixer, norm_over_ranks
from phalanx_runtime.model.partition import Span, cut_evenly

STYLES = {
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_split_input",
    "rowwise_rep",
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "replicate",
    "mla_kv_a_proj",
    "local_params",
}
"""The last four do not change a module."""
Placements = list[tuple[Span, int]]
"""Parts of a matrix with their offsets in the loaded tensor."""


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's spans along one dimension."""

    dim: int
    spans: tuple[Span, ...]

    def apply(self, tensor: Any) -> Tensor:
        """Cuts a tensor or file slice. Only `dim` changes in shape."""
        whole = (slice(None),) * (self.dim % len(_shape(tensor)))
        parts = [tensor[(*whole, slice(span.start, span.stop))] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def intersect_spans(spans: Sequence[Span], start: int, stop: int) -> Placements:
    """Returns the parts in [start, stop), relative to `start`, with offsets in the joined spans."""
    placements, offset = [], 0
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low < high:
            placements.append((Span(low - start, high - start), offset + low - span.start))
        offset += span.size
    return placements


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())


class Splitter:
    """Splits a model on the meta device by hooks in its modules."""

    def __init__(
        self, model: nn.Module, plan: Mapping[str, str], kv_heads: int, collective: Collective, mixers: Collection[str] = ()
    ) -> None:
        """`mixers`: names of the layers with states; of the plan, only embeddings apply to these. Raises ModelError."""
        self._plan, self._mixers = plan, mixers
        if not plan and not mixers:
            raise ModelError("tensor parallel: transformers has no plan for this model; use --tensor-parallel-size 1")
        if collective.world_size > kv_heads:
            raise ModelError(f"tensor-parallel size {collective.world_size} is more than the model's {kv_heads} KV heads")
        names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
        unknown = sorted({style for name in names if (style := self._style(name))} - STYLES)
        if unknown:
            raise ModelError(f"tensor parallel: the model's plan has unsupported styles: {', '.join(unknown)}")
        self.cuts: dict[str, Cut] = {}
        """By parameter."""
        self.zeroed: list[str] = []
        """Parameters to set to zero on this rank."""
        self.whole: list[str] = []
        """Layers with states that each rank computes whole."""
        self._model = model
        self._kv_heads = kv_heads
        self._collective = collective

    def split(self) -> None:
        """Installs the hooks and computes `cuts`, `zeroed` and `whole`."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name in self._mixers:
            cut = cut_mixer(self._model.get_submodule(name), self._collective.rank, self._collective.world_size)
            if cut is None:
                self.whole.append(name)
            else:
                self._split_mixer(name, cut)
        for name, module in self._model.named_modules():
            if style := self._style(name):
                self._split_module(name, module, style)
        for name, parameter in parameters.items():
            if style := self._style(name):
                dim = -1 if style in ("rowwise", "packed_rowwise") else _output_dim(parameter)
                self._cut(name, parameter, dim, 2 if style.startswith("packed_") else 1)

    def _style(self, name: str) -> str | None:
        style = self._plan.get(name) or self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        is_applied = style == "embedding_colwise" or not any(name.startswith(f"{mixer}.") for mixer in self._mixers)
        return style if is_applied else None

    def _split_module(self, name: str, module: nn.Module, style: str) -> None:
        collective = self._collective
        match style:
            case "colwise" | "colwise_gather_output" | "colwise_rep" | "packed_colwise":
                for part, parameter in module.named_parameters(recurse=False):
                    self._cut(f"{name}.{part}", parameter, _output_dim(parameter), 2 if style == "packed_colwise" else 1)
                if style.startswith("colwise_"):
                    module.register_forward_hook(lambda _, args, out: collective.all_gather(out.contiguous(), -1))
            case "rowwise" | "rowwise_split_input" | "rowwise_rep":
                self._split_rows(name, module, splits_input=style != "rowwise")
            case "packed_rowwise":
                self._split_rows(name, module, splits_input=False, num_matrices=2)
            case "moe_tp_experts":
                module.register_forward_hook(lambda _, args, out: collective.all_reduce(out.contiguous()))
            case "embedding_rowwise":
                self._split_embedding(name, module)
            case "embedding_colwise":
                self._cut(f"{name}.weight", module.get_parameter("weight"), -1, 1)
                module.register_forward_hook(lambda _, args, out: collective.all_gather(out.contiguous(), -1))
            case _:
                pass

    def _split_mixer(self, name: str, cut: MixerCut) -> None:
        """Cuts the parameters and buffers of a layer with states, and sets the sizes of this rank's part."""
        module = self._model.get_submodule(name)
        for path, parameter in module.named_parameters():
            spans = cut.rows.get(path) or cut.rows.get(path.rpartition(".")[0])
            if spans is not None:
                dim = next(dim for dim, size in enumerate(parameter.shape) if size > 1)
                self.cuts[f"{name}.{path}"] = Cut(dim, spans)
        for part, span in cut.inputs.items():
            if (linear := getattr(module, part, None)) is not None:
                self._split_rows(f"{name}.{part}", linear, splits_input=False, span=span)
        for buffer, spans in cut.vectors.items():
            if hasattr(module, buffer):
                setattr(module, buffer, Cut(-1, spans).apply(getattr(module, buffer)))
        for attribute, number in cut.numbers.items():
            path, _, leaf = attribute.rpartition(".")
            owner = getattr(module, path, None) if path else module
            if hasattr(owner, leaf):
                setattr(owner, leaf, number)
        if cut.norm_group is not None:
            norm = module.get_submodule("norm")
            norm.forward = norm_over_ranks(norm, cut.norm_group, self._collective.all_reduce)

    def _split_rows(
        self, name: str, module: nn.Module, *, splits_input: bool, span: Span | None = None, num_matrices: int = 1
    ) -> None:
        """Cuts input columns, of each of `num_matrices` by default evenly; rank 0 adds the bias."""
        collective = self._collective
        weight = module.get_parameter("weight")
        cut = self._cut(f"{name}.weight", weight, -1, num_matrices) if span is None else Cut(-1, (span,))
        self.cuts[f"{name}.weight"] = cut
        if splits_input:
            span = cut.spans[0]
            module.register_forward_pre_hook(lambda _, args: (args[0][..., span.start : span.stop], *args[1:]))
        if getattr(module, "bias", None) is not None and collective.rank:
            self.zeroed.append(f"{name}.bias")
        module.register_forward_hook(lambda _, args, out: collective.all_reduce(out.contiguous()))

    def _split_embedding(self, name: str, module: nn.Module) -> None:
        """Cuts rows; other ranks' tokens give zeros."""
        collective = self._collective
        span = self._cut(f"{name}.weight", module.get_parameter("weight"), 0, 1).spans[0]
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # for training; may belong to another rank

        def lookup(inner: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
            local = tokens - span.start
            is_remote = (local < 0) | (local >= span.size)
            rows = inner(local.masked_fill(is_remote, 0)).masked_fill(is_remote.unsqueeze(-1), 0)
            return collective.all_reduce(rows.contiguous())

        inner = module.forward
        module.forward = lambda tokens: lookup(inner, tokens)

    def _cut(self, name: str, parameter: Tensor, dim: int, num_matrices: int) -> Cut:
        size = parameter.shape[dim] // num_matrices
        span = self._span(size)
        cut = Cut(dim, tuple(Span(size * i + span.start, size * i + span.stop) for i in range(num_matrices)))
        self.cuts[name] = cut
        return cut

    def _span(self, size: int) -> Span:
        world_size, rank = self._collective.world_size, self._collective.rank
        if size % self._kv_heads:
            return cut_evenly(size, world_size)[rank]
        unit, heads = size // self._kv_heads, cut_evenly(self._kv_heads, world_size)[rank]
        return Span(heads.start * unit, heads.stop * unit)


def _output_dim(parameter: Tensor) -> int:
    """Of a matrix or a stack of experts."""
    return 0 if parameter.ndim < 3 else parameter.ndim - 2
