"""How models take images: config.json, preprocessor_config.json, processor_config.json and the added tokens of tokenizer.json."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.fuzz.mutations import INTEGERS, encode_document, mutate_bytes, mutate_document, places
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_api import wire
from phalanx_frontend.images.decoding import Picture, decode
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.spans import prompt_images, with_placeholders
from phalanx_frontend.images.tiling import num_tokens
from phalanx_frontend.openai.served_model import taken_images
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.vision import VisionModel, read_vision
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.vision.tower import most_grid_tokens, pixel_values
from tests.frontend.images.pictures import colour, file_of

EDGE, PATCH = 28, 7
MAX_PIXELS = 100_000
MAX_PLACEHOLDERS = 10_000_000
"""Characters of the text of one image."""
MAX_REASON = 1000
"""Characters of the reason why a model takes no images: each client that sends one gets it."""
_LONGEST = {"longest_edge": EDGE}
_SQUARE = {"height": EDGE, "width": EDGE}
_PIXELS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.3], "rescale_factor": 1 / 255, "resample": 3}
_PINNED = [[EDGE, 2 * EDGE], [2 * EDGE, EDGE], [2 * EDGE, 2 * EDGE]]
_CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4}
_CLIP = {"size": {"shortest_edge": EDGE}, "crop_size": _SQUARE, "do_center_crop": True, **_PIXELS}
_ONEVISION = {"vision_aspect_ratio": "anyres_max_2", "vision_feature_select_strategy": "full"}
_QWEN = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, **_PIXELS}
_BOUNDS = {"min_pixels": 4 * EDGE * EDGE, "max_pixels": 8 * EDGE * EDGE}
_SQUARE_STEPS = {"size": _SQUARE, **_PIXELS}

Json = dict[str, Any]
MODELS: tuple[tuple[str, Json, Json, Json], ...] = (
    ("Llava", {"vision_config": {"model_type": "clip_vision_model"}, "vision_feature_select_strategy": "default"}, _CLIP, {}),
    ("Llava", {"vision_config": {"model_type": "siglip_vision_model"}}, _SQUARE_STEPS | {"do_center_crop": False}, {}),
    (
        "Llava",
        {"vision_config": {"model_type": "pixtral"}, "vision_feature_select_strategy": "full"},
        {"size": {"longest_edge": 2 * EDGE}, **_PIXELS},
        {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "patch_size": PATCH},
    ),
    (
        "LlavaNext",
        {"vision_config": {"model_type": "clip_vision_model"}, "image_grid_pinpoints": _PINNED},
        {**_CLIP, "image_grid_pinpoints": _PINNED},
        {},
    ),
    (
        "LlavaOnevision",
        {"vision_config": {"model_type": "siglip_vision_model"}, "image_grid_pinpoints": _PINNED, **_ONEVISION},
        {**_SQUARE_STEPS, "image_grid_pinpoints": _PINNED},
        {"num_image_tokens": 16, **_ONEVISION},
    ),
    ("Gemma3", {"mm_tokens_per_image": 16, "boi_token_index": 4, "eoi_token_index": 5}, _SQUARE_STEPS | _CROPS, {}),
    ("Mistral3", {"spatial_merge_size": 2}, {"size": {"longest_edge": 2 * EDGE}, **_PIXELS}, {"spatial_merge_size": 2}),
    (
        "InternVL",
        {"image_seq_length": 4, "downsample_ratio": 0.5, "vision_feature_select_strategy": "default"},
        {**_SQUARE_STEPS, "min_patches": 1, "max_patches": 6},
        {"image_seq_length": 4},
    ),
    *(
        (
            name,
            {"scale_factor": 2},
            {"max_image_size": {"longest_edge": EDGE}, "size": {"longest_edge": 56}},
            {"image_seq_len": 4},
        )
        for name in ("Idefics3", "SmolVLM")
    ),
    ("Qwen2VL", {"model_type": "qwen2_vl", "max_position_embeddings": 512}, _QWEN | _BOUNDS, {}),
    ("Qwen2_5_VL", {}, {}, {"image_processor": _QWEN | _BOUNDS}),
    ("Qwen3VL", {}, _QWEN | {"size": {"shortest_edge": 3136, "longest_edge": 6272}}, {}),
    ("Qwen3VLMoe", {}, _QWEN | {"size": {"shortest_edge": 3136, "longest_edge": 6272}}, {}),
)
"""Name of the architecture, config.json, preprocessor_config.json and processor_config.json."""
_TOKENS = {3: "<image>", 4: "<start>", 5: "<end>"}


class Processors(Target):
    """Mutated settings of each family of models that read images, with images of several ratios."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sizes = ((12, 9), (200, 40), (1, 90), (64, 64), (3, 3))
        self._files = [file_of(colour(200, *size)) for size in sizes]
        self._tokenizer = {"added_tokens": [{"id": token, "content": name} for token, name in _TOKENS.items()]}

    def run(self, draw: Random) -> Outcome:
        """Reads the settings as the API server does, then takes images as the router does."""
        name, own, steps, processor = draw.choice(MODELS)
        documents = {"config.json": _config(name, own), "preprocessor_config.json": steps, "processor_config.json": processor}
        for file, document in documents.items():
            times = draw.choice((0, 0, 0, 1)) if not document else draw.choice((0, 1, 1, 2))
            self._write(draw, file, deepcopy(document), times)
        self._write(draw, "tokenizer.json", deepcopy(self._tokenizer), draw.choice((0, 0, 0, 0, 0, 1)))
        try:
            assets = read_assets(self._folder, ["tiny"], None)
            vision = read_vision(self._folder)
        except ModelError as error:
            if "config.json" not in str(error) and "tokenizer.json" not in str(error):
                raise Defect(f"an error without the file: {error}") from error
            str(error).encode()
            return "refused"
        taken = taken_images(assets)
        if vision is None or taken is None:
            return "refused"  # a model of text
        if taken != vision.input:
            raise Defect(f"the router gets other settings: {taken}, {vision.input}")
        if taken.obstacle:
            if len(taken.obstacle) > MAX_REASON:
                raise Defect(f"a reason of {len(taken.obstacle)} characters")
            return "refused"
        most_grid_tokens(taken)
        taken = taken.among(draw.choice((1, 2)))
        outcomes = [_take(content, taken, vision) for content in draw.sample(self._files, 2)]
        return "accepted" if "accepted" in outcomes else "refused"

    def _write(self, draw: Random, name: str, document: Any, times: int) -> None:
        for _ in range(times if draw.random() < 0.6 else 0):
            numbers = [(node, key) for node, key in places(document) if isinstance(node[key], int | float)]
            if numbers:
                node, key = draw.choice(numbers)
                node[key] = draw.choice((0, 1, 2, 3, 7, 28, 56, 1000, 4096, -1, 0.5, -7, draw.choice(INTEGERS)))
                times -= 1
        content = encode_document(mutate_document(draw, document, times))
        (self._folder / name).write_bytes(mutate_bytes(draw, content) if draw.random() < 0.02 else content)


def _config(name: str, own: Mapping[str, Any]) -> Json:
    """Returns a config.json."""
    text = {} if "model_type" in own else {"text_config": {"max_position_embeddings": 512, "vocab_size": 352}}
    tower = {"image_size": EDGE, "patch_size": PATCH, "spatial_merge_size": 2, **own.get("vision_config", {})}
    if name == "InternVL":
        tower |= {"image_size": [EDGE, EDGE], "patch_size": [PATCH, PATCH]}
    ids = {"image_token_id": 3, "image_token_index": 3}
    return {**text, **ids, **own, "architectures": [f"{name}ForConditionalGeneration"], "vision_config": tower}


def _take(content: bytes, taken: wire.ImageInput, vision: VisionModel) -> Outcome:
    """Decodes an image and places it in a prompt. Raises Defect for one that a rank could not encode."""
    try:
        picture = decode(content, taken, MAX_PIXELS, "messages")
        text = with_placeholders(f"one {taken.token} two", taken, [picture])
        if len(text) > MAX_PLACEHOLDERS:
            raise Defect(f"{len(text)} characters for an image")
        count = num_tokens(taken, picture.cut)
        [image] = prompt_images(
            [0, *[taken.token_id] * count, 0] if taken.token_id else [taken.token_id] * count, taken, [picture]
        )
    except ImageRefused as error:
        if "messages" not in str(error) and "tokenizer" not in str(error):
            raise Defect(f"an error without the parameter: {error}") from error
        return "refused"
    if not image.spans or image.stop - image.start != count or not count:
        raise Defect(f"{count} tokens of an image: {image.spans}")
    _check_pixels(picture, vision)
    return "accepted"


def _check_pixels(picture: Picture, vision: VisionModel) -> None:
    num_pixels = picture.cut.num_tiles * picture.height * picture.width
    if len(picture.pixels) != 3 * num_pixels or not num_pixels:
        raise Defect(f"{len(picture.pixels)} bytes for {num_pixels} pixels")
    tile = np.frombuffer(picture.pixels, np.uint8)[: 3 * picture.height * picture.width]
    values = pixel_values(tile.reshape(picture.height, picture.width, 3), vision.scale)
    if values.shape != (3, picture.height, picture.width) or not np.isfinite(values).all():
        raise Defect(f"pixels that are not finite: {vision.scale}")
