"""How published models take images, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx_frontend.images.tiling import placeholder, tiling
from phalanx_runtime.checkpoint.vision import VisionModel, read_vision, text_config
from phalanx_runtime.model.config import parse_config

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
    assert "do_pan_and_scan" in read(tmp_path, GEMMA, GEMMA_STEPS | {"do_pan_and_scan": True}).input.obstacle


def test_smolvlm_has_64_tokens_for_a_tile(tmp_path: Path) -> None:
    taken = read(tmp_path, SMOLVLM, SMOLVLM_STEPS).input
    assert (taken.tile_tokens, taken.height, taken.longest_edge, taken.obstacle) == (64, 512, 2048, "")
    assert tiling(taken, 1600, 1200).num_tiles == 13 and tiling(taken, 100, 100).num_tiles == 17
    assert 17 * 512 * 512 * 3 < 14e6


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"vision_config": {"model_type": "pixtral"}}, {}),
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


def test_models_of_text_are_unchanged(tmp_path: Path) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert text_config(raw) is raw and read_vision(tmp_path) is None


def test_a_text_of_another_kind_stays_refused() -> None:
    raw = LLAVA | {"text_config": {"model_type": "mamba"}}
    assert text_config(raw) is raw
