"""Models that read images: their text part as a config.json of its own, and how they take images.

LlavaForConditionalGeneration      a CLIP or SigLIP tower: an image becomes one tile; Pixtral's: as Mistral 3
LlavaNextForConditionalGeneration  an image becomes one tile, and tiles of the image with a border
LlavaOnevisionForConditionalGeneration as LLaVA-NeXT, with fewer tokens of a large image; each of several images becomes one tile
Idefics3ForConditionalGeneration   an image is cut into tiles
SmolVLMForConditionalGeneration    as Idefics3
InternVLForConditionalGeneration   an image is resized to a grid of tiles with about its ratio, and follows in one tile
Gemma3ForConditionalGeneration     an image becomes one tile, whose tokens attend to each other; so may its crops
Mistral3ForConditionalGeneration   an image keeps its ratio; a token ends each row of its tokens
Qwen2VLForConditionalGeneration    an image keeps its ratio; tokens have positions in three dimensions
Qwen2_5_VLForConditionalGeneration as Qwen2-VL, with another tower
Qwen3VLForConditionalGeneration    as Qwen2.5-VL, and features of the tower are added after the first layers
Qwen3VLMoeForConditionalGeneration as Qwen3-VL
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.vision_bounds import PixelScale, checked_input, reason
from phalanx_runtime.checkpoint.vision_inputs import (
    Patches,
    cut_input,
    gemma_input,
    grid_input,
    padded_input,
    patches_of,
    pixtral_patches,
    reduced_input,
    rows_input,
    scale,
    tiled_input,
    whole_input,
)
from phalanx_runtime.checkpoint.vision_texts import text_of

_LLAVA = "LlavaForConditionalGeneration"
_NEXT = "LlavaNextForConditionalGeneration"
_ONEVISION = "LlavaOnevisionForConditionalGeneration"
_GEMMA = "Gemma3ForConditionalGeneration"
_MISTRAL = "Mistral3ForConditionalGeneration"
_INTERN = "InternVLForConditionalGeneration"
_TILED = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_MIXTURE = "Qwen3VLMoeForConditionalGeneration"
_PATCH_EDGES = {
    "Qwen2VLForConditionalGeneration": 14,
    "Qwen2_5_VLForConditionalGeneration": 14,
    "Qwen3VLForConditionalGeneration": 16,
    _MIXTURE: 16,
}
"""By architecture whose images have a grid of tokens."""
ARCHITECTURES = (_LLAVA, _NEXT, _ONEVISION, _GEMMA, _MISTRAL, _INTERN, *_TILED, *_PATCH_EDGES)
_TEXTS = {
    _ONEVISION: "qwen2",
    _GEMMA: "gemma3_text",
    _MISTRAL: "mistral",
    _INTERN: "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    _MIXTURE: "qwen3_vl_moe_text",
}
"""`model_type` of a text whose config has none; llama for other architectures, as in `transformers`."""
_HAS_OWN_TIES = {_LLAVA, _ONEVISION, *_PATCH_EDGES} - {_MIXTURE}
"""The config of whose text may also say that its embedding is the head."""
_TIED = (_GEMMA, _MISTRAL, _INTERN)
"""By default the embedding of the text is the head."""


@dataclass(frozen=True, slots=True)
class VisionModel:
    """How a model takes images."""

    input: wire.ImageInput
    scale: PixelScale
    patches: Patches | None = None
    """Of images that keep their ratio."""


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the model's text; `raw` of a model that reads text only. Raises Unsupported for another text."""
    architecture = _architecture(raw)
    if architecture is None:
        return raw
    kind, is_tied = _TEXTS.get(architecture, "llama"), architecture in _TIED
    return text_of(raw, kind, has_own_ties=architecture in _HAS_OWN_TIES, is_tied=is_tied)


def read_vision(folder: Path) -> VisionModel | None:
    """Returns how the model takes images; none if it reads text only. Raises ModelError for a file that is not JSON."""
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    architecture = _architecture(raw)
    if architecture is None:
        return None
    processor = _optional(folder / "processor_config.json")
    nested = processor.get("image_processor")  # of transformers 5, which prefers it to a file of an earlier version beside it
    steps = nested if isinstance(nested, dict) else _optional(folder / "preprocessor_config.json")
    try:
        taken, patches = _input(folder, raw, steps, processor)
        own = scale(steps, clip=architecture in (_LLAVA, _NEXT, _ONEVISION, _INTERN) or patches is not None)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"config.json or preprocessor_config.json describes images in an unknown way: {error!r}"
        return VisionModel(wire.refused_images(reason(why)), PixelScale(0.0, (), ()))
    return VisionModel(taken, own, patches)


def _optional(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object of a file; empty without the file. Raises ModelError."""
    return read_json(path) if path.is_file() else {}


def _input(
    folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]
) -> tuple[wire.ImageInput, Patches | None]:
    """Returns the input within its bounds, and the patches of images that keep their ratio. Raises what a broken file causes."""
    architecture, patches = _architecture(raw), None
    if architecture in _PATCH_EDGES:
        patches = patches_of(raw, _PATCH_EDGES[architecture])
        taken = grid_input(folder, raw, steps, patches)
    elif architecture == _MISTRAL or (architecture == _LLAVA and raw["vision_config"].get("model_type") == "pixtral"):
        patches = pixtral_patches(raw, has_merge=architecture == _MISTRAL)
        taken = rows_input(folder, raw, steps, processor, patches)
    elif architecture == _LLAVA:
        taken = whole_input(raw, steps)
    elif architecture == _NEXT:
        taken = padded_input(raw, steps)
    elif architecture == _ONEVISION:
        taken = reduced_input(raw, steps, processor)
    elif architecture == _INTERN:
        taken = cut_input(folder, raw, steps, processor)
    elif architecture == _GEMMA:
        taken = gemma_input(folder, raw, steps, processor)
    else:
        taken = tiled_input(raw, steps, processor)
    if taken.obstacle:
        return wire.refused_images(reason(taken.obstacle)), patches
    return checked_input(taken), patches


def _architecture(raw: Mapping[str, Any]) -> str | None:
    names = raw.get("architectures")
    return next((name for name in names if name in ARCHITECTURES), None) if isinstance(names, list) else None
