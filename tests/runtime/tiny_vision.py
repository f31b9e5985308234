"""Tiny random checkpoints of models that read images, their processors, and pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image

from tests.runtime.tiny import EOS_ID, VOCAB_SIZE, WINDOW, save_tokenizer

VisionKind = Literal["llava", "idefics3", "gemma3", "qwen2_5_vl", "qwen3_vl"]
KINDS: tuple[VisionKind, ...] = get_args(VisionKind)
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
)
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
    if kind == "llava":
        config: Any = transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **vision},
            text_config=text,
            image_token_index=VOCAB_SIZE,
        )
        model: Any = transformers.LlavaForConditionalGeneration(config)
    elif kind == "gemma3":
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
    elif kind in ("qwen2_5_vl", "qwen3_vl"):
        config, model = _qwen(kind, text | {"num_hidden_layers": 4} | changes)
    else:
        config = transformers.Idefics3Config(vision_config=vision, text_config=text, image_token_id=VOCAB_SIZE, scale_factor=2)
        model = transformers.Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
                if "post_" in name and "layernorm" in name and kind == "gemma3":
                    parameter.add_(3)  # else the tied head repeats the last token
            elif name.endswith("mm_input_projection_weight"):
                parameter.normal_(0, 0.5)  # transformers makes it of zeros
            elif "projector" in name or "connector" in name:
                parameter.mul_(10)  # else all images are alike beside the text
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    image_processor(kind).save_pretrained(folder)
    return folder


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
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    own["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=own, **ids)
    return config, transformers.Qwen3VLForConditionalGeneration(config)


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
    if kind == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE})
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 4 * EDGE * EDGE, "longest_edge": 8 * EDGE * EDGE}
        return Qwen2VLImageProcessorPil(size=size, patch_size=PATCH)
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 2 * EDGE}, max_image_size={"longest_edge": EDGE})


def processor(folder: Path, kind: VisionKind) -> Any:
    """Returns the processor of `transformers` for a checkpoint: text and images to tensors."""
    import transformers

    tokenizers: Any = transformers.PreTrainedTokenizerFast
    tokenizer = tokenizers(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    if kind == "llava":
        processors: Any = transformers.LlavaProcessor
        return processors(
            image_processor(kind),
            tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if kind == "gemma3":
        tokenizer.boi_token, tokenizer.boi_token_id = IMAGE_TOKEN, VOCAB_SIZE
        tokenizer.image_token, tokenizer.image_token_id = "<image_soft_token>", VOCAB_SIZE + 1
        tokenizer.eoi_token = "<end_of_image>"
        processors = transformers.Gemma3Processor
        return processors(image_processor(kind), tokenizer, image_seq_length=16)
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        tokenizer.image_token, tokenizer.image_token_id = IMAGE_TOKEN, VOCAB_SIZE
        return _QwenProcessor(image_processor(kind), tokenizer)
    processors = transformers.Idefics3Processor
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
