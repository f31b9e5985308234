"""Tiny random checkpoints of models that read images, their processors, and pictures."""

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image

from tests.runtime.tiny import EOS_ID, VOCAB_SIZE, WINDOW, save_tokenizer

VisionKind = Literal[
    "llava",
    "idefics3",
    "gemma3",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava_next",
    "pixtral",
    "mistral3",
    "gemma3_crops",
    "qwen3_vl_moe",
    "qwen2_vl",
    "internvl",
    "internvl_moe",
    "llava_onevision",
    "smolvlm",
]
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ALL: tuple[VisionKind, ...] = get_args(VisionKind)
KINDS, MORE = ALL[:5], ALL[5:]
"""Those that all tests compute, and those that differ from one of these in their images or text alone."""
EDGE, PATCH = 28, 7
IMAGE_TOKEN = "<image>"
_TOKENS = (
    IMAGE_TOKEN,
    "<image_soft_token>",
    "<end_of_image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<row_1_col_1>",
    "<row_1_col_2>",
    "[IMG_BREAK]",
    "[IMG_END]",
)
CROPPING: dict[str, Any] = {
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
NUM_CELLS = (EDGE // PATCH) ** 2
RESOLUTIONS = [[EDGE, 2 * EDGE], [2 * EDGE, EDGE], [2 * EDGE, 2 * EDGE]]
_CHAT = (
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Returns random pixels."""
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def png(image: Image.Image) -> bytes:
    """Returns the file of an image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    """Returns an image as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def save_tiny_vision(folder: Path, kind: VisionKind, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint with tokenizer and image processor, and returns its folder. changes: fields of the text's config."""
    import transformers

    torch.manual_seed(seed)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision |= {"image_size": EDGE, "patch_size": PATCH}
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE + 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        **changes,
    }
    if kind in ("llava", "llava_next", "llava_onevision", "pixtral", "mistral3"):
        config, model = _llava(kind, vision, text)
    elif kind in ("gemma3", "gemma3_crops"):
        own = {"model_type": "gemma3_text", "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16}
        config = transformers.Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
            text_config={**text, **own, "sliding_window": WINDOW, "sliding_window_pattern": 2, **changes},
            mm_tokens_per_image=16,
            image_token_index=VOCAB_SIZE + 1,
            boi_token_index=VOCAB_SIZE,
            eoi_token_index=VOCAB_SIZE + 2,
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    elif kind.startswith("internvl"):
        own = {"model_type": "qwen3", "head_dim": 16}
        if kind == "internvl_moe":
            own |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = transformers.InternVLConfig(
            vision_config=vision, text_config={**text, **own, **changes}, image_token_id=VOCAB_SIZE, image_seq_length=4
        )
        model = transformers.InternVLForConditionalGeneration(config)
    elif kind in QWENS:
        config, model = _qwen(kind, text | {"num_hidden_layers": 4} | changes)
    elif kind == "smolvlm":
        config = transformers.SmolVLMConfig(vision_config=vision, text_config=text, image_token_id=VOCAB_SIZE, scale_factor=2)
        model = transformers.SmolVLMForConditionalGeneration(config)
    else:
        config = transformers.Idefics3Config(vision_config=vision, text_config=text, image_token_id=VOCAB_SIZE, scale_factor=2)
        model = transformers.Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
                if "post_" in name and "layernorm" in name and kind.startswith("gemma3"):
                    parameter.add_(3)  # else the tied head repeats the last token
            elif name.endswith("mm_input_projection_weight"):
                parameter.normal_(0, 0.5)  # transformers makes it of zeros
            elif "projector" in name or "connector" in name:
                parameter.mul_(10)  # else all images are alike beside the text
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    _save_tokenizer(folder)
    image_processor(kind).save_pretrained(folder)
    return folder


def _llava(kind: VisionKind, vision: dict[str, Any], text: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    if kind in ("pixtral", "mistral3"):
        own = {**vision, "model_type": "pixtral", "image_size": 2 * EDGE}
    else:
        own = {**vision, "model_type": "clip_vision_model", "projection_dim": 32}
    shared: dict[str, Any] = {"vision_config": own, "text_config": text, "image_token_index": VOCAB_SIZE}
    if kind == "mistral3":
        config: Any = transformers.Mistral3Config(
            **shared | {"text_config": {**text, "model_type": "mistral", "sliding_window": None}}
        )
        return config, transformers.Mistral3ForConditionalGeneration(config)
    if kind == "llava_next":
        config = transformers.LlavaNextConfig(**shared, image_grid_pinpoints=RESOLUTIONS)
        return config, transformers.LlavaNextForConditionalGeneration(config)
    if kind == "llava_onevision":  # two images of three tiles have more cells than an image may
        own = {**vision, "model_type": "siglip_vision_model", "vision_use_head": False}
        changes = {"vision_config": own, "text_config": {**text, "model_type": "qwen2"}, "vision_aspect_ratio": "anyres_max_2"}
        config = transformers.LlavaOnevisionConfig(**shared | changes, image_grid_pinpoints=RESOLUTIONS)
        return config, transformers.LlavaOnevisionForConditionalGeneration(config)
    features: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"} if kind == "pixtral" else {}
    config = transformers.LlavaConfig(**shared, **features)
    return config, transformers.LlavaForConditionalGeneration(config)


def _qwen(kind: VisionKind, text: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "depth": 3, "num_heads": 4, "patch_size": PATCH}
    vision |= {"out_hidden_size": text["hidden_size"]}
    own = text | {"model_type": f"{kind}_text", "head_dim": 16}
    ids: dict[str, Any] = {"image_token_id": VOCAB_SIZE, "video_token_id": VOCAB_SIZE + 9}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        config: Any = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=own, **ids)
        return config, transformers.Qwen2_5_VLForConditionalGeneration(config)
    if kind == "qwen2_vl":
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        vision = {
            "embed_dim": 32,
            "mlp_ratio": 2,
            "depth": 3,
            "num_heads": 4,
            "patch_size": PATCH,
            "hidden_size": text["hidden_size"],
        }
        config = transformers.Qwen2VLConfig(vision_config=vision, text_config=own, **ids)
        return config, transformers.Qwen2VLForConditionalGeneration(config)
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    own["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    if kind == "qwen3_vl_moe":
        own |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        config = transformers.Qwen3VLMoeConfig(vision_config=vision, text_config=own, **ids)
        return config, transformers.Qwen3VLMoeForConditionalGeneration(config)
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=own, **ids)
    return config, transformers.Qwen3VLForConditionalGeneration(config)


def _transpose_experts(path: Path) -> None:
    """As published."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _TOKENS])
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": _CHAT}))


def image_processor(kind: VisionKind) -> Any:
    """Returns the image processor of `transformers` that the checkpoint describes."""
    if kind == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size={"height": EDGE, "width": EDGE})
    if kind == "llava_next":
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

        crop = {"height": EDGE, "width": EDGE}
        return LlavaNextImageProcessorPil(size={"shortest_edge": EDGE}, crop_size=crop, image_grid_pinpoints=RESOLUTIONS)
    if kind in ("pixtral", "mistral3"):
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        cell = PATCH if kind == "pixtral" else 2 * PATCH
        return PixtralImageProcessorPil(size={"longest_edge": 2 * EDGE}, patch_size={"height": cell, "width": cell})
    if kind in ("gemma3", "gemma3_crops"):
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        crops = {"do_pan_and_scan": True, **CROPPING} if kind == "gemma3_crops" else {}
        return Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE}, **crops)
    if kind in QWENS:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 4 * EDGE * EDGE, "longest_edge": 8 * EDGE * EDGE}
        return Qwen2VLImageProcessorPil(size=size, patch_size=PATCH)
    if kind == "llava_onevision":
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

        return LlavaOnevisionImageProcessorPil(size={"height": EDGE, "width": EDGE}, image_grid_pinpoints=RESOLUTIONS)
    if kind.startswith("internvl"):
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(size={"height": EDGE, "width": EDGE}, max_patches=6)
    if kind == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil(size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE})
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE})


def processor(folder: Path, kind: VisionKind) -> Any:
    """Returns the processor of `transformers` for a checkpoint: text and images to tensors."""
    import transformers

    tokenizers: Any = transformers.PreTrainedTokenizerFast
    tokenizer = tokenizers(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    if kind in ("llava", "llava_next"):
        processors: Any = transformers.LlavaProcessor if kind == "llava" else transformers.LlavaNextProcessor
        return processors(
            image_processor(kind),
            tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if kind in ("gemma3", "gemma3_crops"):
        tokenizer.boi_token, tokenizer.boi_token_id = IMAGE_TOKEN, VOCAB_SIZE
        tokenizer.image_token, tokenizer.image_token_id = "<image_soft_token>", VOCAB_SIZE + 1
        tokenizer.eoi_token = "<end_of_image>"
        processors = transformers.Gemma3Processor
        crops = {"do_pan_and_scan": True, **CROPPING} if kind == "gemma3_crops" else {}  # it takes no notice of its file's
        return partial(processors(image_processor(kind), tokenizer, image_seq_length=16), **crops)
    if kind in ("pixtral", "mistral3"):
        merge = 1 if kind == "pixtral" else 2
        return _PixtralProcessor(image_processor(kind), tokenizer, PATCH * merge)
    if kind in QWENS:
        tokenizer.image_token, tokenizer.image_token_id = IMAGE_TOKEN, VOCAB_SIZE
        return _QwenProcessor(image_processor(kind), tokenizer)
    if kind == "llava_onevision":
        return _OneVisionProcessor(image_processor(kind), tokenizer)
    if kind.startswith("internvl"):
        return _InternProcessor(image_processor(kind), tokenizer)
    processors = transformers.Idefics3Processor  # SmolVLM's needs another library, and writes the same text
    return processors(image_processor(kind), tokenizer, image_seq_len=4)


class _QwenProcessor:
    """That of `transformers` without videos, whose processor needs another library."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self._images, self._tokenizer = images, tokenizer

    def __call__(self, text: str, images: Any, return_tensors: str) -> Any:
        found = self._images(images, return_tensors=return_tensors) if images else {}
        pieces = text.split(IMAGE_TOKEN)
        counts = [int(grid.prod()) // 4 for grid in found.get("image_grid_thw", [])]
        whole = pieces[0] + "".join(IMAGE_TOKEN * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
        inputs = self._tokenizer(whole, return_tensors=return_tensors, return_token_type_ids=False)
        return {**inputs, **found, "mm_token_type_ids": (inputs["input_ids"] == VOCAB_SIZE).int()}


class _InternProcessor:
    """That of `transformers` without videos."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self._images, self._tokenizer = images, tokenizer

    def __call__(self, text: str, images: Any, return_tensors: str) -> Any:
        found = self._images(images, crop_to_patches=True, return_tensors=return_tensors) if images else {}
        first, *pieces = text.split(IMAGE_TOKEN)
        for count, piece in zip(found.pop("num_patches", []), pieces, strict=True):
            first += f"<img>{IMAGE_TOKEN * 4 * int(count)}</img>{piece}"
        return {**self._tokenizer(first, return_tensors=return_tensors, return_token_type_ids=False), **found}


class _OneVisionProcessor:
    """That of `transformers` without videos. Images of one text are nested, as in `apply_chat_template`."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self._images, self._tokenizer = images, tokenizer
        self._text = onevision_text(images, NUM_CELLS, "anyres_max_2")

    def __call__(self, text: str, images: Any, return_tensors: str) -> Any:
        found = self._images([images], return_tensors=return_tensors) if images else {}
        first, *pieces = text.split(IMAGE_TOKEN)
        first += "".join(self._text.replace_image_token(found, index) + piece for index, piece in enumerate(pieces))
        return {**self._tokenizer(first, return_tensors=return_tensors, return_token_type_ids=False), **found}


def onevision_text(images: Any, num_cells: int, aspect: str) -> Any:
    """Returns the processor of LLaVA-OneVision without tokenizer and videos: its `replace_image_token` makes placeholders."""
    from transformers import LlavaOnevisionProcessor

    made: Any = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    made.image_processor, made.num_image_tokens, made.vision_aspect_ratio = images, num_cells, aspect
    made.vision_feature_select_strategy, made.image_token = "full", IMAGE_TOKEN
    return made


class _PixtralProcessor:
    """That of `transformers`, which needs another library."""

    def __init__(self, images: Any, tokenizer: Any, cell: int) -> None:
        self._images, self._tokenizer, self._cell = images, tokenizer, cell

    def __call__(self, text: str, images: Any, return_tensors: str) -> Any:
        found = self._images(images, return_tensors=return_tensors) if images else {}
        first, *pieces = text.split(IMAGE_TOKEN)
        for (height, width), piece in zip(found.get("image_sizes", []), pieces, strict=True):
            row = IMAGE_TOKEN * (int(width) // self._cell)
            first += "[IMG_BREAK]".join([row] * (int(height) // self._cell)) + "[IMG_END]" + piece
        return {**self._tokenizer(first, return_tensors=return_tensors, return_token_type_ids=False), **found}
