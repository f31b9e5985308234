"""The vision tower and projector of a model, computed by `transformers`.

Its language model has no layers here: the fused decoder computes the text. Each rank of the first stage has the whole tower.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx_api import wire
from phalanx_runtime.checkpoint.vision import VisionModel
from phalanx_runtime.checkpoint.vision_inputs import PixelScale
from phalanx_runtime.checkpoint.vision_texts import TEXT_MODULES
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.weights import Checkpoint

log = logging.getLogger(__name__)
_MAKING = threading.Lock()
"""`transformers` changes torch's default dtype while it makes a model: ranks may be threads of one process."""


class Tower:
    """Implements `protocol.ImageEncoder`."""

    def __init__(self, module: Any, vision: VisionModel, width: int, options: LoadOptions) -> None:
        self.num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        self._features: Callable[..., Any] = module.get_image_features
        self._input, self._scale = vision.input, vision.scale
        self._width = width
        self._options = options

    def blank(self) -> wire.Image:
        """See `ImageEncoder`."""
        size = self._input
        pixels = bytes(size.height * size.width * 3)
        count = size.tile_tokens
        return wire.Image(
            digest=b"",
            num_tiles=1,
            height=size.height,
            width=size.width,
            pixels=pixels,
            spans=[(0, count)],
            attends_within=size.attends_within,
        )

    @torch.inference_mode()
    def encode(self, image: wire.Image) -> Tensor:
        """See `ImageEncoder`."""
        size = self._input
        if (image.height, image.width) != (size.height, size.width):
            raise ValueError(f"a tile has {image.width} x {image.height} pixels; the model takes {size.width} x {size.height}")
        tiles = np.frombuffer(image.pixels, np.uint8).reshape(image.num_tiles, image.height, image.width, 3)
        # One tile at a time: the memory that a step takes must not depend on the image.
        return torch.cat([self._encode_tile(tile) for tile in tiles])

    def _encode_tile(self, tile: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
        values = torch.from_numpy(pixel_values(tile, self._scale)).to(self._options.device, self._options.dtype)
        batch = values[None] if self._input.layout == "whole" else values[None, None]
        features = torch.cat(list(self._features(pixel_values=batch, return_dict=True).pooler_output))
        features = features.reshape(-1, self._width)
        if len(features) != self._input.tile_tokens:
            raise ValueError(f"a tile has {len(features)} embeddings; config.json implies {self._input.tile_tokens}")
        return features


def pixel_values(tile: np.ndarray[Any, np.dtype[np.uint8]], scale: PixelScale) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the normalised values of a tile, [3, height, width], from [height, width, 3]."""
    values = np.moveaxis(tile, -1, 0)
    scaled = (values.astype(np.float64) * scale.factor).astype(np.float32) if scale.factor else values.astype(np.float32)
    if not scale.mean:
        return np.ascontiguousarray(scaled)
    mean, std = (np.asarray(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.std))
    return np.ascontiguousarray((scaled - mean) / std)


def load_tower(folder: Path, vision: VisionModel, width: int, options: LoadOptions) -> Tower:
    """Loads the tower. `width`: hidden size of the text. Raises ModelError."""
    module = _module(folder, options)
    with Checkpoint(folder, options.dtype, options.device) as checkpoint:
        names = {_bare(name): name for name in checkpoint.names()}
        with torch.no_grad():
            for name, target in module.state_dict().items():
                if name.startswith(TEXT_MODULES):
                    continue
                stored = names.get(_bare(name))
                if stored is None:
                    raise ModelError(f"{folder}: tensor {name} of the vision tower is missing")
                if checkpoint.shape(stored) != tuple(target.shape):
                    raise ModelError(
                        f"{folder}: tensor {stored} has shape {list(checkpoint.shape(stored))}; "
                        f"config.json implies {list(target.shape)}"
                    )
                target.copy_(checkpoint.part(stored, None))
    for name in TEXT_MODULES:
        if hasattr(module, name.rstrip(".")):
            delattr(module, name.rstrip("."))
    tower = Tower(module, vision, width, options)
    log.info("vision tower loaded", extra={"bytes": tower.num_bytes, "tile_tokens": vision.input.tile_tokens})
    return tower


def _bare(name: str) -> str:
    """Returns the name without the parts that versions of `transformers` add or leave out."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def _module(folder: Path, options: LoadOptions) -> nn.Module:
    """Returns the model without layers of its text, with random weights. Raises ModelError."""
    import transformers  # slow to import, and only these models need it

    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(folder)
        config.text_config.num_hidden_layers, config.text_config.vocab_size = 0, 1
        config.text_config.pad_token_id = 0
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = []
        models: Any = transformers.AutoModel
        with _MAKING:
            module: nn.Module = models.from_config(config, dtype=options.dtype)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{folder}: the vision tower cannot be made from config.json: {error}") from error
    return module.to(options.device).eval()
