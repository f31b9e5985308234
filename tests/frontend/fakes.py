"""A backend that plays scripts, and a tiny model, for all tests with an API server."""

import asyncio
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_frontend.stream.response_cache import MISS, CacheAnswer, CachedOutput, CacheQuery
from phalanx_frontend.text.tokenizer import RecentEncodings

Step = Delta | KeepAlive | asyncio.Event | Exception
"""A step of a script: an item to yield, an event to wait for, or an error to raise."""
Script = Callable[[wire.Request], Iterable[Step]]

EOS = "<eos>"
EMBEDDING = wire.Embedding(size=8, pooling="mean")
MIXED_TEXT = "once 🦊 upon STOP a\n\n time 🦊"
"""An answer with multi-byte characters, a stop string and an empty line."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with all 256 bytes, some merges and two special tokens. A text starts with <bos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["the quick brown fox jumps over the lazy dog", "once upon a time there was a little girl", "STOP here, не здесь 🦊"]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return tokenizer


def tiny_tokenizer_json() -> bytes:
    """Returns the tokenizer.json of `tiny_tokenizer`, with a post-processor that adds <bos>."""
    document = json.loads(tiny_tokenizer().to_str())
    bos = {"id": "<bos>", "ids": [tiny_tokenizer().token_to_id("<bos>")], "tokens": ["<bos>"]}
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<bos>": bos}
    }  # fmt: skip
    return json.dumps(document).encode()


def tiny_assets(
    *,
    names: Sequence[str] = ("tiny",),
    max_model_len: int = 512,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, object] | None = None,
    without: Sequence[str] = (),
    vocab_size: int | None = None,
    embedding: wire.Embedding | None = EMBEDDING,
    classification: wire.Classification | None = None,
) -> wire.Assets:
    """Returns the assets of a model that exists only in tests."""
    config: dict[str, object] = {"bos_token": "<bos>", "eos_token": {"content": EOS}}
    files = {"tokenizer.json": tiny_tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    if generation_config is not None:
        files["generation_config.json"] = json.dumps(generation_config).encode()
    if embedding is not None:
        files[wire.EMBEDDING_FILE] = msgspec.json.encode(embedding)
    if classification is not None:
        files[wire.CLASSIFICATION_FILE] = msgspec.json.encode(classification)
    for name in without:
        del files[name]
    return wire.make_assets(files, list(names), max_model_len, [eos_id()], vocab_size)


def eos_id() -> int:
    """Returns the id of the end-of-sequence token."""
    return int(tiny_tokenizer().get_vocab()[EOS])


def token_ids(text: str) -> list[int]:
    """Returns the ids of a text, without special tokens."""
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def text_script(text: str, *, finish: wire.FinishReason = "length", cached_tokens: int = 0) -> Script:
    """Answers every request with the tokens of this text, one delta each."""
    return lambda request: token_deltas(token_ids(text), finish, cached_tokens)


def token_deltas(tokens: Sequence[int], finish: wire.FinishReason, cached_tokens: int = 0) -> list[Step]:
    """Returns a delta for each token; the last has the finish reason."""
    steps: list[Step] = [Delta(index=index, tokens=[token]) for index, token in enumerate(tokens[:-1])]
    return [*steps, Delta(index=len(tokens) - 1, tokens=[tokens[-1]], finish=finish, cached_tokens=cached_tokens)]


@cache
def plain_tokens() -> tuple[int, ...]:
    """Returns ids with printable ASCII text."""
    decode = tiny_tokenizer().decode
    return tuple(
        id for id in range(2, tiny_tokenizer().get_vocab_size()) if (text := decode([id])).isascii() and text.isprintable()
    )


def seeded_script(request: wire.Request) -> Sequence[Step]:
    """Generates tokens that depend on prompt, seed (when sampling) and index, up to max_tokens. A request for more than 200
    tokens hangs after five of them, until it is aborted."""
    if request.pooling is not None:
        return [Delta(index=0, tokens=[], finish="stop", vector=vector_of(request), cached_tokens=1)]
    sampling = request.sampling
    seed = sampling.seed if sampling.temperature > 0 else 0
    is_endless = sampling.max_tokens > 200
    tokens = [_draw(request.prompt, seed, index) for index in range(5 if is_endless else sampling.max_tokens)]
    if is_endless:
        return [*(Delta(index=index, tokens=[token]) for index, token in enumerate(tokens)), asyncio.Event()]
    return token_deltas(tokens, "length")


def vector_of(request: wire.Request) -> bytes:
    """Returns the vector of a pooled request: a function of prompt and pooling."""
    digest = hashlib.sha256(repr((request.prompt, request.pooling)).encode()).digest()
    return struct.pack(f"<{EMBEDDING.size}f", *(byte / 16 - 8 for byte in digest[: EMBEDDING.size]))


def _draw(prompt: Sequence[int], seed: int, index: int) -> int:
    digest = hashlib.sha256(repr((list(prompt), seed, index)).encode()).digest()
    choices = plain_tokens()
    return choices[int.from_bytes(digest[:4], "big") % len(choices)]


def detail_of(request: wire.Request, token: int) -> wire.TokenDetail | None:
    """Returns the detail of an output token that is the most probable one; the next ids are the next best."""
    sampling = request.sampling
    if sampling.logprobs is None and not sampling.return_gaps:
        return None
    return _detail(token, sampling.logprobs or 0, 0.5 if sampling.return_gaps else None)


def prompt_details_of(request: wire.Request) -> list[wire.TokenDetail]:
    """Returns the details of the prompt's tokens."""
    count = request.sampling.prompt_logprobs
    return [] if count is None else [_detail(token, count, None) for token in request.prompt[1:]]


def _detail(token: int, count: int, gap: float | None) -> wire.TokenDetail:
    best = [(token + step) % tiny_tokenizer().get_vocab_size() for step in range(count)]
    return wire.TokenDetail(logprob=-0.25, rank=0, top_ids=best, top_logprobs=[-0.25 - step for step in range(count)], gap=gap)


def with_details(request: wire.Request, delta: Delta) -> Delta:
    """Returns the delta with the requested details, those of the prompt included if it is the first."""
    details = [detail for token in delta.tokens if (detail := detail_of(request, token)) is not None]
    prompt_details = prompt_details_of(request) if delta.index == 0 else []
    return msgspec.structs.replace(delta, details=delta.details or details, prompt_details=delta.prompt_details or prompt_details)


class FakeBackend:
    """Plays a script for each request. `requests`: those received; `aborts`: ids of those closed early."""

    def __init__(self, script: Script = seeded_script, assets: wire.Assets | None = None, not_ready: str | None = None) -> None:
        self.script = script
        self.current_assets: wire.Assets | None = assets or tiny_assets()
        self.reason = not_ready
        self.requests: list[wire.Request] = []
        self.checked_tokens: list[int] = []
        self.resumable: dict[str, ResumableStream] = {}
        self.aborts: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Yields the script's steps."""
        wire.encode(wire.Submit(1, request))  # an unencodable request is a fault of the API server
        self.requests.append(request)
        has_ended = False
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    has_ended = True
                    raise step
                else:
                    has_ended = isinstance(step, Delta) and step.finish is not None
                    yield with_details(request, step) if isinstance(step, Delta) else step
            has_ended = True
        finally:
            if not has_ended:
                self.aborts.put_nowait(request.id)

    def check_quota(self, tenant: str, prompt_tokens: int) -> None:
        """Accepts all, and remembers their number."""
        self.checked_tokens.append(prompt_tokens)

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Returns those of the streams in `resumable`."""
        return {id: self.resumable[id] for id in ids if id in self.resumable}

    async def wait_for_assets(self, name: str = "") -> None:
        """Returns at once."""

    def assets(self) -> wire.Assets:
        """Returns the model, or raises BackendError 503 while `current_assets` is null."""
        if self.current_assets is None:
            raise BackendError(503, "not_ready", "no group has reported its model yet", retry_after_s=1.5)
        return self.current_assets

    def not_ready(self) -> str | None:
        """Returns `reason`."""
        return self.reason


class StoredOutputs:
    """A cache that never finds anything."""

    is_enabled = True
    encodings = RecentEncodings()

    def __init__(self, fails: bool = False) -> None:
        self.outputs: list[CachedOutput] = []
        self.num_sent = 0
        self._fails = fails

    async def find(self, query: CacheQuery) -> CacheAnswer:
        """Returns a miss."""
        return MISS

    def store(self, query: CacheQuery, output: CachedOutput, answer: CacheAnswer) -> None:
        """Keeps the output. Raises MemoryError on request."""
        self.outputs.append(output)
        if self._fails:
            raise MemoryError

    def was_sent(self, query: CacheQuery, answer: CacheAnswer) -> None:
        """Counts."""
        self.num_sent += 1
