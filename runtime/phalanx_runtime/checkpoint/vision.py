"""Models that read images: their text part as a config.json of its own, and how they take images.

LlavaForConditionalGeneration      a CLIP or SigLIP tower; an image becomes one tile
Idefics3ForConditionalGeneration   an image is cut into tiles
SmolVLMForConditionalGeneration    as Idefics3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json

Json = dict[str, Any]
TEXT_MODULES = ("language_model.", "text_model.")
"""Modules of the text in a model of `transformers`."""
TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""Stored prefixes of the text's tensors, and those of a causal language model."""
_TEXTS: dict[str, tuple[str, Json]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
    ),
}
"""By `model_type`: the architecture, and fields that published models leave out."""
_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""By `model_type`: embeddings of a tower that belong to no patch."""
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_BICUBIC, _LANCZOS = 3, 1
_LLAVA = "LlavaForConditionalGeneration"
_TILED = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
ARCHITECTURES = (_LLAVA, *_TILED)


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How bytes of pixels become numbers."""

    factor: float
    """0: they are not scaled."""
    mean: Sequence[float]
    """Of each channel; empty: they are not normalised."""
    std: Sequence[float]


@dataclass(frozen=True, slots=True)
class VisionModel:
    """How a model takes images."""

    input: wire.ImageInput
    scale: PixelScale


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the model's text; `raw` of a model that reads text only, or of an unknown kind."""
    text = raw.get("text_config")
    if _architecture(raw) is None or not isinstance(text, dict):
        return raw
    name, defaults = _TEXTS.get(str(text.get("model_type", "llama")), (None, {}))
    if name is None:
        return raw
    tied = raw.get("tie_word_embeddings", False)
    if _architecture(raw) == _LLAVA:
        tied = tied or text.get("tie_word_embeddings", False)
    shared = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    given = {key: value for key, value in text.items() if value is not None}
    return {**defaults, **given, **shared, "architectures": [name], "tie_word_embeddings": tied}


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
    try:
        taken = _whole_input(raw, steps) if architecture == _LLAVA else _tiled_input(raw, steps, processor)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        taken = _refused(f"config.json or preprocessor_config.json describes images in an unknown way: {error!r}")
    return VisionModel(taken, _scale(steps, clip=architecture == _LLAVA))


def _architecture(raw: Mapping[str, Any]) -> str | None:
    names = raw.get("architectures")
    return next((name for name in names if name in ARCHITECTURES), None) if isinstance(names, list) else None


def _refused(why: str) -> wire.ImageInput:
    return wire.ImageInput(layout="whole", token="", token_id=0, tile_tokens=1, height=1, width=1, resample=0, obstacle=why)


def _whole_input(raw: Mapping[str, Any], steps: Mapping[str, Any]) -> wire.ImageInput:
    vision = raw["vision_config"]
    tower = str(vision.get("model_type"))
    if tower not in _TOWERS:
        return _refused(f"the vision tower {tower} is not supported: use one of {', '.join(_TOWERS)}")
    if steps.get("do_pad"):
        return _refused("images that are padded to squares (do_pad) are not supported")
    size, crop = steps.get("size") or {}, steps.get("crop_size") or {}
    crops = bool(steps.get("do_center_crop", tower == "clip_vision_model"))
    shortest = int(size.get("shortest_edge") or 0) if isinstance(size, dict) else int(size)
    height, width = (_edge(crop, "height"), _edge(crop, "width")) if crops else (int(size["height"]), int(size["width"]))
    if crops and not shortest:
        shortest = height if (size.get("height"), size.get("width")) == (height, width) == (height, height) else 0
    if crops and shortest < max(height, width):
        return _refused("images whose crop is larger than their resized edge are not supported")
    patch = int(vision.get("patch_size", 32))
    strategy = raw.get("vision_feature_select_strategy", "default")
    count = (height // patch) * (width // patch) + _TOWERS[tower] - (strategy == "default")
    return wire.ImageInput(
        layout="whole",
        token="<image>",
        token_id=int(raw.get("image_token_index", raw.get("image_token_id", 32000))),
        tile_tokens=count,
        height=_checked(height),
        width=_checked(width),
        resample=int(steps.get("resample", _BICUBIC)),
        shortest_edge=shortest if crops else 0,
    )


def _tiled_input(raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]) -> wire.ImageInput:
    vision = raw["vision_config"]
    edge = int((steps.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
    patch, factor = int(vision.get("patch_size", 32)), int(raw.get("scale_factor", 2))
    longest = int((steps.get("size") or {"longest_edge": 4 * 364})["longest_edge"])
    count = int((edge // patch) ** 2 / factor**2)
    if int(processor.get("image_seq_len", count)) != count:
        return _refused(f"image_seq_len of processor_config.json is not {count}, the number of embeddings of a tile")
    return wire.ImageInput(
        layout="tiles",
        token="<image>",
        token_id=int(raw.get("image_token_id", 128257)),
        tile_tokens=count,
        height=_checked(edge),
        width=_checked(edge),
        resample=int(steps.get("resample", _LANCZOS)),
        longest_edge=longest if steps.get("do_resize", True) else 0,
        is_split=bool(steps.get("do_image_splitting", True)),
    )


def _edge(size: Any, name: str) -> int:
    return int(size[name]) if isinstance(size, dict) else int(size)


def _checked(edge: int) -> int:
    if not 0 < edge <= wire.MAX_TILE_EDGE:
        raise ValueError(f"an edge of {edge} pixels")
    return edge


def _scale(steps: Mapping[str, Any], *, clip: bool) -> PixelScale:
    mean, std = _CLIP if clip else ([0.5] * 3, [0.5] * 3)
    factor = float(steps.get("rescale_factor", 1 / 255)) if steps.get("do_rescale", True) else 0.0
    if not steps.get("do_normalize", True):
        return PixelScale(factor, (), ())
    return PixelScale(factor, steps.get("image_mean") or mean, steps.get("image_std") or std)
