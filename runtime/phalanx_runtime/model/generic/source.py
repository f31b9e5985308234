"""A model folder that `transformers` computes with paged attention, and this rank's part of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import Attention, LayerCache, StepBatch
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.config import stored_dtype
from phalanx_runtime.model.generic.check import probe
from phalanx_runtime.model.generic.layers import Call, PagedAnswer, answered_by, layout_of, register
from phalanx_runtime.model.generic.load import fill, make_empty
from phalanx_runtime.model.generic.part import Part
from phalanx_runtime.model.generic.split import Splitter
from phalanx_runtime.model.partition import WHOLE, Span, Stage, cut_evenly
from phalanx_runtime.model.protocol import Form, Model
from phalanx_runtime.model.rope import Json
from phalanx_runtime.model.weights import Checkpoint

STRETCHING = ("dynamic", "longrope")
"""Rotary embeddings that change all keys when a request exceeds the original position range."""


@dataclass(frozen=True, slots=True)
class GenericSource:
    """A checkpoint of an architecture in `transformers`."""

    folder: Path
    config: Any
    dtype: str
    max_position: int

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Returns 0: all linears are torch's, so their weights have no packed layout."""
        return 0

    def load(self, collective: Collective, form: Form, attention: Attention | None = None, stage: Stage = WHOLE) -> Model:
        """This rank's part of the model, checked on a few tokens. Raises ModelError with the reason if it is unsupported."""
        if form.positions > self.max_position:
            raise ModelError(f"max_model_len {form.positions} is more than the {self.max_position} positions of the model")
        if form.kernels.precision == "int8":
            raise ModelError("quantization int8 is for models of the fused decoder only")
        register()
        model = make_empty(self.config, form.dtype, "eager" if form.device.type == "cpu" else None)
        text = self.config.get_text_config()
        part = Part(model, stage, int(getattr(text, "hidden_size", None) or text.vocab_size))
        splitter = None
        if collective.world_size > 1:
            splitter = Splitter(model, getattr(model, "_tp_plan", None) or {}, _kv_heads(text), collective)
            splitter.split()
        with Checkpoint(self.folder, form.dtype, form.device) as checkpoint:
            num_bytes = fill(model, checkpoint, splitter.cuts if splitter else {}, part.unread)
        for name in splitter.zeroed if splitter else ():
            model.get_parameter(name).zero_()
        calls = probe(part, form.positions, int(text.vocab_size), form.device, form.dtype, whole=collective.world_size == 1)
        return GenericModel(
            part,
            calls,
            positions=form.positions,
            num_bytes=num_bytes,
            collective=collective,
            attention=attention or choose_attention(form.device),
        )


class GenericModel:
    """One rank's part of a `transformers` model."""

    def __init__(
        self, part: Part, calls: list[Call], positions: int, num_bytes: int, collective: Collective, attention: Attention
    ) -> None:
        self.kv = layout_of(calls)
        self.positions = positions
        self.num_bytes = num_bytes
        self.vocab_size = int(part.model.config.get_text_config().vocab_size)
        self.width = part.width
        self._part = part
        self._calls = calls
        self._attention = attention
        self._span: Span = cut_evenly(self.vocab_size, collective.world_size)[collective.rank]

    def hidden(self, batch: StepBatch, caches: list[LayerCache], before: Tensor | None = None) -> Tensor:
        """Logits at the batch's `drawn` tokens over the whole vocabulary; hidden states of all tokens before the last stage.

        Writes the step's keys and values.
        """
        answer = PagedAnswer(self._calls, self.kv, self._attention, batch, caches)
        with answered_by(answer):
            scores = self._part.forward(batch.tokens, batch.positions, before, logits_to_keep=batch.drawn)
        answer.check_complete()
        if not self._part.stage.is_last:
            return scores
        return scores if len(scores) == len(batch.drawn) else scores.index_select(0, batch.drawn)

    def scores(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits: the model gathers them on every rank."""
        return hidden[:, self._span.start : self._span.stop]


def open_generic(folder: Path, raw: Json) -> GenericSource:
    """Opens the model in this folder. Raises ModelError, with the reason, when `transformers` cannot create it."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"this architecture needs transformers, which cannot be imported: {error}") from error
    if raw.get("auto_map"):
        raise Unsupported("the checkpoint brings code of its own (auto_map), which is never run")
    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"transformers does not know this model: {' '.join(str(error).split())}") from error
    check_config(config)
    return GenericSource(folder, config, stored_dtype(raw), _max_position(config.get_text_config()))


def check_config(config: Any) -> None:
    """Raises Unsupported when the config alone excludes the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"model_type {config.model_type} is no causal language model of transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder-decoder")
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    strange = sorted(kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "chunked_attention"))
    if strange:
        raise Unsupported(f"it has layers of the kind {', '.join(strange)}")


def _max_position(text: Any) -> int:
    """Range of positions in which the model's rotary embedding does not change."""
    longest = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 0)
    longest = longest if longest > 0 else 2048
    rope = getattr(text, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in STRETCHING:
        longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _kv_heads(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError("tensor parallel: the model's layers have KV heads of their own; use --tensor-parallel-size 1")
    return heads
