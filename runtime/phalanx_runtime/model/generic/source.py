"""Models of `transformers` with paged attention."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.encoders import is_classifier
from phalanx_runtime.checkpoint.quantization import GgufScheme, Scheme, parse_quantization
from phalanx_runtime.checkpoint.schemes.tables import TableScheme
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.config import stored_dtype
from phalanx_runtime.model.generic.check import probe
from phalanx_runtime.model.generic.families import FamilyNeeds, needs_of
from phalanx_runtime.model.generic.latent import keep_latents, release_projections
from phalanx_runtime.model.generic.layers import (
    AttentionCall,
    PagedHandler,
    handle_calls,
    kv_layout,
    register,
    running_handler,
)
from phalanx_runtime.model.generic.load import load_parameters, make_empty_model, model_maker
from phalanx_runtime.model.generic.part import Part
from phalanx_runtime.model.generic.split import Cut, Splitter
from phalanx_runtime.model.generic.stored import StoredWeights
from phalanx_runtime.model.partition import WHOLE, Span, Stage, cut_evenly
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.rope import Json
from phalanx_runtime.model.stored.matrices import check_scheme
from phalanx_runtime.model.weights import Checkpoint, weights_dtype

log = logging.getLogger(__name__)

_LAYER_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
_STATE_KINDS = {"conv", "linear_attention"}
_LAYER_KINDS |= _STATE_KINDS | {"hybrid", "hybrid_sliding"}  # with a state per request
_STATES_POSITION = 1 << 17
"""Maximum request length of a model without attention, which limits none."""
_DYNAMIC_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that change all keys of requests beyond the original range."""


@dataclass(frozen=True, slots=True)
class GenericFolder:
    """`ModelFolder` of an architecture in `transformers`."""

    folder: Path
    config: Any
    dtype: str
    max_position: int
    scheme: Scheme | None = None
    """How the weights are quantised, if they are."""
    has_latents: bool = True
    """Pages have latents in place of the keys and values of all heads, in models that have some."""

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Returns 0: no packed layouts."""
        return 0

    def _limit(self, selected: str | None) -> str:
        """Returns what limits requests. selected: the fields with the number of keys that a query selects, if that does."""
        if selected is None:
            return f"{self.max_position} positions of the model"
        return f"{self.max_position} keys that a query selects ({selected}), and the runtime chooses none"

    def _check(self, options: LoadOptions, needs: FamilyNeeds) -> None:
        """Raises ModelError for options that the model does not support; logs what limits requests, and the quantisation."""
        is_selection = needs.num_selected(self.config.get_text_config()) == self.max_position
        limit = self._limit(needs.selected.fields if needs.selected is not None and is_selection else None)
        if options.positions > self.max_position:
            raise ModelError(f"max_model_len {options.positions} is more than the {limit}")
        if is_selection:
            log.warning("the runtime does not choose keys: requests are limited", extra={"limit": limit})
        if options.kernels.precision != "bf16" and self.scheme is None:
            raise ModelError(f"quantization {options.kernels.precision} is for models of the fused decoder only")
        if options.max_loras:
            raise ModelError("--enable-lora: adapters are for models of the fused decoder only (docs/architectures.md)")
        if self.scheme is not None:
            check_scheme(self.scheme, options.kernels, options.dtype, options.device)

    def load(
        self, collective: Collective, options: LoadOptions, attention: Attention | None = None, stage: Stage = WHOLE
    ) -> Model:
        """See `ModelFolder`. Checks the model on a few tokens."""
        text = self.config.get_text_config()
        needs = needs_of(text)
        self._check(options, needs)
        register()
        is_eager = options.device.type == "cpu" or self.scheme is not None
        model = make_empty_model(self.config, options.dtype, "eager" if is_eager else None)
        needs.adapt(model)
        width = int(getattr(text, "hidden_size", None) or text.vocab_size)
        part = Part(model, stage, width, needs)
        own_plan = keep_latents(model, lambda: running_handler() is not None) if self.has_latents else {}
        cuts, zeroed = _split(part, own_plan, needs, collective) if collective.world_size > 1 else ({}, [])
        with Checkpoint(self.folder, options.dtype, options.device, progress=options.progress) as checkpoint:
            stored = None if self.scheme is None else StoredWeights(checkpoint, self.scheme, options.kernels)
            num_bytes = load_parameters(model, checkpoint, cuts, part.unused, stored)
        for name in zeroed:
            model.get_parameter(name).zero_()
        calls = probe(
            part,
            options.positions,
            int(text.vocab_size),
            device=options.device,
            dtype=options.dtype,
            own_attention=needs.own_attention if collective.world_size == 1 else None,
            peers=collective,
        )
        if options.device.type == "cuda" and any(call.has_slopes or call.block or call.is_latent for call in calls):
            log.warning(
                "torch computes attention with slopes (ALiBi), in blocks of tokens or over latents: the GPU kernels do not"
            )
        release_projections(model)
        return GenericModel(
            part,
            calls,
            positions=options.positions,
            num_bytes=num_bytes,
            collective=collective,
            attention=attention or choose_attention(options.device),
        )


def _split(
    part: Part, own_plan: Mapping[str, str], needs: FamilyNeeds, collective: Collective
) -> tuple[dict[str, Cut], list[str]]:
    """Splits the model over ranks by its plan, completed by `own_plan`. Returns the cuts, and the parameters to set to zero."""
    plan = dict(getattr(part.model, "_tp_plan", None) or {})
    plan = plan and {**plan, **own_plan}
    plan |= {f"{part.model.base_model_prefix}.{name}": style for name, style in needs.plan.items()}
    mixers = [mixer.name for mixer in part.mixers.mixers]
    kv_heads = _kv_heads(part.model.config.get_text_config()) if plan or not mixers else collective.world_size
    splitter = Splitter(part.model, plan, kv_heads, collective, mixers)
    splitter.split()
    if splitter.whole:
        log.warning("each rank computes whole layers with a state per request", extra={"layers": splitter.whole})
    return splitter.cuts, splitter.zeroed


class GenericModel:
    """One rank's `Model` in `transformers`."""

    def __init__(
        self, part: Part, calls: list[AttentionCall], positions: int, num_bytes: int, collective: Collective, attention: Attention
    ) -> None:
        self.kv = kv_layout(calls)
        self.positions = positions
        self.num_bytes = num_bytes
        self.vocab_size = int(part.model.config.get_text_config().vocab_size)
        self.width = part.width
        self.embedding_size = part.width if part.has_hidden else 0
        self._pooled = torch.empty(0)
        self._part, self.mixers = part, part.mixers
        self._calls = calls
        self._attention = attention
        self._span: Span = cut_evenly(self.vocab_size, collective.world_size)[collective.rank]

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        """See `Model`. The last stage returns logits of the whole vocabulary, without rows for pooled tokens."""
        handler = PagedHandler(self._calls, self.kv, self._attention, batch, caches)
        num_logits = len(batch.logits_indices) - batch.num_pooled
        indices, pooled = batch.logits_indices[:num_logits], batch.logits_indices[num_logits:]
        self._part.keeps_hidden = bool(batch.num_pooled)
        with handle_calls(handler):
            output = self._part.forward(batch.tokens, batch.positions, stage_input, rows=batch.rows, logits_indices=indices)
        handler.check_complete()
        if not self._part.stage.is_last:
            return output
        if batch.num_pooled:
            assert self._part.hidden is not None, "the base model returned its output"
            self._pooled, self._part.hidden = self._part.hidden.index_select(0, pooled), None
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`. `hidden` has the logits of all ranks."""
        return hidden[:, self._span.start : self._span.stop]

    def pooled_states(self, hidden: Tensor) -> Tensor:
        """See `Model`. They were kept by `hidden`, which returned logits."""
        return self._pooled


def open_generic(folder: Path, raw: Json) -> GenericFolder:
    """Opens the folder. Raises ModelError."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"this architecture needs transformers, which cannot be imported: {error}") from error
    if is_classifier(raw):
        raise Unsupported("its classification head: only the fused decoder computes classes (docs/embeddings.md)")
    inner = raw.get("text_config")
    scheme = parse_quantization(raw) or parse_quantization(inner if isinstance(inner, dict) else {})
    if isinstance(scheme, GgufScheme):
        if raw.get("model_type") == "gpt_oss":
            raise Unsupported("only the fused decoder reads gpt-oss from a GGUF file: convert the file (docs/models.md)")
        log.info("GGUF file", extra={"scheme": scheme.name, "loaded_as": "dequantised"})
        scheme = None  # the checkpoint dequantises what is read
    if isinstance(scheme, TableScheme) and scheme.layout == "mxfp4":
        raise Unsupported(f"quantization_config: only the fused decoder loads {scheme.name}")
    if raw.get("auto_map") and raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise Unsupported("transformers has no class for it, and the code of the checkpoint (auto_map) is never run")
    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers does not know this model: {' '.join(str(error).split())}") from error
    check_config(config)
    text = config.get_text_config()
    dtype = stored_dtype(raw) or weights_dtype(folder)
    return GenericFolder(folder, config, dtype, needs_of(text).longest(text, _max_position(text)), scheme)


def check_config(config: Any) -> None:
    """Raises Unsupported for an unsupported config."""
    model_maker(config)
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder-decoder")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    unsupported = sorted(kinds - _LAYER_KINDS - {needs_of(text).indexed_kind})
    if unsupported:
        raise Unsupported(f"it has layers of the kind {', '.join(unsupported)}")


def _max_position(text: Any) -> int:
    """Returns the range in which the rotary embedding is constant."""
    longest = int(
        getattr(text, "max_position_embeddings", None)
        or getattr(text, "n_positions", None)
        or getattr(text, "max_seq_len", None)
        or 0
    )
    kinds = set(getattr(text, "layer_types", None) or ())
    longest = longest if longest > 0 else _STATES_POSITION if kinds and kinds <= _STATE_KINDS else 2048
    rope = getattr(text, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in _DYNAMIC_ROPES:
        longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _kv_heads(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError("tensor parallel: the model's layers have KV heads of their own; use --tensor-parallel-size 1")
    return heads
