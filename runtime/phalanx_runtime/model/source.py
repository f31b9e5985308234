"""Opens a model folder with the fused decoder or with `transformers`."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx_runtime.checkpoint.encoders import is_classifier
from phalanx_runtime.checkpoint.vision import read_vision, text_config
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.attention.paged import Attention
from phalanx_runtime.model.config import ModelConfig, parse_config, read_json
from phalanx_runtime.model.decoder.load import load
from phalanx_runtime.model.partition import WHOLE, Stage, num_linear_weights, partition
from phalanx_runtime.model.protocol import LoadOptions, Model, ModelFolder
from phalanx_runtime.model.weights import weights_dtype

log = logging.getLogger(__name__)
ModelImpl = Literal["auto", "fused", "transformers"]
"""`auto` prefers the fused decoder."""


def open_model(
    folder: Path, impl: ModelImpl = "auto", has_parallel_experts: bool = False, *, may_classify: bool = False
) -> ModelFolder:
    """Opens the folder. Raises ModelError if `impl` does not support the model.

    `has_parallel_experts`: each rank has whole experts, which needs a model with experts in the fused decoder. `may_classify`:
    the caller computes classes too, and not only tokens.
    """
    raw = text_config(read_json(folder))
    if is_classifier(raw) and not may_classify:
        raise Unsupported("it has a classification head, and generates no tokens")
    if impl == "transformers" and not has_parallel_experts:
        return _generic(folder)
    try:
        config = parse_config(raw)
        return FusedFolder(folder, _with_parallel_experts(config, impl) if has_parallel_experts else config)
    except Unsupported as fused:
        if impl == "fused" or has_parallel_experts:
            raise
        try:
            return _generic(folder)
        except ModelError as generic:
            raise Unsupported(f"{fused}; through transformers: {generic}") from generic


def _with_parallel_experts(config: ModelConfig, impl: ModelImpl) -> ModelConfig:
    if config.mixture is None or impl == "transformers":
        raise ModelError("--enable-expert-parallel needs a model with experts in the fused decoder: docs/architectures.md")
    return replace(config, mixture=replace(config.mixture, is_parallel=True))


def _generic(folder: Path) -> ModelFolder:
    from phalanx_runtime.model.generic.source import open_generic  # imports transformers

    return open_generic(folder, read_json(folder))


@dataclass(frozen=True, slots=True)
class FusedFolder:
    """`ModelFolder` of the fused decoder."""

    folder: Path
    config: ModelConfig

    @property
    def dtype(self) -> str:
        """See `ModelFolder`."""
        return self.config.dtype or weights_dtype(self.folder)

    @property
    def max_position(self) -> int:
        """See `ModelFolder`."""
        return self.config.max_position

    def num_linear_weights(self, rank: int, world_size: int, stage: Stage = WHOLE) -> int:
        """See `ModelFolder`."""
        return num_linear_weights(self.config, partition(self.config, world_size)[rank], stage)

    def load(
        self, collective: Collective, options: LoadOptions, attention: Attention | None = None, stage: Stage = WHOLE
    ) -> Model:
        """See `ModelFolder`."""
        model = load(self.folder, self.config, collective=collective, options=options, attention=attention, stage=stage)
        vision = read_vision(self.folder) if stage.is_first else None
        if vision is not None and vision.input.obstacle:
            log.warning("the model takes no images", extra={"why": vision.input.obstacle})
        elif vision is not None:
            from phalanx_runtime.model.vision.tower import load_tower  # imports transformers

            tower = load_tower(self.folder, vision, self.config.hidden_size, options)
            model.images, model.num_bytes = tower, model.num_bytes + tower.num_bytes
        return model
