"""A backend that plays scripts, and a tiny model for the door. Anyone who tests something that holds a door may use them."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream

Step = Delta | KeepAlive | asyncio.Event | Exception
"""Given out, waited for, or raised."""
Script = Callable[[wire.Request], Iterable[Step]]

EOS = "<eos>"
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
    """The tokenizer.json of `tiny_tokenizer`, with a post-processor that adds <bos>."""
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
) -> wire.Assets:
    """What a door needs of a model that exists only in tests."""
    config: dict[str, object] = {"bos_token": "<bos>", "eos_token": {"content": EOS}}
    files = {"tokenizer.json": tiny_tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    if generation_config is not None:
        files["generation_config.json"] = json.dumps(generation_config).encode()
    for name in without:
        del files[name]
    return wire.make_assets(files, list(names), max_model_len, [eos_id()], vocab_size)


def eos_id() -> int:
    """Id of the token that ends a text."""
    return int(tiny_tokenizer().get_vocab()[EOS])


def token_ids(text: str) -> list[int]:
    """Ids of a text, without special tokens."""
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def saying(text: str, *, finish: wire.FinishReason = "length", cached_tokens: int = 0) -> Script:
    """Every request is answered with the tokens of this text, one delta each."""
    return lambda request: one_by_one(token_ids(text), finish, cached_tokens)


def one_by_one(tokens: Sequence[int], finish: wire.FinishReason, cached_tokens: int = 0) -> list[Step]:
    """A delta for each token; the last has the reason."""
    steps: list[Step] = [Delta(index=index, tokens=[token]) for index, token in enumerate(tokens[:-1])]
    return [*steps, Delta(index=len(tokens) - 1, tokens=[tokens[-1]], finish=finish, cached_tokens=cached_tokens)]


@cache
def plain_tokens() -> tuple[int, ...]:
    """Ids whose text is printable ASCII."""
    decode = tiny_tokenizer().decode
    return tuple(
        id for id in range(2, tiny_tokenizer().get_vocab_size()) if (text := decode([id])).isascii() and text.isprintable()
    )


def drawing(request: wire.Request) -> Sequence[Step]:
    """Tokens that depend on prompt, seed (when sampling) and index as a model's would, up to max_tokens.

    A request for more than 200 tokens stays in the air after five of them: it ends only by an abort.
    """
    sampling = request.sampling
    seed = sampling.seed if sampling.temperature > 0 else 0
    is_endless = sampling.max_tokens > 200
    tokens = [_draw(request.prompt, seed, index) for index in range(5 if is_endless else sampling.max_tokens)]
    if is_endless:
        return [*(Delta(index=index, tokens=[token]) for index, token in enumerate(tokens)), asyncio.Event()]
    return one_by_one(tokens, "length")


def _draw(prompt: Sequence[int], seed: int, index: int) -> int:
    digest = hashlib.sha256(repr((list(prompt), seed, index)).encode()).digest()
    choices = plain_tokens()
    return choices[int.from_bytes(digest[:4], "big") % len(choices)]


def detail_of(request: wire.Request, token: int) -> wire.TokenDetail | None:
    """What a backend would tell of an output token: the most probable one, with those after it as the next best."""
    sampling = request.sampling
    if sampling.logprobs is None and not sampling.return_gaps:
        return None
    return _detail(token, sampling.logprobs or 0, 0.5 if sampling.return_gaps else None)


def prompt_details_of(request: wire.Request) -> list[wire.TokenDetail]:
    """What a backend would tell of the prompt."""
    count = request.sampling.prompt_logprobs
    return [] if count is None else [_detail(token, count, None) for token in request.prompt[1:]]


def _detail(token: int, count: int, gap: float | None) -> wire.TokenDetail:
    best = [(token + step) % tiny_tokenizer().get_vocab_size() for step in range(count)]
    return wire.TokenDetail(logprob=-0.25, rank=0, top_ids=best, top_logprobs=[-0.25 - step for step in range(count)], gap=gap)


def told(request: wire.Request, delta: Delta) -> Delta:
    """The delta with everything that the request asked about its tokens, and about the prompt if it is the first."""
    details = [detail for token in delta.tokens if (detail := detail_of(request, token)) is not None]
    prompt_details = prompt_details_of(request) if delta.index == 0 else []
    return replace(delta, details=delta.details or details, prompt_details=delta.prompt_details or prompt_details)


class FakeBackend:
    """Plays a script for each request. `requests` are those it was given, `aborts` the ids of those closed early."""

    def __init__(self, script: Script = drawing, assets: wire.Assets | None = None, not_ready: str | None = None) -> None:
        self.script = script
        self.current_assets: wire.Assets | None = assets or tiny_assets()
        self.reason = not_ready
        self.requests: list[wire.Request] = []
        self.begun: dict[str, ResumableStream] = {}
        self.aborts: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """The script's steps."""
        wire.encode(wire.Submit(1, request))  # what no link can carry is a fault of the door
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
                    yield told(request, step) if isinstance(step, Delta) else step
            has_ended = True
        finally:
            if not has_ended:
                self.aborts.put_nowait(request.id)

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Those of the streams that `begun` holds."""
        return {id: self.begun[id] for id in ids if id in self.begun}

    async def wait_for_assets(self) -> None:
        """At once: what is not known yet, no request waits for."""

    def assets(self) -> wire.Assets:
        """The model, or BackendError 503 while `current_assets` is None."""
        if self.current_assets is None:
            raise BackendError(503, "not_ready", "no group has told what it serves yet", retry_after_s=1.5)
        return self.current_assets

    def not_ready(self) -> str | None:
        """The reason it was given."""
        return self.reason
