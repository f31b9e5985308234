"""How models take images, by their config.json and the settings of their processors. All may raise what a broken file causes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.checkpoint.vision_bounds import PixelScale, checked_scale

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""By `model_type`: embeddings of a tower that belong to no patch."""
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
MAX_CUT_TILES = 63
"""Tiles of the grid of an image of InternVL: with the one of the whole image routers take 64."""
MAX_MERGE, MAX_DEPTH = 64, 16
"""Patches along the edge of a token, and repetitions of a patch."""
_CROPPING = {"max_num_crops": 4, "min_crop_size": 256, "min_ratio_to_activate": 1.2}
"""Of pan-and-scan, by default."""


@dataclass(frozen=True, slots=True)
class Patches:
    """What the tower takes of an image that keeps its ratio."""

    edge: int
    """Pixels of a patch's edge."""
    merge: int
    """Patches along the edge of a cell, which becomes a token."""
    depth: int
    """How often a patch is repeated, in the place of frames."""


def whole_input(raw: Mapping[str, Any], steps: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of LLaVA with a tower of CLIP or SigLIP."""
    vision = raw["vision_config"]
    tower = str(vision.get("model_type"))
    if tower not in _TOWERS:
        return wire.refused_images(f"the vision tower {tower} is not supported: use one of {', '.join(_TOWERS)}, or pixtral")
    if steps.get("do_pad"):
        return wire.refused_images("images that are padded to squares (do_pad) are not supported")
    size, crop = steps.get("size") or {}, steps.get("crop_size") or {}
    crops = bool(steps.get("do_center_crop", tower == "clip_vision_model"))
    shortest = int(size.get("shortest_edge") or 0) if isinstance(size, dict) else int(size)
    height, width = (_edge(crop, "height"), _edge(crop, "width")) if crops else (int(size["height"]), int(size["width"]))
    if crops and not shortest:
        shortest = height if (size.get("height"), size.get("width")) == (height, width) == (height, height) else 0
    if crops and shortest < max(height, width):
        return wire.refused_images("images whose crop is larger than their resized edge are not supported")
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


_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def padded_input(raw: Mapping[str, Any], steps: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of LLaVA-NeXT: that of LLaVA for a tile, and resolutions of several."""
    defaults = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
    whole = whole_input(raw, {**defaults, **steps, "do_pad": False})  # it pads lists of tiles
    if whole.obstacle:
        return whole
    edge = int(raw["vision_config"].get("image_size", 336))
    if (whole.height, whole.width) != (edge, edge) or whole.shortest_edge not in (0, edge):
        return wire.refused_images(f"the processor's size {steps.get('size')} is not that of the vision tower, {edge}")
    if whole.tile_tokens != (edge // int(raw["vision_config"].get("patch_size", 14))) ** 2:
        return wire.refused_images("vision_feature_select_strategy must leave the tokens of the patches alone")
    pinned = raw.get("image_grid_pinpoints") or _RESOLUTIONS
    if list(steps.get("image_grid_pinpoints") or _RESOLUTIONS) != list(pinned):
        return wire.refused_images("image_grid_pinpoints of the processor are not those of config.json")
    resolutions = [(_in_tiles(height, edge), _in_tiles(width, edge)) for height, width in pinned]
    return msgspec.structs.replace(whole, layout="padded", resolutions=resolutions, shortest_edge=0)


_EDGES = range(384, 2305, 384)
_ONEVISION: dict[str, Any] = {
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[height, width] for height in _EDGES for width in _EDGES],
    "vision_aspect_ratio": "anyres_max_9",
}
_ONEVISION_TOWER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
_ONEVISION_STEPS = {
    "size": {"height": 384, "width": 384},
    "do_center_crop": False,
    "image_grid_pinpoints": _ONEVISION["image_grid_pinpoints"],
}


def reduced_input(raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of LLaVA-OneVision: that of LLaVA-NeXT with a bound of cells, and each of several images in one tile."""
    token_id = raw.get("image_token_index", raw.get("image_token_id", 151646))
    full = {**_ONEVISION, **raw, "vision_config": {**_ONEVISION_TOWER, **raw["vision_config"]}, "image_token_index": token_id}
    padded = padded_input(full, {**_ONEVISION_STEPS, **steps})
    if padded.obstacle:
        return padded
    aspect = str(full["vision_aspect_ratio"])
    stated = {"vision_aspect_ratio": aspect, "num_image_tokens": padded.tile_tokens}
    differs = [name for name, value in stated.items() if processor.get(name, value) != value]
    bound = re.fullmatch(r"anyres_max_(\d+)", aspect)
    if differs or bound is None or not int(bound[1]):
        return wire.refused_images(
            f"{differs[0] if differs else 'vision_aspect_ratio'} of the processor or config.json is not supported"
        )
    red, green, blue = (int(share * 255) for share in steps.get("image_mean") or _CLIP[0])
    one_tile = msgspec.structs.replace(
        padded, layout="square", tile_tokens=padded.tile_tokens + 1, resolutions=[], border=(red, green, blue)
    )
    return msgspec.structs.replace(padded, layout="reduced", max_cells=int(bound[1]) * padded.tile_tokens, several=one_tile)


def _in_tiles(length: int, edge: int) -> int:
    if length < edge or length % edge:
        raise ValueError(f"{length} pixels in tiles of {edge}")
    return int(length)


def rows_input(
    folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any], patches: Patches
) -> wire.ImageInput:
    """Returns the input of Pixtral and Mistral 3."""
    if raw.get("vision_feature_select_strategy", "full") != "full":
        return wire.refused_images("vision_feature_select_strategy must be full with the vision tower pixtral")
    stated = {"patch_size": patches.edge, "spatial_merge_size": patches.merge}
    differs = [name for name, value in stated.items() if int(processor.get(name, value)) != value]
    if differs or not steps.get("do_resize", True) or steps.get("do_center_crop"):
        return wire.refused_images(
            f"the processor's {', '.join(differs) or 'do_resize or do_center_crop'} is not that of the vision tower"
        )
    size = steps.get("size") or {"longest_edge": 1024}
    longest = int(size.get("longest_edge") or (size["height"] if size["height"] == size["width"] else 0))
    if not longest:
        return wire.refused_images(f"images within {size}, which is no square, are not supported")
    token_id, cell = int(raw.get("image_token_index", raw.get("image_token_id", 10))), _checked(patches.edge * patches.merge)
    return wire.ImageInput(
        layout="rows",
        token=_added_tokens(folder)[token_id],
        token_id=token_id,
        tile_tokens=1,
        height=cell,
        width=cell,
        resample=int(steps.get("resample", _BICUBIC)),
        longest_edge=_checked(longest),
        row_end=str(processor.get("image_break_token", "[IMG_BREAK]")),
        after=str(processor.get("image_end_token", "[IMG_END]")),
    )


def pixtral_patches(raw: Mapping[str, Any], *, has_merge: bool) -> Patches:
    """Returns the patches of Pixtral's tower. `has_merge`: the model joins them, as Mistral 3 does."""
    merge = int(raw.get("spatial_merge_size", 2)) if has_merge else 1
    return _checked_patches(Patches(int(raw["vision_config"].get("patch_size", 14 if has_merge else 16)), merge, 1))


def tiled_input(raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of Idefics3 and SmolVLM."""
    vision = raw["vision_config"]
    edge = int((steps.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
    patch, factor = int(vision.get("patch_size", 32)), int(raw.get("scale_factor", 2))
    longest = int((steps.get("size") or {"longest_edge": 4 * 364})["longest_edge"])
    count = int((edge // patch) ** 2 / factor**2)
    if int(processor.get("image_seq_len", count)) != count:
        return wire.refused_images(f"image_seq_len of processor_config.json is not {count}, the number of embeddings of a tile")
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


def cut_input(folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of InternVL. Its processor cuts images whatever `crop_to_patches` of the image processor says."""
    vision, size = raw["vision_config"], steps.get("size") or {"height": 384, "width": 384}
    (edge, other), (patch, across) = (
        _pair(vision.get(name, default)) for name, default in (("image_size", 448), ("patch_size", 14))
    )
    if (edge, edge) != (other, int(size["height"])) or edge != int(size["width"]) or patch != across:
        return wire.refused_images(
            f"the processor's size {size} is not that of the vision tower, {edge} x {other}, or patches are not square"
        )
    if raw.get("vision_feature_select_strategy", "default") != "default":
        return wire.refused_images("vision_feature_select_strategy must be default")
    count = int((edge // patch) ** 2 * float(raw.get("downsample_ratio", 0.5)) ** 2)
    if {int(raw.get("image_seq_length", 256)), int(processor.get("image_seq_length", count))} != {count}:
        return wire.refused_images(f"image_seq_length is not {count}, the number of embeddings of a tile")
    least, most = int(steps.get("min_patches") or 1), int(steps.get("max_patches") or 12)
    if not 1 <= least <= most <= MAX_CUT_TILES:
        return wire.refused_images(f"min_patches {least} and max_patches {most} must be within 1 and {MAX_CUT_TILES}")
    token_id = int(raw.get("image_token_id", 151667))
    return wire.ImageInput(
        layout="cut",
        token=_added_tokens(folder)[token_id],
        token_id=token_id,
        tile_tokens=count,
        height=_checked(edge),
        width=_checked(edge),
        resample=int(steps.get("resample", _BICUBIC)),
        before="<img>",
        after="</img>",
        min_tiles=least,
        max_tiles=most,
    )


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, list) else (int(size), int(size))


def gemma_input(folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Any], processor: Mapping[str, Any]) -> wire.ImageInput:
    """Returns the input of Gemma 3. The tokens around an image have the names that the tokenizer gives their ids."""
    vision, size, count = raw["vision_config"], steps["size"], int(raw.get("mm_tokens_per_image", 256))
    if vision.get("model_type", "siglip_vision_model") != "siglip_vision_model":
        return wire.refused_images(f"the vision tower {vision['model_type']} is not supported: use siglip_vision_model")
    scans = bool(steps.get("do_pan_and_scan"))
    crops, least, ratio = (
        float(steps.get(f"pan_and_scan_{name}") or value) if scans else 0.0 for name, value in _CROPPING.items()
    )
    if scans and (crops < 1 or least < 1):
        return wire.refused_images(f"pan_and_scan_max_num_crops {crops} and pan_and_scan_min_crop_size {least} are below 1")
    if (edge := int(vision.get("image_size", 224))) != int(size["height"]) or edge != int(size["width"]):
        return wire.refused_images(f"the processor's size {size} is not that of the vision tower, {edge}")
    if int(processor.get("image_seq_length", count)) != count:
        return wire.refused_images(f"image_seq_length of the processor is not {count}, mm_tokens_per_image of config.json")
    token_id = int(raw.get("image_token_index", raw.get("image_token_id", 262144)))
    names = _added_tokens(folder)
    start, end = names[int(raw.get("boi_token_index", 255999))], names[int(raw.get("eoi_token_index", 256000))]
    return wire.ImageInput(
        layout="whole",
        token=start,
        token_id=token_id,
        tile_tokens=count,
        height=_checked(edge),
        width=_checked(edge),
        resample=int(steps.get("resample", _BILINEAR)),
        run_token=names[token_id],
        before=f"\n\n{start}",
        after=f"{end}\n\n",
        attends_within=True,
        max_crops=int(crops),
        min_crop_edge=int(least),
        min_crop_ratio=ratio,
    )


def grid_input(folder: Path, raw: Mapping[str, Any], steps: Mapping[str, Any], patches: Patches) -> wire.ImageInput:
    """Returns the input of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""
    size = steps.get("size") or {}
    names = {"edge": "patch_size", "merge": "merge_size", "depth": "temporal_patch_size"}
    differs = [name for field, name in names.items() if int(steps.get(name, getattr(patches, field))) != getattr(patches, field)]
    if differs or not steps.get("do_resize", True):
        return wire.refused_images(f"the processor's {', '.join(differs) or 'do_resize'} is not that of the vision tower")
    token_id, cell = int(raw.get("image_token_id", 151655)), _checked(patches.edge * patches.merge)
    most = int(steps.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    if most < cell * cell:
        return wire.refused_images(f"an image of at most {most} pixels has no token")
    return wire.ImageInput(
        layout="grid",
        token=_added_tokens(folder)[token_id],
        token_id=token_id,
        tile_tokens=1,
        height=cell,
        width=cell,
        resample=int(steps.get("resample", _BICUBIC)),
        min_pixels=int(steps.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        max_pixels=most,
    )


def patches_of(raw: Mapping[str, Any], edge: int) -> Patches:
    """Returns the patches of a tower. `edge`: by default."""
    vision = raw["vision_config"]
    edge, merge, depth = (
        int(vision.get(name, default))
        for name, default in (("patch_size", edge), ("spatial_merge_size", 2), ("temporal_patch_size", 2))
    )
    return _checked_patches(Patches(edge, merge, depth))


def _checked_patches(patches: Patches) -> Patches:
    if not (0 < patches.edge and 0 < patches.merge <= MAX_MERGE and 0 < patches.depth <= MAX_DEPTH):
        raise ValueError(
            f"vision_config: patch_size {patches.edge}, spatial_merge_size {patches.merge} (at most {MAX_MERGE}), "
            f"temporal_patch_size {patches.depth} (at most {MAX_DEPTH})"
        )
    return patches


def _added_tokens(folder: Path) -> dict[int, str]:
    tokenizer: Mapping[str, Any] = read_json(folder / "tokenizer.json")
    return {int(token["id"]): str(token["content"]) for token in tokenizer["added_tokens"]}


def _edge(size: Any, name: str) -> int:
    return int(size[name]) if isinstance(size, dict) else int(size)


def _checked(edge: int) -> int:
    if not 0 < edge <= wire.MAX_TILE_EDGE:
        raise ValueError(f"an edge of {edge} pixels")
    return edge


def scale(steps: Mapping[str, Any], *, clip: bool) -> PixelScale:
    """Returns the normalisation. `clip`: its default is CLIP's."""
    mean, std = _CLIP if clip else ([0.5] * 3, [0.5] * 3)
    factor = steps.get("rescale_factor", 1 / 255) if steps.get("do_rescale", True) else 0.0
    if not steps.get("do_normalize", True):
        return checked_scale(factor, (), ())
    return checked_scale(factor, steps.get("image_mean") or mean, steps.get("image_std") or std)
