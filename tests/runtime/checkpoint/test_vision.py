"""How published models take images, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from phalanx_frontend.images.tiling import num_tokens, placeholder, tiling
from phalanx_runtime.checkpoint.vision import VisionModel, read_vision, text_config
from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.config import parse_config
from tests.runtime.tiny_vision import onevision_text

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "torch_dtype": "float16",
    "vision_config": {"hidden_size": 1024, "image_size": 336, "model_type": "clip_vision_model", "patch_size": 14},
    "vision_feature_select_strategy": "default",
}
"""As published for LLaVA 1.5 with 7 billion parameters."""
LLAVA_STEPS: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "resample": 3,
    "size": {"shortest_edge": 336},
}
SMOLVLM: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "scale_factor": 4,
    "text_config": {"model_type": "llama", "hidden_size": 576, "vocab_size": 49280, "max_position_embeddings": 8192},
    "vision_config": {"image_size": 512, "patch_size": 16, "model_type": "idefics3"},
}
"""As published for SmolVLM with 256 million parameters."""
RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
}
"""As published for Gemma 3 with 4 billion parameters."""
QWEN2_STEPS = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
QWEN: dict[str, tuple[dict[str, Any], dict[str, Any], int, tuple[int, ...], int]] = {
    "qwen2": (
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "image_token_id": 151655,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2},
        },
        QWEN2_STEPS,
        28,
        (0,) * 16 + (1,) * 24 + (2,) * 24,
        12845056,
    ),
    "qwen2.5": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "image_token_id": 151655,
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
            "vision_config": {"depth": 32, "model_type": "qwen2_5_vl", "patch_size": 14, "spatial_merge_size": 2},
        },
        QWEN2_STEPS,
        28,
        (0,) * 16 + (1,) * 24 + (2,) * 24,
        12845056,
    ),
    "qwen3": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": 151655,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 2560,
                "head_dim": 128,
                "num_key_value_heads": 8,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5000000,
            },
            "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "model_type": "qwen3_vl", "patch_size": 16},
        },
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2},
        32,
        (0, 1, 2) * 20 + (0,) * 4,
        16777216,
    ),
}
"""As published for Qwen2-VL with 2, Qwen2.5-VL with 7 and Qwen3-VL with 4 billion parameters: config.json, processor, and what
follows."""
GEMMA_STEPS: dict[str, Any] = {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None}
GEMMA_NAMES = {255999: "<start_of_image>", 256000: "<end_of_image>", 262144: "<image_soft_token>"}
SMOLVLM_STEPS: dict[str, Any] = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}, "resample": 1}


def read(folder: Path, config: dict[str, Any], steps: dict[str, Any] | None = None) -> VisionModel:
    (folder / "config.json").write_text(json.dumps(config))
    if steps is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(steps))
    vision = read_vision(folder)
    assert vision is not None
    return vision


def test_llava_has_576_tokens_for_an_image(tmp_path: Path) -> None:
    taken = read(tmp_path, LLAVA, LLAVA_STEPS).input
    assert (taken.tile_tokens, taken.height, taken.width, taken.shortest_edge, taken.obstacle) == (576, 336, 336, 336, "")
    text = text_config(LLAVA)
    assert (text["architectures"], text["hidden_size"], text["num_hidden_layers"]) == (["LlamaForCausalLM"], 4096, 32)
    assert (text["vocab_size"], text["torch_dtype"]) == (32064, "float16")


def test_settings_within_those_of_the_processor_come_first(tmp_path: Path) -> None:
    """As in `transformers` 5, which saves them there and leaves a file of an earlier version as it is."""
    own = {**LLAVA_STEPS, "crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 224}, "image_mean": [0.5] * 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    found = [read(tmp_path, LLAVA, steps) for steps in (None, LLAVA_STEPS)]
    assert [(one.input.height, one.input.tile_tokens, one.scale.mean[0]) for one in found] == [(224, 256, 0.5)] * 2
    (tmp_path / "processor_config.json").write_text("{}")
    assert read(tmp_path, LLAVA).input.height == 336


def test_llava_next_has_tokens_of_its_best_resolution(tmp_path: Path) -> None:
    """As published for LLaVA 1.6 with Mistral: the image of 672 x 672 has 24 rows of 48 cells for one that is twice as wide."""
    changes = {"architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": RESOLUTIONS}
    steps = LLAVA_STEPS | {"do_pad": True, "image_grid_pinpoints": RESOLUTIONS}
    taken = read(tmp_path, LLAVA | changes, steps).input
    assert (taken.tile_tokens, taken.height, taken.obstacle) == (576, 336, "")
    assert [tiling(taken, *size).num_tiles for size in ((640, 480), (1000, 100), (300, 300))] == [5, 4, 3]
    assert num_tokens(taken, tiling(taken, 672, 672)) == 576 + 48 * 49
    assert num_tokens(taken, tiling(taken, 640, 480)) == 576 + 36 * 49
    other = read(tmp_path, LLAVA | changes, steps | {"image_grid_pinpoints": [[336, 336]]}).input
    assert "image_grid_pinpoints" in other.obstacle


def test_onevision_reduces_large_images(tmp_path: Path) -> None:
    """As published for 7 billion parameters; the numbers of tokens are those of its processor."""
    config = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "image_token_index": 151646,
        "text_config": {"model_type": "qwen2", "hidden_size": 3584, "tie_word_embeddings": False},
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {"image_size": 384, "model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False},
        "vision_feature_select_strategy": "full",
    }
    steps = {"size": {"height": 384, "width": 384}, "image_mean": [0.5, 0.5, 0.5], "do_pad": True, "do_center_crop": None}
    processor = {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9", "vision_feature_select_strategy": "full"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    taken = read(tmp_path, config, steps).input
    assert (taken.tile_tokens, taken.height, taken.obstacle) == (729, 384, "")
    images = SimpleNamespace(image_grid_pinpoints=[list(size) for size in taken.resolutions])
    text = onevision_text(images, 729, "anyres_max_9")
    counts = []
    for width, height in ((300, 300), (640, 480), (1920, 1080), (4000, 300), (1000, 3000), (2304, 2304), (769, 383)):
        cut = tiling(taken, width, height)
        found = {"batch_num_images": [1], "image_sizes": [[height, width]], "pixel_values": torch.zeros(1, 1, 3, 384, 384)}
        assert placeholder(taken, cut) == text.replace_image_token(found, 0) and cut.num_tiles <= 37
        counts.append(num_tokens(taken, cut))
    assert max(counts) < 10.4 * 729, "a large image is reduced"
    several = taken.among(2)
    assert taken.among(1) is taken and num_tokens(several, tiling(several, 1920, 1080)) == 730
    assert (several.layout, several.border) == ("square", (127, 127, 127))
    for change in (
        {"vision_aspect_ratio": "pad"},
        {"image_grid_pinpoints": [[100, 384]]},
        {"vision_aspect_ratio": "anyres_max_0"},
    ):
        assert read(tmp_path, config | change, steps).input.obstacle
    assert "image_grid_pinpoints" in read(tmp_path, config, steps | {"image_grid_pinpoints": [[384, 384]]}).input.obstacle
    (tmp_path / "processor_config.json").write_text(json.dumps(processor | {"num_image_tokens": 576}))
    assert "num_image_tokens" in read(tmp_path, config, steps).input.obstacle


def test_mistral_ends_each_row_of_tokens(tmp_path: Path) -> None:
    """As published for Mistral Small 3.1."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 10, "content": "[IMG]"}]}))
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120},
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    }
    taken = read(tmp_path, config, {"size": {"longest_edge": 1540}}).input
    assert (taken.height, taken.longest_edge, taken.obstacle) == (28, 1540, "")
    cut = tiling(taken, 80, 50)
    assert placeholder(taken, cut) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert tiling(taken, 3080, 1540).sizes == ((1540, 784),)
    assert text_config(config)["tie_word_embeddings"]
    assert not text_config({**config, "tie_word_embeddings": False})["tie_word_embeddings"]
    (tmp_path / "processor_config.json").write_text(json.dumps({"spatial_merge_size": 1}))
    assert "spatial_merge_size" in read(tmp_path, config).input.obstacle


@pytest.mark.parametrize(("fields", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 8}, 8)])
def test_a_mistral_beside_images_has_a_window(fields: dict[str, Any], window: int | None) -> None:
    """As in `transformers`: that of its first version, which BakLLaVA leaves out, unless the field is null."""
    text = {"model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05, **fields}
    theirs = AutoConfig.for_model("llava", text_config=dict(text)).get_text_config()
    config = parse_config(dict(text_config({**LLAVA, "text_config": text})))
    assert set(config.windows) == {window} and theirs.sliding_window == window


def test_gemma_has_256_tokens_that_attend_to_each_other(tmp_path: Path) -> None:
    added = [{"id": number, "content": name} for number, name in GEMMA_NAMES.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    taken = read(tmp_path, GEMMA, GEMMA_STEPS).input
    assert (taken.tile_tokens, taken.height, taken.obstacle, taken.attends_within) == (256, 896, "", True)
    run = "<image_soft_token>" * 256
    shown = placeholder(taken, tiling(taken, 640, 480))
    assert (taken.token, shown) == ("<start_of_image>", f"\n\n<start_of_image>{run}<end_of_image>\n\n")
    config = parse_config(dict(text_config(GEMMA)))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.tied and config.windows[:6] == (1024,) * 5 + (None,)
    scans = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": None}
    taken = read(tmp_path, GEMMA, GEMMA_STEPS | scans).input
    assert [tiling(taken, *size).num_tiles for size in ((640, 480), (1200, 600), (300, 1100), (400, 200), (512, 512))] == [
        3,
        3,
        5,
        1,
        1,
    ]
    assert placeholder(taken, tiling(taken, 1200, 600)).count("<image_soft_token>") == 3 * 256
    assert read(tmp_path, GEMMA, GEMMA_STEPS | scans | {"pan_and_scan_max_num_crops": -1}).input.obstacle


@pytest.mark.parametrize("name", QWEN)
def test_qwen_has_a_token_for_each_cell(tmp_path: Path, name: str) -> None:
    config, steps, cell, axes, most = QWEN[name]
    added = [{"id": 151655, "content": "<|image_pad|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    taken = read(tmp_path, config, steps).input
    assert (taken.token, taken.height, taken.width, taken.max_pixels, taken.obstacle) == ("<|image_pad|>", cell, cell, most, "")
    cut = tiling(taken, 640, 480)
    (width, height) = cut.sizes[-1]
    assert num_tokens(taken, cut) == (width // cell) * (height // cell) == placeholder(taken, cut).count("<|image_pad|>")
    parsed = parse_config(dict(text_config(config)))
    (rope,) = set(parsed.ropes)
    assert rope is not None and rope.axes == axes and rope.theta == config.get("rope_theta", 5000000)
    assert parsed.head_dim == 128 and parsed.tied == config["tie_word_embeddings"]
    assert "patch_size" in read(tmp_path, config, steps | {"patch_size": 7}).input.obstacle


def test_internvl_cuts_images_by_their_ratio(tmp_path: Path) -> None:
    """As published for InternVL3 with 1 billion parameters; the tilings are those of its processor."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 151667, "content": "<IMG_CONTEXT>"}]}))
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "text_config": {"model_type": "qwen2", "hidden_size": 896, "tie_word_embeddings": False},
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14], "model_type": "internvl_vision"},
    }
    steps = {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12}
    taken = read(tmp_path, config, steps).input
    assert (taken.tile_tokens, taken.height, taken.obstacle) == (256, 448, "")
    sizes = (448, 448), (300, 300), (1920, 1080), (1000, 3000), (4000, 300), (900, 450), (2000, 1000)
    for width, height in sizes:
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        assert tiling(taken, width, height).sizes == ((448 * columns, 448 * rows),)
        assert tiling(taken, width, height).num_tiles == columns * rows + (columns * rows > 1)
    assert placeholder(taken, tiling(taken, 900, 450)) == f"<img>{'<IMG_CONTEXT>' * 3 * 256}</img>"
    for tied in ({}, {"tie_word_embeddings": True}):  # as `transformers` writes by default
        assert text_config(config | tied)["tie_word_embeddings"]
    for change in ({"max_patches": 10**6}, {"min_patches": 13}, {"size": {"height": 224, "width": 224}}):
        assert read(tmp_path, config, steps | change).input.obstacle
    assert "image_seq_length" in read(tmp_path, config | {"image_seq_length": 64}, steps).input.obstacle


def test_smolvlm_has_64_tokens_for_a_tile(tmp_path: Path) -> None:
    taken = read(tmp_path, SMOLVLM, SMOLVLM_STEPS).input
    assert (taken.tile_tokens, taken.height, taken.longest_edge, taken.obstacle) == (64, 512, 2048, "")
    assert tiling(taken, 1600, 1200).num_tiles == 13 and tiling(taken, 100, 100).num_tiles == 17
    assert 17 * 512 * 512 * 3 < 14e6


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"vision_config": {"model_type": "dinov2"}}, {}),
        ({}, {"do_pad": True}),
        ({}, {"size": {"shortest_edge": 224}}),
        ({}, {"crop_size": {"height": 10**9, "width": 10**9}, "size": {"shortest_edge": 10**9}}),
        ({"vision_config": 3}, {}),
        ({"vision_config": {"model_type": "clip_vision_model", "patch_size": 0}}, {}),
    ],
    ids=["another tower", "padding", "a crop beyond the image", "a huge crop", "no config", "no patches"],
)
def test_other_processing_is_an_obstacle(tmp_path: Path, config: dict[str, Any], steps: dict[str, Any]) -> None:
    assert read(tmp_path, LLAVA | config, LLAVA_STEPS | steps).input.obstacle


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ({"resample": 56}, "preprocessor_config.json: resample 56 must be within 0 and 5"),
        ({"image_mean": [0.5, 0.5, None]}, "preprocessor_config.json: image_mean must be a number"),
        ({"image_std": [0.5, 0, 0.5]}, "preprocessor_config.json: image_std (0.5, 0.0, 0.5) must be within 1e-06 and 1e+06"),
        ({"image_std": [[1]]}, "image_std must be a list of three numbers"),
        ({"rescale_factor": -1}, "rescale_factor -1 must be within 0 and 1e+06"),
        ({"rescale_factor": {}}, "rescale_factor must be a number"),
        ({"image_mean": [1e30] * 3}, "image_mean (1e+30, 1e+30, 1e+30) must be within 1e+06"),
    ],
)
def test_pixels_have_finite_values(tmp_path: Path, steps: dict[str, Any], reason: str) -> None:
    assert reason in read(tmp_path, LLAVA, LLAVA_STEPS | steps).input.obstacle


@pytest.mark.parametrize(
    ("model", "steps", "reason"),
    [
        ({"vision_config": {"patch_size": 1, "image_size": 4096}}, {"max_image_size": {"longest_edge": 4096}}, "of a tile"),
        ({"image_token_id": 10**400}, {}, "image_token_id of many digits must be within"),
        ({}, {"size": {"longest_edge": -5}}, "size: longest_edge -5 must be within 0 and"),
        ({"scale_factor": 2000}, {}, "the number of tokens of a tile, by its patches, 0 must be within 1 and 8192"),
    ],
    ids=["tokens", "token", "edge", "no tokens"],
)
def test_numbers_of_images_are_bounded(tmp_path: Path, model: dict[str, Any], steps: dict[str, Any], reason: str) -> None:
    """A router writes each token of an image as text, and resizes an image to these edges."""
    assert reason in read(tmp_path, SMOLVLM | model, SMOLVLM_STEPS | steps).input.obstacle


@pytest.mark.parametrize(
    ("vision", "steps", "reason"),
    [
        ({"patch_size": -14, "spatial_merge_size": -2}, {"patch_size": -14, "merge_size": -2}, "patch_size -14"),
        ({"temporal_patch_size": 10**9}, {"temporal_patch_size": 10**9}, "temporal_patch_size 1000000000 (at most 16)"),
        (
            {"patch_size": 1, "spatial_merge_size": 1},
            {"patch_size": 1, "merge_size": 1},
            "the edge of a token 1 must be within 4",
        ),
        ({}, {"min_pixels": 10**9}, "min_pixels 1000000000 is more than max_pixels 12845056"),
        ({}, {"max_pixels": 10**30}, "max_pixels of many digits must be within"),
    ],
    ids=["negative", "depth", "small cells", "least pixels", "most pixels"],
)
def test_cells_of_images_are_bounded(tmp_path: Path, vision: dict[str, Any], steps: dict[str, Any], reason: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 151655, "content": "<|image_pad|>"}]}))
    config, own, *_ = QWEN["qwen2"]
    changed = config | {"vision_config": config["vision_config"] | vision}
    assert reason in read(tmp_path, changed, own | steps).input.obstacle


@pytest.mark.parametrize("name", ["", "x" * 129, "\ud800"], ids=["empty", "long", "half of a pair"])
def test_tokens_of_images_have_short_names(tmp_path: Path, name: str) -> None:
    """A router splits texts at them, and sends them."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 151655, "content": name}]}))
    config, steps, *_ = QWEN["qwen2"]
    obstacle = read(tmp_path, config, steps).input.obstacle
    assert "tokenizer.json" in obstacle and len(obstacle.encode()) < 500


def test_models_of_text_are_unchanged(tmp_path: Path) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert text_config(raw) is raw and read_vision(tmp_path) is None


@pytest.mark.parametrize("text", [{"model_type": "mamba"}, None])
def test_a_text_of_another_kind_is_refused(text: object) -> None:
    with pytest.raises(Unsupported, match="mamba. .* is not supported: use one of llama, mistral" if text else "text_config"):
        text_config(LLAVA | {"text_config": text})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlavaForConditionalGeneration", "LlamaForCausalLM"),
        ("LlavaOnevisionForConditionalGeneration", "Qwen2ForCausalLM"),
        ("InternVLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("Mistral3ForConditionalGeneration", "MistralForCausalLM"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"),
    ],
)
def test_a_text_has_the_kind_of_its_model(architecture: str, name: str) -> None:
    assert text_config({"architectures": [architecture], "text_config": {}})["architectures"] == [name]
