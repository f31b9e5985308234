"""Opens an encoder of `transformers`, with or without a classification head, and computes whole texts in padded batches.

Attention is bidirectional, and no keys and values are kept.

Its pages have one number a token, which is never read: they only count the tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.encoders import is_classifier
from phalanx_runtime.checkpoint.quantization import NAMES
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import LayerCache, StepBatch
from phalanx_runtime.model.config import read_json, stored_dtype
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.model.weights import weights_dtype

COUNTED = KvLayout(kv_heads=1, head_dims=(1,), windows=(None,))
MAX_PADDING = 0.2
"""Largest share of padding in a batch."""
_PAD_OFFSET = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Positions of these start after that of the padding token."""
_WITHOUT_POOLER = ("albert", "bert", "camembert", "mpnet", "roberta", "xlm-roberta")
"""Their `AutoModel` has a layer for a task of its training, which embeddings do not use."""


def padded_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Cuts sequences into batches of similar lengths. Returns the indices of each, in which padding is at most MAX_PADDING."""
    batches: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        size = len(batches[-1]) + 1 if batches else 0
        if size and total + lengths[index] >= (1 - MAX_PADDING) * size * longest:
            batches[-1].append(index)
            total += lengths[index]
        else:
            batches.append([index])
            longest = total = lengths[index]
    return batches


class EncoderModel:
    """A `Model` for pooled requests, whole on one rank.

    The vector of a request is pooled of its hidden states; with a classification head it is the logits, however it is pooled.
    """

    def __init__(self, model: Any, positions: int, *, is_classifier: bool) -> None:
        self.kv = COUNTED
        self.positions = positions
        self.num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.vocab_size = int(model.config.vocab_size)
        self.width = int(model.config.hidden_size)
        self.embedding_size = int(model.config.num_labels) if is_classifier else self.width
        self._model = model
        self._is_classifier = is_classifier
        self._pad = int(model.config.pad_token_id or 0)
        self._has_types = int(getattr(model.config, "type_vocab_size", None) or 0) > 1

    def hidden(self, batch: StepBatch, caches: list[LayerCache], stage_input: Tensor | None = None) -> Tensor:
        """Returns the rows of the pooled tokens, [n, embedding_size]. `batch` has `sequences`, whole ones."""
        lengths = [length for length, _ in batch.sequences]
        ends = torch.tensor(lengths).cumsum(0)
        texts = torch.split(batch.tokens, lengths)
        outputs = torch.empty(
            (len(lengths) if self._is_classifier else len(batch.tokens), self.embedding_size),
            dtype=self._model.dtype,
            device=batch.tokens.device,
        )
        for indices in padded_batches(lengths):
            computed = self._compute([texts[index] for index in indices], [batch.sequences[index][1] for index in indices])
            for row, index in zip(computed, indices, strict=True):
                end = int(ends[index])
                where = slice(index, index + 1) if self._is_classifier else slice(end - lengths[index], end)
                outputs[where] = row if self._is_classifier else row[: lengths[index]]
        rows = batch.logits_indices
        if self._is_classifier:
            rows = torch.bucketize(rows, ends.to(rows.device), right=True)
        return outputs.index_select(0, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises NotImplementedError: encoders sample no tokens."""
        raise NotImplementedError("encoders sample no tokens")

    def pooled_states(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        return hidden

    def _compute(self, texts: Sequence[Tensor], pair_starts: Sequence[int]) -> Tensor:
        """Returns hidden states, [texts, longest, hidden], or logits, [texts, labels]."""
        tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=self._pad)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = torch.tensor([len(text) for text in texts], device=tokens.device)[:, None]
        inputs = {"input_ids": tokens, "attention_mask": (columns < lengths).long()}
        if self._has_types:
            starts = torch.tensor([start or tokens.shape[1] for start in pair_starts], device=tokens.device)[:, None]
            inputs["token_type_ids"] = ((columns >= starts) & (columns < lengths)).long()
        output = self._model(**inputs, return_dict=True)
        result: Tensor = output.logits if self._is_classifier else output.last_hidden_state
        return result


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    """A parsed folder of an encoder."""

    folder: Path
    config: Any
    dtype: str
    max_position: int
    """Maximum request length."""
    is_classifier: bool

    def load(self, dtype: torch.dtype, device: torch.device) -> EncoderModel:
        """Loads the whole model. Raises ModelError for missing tensors and broken files."""
        import transformers

        messages: Any = transformers.logging
        messages.set_verbosity_error()  # a checkpoint may have a head that embeddings do not use
        messages.disable_progress_bar()
        auto: Any = transformers.AutoModelForSequenceClassification if self.is_classifier else transformers.AutoModel
        options: dict[str, Any] = {}
        if not self.is_classifier and self.config.model_type in _WITHOUT_POOLER:
            options["add_pooling_layer"] = False
        try:
            model, found = auto.from_pretrained(
                self.folder,
                config=self.config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        except Exception as error:
            raise ModelError(f"transformers cannot load the encoder: {' '.join(str(error).split())}") from error
        missing, wrong = sorted(found["missing_keys"]), sorted(map(str, found["mismatched_keys"]))
        if missing or wrong:
            raise ModelError(f"the checkpoint lacks tensors of the encoder, or has them in other shapes: {(missing or wrong)[0]}")
        return EncoderModel(model.to(device).eval(), self.max_position, is_classifier=self.is_classifier)


def open_encoder(folder: Path) -> EncoderFolder:
    """Opens the folder of an encoder, see `checkpoint.encoders`. Raises ModelError."""
    import transformers

    raw = read_json(folder)
    for name in (*NAMES, "auto_map"):
        if raw.get(name):
            raise Unsupported(f"{name}: encoders are loaded as `transformers` defines them, in full precision")
    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"transformers does not know this model: {' '.join(str(error).split())}") from error
    if getattr(config, "is_decoder", False):
        raise Unsupported("is_decoder: an encoder with causal attention")
    longest = int(config.max_position_embeddings)
    if config.model_type in _PAD_OFFSET:
        longest -= int(config.pad_token_id) + 1
    return EncoderFolder(folder, config, stored_dtype(raw) or weights_dtype(folder), longest, is_classifier(raw))
