"""A model at the API server."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.images.source import ImageSource
from phalanx_frontend.openai.sampling import Defaults, read_defaults
from phalanx_frontend.openai.structured import GrammarCheck
from phalanx_frontend.text.chat import ChatTemplate, ChatTemplateError, read_chat_template
from phalanx_frontend.text.cuts import Owner
from phalanx_frontend.text.tokenizer import RecentEncodings, TextKey, TextTokenizer

T = TypeVar("T")
Content = TypeVar("Content")
MAX_CACHED_MODELS = 4
"""Two revisions during a rollout, and a reserve."""
NO_TEMPLATE = (
    "this model has no chat template (a chat_template.jinja, or chat_template in tokenizer_config.json); use /v1/completions"
)
RETRY_S = 1.0
MAX_CHARACTERS = 8192
"""Longer questions are not compared: their embedding costs as much as a prompt, and their details decide."""
LONG_TEXT = 4096
"""Characters from which a text is tokenized in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A parsed model."""

    assets: wire.Assets
    tokenizer: TextTokenizer
    template: ChatTemplate | str  # or why there is no usable one
    defaults: Defaults
    grammars: GrammarCheck
    images: ImageSource = field(default_factory=ImageSource)
    recent: RecentEncodings | None = None
    """Where `encode` finds and keeps texts of `owner`."""
    owner: Owner = ()

    @property
    def taken_images(self) -> wire.ImageInput | None:
        """How the model takes images; none if it reads text only."""
        return taken_images(self.assets)

    def image_input(self, param: str) -> wire.ImageInput:
        """Returns how the model takes images. Raises ApiError 400 that names `param` if it takes none."""
        taken = self.taken_images
        if taken is None:
            raise invalid(param, f"{param}: this model reads text only", "no_images")
        if taken.obstacle:
            raise invalid(param, f"{param}: this model takes no images: {taken.obstacle}", "no_images")
        return taken

    def chat_template(self) -> ChatTemplate:
        """Returns the chat template. Raises ApiError 400."""
        if self.is_encoder:
            raise invalid("model", "this model is an encoder, which answers no messages", "no_generation")
        if isinstance(self.template, str):
            raise invalid("messages", self.template, "no_chat_template")
        return self.template

    def embedding(self) -> wire.Embedding:
        """Returns how the model makes embeddings. Raises ApiError 400 if it makes none."""
        content = self.assets.files.get(wire.EMBEDDING_FILE)
        if content is None:
            raise invalid("model", "this model computes no embeddings: its hidden states are not accessible", "no_embeddings")
        embedding = msgspec.json.decode(content, type=wire.Embedding)
        if embedding.obstacle:
            raise invalid("model", f"this model computes no embeddings: {embedding.obstacle}", "no_embeddings")
        return embedding

    def classification(self) -> wire.Classification | None:
        """Returns what the numbers of the model's classification head mean; null without a head. Raises ApiError 400."""
        content = self.assets.files.get(wire.CLASSIFICATION_FILE)
        if content is None:
            return None
        classification = msgspec.json.decode(content, type=wire.Classification)
        if classification.obstacle:
            raise invalid("model", f"this model cannot classify: {classification.obstacle}", "no_classification")
        return classification

    @property
    def is_encoder(self) -> bool:
        """Whether the model generates no tokens."""
        content = self.assets.files.get(wire.EMBEDDING_FILE)
        return content is not None and msgspec.json.decode(content, type=wire.Embedding).is_encoder

    @property
    def reranker(self) -> str:
        """Returns how a model that generates scores texts: a name of `EngineConfig.reranker`."""
        content = self.assets.files.get(wire.EMBEDDING_FILE)
        return "none" if content is None else msgspec.json.decode(content, type=wire.Embedding).reranker

    def name_for(self, requested: str | None, caller: Caller) -> str:
        """Returns the model name of the response. Raises ApiError 404, also for a name that the caller's key does not allow."""
        allowed = usable_names(self.assets, caller)
        if requested is None and allowed:
            return allowed[0]
        if requested not in allowed:
            name = self.assets.served_names[0] if requested is None else requested
            if name in (*self.assets.served_names, *(adapter.name for adapter in self.assets.adapters)):
                caller.audit_use(f"models/{name}", "this API key does not allow the model")
            message = f"The model `{name}` does not exist or you do not have access to it."
            raise ApiError(404, message, "model", "model_not_found")
        return requested

    def adapter(self, name: str) -> wire.Adapter | None:
        """Returns the adapter with this name; null for a name of the base model, which comes first.

        Raises ApiError 503 for one that no group has loaded.
        """
        if name in self.assets.served_names:
            return None
        adapter = next((adapter for adapter in self.assets.adapters if adapter.name == name), None)
        if adapter is not None and not adapter.content_hash:  # page keys need it
            raise ApiError(503, f"the adapter {name} is not loaded yet: retry", "model", "adapter_unavailable", RETRY_S)
        return adapter

    def checked_ids(self, ids: list[int], param: str) -> list[int]:
        """Returns `ids` if each has a token and an embedding. Raises ApiError 400."""
        last = self._last_id
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise invalid(param, f"token ids must be between 0 and {last}")
        return ids

    @property
    def _last_id(self) -> int:
        """The last id that has a token and an embedding."""
        last, size = self.tokenizer.max_token_id, self.assets.vocab_size
        return last if size is None else min(last, size - 1)

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Returns the token ids of `text`. Raises ApiError 400."""
        recent, key = self.recent, TextKey(self.owner, text, add_special_tokens)
        known = None if recent is None else recent.get(key)
        if known is not None:
            return self._checked(known, param)
        encode = partial(self.tokenizer.encode, text, add_special_tokens)
        if recent is not None and self.tokenizer.has_cuts and len(text) < LONG_TEXT:  # in this thread
            encode = partial(self.tokenizer.encode_recent, text, add_special_tokens, recent.parts, self.owner)
        ids = await _encoded(encode, len(text), param)
        if recent is not None:
            recent.put(key, ids)
        return self._checked(ids, param)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        """As `checked_ids`, for ids of the tokenizer: most models have an embedding for each."""
        return ids if self._last_id == self.tokenizer.max_token_id else self.checked_ids(ids, param)

    def recalling(self, recent: RecentEncodings, tenant: str, salt: str) -> "ServedModel":
        """Returns the model for a request, which finds and keeps the texts of its tenant and salt in `recent`."""
        return replace(self, recent=recent, owner=(self.assets.content_hash, tenant, salt))

    async def encode_texts(
        self,
        texts: tuple[str, str | None],
        add_special_tokens: bool,
        limit: int | None,
        param: str,
        known: list[int] | None = None,
    ) -> tuple[list[int], int]:
        """See `TextTokenizer.encode_texts`. Raises ApiError 400."""
        call = partial(self.tokenizer.encode_texts, *texts, add_special_tokens, limit, known)
        length = (0 if known is not None else len(texts[0])) + len(texts[1] or "")
        ids, pair_start = await _encoded(call, length, param)
        return self.checked_ids(ids, param), pair_start


async def _encoded(encode: Callable[[], T], length: int, param: str) -> T:
    """Returns the result of a tokenizer, for long texts by a thread. Raises ApiError 400."""
    try:
        return encode() if length < LONG_TEXT else await asyncio.to_thread(encode)
    except UnicodeEncodeError as error:
        raise invalid(param, f"{param} is not valid Unicode: it contains half of a surrogate pair; remove it") from error


def taken_images(assets: wire.Assets) -> wire.ImageInput | None:
    """Returns how a model takes images; none if it reads text only."""
    content = assets.files.get(wire.IMAGES_FILE)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=wire.ImageInput)
    except msgspec.ValidationError:  # a layout of a later version
        why = "this router is of an earlier version than the group, and does not know how the model takes images: update it"
        return wire.refused_images(why)


def usable_names(assets: wire.Assets, caller: Caller) -> list[str]:
    """Returns the names of a model and its adapters that the caller's key allows."""
    names = [*assets.served_names, *(adapter.name for adapter in assets.adapters)]
    return [name for name in names if caller.may_use(name)]


def load_model(assets: wire.Assets, images: ImageSource | None = None) -> ServedModel:
    """Parses assets, in up to a second. Raises ApiError 500 that names a missing or broken file.

    `images`: reads those of requests.
    """
    if "tokenizer.json" not in assets.files:
        raise ApiError(500, "the model has no tokenizer.json; add it to the model's files", code="model_broken")
    document = assets.files["tokenizer.json"]
    tokenizer = _parsed("tokenizer.json", document, _tried_tokenizer)
    try:
        template = read_chat_template(assets.files, tokenizer.added_tokens) or NO_TEMPLATE
    except ChatTemplateError as error:
        template = str(error)
    return ServedModel(
        assets=assets,
        tokenizer=tokenizer,
        template=template,
        defaults=_parsed("generation_config.json", assets.files.get("generation_config.json"), read_defaults),
        grammars=GrammarCheck(document),
        images=images or ImageSource(),
    )


def _tried_tokenizer(document: bytes) -> TextTokenizer:
    """Returns the tokenizer after a first use: some broken ones fail only then."""
    tokenizer = TextTokenizer(document)
    tokenizer.decode(tokenizer.encode("Hello, world", True), True)
    return tokenizer


def _parsed(name: str, content: Content, parse: Callable[[Content], T]) -> T:
    """Returns what `parse` makes of a file. Raises ApiError 500."""
    try:
        return parse(content)
    except BaseException as error:  # libraries raise various types, and a panic of tokenizers is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ApiError(500, f"the model's {name} cannot be read: {error}; correct the file", code="model_broken") from error


class ModelCache:
    """LRU cache of models by content hash."""

    def __init__(self, images: ImageSource | None = None) -> None:
        """`images`: reads those of requests."""
        self._images = images or ImageSource()
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    async def get(self, assets: wire.Assets) -> ServedModel:
        """Returns the model, loaded once, in a thread. Assets that differ in names or limits alone share it."""
        key = assets.content_hash
        if key not in self._models:
            async with self._loading:
                if key not in self._models:
                    same = next((model for model in self._models.values() if model.assets.files == assets.files), None)
                    if same is None:
                        loaded = await asyncio.to_thread(load_model, assets, self._images)
                    else:
                        loaded = replace(same, assets=assets)
                    self._models[key] = loaded
        # The most recently used model is last.
        model = self._models[key] = self._models.pop(key)
        while len(self._models) > MAX_CACHED_MODELS:
            del self._models[next(iter(self._models))]
        return model
