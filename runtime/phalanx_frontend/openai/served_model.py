"""The door's side of a model: tokenizer, chat template, defaults, made once from `wire.Assets` and kept by content hash."""

import asyncio
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.openai.sampling import Defaults, read_defaults
from phalanx_frontend.openai.structured import GrammarCheck
from phalanx_frontend.text.chat import ChatTemplate, ChatTemplateError, read_chat_template
from phalanx_frontend.text.tokenizer import TextTokenizer

KEPT_MODELS = 4
"""How many contents are kept: those of a rollout's two revisions, and then some. Each costs the memory of its tokenizer."""
NO_TEMPLATE = (
    "this model has no chat template (a chat_template.jinja, or chat_template in tokenizer_config.json); use /v1/completions"
)
"""What a chat is told then."""
LONG_TEXT = 4096
"""Characters from which a text is tokenised beside the event loop: shorter ones take less than the detour."""


@dataclass(frozen=True, slots=True)
class DoorModel:
    """What the door knows of a model. `template` is a sentence for the client when there is none that works."""

    assets: wire.Assets
    tokenizer: TextTokenizer
    template: ChatTemplate | str
    defaults: Defaults
    grammars: GrammarCheck

    def name_for(self, asked: str | None) -> str:
        """The name to answer with. None asks for the first. Raises ApiError 404 for a name that is not served."""
        if asked is None:
            return self.assets.served_names[0]
        if asked not in self.assets.served_names:
            raise ApiError(404, f"The model `{asked}` does not exist.", "model", "model_not_found")
        return asked

    def checked_ids(self, ids: list[int], param: str) -> list[int]:
        """The same ids, once each is known to have a token and an embedding. Raises ApiError 400."""
        last = self.tokenizer.max_token_id
        if self.assets.vocab_size is not None:
            last = min(last, self.assets.vocab_size - 1)
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise invalid(param, f"token ids must be between 0 and {last}")
        return ids

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text. Raises ApiError 400 for text that cannot be encoded."""
        try:
            if len(text) < LONG_TEXT:
                ids = self.tokenizer.encode(text, add_special_tokens)
            else:
                ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
            return self.checked_ids(ids, param)
        except UnicodeEncodeError as error:
            raise invalid(param, f"{param} is not valid Unicode: it has half of a surrogate pair") from error


def load_model(assets: wire.Assets) -> DoorModel:
    """Everything of these assets, parsed. Takes a second for a large vocabulary. Raises ApiError 500 without a tokenizer."""
    if "tokenizer.json" not in assets.files:
        raise ApiError(500, "the model has no tokenizer.json", code="model_broken")
    try:
        template = read_chat_template(assets.files) or NO_TEMPLATE
    except ChatTemplateError as error:
        template = str(error)
    document = assets.files["tokenizer.json"]
    defaults = read_defaults(assets.files.get("generation_config.json"))
    return DoorModel(assets, TextTokenizer(document), template, defaults, GrammarCheck(document))


class Models:
    """Models by content hash, the last used ones kept."""

    def __init__(self) -> None:
        self._models: dict[str, DoorModel] = {}
        self._loading = asyncio.Lock()

    async def get(self, assets: wire.Assets) -> DoorModel:
        """The model of these assets. The first asker loads it, beside the event loop; the others wait for that."""
        key = assets.content_hash
        if key not in self._models:
            async with self._loading:
                if key not in self._models:
                    self._models[key] = await asyncio.to_thread(load_model, assets)
        # Most recently used last, so that the first is the one to forget.
        model = self._models[key] = self._models.pop(key)
        while len(self._models) > KEPT_MODELS:
            del self._models[next(iter(self._models))]
        return model
