"""The vision tower and projector of a model, computed by `transformers`.

Its language model has no layers here: the fused decoder computes the text. Each rank of the first stage has the whole tower.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx_api import wire
from phalanx_runtime.checkpoint.vision import VisionModel
from phalanx_runtime.checkpoint.vision_bounds import PixelScale
from phalanx_runtime.checkpoint.vision_inputs import Patches
from phalanx_runtime.checkpoint.vision_texts import TEXT_MODULES
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.weights import Checkpoint

log = logging.getLogger(__name__)
BLANK_EDGE = 16
"""Cells along the edge of an image that keeps its ratio, for measurements; a larger one takes in proportion."""
MASK_COPIES = 2
"""Of the mask between all patches that Pixtral's tower makes."""
JOIN_COPIES = 4
"""Of the embeddings of all tiles while those of the border are left out, and others are interpolated."""
MAX_BUFFER_BYTES = 256 << 20
"""Of tables that are computed from config.json, and not stored."""
_MAKING = threading.Lock()
"""`transformers` changes torch's default dtype while it makes a model: ranks may be threads of one process."""


class Tower:
    """Implements `protocol.ImageEncoder`."""

    def __init__(self, module: Any, vision: VisionModel, width: int, options: LoadOptions) -> None:
        self.num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        self._module = module
        self._features: Callable[..., Any] = module.get_image_features
        self._input, self._scale = vision.input, vision.scale
        self._patches = vision.patches
        self._width = width
        self._options = options
        self.device = options.device
        self.num_levels = 1 + len(getattr(getattr(module, "visual", None), "deepstack_visual_indexes", ()))
        self._cells = min(most_grid_tokens(vision.input), options.positions)
        self._edge = min(BLANK_EDGE, isqrt(self._cells))
        tile_bytes = 3 * vision.input.height * vision.input.width
        num_tokens = min(options.positions, wire.MAX_PIXEL_BYTES * vision.input.tile_tokens // tile_bytes)
        self.request_bytes = num_tokens * self.num_levels * width * options.dtype.itemsize

    def blank(self) -> wire.Image:
        """See `ImageEncoder`."""
        size, edge = self._input, self._edge
        pixels = bytes(edge * size.height * edge * size.width * 3)
        count = (size.several or size).tile_tokens * edge**2
        return wire.Image(
            digest=b"",
            num_tiles=1,
            height=edge * size.height,
            width=edge * size.width,
            pixels=pixels,
            spans=[(0, count)],
            attends_within=size.attends_within,
        )

    def peak_bytes(self, measured: int) -> int:
        """See `ImageEncoder`: in proportion to the cells, beside the mask of Pixtral's tower and embeddings of several tiles."""
        peak, size = measured * self._cells // self._edge**2, self._options.dtype.itemsize
        if self._input.layout == "rows" and self._patches is not None:
            return peak + MASK_COPIES * (self._cells * self._patches.merge**2) ** 2 * size
        cells = max((height * width for height, width in self._input.resolutions), default=0)
        num_tiles = cells // (self._input.height * self._input.width) + (self._input.max_tiles and self._input.max_tiles + 1)
        return peak + JOIN_COPIES * num_tiles * self._input.tile_tokens * self._width * size

    @torch.inference_mode()
    def encode(self, image: wire.Image) -> Tensor:
        """See `ImageEncoder`."""
        size = self._input
        if self._patches is not None:
            encode = self._encode_grid if size.layout == "grid" else self._encode_rows
            return encode(image, self._patches)
        if (image.height, image.width) != (size.height, size.width):
            raise ValueError(f"a tile has {image.width} x {image.height} pixels; the model takes {size.width} x {size.height}")
        tiles = np.frombuffer(image.pixels, np.uint8).reshape(image.num_tiles, image.height, image.width, 3)
        # One tile at a time: the memory that a step takes must not depend on the image.
        encoded = [self._encode_tile(tile) for tile in tiles]
        if image.size is None and size.layout != "reduced":
            return torch.cat(encoded)
        return self._joined(encoded, image.size or (image.height, image.width))

    def _encode_tile(self, tile: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
        values = torch.from_numpy(pixel_values(tile, self._scale)).to(self._options.device, self._options.dtype)
        if self._input.layout in ("padded", "reduced"):
            features = self._projected(values[None])
        else:
            batch = values[None] if self._input.layout in ("whole", "cut") else values[None, None]
            features = torch.cat(list(self._features(pixel_values=batch, return_dict=True).pooler_output))
        features = features.reshape(-1, self._width)
        if len(features) != self._input.tile_tokens:
            raise ValueError(f"a tile has {len(features)} embeddings; config.json implies {self._input.tile_tokens}")
        return features

    def _projected(self, values: Tensor) -> Tensor:
        """Returns the features of a tile of LLaVA-NeXT or OneVision: `get_image_features` takes all tiles of an image at once."""
        config = self._module.config
        chosen, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
        states = self._module.vision_tower(values, output_hidden_states=True, return_dict=True).hidden_states
        layers = [states[layer] for layer in ([chosen] if isinstance(chosen, int) else chosen)]
        projected: Tensor = self._module.multi_modal_projector(torch.cat(layers, -1)[:, strategy == "default" :])
        return projected

    def _joined(self, tiles: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """Returns the features of LLaVA's tiles without those of the border, each row of all tiles with its end."""
        config, newline = self._module.config, self._module.image_newline
        setting = "vision_aspect_ratio" if self._input.layout == "reduced" else "vision_feature_select_strategy"
        stated: Any = {setting: getattr(config, setting)}
        [features], _ = self._module.pack_image_features([torch.stack(list(tiles))], [size], image_newline=newline, **stated)
        joined: Tensor = features
        return joined

    def _encode_rows(self, image: wire.Image, patches: Patches) -> Tensor:
        tile = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        values = torch.from_numpy(pixel_values(tile, self._scale)).to(self._options.device, self._options.dtype)
        sizes = torch.tensor([[image.height, image.width]], device=self._options.device)
        features = torch.cat(list(self._features(pixel_values=values[None], image_sizes=sizes, return_dict=True).pooler_output))
        return features.reshape(-1, self._width)

    def _encode_grid(self, image: wire.Image, patches: Patches) -> Tensor:
        rows, columns, merge, edge = image.height // patches.edge, image.width // patches.edge, patches.merge, patches.edge
        tile = np.frombuffer(image.pixels, np.uint8).reshape(rows * edge, columns * edge, 3)
        values = torch.from_numpy(pixel_values(tile, self._scale))
        # [rows of cells, columns of cells, rows in a cell, columns in a cell, channels, height, width]
        shape, order = (3, rows // merge, merge, edge, columns // merge, merge, edge), (1, 4, 2, 5, 0, 3, 6)
        cells = values.view(shape).permute(order)
        repeated = cells.unsqueeze(5).expand(*cells.shape[:5], patches.depth, edge, edge).reshape(rows * columns, -1)
        output = self._features(
            pixel_values=repeated.to(self._options.device, self._options.dtype),
            image_grid_thw=torch.tensor([[1, rows, columns]], device=self._options.device),
            return_dict=True,
        )
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([torch.cat(list(level)) for level in levels], -1)


def most_grid_tokens(taken: wire.ImageInput) -> int:
    """Returns the most tokens of an image that keeps its ratio; 1 for tiles of one size."""
    if taken.layout == "grid":
        return max(1, taken.max_pixels // taken.height**2)
    return (-(-taken.longest_edge // taken.height)) ** 2 if taken.layout == "rows" else 1


def pixel_values(tile: np.ndarray[Any, np.dtype[np.uint8]], scale: PixelScale) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the normalised values of a tile, [3, height, width], from [height, width, 3]."""
    values = np.moveaxis(tile, -1, 0)
    scaled = (values.astype(np.float64) * scale.factor).astype(np.float32) if scale.factor else values.astype(np.float32)
    if not scale.mean:
        return np.ascontiguousarray(scaled)
    mean, std = (np.asarray(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.std))
    return np.ascontiguousarray((scaled - mean) / std)


def load_tower(folder: Path, vision: VisionModel, width: int, options: LoadOptions) -> Tower:
    """Loads the tower. `width`: hidden size of the text. Raises ModelError, before config.json's sizes take memory."""
    config = _read_config(folder)
    with Checkpoint(folder, options.dtype, options.device, progress=options.progress) as checkpoint:
        names = {_bare(name): name for name in checkpoint.names()}
        _check_layers(folder, config.vision_config, len(names))
        _check_sizes(folder, _make_module(folder, config, options.dtype, torch.device("meta")), checkpoint, names)
        module = _make_module(folder, config, options.dtype, torch.device("cpu")).to(options.device)
        with torch.no_grad():
            for name, target in _vision_tensors(module):
                target.copy_(checkpoint.part(names[_bare(name)], None))
    for name in TEXT_MODULES:
        if hasattr(module, name.rstrip(".")):
            delattr(module, name.rstrip("."))
    tower = Tower(module, vision, width, options)
    log.info("vision tower loaded", extra={"bytes": tower.num_bytes, "tile_tokens": vision.input.tile_tokens})
    return tower


def _vision_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in module.state_dict().items() if not name.startswith(TEXT_MODULES)]


def _check_layers(folder: Path, vision: Any, num_stored: int) -> None:
    """Raises ModelError for more layers than there are stored tensors, which would take hours to make."""
    counts = {name: getattr(vision, name, 0) for name in ("num_hidden_layers", "depth")}
    counts["deepstack_visual_indexes"] = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    for name, count in counts.items():
        if not isinstance(count, int) or not 0 <= count <= num_stored:
            raise ModelError(f"{folder}/config.json: vision_config: {name} {count!r:.40} must be within 0 and {num_stored}")


def _check_sizes(folder: Path, module: nn.Module, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    """Raises ModelError unless the checkpoint has the tensors of the tower in the sizes of config.json."""
    for name, target in _vision_tensors(module):
        stored = names.get(_bare(name))
        if stored is None:
            raise ModelError(f"{folder}: tensor {name} of the vision tower is missing")
        if checkpoint.shape(stored) != tuple(target.shape):
            raise ModelError(
                f"{folder}: tensor {stored} has shape {list(checkpoint.shape(stored))}; config.json implies {list(target.shape)}"
            )
    if (num_bytes := sum(buffer.nbytes for buffer in module.buffers())) > MAX_BUFFER_BYTES:
        raise ModelError(f"{folder}/config.json: vision_config implies tables of {num_bytes} bytes; at most {MAX_BUFFER_BYTES}")


def _bare(name: str) -> str:
    """Returns the name without the parts that versions of `transformers` add or leave out."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def empty_module(folder: Path, options: LoadOptions) -> nn.Module:
    """Returns the model without layers of its text, with random weights. Raises ModelError."""
    return _make_module(folder, _read_config(folder), options.dtype, torch.device("cpu")).to(options.device)


def _read_config(folder: Path) -> Any:
    """Returns the config without layers of the text. Raises ModelError."""
    import transformers  # slow to import, and only these models need it

    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.text_config.num_hidden_layers, config.text_config.vocab_size = 0, 1
        config.text_config.pad_token_id = 0
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = []
        config.vision_config  # noqa: B018 -- raises for a config without one
    except Exception as error:  # it validates with errors of several libraries
        raise ModelError(_unusable(folder, error)) from error
    return config


def _make_module(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns the model with random weights, on the device meta with sizes alone. Raises ModelError."""
    import transformers

    models: Any = transformers.AutoModel
    try:
        with _MAKING, device:
            module: nn.Module = models.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # sizes that are zero, negative or too large raise errors of several libraries
        raise ModelError(_unusable(folder, error)) from error
    return module.eval()


def _unusable(folder: Path, error: Exception) -> str:
    why = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    return f"{folder}: the vision tower cannot be made from config.json: {why:.500}"
