"""What the model code of some families needs beside paged attention. A family is one line in `FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic import attentions
from phalanx_runtime.model.generic.attentions import Method, replace_attention
from phalanx_runtime.model.generic.layers import MASKED, PAGED


@dataclass(frozen=True, slots=True)
class SelectedKeys:
    """The keys that a query selects, by a rule that the runtime does not compute."""

    fields: str
    """Fields of the config, as messages name them."""
    count: Callable[[Any], int]
    """Returns the length of the longest request whose queries select all keys, of a text config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyNeeds:
    """Changes to the model code of a family."""

    attention: tuple[str, str, Callable[[Any], Method]] | None = None
    """Class and method of the attention modules that do not use AttentionInterface, with the method that does."""
    positions: str | None = None
    """Class of the modules that count positions from the first token of a step, which is not that of the request."""
    is_offset: bool = False
    """Whether positions start after the id of the padding token."""
    indexed_kind: str | None = None
    """Kind of the layers whose queries choose their keys by an indexer, of the layer or of an earlier one."""
    selected: SelectedKeys | None = None
    """Requests are at most as long as queries of all layers, or of those of `indexed_kind`, select all keys."""
    implementation: str = PAGED
    """Of attention in `transformers`, within steps."""
    own_attention: str = "eager"
    """Implementation in `transformers` whose logits are right."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """Tensor parallel: styles of modules of the base model that `transformers` leaves whole."""

    def first_position(self, text: Any) -> int:
        """Returns the position of a request's first token. text: the text config."""
        return int(text.pad_token_id or 0) + 1 if self.is_offset else 0

    def longest(self, text: Any, positions: int) -> int:
        """Returns the maximum request length of a model with `positions` positions. text: the text config."""
        positions -= self.first_position(text)
        num_selected = self.num_selected(text)
        return positions if num_selected is None else min(positions, num_selected)

    def num_selected(self, text: Any) -> int | None:
        """Returns the length up to which queries select all keys, or None for any. text: the text config. Raises Unsupported."""
        if self.selected is None or self.indexed_kind not in (None, *(getattr(text, "layer_types", None) or ())):
            return None
        try:
            return int(self.selected.count(text))
        except TypeError as error:
            raise Unsupported(f"its config lacks a number of keys that a query selects: {self.selected.fields}") from error

    def adapt(self, model: Any) -> None:
        """Makes all attention of the model use the handler of the running thread."""
        if self.attention is not None:
            replace_attention(model, *self.attention)


NO_NEEDS = FamilyNeeds()
_BERT = "forward", attentions.bert
_BART = "forward", attentions.bart
_INNER = "_attn", attentions.inner
_OFFSET = FamilyNeeds(is_offset=True)


def _heads(attention: str, output: str = "o_proj") -> dict[str, str]:
    """Returns the styles of attention of layers."""
    heads = {f"layers.*.{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "g_proj")}
    return {**heads, f"layers.*.{attention}.{output}": "rowwise"}


def _split(attention: str, mlp: str, output: str = "o_proj", *, ins: tuple[str, ...], out: str) -> FamilyNeeds:
    """Attention and gated MLP of layers, for tensor parallel. ins, out: linears of the MLP."""
    inner = {f"layers.*.{mlp}.{name}": "colwise" for name in ins}
    return FamilyNeeds(plan={**_heads(attention, output), **inner, f"layers.*.{mlp}.{out}": "rowwise"})


_GATED = _split("self_attn", "feed_forward", ins=("gate_proj", "up_proj"), out="down_proj")
_LFM2 = _split("self_attn", "feed_forward", "out_proj", ins=("w1", "w3"), out="w2")


def _indexed(indexer: str) -> FamilyNeeds:
    return FamilyNeeds(attention=(indexer, "forward", attentions.index), indexed_kind="indexed_attention", implementation=MASKED)


FAMILIES: Mapping[str, FamilyNeeds] = {
    "axk2": _indexed("AXK2Indexer"),
    "bailing_hybrid": FamilyNeeds(plan={"layers.*.self_attn.g_proj": "colwise"}),
    "bamba": _GATED,
    "bart": FamilyNeeds(positions="BartLearnedPositionalEmbedding"),
    "big_bird": FamilyNeeds(attention=("BigBirdSelfAttention", *_BERT)),
    "bigbird_pegasus": FamilyNeeds(positions="BigBirdPegasusLearnedPositionalEmbedding"),
    "blenderbot": FamilyNeeds(positions="BlenderbotLearnedPositionalEmbedding"),
    "blenderbot-small": FamilyNeeds(positions="BlenderbotSmallLearnedPositionalEmbedding"),
    "bloom": FamilyNeeds(attention=("BloomAttention", "forward", attentions.bloom)),
    "camembert": _OFFSET,
    "codegen": FamilyNeeds(attention=("CodeGenAttention", *_INNER)),
    "data2vec-text": _OFFSET,
    "deepseek_v32": _indexed("DeepseekV32Indexer"),
    "doge": FamilyNeeds(
        attention=("DogeAttention", "forward", attentions.doge),
        selected=SelectedKeys("keep_window_size", lambda text: text.keep_window_size),
    ),
    "dots3_note_text": _indexed("Dots3NoteTextIndexer"),
    "falcon": FamilyNeeds(attention=("FalconAttention", "forward", attentions.falcon), own_attention="sdpa"),
    "falcon_h1": _GATED,
    "git": FamilyNeeds(attention=("GitSelfAttention", *_BERT)),
    "glm_moe_dsa": _indexed("GlmMoeDsaIndexer"),
    "gpt_neo": FamilyNeeds(attention=("GPTNeoSelfAttention", "_attn", attentions.gpt_neo)),
    "gpt_neox_japanese": FamilyNeeds(attention=("GPTNeoXJapaneseAttention", *_INNER)),
    "gptj": FamilyNeeds(attention=("GPTJAttention", *_INNER)),
    "granitemoehybrid": FamilyNeeds(
        plan={
            **_split("self_attn", "shared_mlp", ins=(), out="output_linear").plan,
            "layers.*.shared_mlp.input_linear": "packed_colwise",
        }
    ),
    "hy_v4": _indexed("HYV4Indexer"),
    "jamba": _GATED,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _split("self_attn", "feed_forward", ins=("w1", "w3"), out="w2"),
    "marian": FamilyNeeds(positions="MarianSinusoidalPositionalEmbedding"),
    "mbart": FamilyNeeds(positions="MBartLearnedPositionalEmbedding"),
    "megatron-bert": FamilyNeeds(attention=("MegatronBertSelfAttention", *_BERT)),
    "minimax_m3_vl_text": FamilyNeeds(
        attention=("MiniMaxM3VLIndexer", "forward", attentions.index_all),
        indexed_kind="minimax_m3_sparse",
        selected=SelectedKeys(  # a query selects whole blocks; its own and an incomplete one count too
            "index_topk_blocks * index_block_size", lambda text: text.index_topk_blocks * text.index_block_size
        ),
    ),
    "mpt": FamilyNeeds(attention=("MptAttention", "forward", attentions.mpt), implementation=MASKED),  # it converts a mask
    "mvp": FamilyNeeds(attention=("MvpAttention", *_BART), positions="MvpLearnedPositionalEmbedding"),
    "nemotron_h": FamilyNeeds(
        plan={
            **_split("mixer", "mixer", ins=("up_proj",), out="down_proj").plan,
            "layers.*.mixer.shared_experts.up_proj": "colwise",
            "layers.*.mixer.shared_experts.down_proj": "rowwise",
        }
    ),
    "openai-gpt": FamilyNeeds(attention=("Attention", "_attn", attentions.gpt)),
    "pegasus": FamilyNeeds(positions="PegasusSinusoidalPositionalEmbedding"),
    "plbart": FamilyNeeds(positions="PLBartLearnedPositionalEmbedding"),
    "qwen4_exp_text": FamilyNeeds(
        attention=("Qwen4ExpTextQSAIndexer", "forward", attentions.index_all),
        indexed_kind="indexed_attention",
        selected=SelectedKeys(  # complete blocks, and all tokens after these
            "indexer_budget + indexer_compress_ratio - 1",
            lambda text: text.indexer_budget + text.indexer_compress_ratio - 1,
        ),
        implementation=MASKED,
        plan=_heads("self_attn"),
    ),
    "rembert": FamilyNeeds(attention=("RemBertSelfAttention", *_BERT)),
    "roberta": _OFFSET,
    "roberta-prelayernorm": _OFFSET,
    "roformer": FamilyNeeds(attention=("RoFormerSelfAttention", *_BERT), positions="RoFormerSinusoidalPositionalEmbedding"),
    "trocr": FamilyNeeds(attention=("TrOCRAttention", *_BART), positions="TrOCRLearnedPositionalEmbedding"),
    "xglm": FamilyNeeds(attention=("XGLMAttention", *_BART)),
    "xlm-roberta": _OFFSET,
    "xlm-roberta-xl": _OFFSET,
    "xmod": _OFFSET,
}
"""By model_type of the text config."""


def needs_of(text: Any) -> FamilyNeeds:
    """Returns the changes for a text config; those of most families are none."""
    return FAMILIES.get(text.model_type, NO_NEEDS)
