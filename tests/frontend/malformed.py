"""Random invalid requests: each is wrong in at least one way."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx_frontend.errors import OTHER_PATHS
from tests.frontend.images.pictures import bomb, colour, file_of, url_of

JSON = "application/json"
HUGE = 10**400


@dataclass(frozen=True, slots=True)
class Malformed:
    """One request, and its fault."""

    why: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": JSON})


VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "once", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "once"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "once"}]},
    "/v1/responses": {"input": "once", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": [{"role": "user", "content": "once"}]},
    "/v1/generate": {"prompt": "once", "max_tokens": 2},
    "/v1/batch": {"requests": [{"prompt": "once", "max_tokens": 2}]},
    "/v1/embeddings": {"input": "once"},
    "/v1/score": {"text_1": "once", "text_2": ["twice", "once"]},
    "/v1/rerank": {"query": "once", "documents": ["twice", "once"]},
    "/v1/classify": {"input": "once"},
    "/tokenize": {"prompt": "once"},
    "/detokenize": {"tokens": [1, 2]},
}
VALID |= {path: VALID[other] for path, other in OTHER_PATHS.items()}
IMAGES: list[Any] = [
    *("", "x", "data:", "data:,", "data:image/png;base64,AAAA", "data:image/png;base64,%%", "data:image/png;base64,\ud800"),
    *("http://a.example/b.png", "https://a.example/b.png", "https://10.0.0.1/b.png", "https://[::1]/b.png", "file:///etc/passwd"),
    *(url_of(bomb(30_000, 30_000)), url_of(file_of(colour(1))[:45]), url_of(b"\xff\xd8" + b"\xff\xda" * 99), 5, None, {}, ["x"]),
]
"""URLs of images that no model takes."""
_IMAGE_CHATS: list[Any] = [
    [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    for url in IMAGES
    for image in ({"url": url}, url, {"uri": url})
]
_IMAGE_ITEMS: list[Any] = [
    [{"role": role, "content": [{"type": "input_image", "image_url": url}]}] for url in IMAGES for role in ("user", "assistant")
]
_IMAGE_TURNS: list[Any] = [
    [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for url in IMAGES
    for source in ({"type": "url", "url": url}, {"type": "base64", "data": url}, {"type": "file", "file_id": url}, url)
]
_SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "5", True, [], {}, HUGE, -HUGE, 10**9],
    "temperature": [-1, -0.001, "hot", [], {}, True, float("nan"), float("inf"), -HUGE],
    "top_p": [0, -1, 1.01, "x", [], float("nan"), HUGE],
    "top_k": [-2, 1.5, "x", 2**40, HUGE, []],
    "min_p": [-0.1, 2, "x", {}],
    "seed": [2**70, -(2**70), 1.5, "x", [], HUGE],
    "stop": [[1], {"a": 1}, 5, "", [""], ["\ud800"], [None], ["s"] * 65, "x" * 2000],
    "stop_token_ids": [[-1], ["x"], 5, [2**40], [1.5], [[]], [1] * 129],
    "ignore_eos": ["yes", 1, [], {}],
    "min_tokens": [-1, "x", 1.5, HUGE],
    "model": [5, [], {}, "no such model", "", "\u0000"],
    "stream": ["yes", 1, {}, []],
    "priority": ["high", 1.5, 2**40, -HUGE, []],
    "deadline_ms": [0, -1, "soon", [], float("inf")],
    "cache": ["store", "", 5, [], {}, True],
    "tenant": [5, [], {}, "\ud800", "x" * 513],
}
_OPENAI: dict[str, list[Any]] = {
    "user": [5, [], {}, "\ud800", "x" * 513],
    "n": [0, -1, "x", 1.5, HUGE],
    "stream_options": [5, "x", []],
    "presence_penalty": ["x", [], 100, float("nan")],
    "logit_bias": ["x", 5, [1]],
}
_PROMPT = [5, 1.5, True, {}, {"a": "b"}, [1.5], [-5], [10**9], [HUGE], [None], ["a", 1], [[["x"]]], "\ud800", "once " * 5000, ""]
_TURNS: dict[str, list[Any]] = {
    "messages": [
        [], "x", 5, [1], [{}], None, [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {}}]}],
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "i"}]}, {"role": "user", "content": "x"}],
    ],
    "system": [5, {}, [5], [{"type": "image"}], "\ud800"],
    "tools": [5, [5], [{}], [{"name": "x"}], [{"name": "a b", "input_schema": {}}], [{"type": "bash_20250124", "name": "bash"}]],
    "tool_choice": [5, "auto", {}, {"type": "tool"}, {"type": "any"}],
    "thinking": [5, True, {"type": "on"}, {"type": "enabled", "budget_tokens": 0}],
}  # fmt: skip
_ITEMS: dict[str, list[Any]] = {
    "input": [
        [], 5, {}, [5], None, [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{}]}], [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": "\ud800"}], [{"type": "function_call", "call_id": "c", "name": "a b"}],
        [{"type": "function_call_output", "call_id": "c", "output": "x"}], [{"type": "item_reference", "id": "x"}],
        [{"type": "mcp_call", "id": "m"}], [{"type": "reasoning", "summary": [5]}], [{"type": 5, "role": "user"}],
    ],
    "instructions": [5, {}, "\ud800", ["x"]],
    "previous_response_id": ["resp_1", "", 5, "\ud800"],
    "tools": [5, [5], [{}], [{"type": "function"}], [{"type": "web_search"}], [{"type": "function", "name": "a b"}]],
    "tool_choice": [5, "any", {}, {"type": "function"}, {"type": "allowed_tools", "mode": "auto", "tools": []}],
    "text": [5, {"format": {"type": "xml"}}, {"format": {"type": "json_schema", "name": "n"}}, {"verbosity": "high"}],
    "reasoning": [5, "low", {"effort": 5}], "truncation": [5, "middle"],
}  # fmt: skip
# fmt: off
BAD: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {**_SAMPLING, **_OPENAI, "prompt": [*_PROMPT[:-1], None]},
    "/v1/chat/completions": {
        **_SAMPLING,
        **_OPENAI,
        "messages": [
            [], "x", 5, {}, [1], ["x"], [{}], [{"role": 1}], [{"role": ""}], [{"role": "user", "content": 5}], None,
            [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "once " * 5000}], *_IMAGE_CHATS,
        ],
        "chat_template_kwargs": [5, [], "x", {"tools": [1]}, {"messages": 5}, {"add_generation_prompt": {}}],
    },
    "/v1/messages": {
        **{name: _SAMPLING[name] for name in ("temperature", "top_p", "model", "stream", "priority")},
        **_TURNS,
        "messages": [
            *_TURNS["messages"], *_IMAGE_TURNS, [{"role": "assistant", "content": ""}],
            [{"role": "user", "content": "once " * 5000}],
        ],
        "top_k": [-1, 1.5, "x", 2**40], "stop_sequences": _SAMPLING["stop"], "metadata": [5, {"user_id": 5}],
        "mcp_servers": [[{"url": "x"}]], "max_tokens": [0, -1, 1.5, "5", None, [], {}],
    },
    "/v1/messages/count_tokens": {**_TURNS, "model": [5, "nope"]},
    "/v1/responses": {
        **{name: _SAMPLING[name] for name in ("temperature", "top_p", "seed", "model", "stream", "priority")}, **_ITEMS,
        "input": [*_ITEMS["input"], *_IMAGE_ITEMS, "once " * 5000],
        "user": _OPENAI["user"], "max_output_tokens": [0, -1, 1.5, "5", [], {}, HUGE, 2**31], "include": [5, ["x"], [5]],
        "top_logprobs": [-1, 21, "x"], "metadata": [5, {"a": 5}, {"a": "\ud800"}, {"a" * 65: "b"}], "store": ["no", 1],
        "conversation": ["c"], "prompt": [{"id": "p"}], "service_tier": ["flex", 5], "background": ["yes", 5, []],
    },
    "/v1/responses/input_tokens": {**_ITEMS, "model": [5, "nope"]},
    "/v1/generate": {**_SAMPLING, "prompt": [*_PROMPT[:-1], ["x"], None], "prompt_tokens": [[1], "x"], "unknown": [1], "n": [2]},
    "/v1/batch": {"requests": [[], "x", 5, {}, None, [{}] * 257], "unknown": [1]},
    "/v1/embeddings": {
        "input": [*_PROMPT, None, [], [[]], ["a", ""]], "model": [5, "nope"], "dimensions": [0, -1, 1.5, "8", 10**6, HUGE, []],
        "encoding_format": ["int8", 5, [], {}], "user": [5, [], "\ud800"], "priority": ["high", 1.5, 2**40],
    },
    "/v1/score": {
        "text_1": [5, [], {}, [5], None, "\ud800", ["a"] * 3, ""], "text_2": [5, [], {}, [5], None, [""], "once " * 5000],
        "model": [5, "nope"], "priority": ["high", 1.5, 2**40], "truncate_prompt_tokens": [0, -2, 1.5, "x", HUGE],
    },
    "/v1/rerank": {
        "query": [5, [], {}, None, "\ud800", ""], "documents": [5, [], {}, [5], [{}], None, [""], ["\ud800"], ["once " * 5000]],
        "top_n": [-1, 1.5, "x", HUGE], "return_documents": [5, "yes", []], "model": [5, "nope"],
    },
    "/v1/classify": {
        "input": [*_PROMPT, None, [], [[]], ["a", ""]], "model": [5, "nope"], "use_activation": [5, "yes", []],
        "priority": ["high", 1.5, 2**40], "truncate_prompt_tokens": [0, -2, 1.5, "x", HUGE],
    },
    "/tokenize": {"prompt": [5, [], {}, "\ud800", None, ["x"]], "messages": [[{"role": "user"}], [], "x"], "model": [5, "nope"]},
    "/detokenize": {"tokens": [5, "x", [-1], [1.5], [2**40], [10**6], [HUGE], [[]], None], "model": [5, "nope"]},
}
BAD |= {path: BAD[other] for path, other in OTHER_PATHS.items()}
# fmt: on


def malformed(seed: int, max_body_bytes: int) -> Iterator[Malformed]:
    """Yields requests without end. Some bodies are larger than `max_body_bytes`."""
    draw = random.Random(seed)
    faults: list[Callable[[random.Random, str], Malformed]] = [
        _bad_field, _bad_field, _bad_field, _bad_field, _bad_fields, _missing, _no_object, _cut, _noise, _no_utf8, _deep,
        _wrong_type, _wrong_place,
    ]  # fmt: skip
    while True:
        path = draw.choice(list(VALID))
        if draw.random() < 0.01:
            yield Malformed("too large", path, b'{"prompt": "' + b"x" * max_body_bytes + b'"}')
        else:
            yield draw.choice(faults)(draw, path)


def _encoded(document: object) -> bytes:
    return json.dumps(document).encode()


def _bad_field(draw: random.Random, path: str) -> Malformed:
    name = draw.choice(list(BAD[path]))
    value = draw.choice(BAD[path][name])
    return Malformed(f"{name} is {str(value)[:40]!r}", path, _encoded({**VALID[path], name: value}))


def _bad_fields(draw: random.Random, path: str) -> Malformed:
    names = draw.sample(list(BAD[path]), min(3, len(BAD[path])))
    body = {**VALID[path], **{name: draw.choice(BAD[path][name]) for name in names}}
    return Malformed(f"{names} are wrong", path, _encoded(body))


def _missing(draw: random.Random, path: str) -> Malformed:
    return Malformed("the prompt is missing", path, _encoded({"max_tokens": 2} if draw.random() < 0.5 else {}))


def _no_object(draw: random.Random, path: str) -> Malformed:
    body = draw.choice([[], [1], "text", 5, 1.5, None, True, [VALID[path]], HUGE])
    return Malformed("no object", path, _encoded(body))


def _cut(draw: random.Random, path: str) -> Malformed:
    whole = _encoded(VALID[path])
    return Malformed("cut", path, whole[: draw.randrange(len(whole))])


def _noise(draw: random.Random, path: str) -> Malformed:
    whole = _encoded(VALID[path])
    return draw.choice(
        [
            Malformed("bytes of nothing", path, b"\xff" + draw.randbytes(draw.randrange(1, 300))),
            Malformed("more after the end", path, whole + draw.choice([b"}", b"{}", b",", b"\x00", b"x"])),
            Malformed("single quotes", path, whole.replace(b'"', b"'")),
            Malformed("a comma too many", path, whole[:-1] + b",}"),
            Malformed("no colon", path, whole.replace(b":", b" ", 1)),
        ]
    )


def _no_utf8(draw: random.Random, path: str) -> Malformed:
    bad = draw.choice([b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80"])
    return Malformed("no UTF-8", path, b'{"prompt": "' + bad + b'", "requests": [], "tokens": "", "messages": []}')


def _deep(draw: random.Random, path: str) -> Malformed:
    depth = draw.choice([200, 5_000, 50_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    name = draw.choice([b"prompt", b"messages", b"tokens", b"requests", b"stop"])
    inner = b"1" if draw.random() < 0.5 else b""
    return Malformed("deep", path, b'{"model": 5, "' + name + b'": ' + opening * depth + inner + closing * depth + b"}")


def _wrong_type(draw: random.Random, path: str) -> Malformed:
    kind = draw.choice(
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png", "x", ""]
    )
    return Malformed(f"content type {kind}", path, _encoded(VALID[path]), headers={"content-type": kind})


def _wrong_place(draw: random.Random, path: str) -> Malformed:
    return draw.choice(
        [
            Malformed("no such path", f"{path}/{draw.randrange(9**9)}", _encoded(VALID[path])),
            Malformed("no such path", f"/v2{path}", b"", "GET"),
            Malformed("no such method", path, _encoded(VALID[path]), draw.choice(["PUT", "DELETE", "PATCH", "GET"])),
            Malformed("no such model", "/v1/models/%00%ff", b"", "GET"),
            Malformed("no such model", "/v1/models?after_id=%00", b"", "GET", {"anthropic-version": "x"}),
            Malformed(
                "no page", f"/v1/models?limit={draw.choice(['0', '-1', 'x', 9**99])}", b"", "GET", {"anthropic-version": "x"}
            ),
            Malformed("no such response", f"/v1/responses/{draw.choice(['resp_1', '%ff', 'compact'])}/cancel", b""),
            Malformed("no such response", "/v1/responses/resp_1?stream=true&starting_after=0", b"", "GET"),
            Malformed("no number", f"/v1/responses/resp_1?starting_after={draw.choice(['x', -1, 9**99])}", b"", "GET"),
            Malformed("not served", "/v1/responses/compact", _encoded(VALID["/v1/responses"])),
        ]
    )


# Every text field of a body, from /openapi.json

Schema = Mapping[str, Any]


def bodies_with(text: str, path: str, openapi: Schema) -> Iterator[tuple[bytes, bool]]:
    """Returns bodies of a route that differ in this text, and whether the text is a declared field: open objects accept
    anything."""
    content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    parts = openapi["components"]["schemas"]
    for body, is_own in _with(text, content["schema"], parts):
        yield _encoded({**VALID[path], **body}), is_own


def _with(text: str, schema: Schema, parts: Schema) -> Iterator[tuple[Any, bool]]:
    match schema:
        case {"$ref": str(name)}:
            yield from _with(text, parts[name.rpartition("/")[2]], parts)
        case {"anyOf": [*choices]}:
            for choice in choices:
                yield from _with(text, choice, parts)
        case {"type": "string"} if "const" not in schema and "enum" not in schema:
            yield text, True
        case {"type": "array", "items": items}:
            for item, is_own in _with(text, items, parts):
                yield [item], is_own
        case {"type": "object"}:
            properties = schema.get("properties", {})
            required = {name: _least(properties[name], parts) for name in schema.get("required", [])}
            for name, inner in properties.items():
                for value, is_own in _with(text, inner, parts):
                    yield {**required, name: value}, is_own
            if schema.get("additionalProperties", False) is not False:
                yield {**required, "extra": text}, False
                yield {**required, text: 1}, False


def _least(schema: Schema, parts: Schema) -> Any:
    """Returns a valid value."""
    match schema:
        case {"$ref": str(name)}:
            return _least(parts[name.rpartition("/")[2]], parts)
        case {"anyOf": [first, *_]}:
            return _least(first, parts)
        case {"const": value} | {"enum": [value, *_]}:
            return value
        case {"type": "array", "items": items}:
            return [_least(items, parts)]
        case {"type": "object"}:
            return {name: _least(schema["properties"][name], parts) for name in schema.get("required", [])}
        case {"type": "string"}:
            return "x"
        case _:
            return 1
