"""Which level computes a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import Attention
from phalanx_runtime.model.config import ModelConfig, parse_config, read_json
from phalanx_runtime.model.decoder.load import load
from phalanx_runtime.model.partition import WHOLE, Stage, num_linear_weights, partition
from phalanx_runtime.model.protocol import Form, Model, Source

Level = Literal["auto", "fused", "transformers"]
"""The fused decoder, `transformers` around our attention, or the first that computes the model."""


def open_model(folder: Path, level: Level = "auto") -> Source:
    """The model in this folder: fused where its architecture is known to the fused decoder, else of `transformers`.

    Raises ModelError with the reason when neither computes it, or not the level that was asked for.
    """
    raw = read_json(folder)
    if level == "transformers":
        return _generic(folder)
    try:
        return FusedSource(folder, parse_config(raw))
    except Unsupported as fused:
        if level == "fused":
            raise
        try:
            return _generic(folder)
        except ModelError as generic:
            raise Unsupported(f"{fused}; through transformers: {generic}") from generic


def _generic(folder: Path) -> Source:
    # Ranks of fused models never import transformers.
    from phalanx_runtime.model.generic.source import open_generic

    return open_generic(folder, read_json(folder))


@dataclass(frozen=True, slots=True)
class FusedSource:
    """A checkpoint that the fused decoder computes."""

    folder: Path
    config: ModelConfig

    @property
    def dtype(self) -> str:
        """The dtype of its weights, as config.json names it."""
        return self.config.dtype

    @property
    def max_position(self) -> int:
        """Tokens of the longest request that the model was made for."""
        return self.config.max_position

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Weights in the linears of this rank's part. Raises ModelError when the model cannot be split so."""
        return num_linear_weights(self.config, partition(self.config, world_size)[rank], stage)

    def load(self, collective: Collective, form: Form, attention: Attention | None = None, stage: Stage = WHOLE) -> Model:
        """This rank's part of the model. Raises ModelError."""
        return load(self.folder, self.config, collective, form, attention, stage)
