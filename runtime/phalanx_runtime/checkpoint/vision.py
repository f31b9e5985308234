"""Models that read images: their text part as a config.json of its own, and how they take images.

LlavaForConditionalGeneration      a CLIP or SigLIP tower; an image becomes one tile
Idefics3ForConditionalGeneration   an image is cut into tiles
SmolVLMForConditionalGeneration    as Idefics3
Gemma3ForConditionalGeneration     an image becomes one tile, whose tokens attend to each other
Qwen2_5_VLForConditionalGeneration an image keeps its ratio; tokens have positions in three dimensions
Qwen3VLForConditionalGeneration    as Qwen2.5-VL, and features of the tower are added after the first layers
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.vision_inputs import (
    Patches,
    PixelScale,
    gemma_input,
    grid_input,
    patches_of,
    refused,
    scale,
    tiled_input,
    whole_input,
)
from phalanx_runtime.checkpoint.vision_texts import text_of

_LLAVA = "LlavaForConditionalGeneration"
_GEMMA = "Gemma3ForConditionalGeneration"
_TILED = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_PATCH_EDGES = {"Qwen2_5_VLForConditionalGeneration": 14, "Qwen3VLForConditionalGeneration": 16}
"""By architecture whose images have a grid of tokens."""
ARCHITECTURES = (_LLAVA, _GEMMA, *_TILED, *_PATCH_EDGES)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """How a model takes images."""

    input: wire.ImageInput
    scale: PixelScale
    patches: Patches | None = None
    """Of images in a grid."""


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the model's text; `raw` of a model that reads text only, or of an unknown kind."""
    architecture = _architecture(raw)
    if architecture is None:
        return raw
    text = text_of(raw, has_own_ties=architecture == _LLAVA or architecture in _PATCH_EDGES, is_tied=architecture == _GEMMA)
    return raw if text is None else text


def read_vision(folder: Path) -> VisionModel | None:
    """Returns how the model takes images; none if it reads text only. Raises ModelError for a file that is not JSON."""
    raw = read_json(folder / "config.json")
    architecture = _architecture(raw)
    if architecture is None:
        return None
    path = folder / "preprocessor_config.json"
    steps: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    processor_path = folder / "processor_config.json"
    processor: Mapping[str, Any] = read_json(processor_path) if processor_path.is_file() else {}
    if not steps and isinstance(nested := processor.get("image_processor"), dict):
        steps = nested
    patches = None
    try:
        if architecture in _PATCH_EDGES:
            patches = patches_of(raw, _PATCH_EDGES[architecture])
            taken = grid_input(folder, raw, steps, patches)
        elif architecture == _LLAVA:
            taken = whole_input(raw, steps)
        elif architecture == _GEMMA:
            taken = gemma_input(folder, raw, steps, processor)
        else:
            taken = tiled_input(raw, steps, processor)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        taken = refused(f"config.json or preprocessor_config.json describes images in an unknown way: {error!r}")
    return VisionModel(taken, scale(steps, clip=architecture == _LLAVA or patches is not None), patches)


def _architecture(raw: Mapping[str, Any]) -> str | None:
    names = raw.get("architectures")
    return next((name for name in names if name in ARCHITECTURES), None) if isinstance(names, list) else None
