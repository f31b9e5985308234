"""The random checkpoint that every engine serves: 135 million weights in Llama's shape, tied, bf16, seeded.

Greedy decoding repeats itself, which does not matter for speed. Every token has a printable text, so that each one produces an
event.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tools.cache import cache_root, finished, key_of

VOCABULARY = 49152
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NUM_WEIGHTS = VOCABULARY * 576 + 30 * (576 * (960 + 576 + 3 * 1536) + 2 * 576) + 576
_SEED = 20261121
_VERSION = "1"


def checkpoint() -> Path:
    """Returns the checkpoint's folder in the cache; creates it if absent, within seconds."""
    return finished(cache_root() / f"bench-small-{key_of(json.dumps(CONFIG), str(_SEED), _VERSION)}", _make)


def _make(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder, VOCABULARY)


def save_tokenizer(folder: Path, size: int) -> None:
    """Writes a tokenizer of `size` tokens with a printable text each; token 0 ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {_text(token, letters): token for token in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _text(0, letters), "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _text(token: int, letters: list[str]) -> str:
    """Returns a letter of the byte alphabet for the first tokens, a word with a leading space for the others."""
    return letters[token - 1] if 0 < token <= len(letters) else f"\u0120t{token}"


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    weights = {"model.embed_tokens.weight": noise(VOCABULARY, 576), "model.norm.weight": torch.ones(576).bfloat16()}
    shapes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    for layer in range(30):
        name = f"model.layers.{layer}."
        weights |= {f"{name}self_attn.{part}.weight": noise(*shape) for part, shape in shapes.items()}
        weights |= {f"{name}mlp.{part}_proj.weight": noise(1536, 576) for part in ("gate", "up")}
        weights[f"{name}mlp.down_proj.weight"] = noise(576, 1536)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = torch.ones(576).bfloat16()
    return weights
