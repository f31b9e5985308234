"""Opens a model folder with the fused decoder or with `transformers`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import Attention
from phalanx_runtime.model.config import ModelConfig, parse_config, read_json
from phalanx_runtime.model.decoder.load import load
from phalanx_runtime.model.partition import WHOLE, Stage, num_linear_weights, partition
from phalanx_runtime.model.protocol import Form, Model, ModelFolder

Level = Literal["auto", "fused", "transformers"]
"""`auto` is the fused decoder where it supports the architecture, else `transformers`."""


def open_model(folder: Path, level: Level = "auto") -> ModelFolder:
    """Returns the model in `folder` at the given level.

    Raises ModelError with the reason when no level, or not the requested level, supports the model.
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


def _generic(folder: Path) -> ModelFolder:
    # Ranks of fused models never import transformers.
    from phalanx_runtime.model.generic.source import open_generic

    return open_generic(folder, read_json(folder))


@dataclass(frozen=True, slots=True)
class FusedSource:
    """A checkpoint for the fused decoder."""

    folder: Path
    config: ModelConfig

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as in config.json."""
        return self.config.dtype

    @property
    def max_position(self) -> int:
        """The model's maximum request length in tokens."""
        return self.config.max_position

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """Returns the number of linear weights of this rank. Raises ModelError when the model cannot be split this way."""
        return num_linear_weights(self.config, partition(self.config, world_size)[rank], stage)

    def load(self, collective: Collective, form: Form, attention: Attention | None = None, stage: Stage = WHOLE) -> Model:
        """Returns this rank's part of the model. Raises ModelError."""
        return load(self.folder, self.config, collective=collective, form=form, attention=attention, stage=stage)
