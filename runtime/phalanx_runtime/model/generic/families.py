"""What the model code of some families needs beside paged attention. A family is one line in `FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx_runtime.model.generic import attentions
from phalanx_runtime.model.generic.attentions import Method, replace_attention
from phalanx_runtime.model.generic.layers import PAGED, PROBED


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyNeeds:
    """Changes to the model code of a family."""

    attention: tuple[str, str, Callable[[Any], Method]] | None = None
    """Class and method of the attention modules that do not use AttentionInterface, with the method that does."""
    positions: str | None = None
    """Class of the modules that count positions from the first token of a step, which is not that of the request."""
    is_offset: bool = False
    """Whether positions start after the id of the padding token."""
    implementation: str = PAGED
    """Of attention in `transformers`, within steps."""
    own_attention: str = "eager"
    """Implementation in `transformers` whose logits are right."""

    def first_position(self, config: Any) -> int:
        """Returns the position of a request's first token."""
        return int(config.pad_token_id or 0) + 1 if self.is_offset else 0

    def adapt(self, model: Any) -> None:
        """Makes all attention of the model use the handler of the running thread."""
        if self.attention is not None:
            replace_attention(model, *self.attention)


NO_NEEDS = FamilyNeeds()
_BERT = "forward", attentions.bert
_BART = "forward", attentions.bart
_INNER = "_attn", attentions.inner
_OFFSET = FamilyNeeds(is_offset=True)
FAMILIES: Mapping[str, FamilyNeeds] = {
    "bart": FamilyNeeds(positions="BartLearnedPositionalEmbedding"),
    "big_bird": FamilyNeeds(attention=("BigBirdSelfAttention", *_BERT)),
    "blenderbot": FamilyNeeds(positions="BlenderbotLearnedPositionalEmbedding"),
    "blenderbot-small": FamilyNeeds(positions="BlenderbotSmallLearnedPositionalEmbedding"),
    "bloom": FamilyNeeds(attention=("BloomAttention", "forward", attentions.bloom)),
    "camembert": _OFFSET,
    "codegen": FamilyNeeds(attention=("CodeGenAttention", *_INNER)),
    "data2vec-text": _OFFSET,
    "falcon": FamilyNeeds(attention=("FalconAttention", "forward", attentions.falcon), own_attention="sdpa"),
    "git": FamilyNeeds(attention=("GitSelfAttention", *_BERT)),
    "gpt_neo": FamilyNeeds(attention=("GPTNeoSelfAttention", "_attn", attentions.gpt_neo)),
    "gpt_neox_japanese": FamilyNeeds(attention=("GPTNeoXJapaneseAttention", *_INNER)),
    "gptj": FamilyNeeds(attention=("GPTJAttention", *_INNER)),
    "marian": FamilyNeeds(positions="MarianSinusoidalPositionalEmbedding"),
    "mbart": FamilyNeeds(positions="MBartLearnedPositionalEmbedding"),
    "megatron-bert": FamilyNeeds(attention=("MegatronBertSelfAttention", *_BERT)),
    "mpt": FamilyNeeds(attention=("MptAttention", "forward", attentions.mpt), implementation=PROBED),  # it converts a mask
    "mvp": FamilyNeeds(attention=("MvpAttention", *_BART), positions="MvpLearnedPositionalEmbedding"),
    "openai-gpt": FamilyNeeds(attention=("Attention", "_attn", attentions.gpt)),
    "pegasus": FamilyNeeds(positions="PegasusSinusoidalPositionalEmbedding"),
    "plbart": FamilyNeeds(positions="PLBartLearnedPositionalEmbedding"),
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
"""By model_type of the config."""


def needs_of(config: Any) -> FamilyNeeds:
    """Returns the changes for a config; those of most families are none."""
    return FAMILIES.get(config.model_type, NO_NEEDS)
