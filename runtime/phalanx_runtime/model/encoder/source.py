"""Opens an encoder: a model of `transformers` with bidirectional attention, with or without a classification head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx_runtime.checkpoint.encoders import is_classifier
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.config import read_json, stored_dtype
from phalanx_runtime.model.encoder.model import EncoderModel

_PAD_OFFSET = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Positions of these start after that of the padding token."""
_WITHOUT_POOLER = ("albert", "bert", "camembert", "mpnet", "roberta", "xlm-roberta")
"""Their `AutoModel` has a layer for a task of its training, which embeddings do not use."""


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
    for name in ("quantization_config", "auto_map"):
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
    return EncoderFolder(folder, config, stored_dtype(raw), longest, is_classifier(raw))
