"""Text that a model or a client brings: tokenizer, chat template, grammar, keys."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Literal

from bench.fuzz.mutations import edge_value, encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_api import wire
from phalanx_frontend.auth.api_keys import KeysUnreadable, gather_keys
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.served_model import load_model
from phalanx_frontend.openai.structured import GrammarCheck
from phalanx_frontend.text import sandbox
from phalanx_frontend.text.chat import ChatTemplate, ChatTemplateError
from tests.frontend.fakes import CHAT_TEMPLATE, tiny_tokenizer_json

MAX_PROMPT_CHARS = 40 << 20
TEMPLATE_CPU_S = 0.1
"""Lowered, so that loops without an end cost less; a case still fails after the time of the child."""


class Tokenizers(Target):
    """Mutated tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja, loaded as one model."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            "tokenizer.json": tiny_tokenizer_json(),
            "tokenizer_config.json": json.dumps(
                {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": "x"}
            ).encode(),
            "generation_config.json": json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [1]}).encode(),
        }

    def run(self, draw: Random) -> Outcome:
        """Loads a model and uses its tokenizer."""
        name = draw.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"))
        content = encode_document(mutate_document(draw, json.loads(self._files[name]), draw.choice((1, 1, 2, 4))))
        if draw.random() < 0.2:
            content = mutate_bytes(draw, content)
        assets = wire.make_assets({**self._files, name: content}, ["tiny"], 512, [1], None)
        try:
            model = load_model(assets)
        except ApiError as error:
            if error.code != "model_broken" or ".json" not in error.message:
                raise Defect(f"{error.code}: {error.message}") from error
            return "refused"
        try:
            ids = asyncio.run(model.encode("once upon 🦊 a\n", True, "prompt"))
        except ApiError:
            return "refused"
        model.tokenizer.decode(ids, True)
        for id in ids:
            model.tokenizer.token_bytes(id)
        return "accepted"


_ATOMS = (
    *("messages", "messages[0]", "messages[-1].content", "loop.index", "x", "ns.t", "bos_token", "none", "''"),
    *("'x' * 100000", "9 ** 99999", "range(100000)", "range(10**9)", "10**400", "[1,2]", "{'a': 1}", "f(3)", "self", "1/0"),
    *("'%900000000d' % 1", "'{:>900000000}'.format(1)", "''.__class__", "messages.append(1)", "strftime_now('%Y')"),
    *("raise_exception('no')", "namespace(t=1)", "cycler(1,2)", "joiner(',')", "'{9}'.format(1)", "'x'.ljust(10**9)"),
)  # fmt: skip
_FILTERS = (
    *("length", "tojson", "tojson(indent=9)", "trim", "upper", "join(',')", "list", "first", "last", "sort", "reverse", "int"),
    *("replace('a', 'b' * 1000)", "center(10**9)", "indent(10**9)", "batch(3)", "slice(10**9)", "map(attribute='role')", "sum"),
    *("selectattr('role')", "items", "dictsort", "format(1)", "string", "e", "wordwrap(1)", "round(10**9)", "pprint", "abs"),
)  # fmt: skip


class Templates(Target):
    """Random chat templates, rendered with a short conversation."""

    def __init__(self, folder: Path) -> None:
        self._cpu_s, sandbox.CPU_S = sandbox.CPU_S, TEMPLATE_CPU_S
        self._messages: list[dict[str, object]] = [
            {"role": "user", "content": "once"},
            {"role": "assistant", "content": "x", "tool_calls": [{"a": 1}]},
        ]

    def run(self, draw: Random) -> Outcome:
        """Compiles and renders one template."""
        source = _statements(draw, draw.choice((0, 1, 1, 2, 2, 3, 4)))
        if draw.random() < 0.2:
            source = mutate_bytes(draw, (source or CHAT_TEMPLATE).encode()).decode(errors="replace")
        try:
            text = ChatTemplate(source, {"bos_token": "<s>"}).render(self._messages, True, {"x": edge_value(draw)})
        except ChatTemplateError:
            return "refused"
        if not isinstance(text, str) or len(text) > MAX_PROMPT_CHARS:
            raise Defect(f"a prompt of {len(text)} characters: {source[:200]!r}")
        return "accepted"

    def close(self) -> None:
        """Restores the time of a rendering."""
        sandbox.CPU_S = self._cpu_s


def _expression(draw: Random) -> str:
    text = draw.choice(_ATOMS)
    while draw.random() < 0.4:
        other = draw.choice(_ATOMS)
        text = draw.choice(
            (
                f"({text})|{draw.choice(_FILTERS)}",
                f"({text}) + {other}",
                f"({text}) * {other}",
                f"({text}) ~ ({text})",
                f"{text}[{other}]",
            )
        )
    return text


def _statements(draw: Random, depth: int) -> str:
    parts = []
    for _ in range(draw.randrange(1, 4)):
        inner = _statements(draw, depth - 1) if depth else "."
        value = _expression(draw)
        parts.append(
            draw.choice(
                (
                    f"{{{{ {value} }}}}",
                    f"{{% for m in {value} %}}{inner}{{% endfor %}}",
                    f"{{% for m in range(100000) %}}{inner}{{% endfor %}}",
                    f"{{% if {value} %}}{inner}{{% else %}}-{{% endif %}}",
                    "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
                    f"{{% macro f(n) %}}{inner}{{% if n %}}{{{{ f(n-1) ~ f(n-1) }}}}{{% endif %}}{{% endmacro %}}{{{{ f(40) }}}}",
                    f"{{% set x = {value} %}}",
                    f"{{% generation %}}{inner}{{% endgeneration %}}",
                    f"{{% filter {draw.choice(_FILTERS)} %}}{inner}{{% endfilter %}}",
                    f"{{% call(m) f({value}) %}}{inner}{{% endcall %}}",
                    "{% break %}",
                )
            )
        )
    return "".join(parts)


class Grammars(Target):
    """Mutated JSON schemas, regular expressions and Lark grammars, checked as those of a request."""

    def __init__(self, folder: Path) -> None:
        self._check = GrammarCheck(tiny_tokenizer_json())

    def run(self, draw: Random) -> Outcome:
        """Checks one grammar."""
        kind, make = draw.choice(_GRAMMARS)
        try:
            asyncio.run(self._check.check("guided", wire.Grammar(kind, make(draw))))
        except ApiError as error:
            if error.status != 400 or error.code != "invalid_grammar":
                raise Defect(f"{error.status} {error.code}: {error.message}") from error
            return "refused"
        return "accepted"


_SCHEMA_TEXT = json.dumps(
    {
        "$defs": {
            "d": {"type": "object", "properties": {"n": {"$ref": "#/$defs/d"}}},
            "e": {"type": "string", "pattern": "^a{2,9}$"},
        },
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -5, "maximum": 900, "multipleOf": 3},
            "b": {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1, "maxItems": 4},
            "c": {"anyOf": [{"const": "x"}, {"enum": [1, None, "y"]}]},
            "s": {"type": "string", "minLength": 2, "maxLength": 20, "format": "date-time"},
            "f": {"allOf": [{"type": "number", "exclusiveMinimum": 0.5}, {"maximum": 7.25}]},
            "t": {"type": ["string", "null"]},
        },
        "patternProperties": {"^p_[a-z]+$": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


def _schema(draw: Random) -> str:
    document = mutate_document(draw, json.loads(_SCHEMA_TEXT), draw.choice((1, 1, 2, 4)))
    if draw.random() < 0.02:
        length = draw.choice((50, 800, 3000))
        links = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(length)}
        document = {"$defs": {**links, f"a{length}": {}}, "$ref": "#/$defs/a0"}
    return encode_document(document).decode()


_PIECES = (
    "a",
    "b",
    ".",
    "\\d",
    "[a-z]",
    "[^a]",
    "é",
    "\\p{L}",
    "(?i:x)",
    "\\b",
    "^",
    "$",
    "()",
    "(?=a)",
    "\\1",
    "[[:alpha:]]",
    "\\x{10FFFF}",
    "(?P<n>a)",
)
_REPEATS = ("", "", "*", "+", "?", "{2}", "{0,1000}", "{1000}", "{99999}", "{5,2}", "{,}", "*?")


def _regex(draw: Random) -> str:
    text = "".join(draw.choice(_PIECES) + draw.choice(_REPEATS) for _ in range(draw.randrange(1, 8)))
    for _ in range(draw.choice((0, 1, 2, 3, 300))):
        text = f"({text}){draw.choice(_REPEATS)}"
    return text if draw.random() < 0.9 else mutate_bytes(draw, text.encode()).decode(errors="replace")


def _lark(draw: Random) -> str:
    length = draw.choice((2, 4, 8, 8, 8, 3000 if draw.random() < 0.02 else 8))
    name = draw.choice(("r", "R"))
    bodies = (
        '"a" | {n}', "{n} {n}", "({n})+", "{n}?", '"é" {n}', "/a[bc]*d/", "{n} | {n}", '%json {{"type": "integer"}}',
        "{n}{{2,90}}",         '"x".."z"', "/a/ & /b/", "~/a/", "[{n}]", "%regex {{}}", '""', "{n} {n} {n} {n}",
    )  # fmt: skip
    chosen = [draw.choice(bodies) if length < 100 else "{n}" for _ in range(length)]
    rules = [f"{name}{number}: " + body.format(n=f"{name}{(number + 1) % (length + 2)}") for number, body in enumerate(chosen)]
    text = "\n".join([f"start: {name}0", *rules, f'{name}{length}: "a"', f'{name}{length + 1}: "b"'])
    return text if draw.random() < 0.8 else mutate_bytes(draw, text.encode()).decode(errors="replace")


_GRAMMARS: tuple[tuple[Literal["json_schema", "regex", "lark"], Callable[[Random], str]], ...] = (
    ("json_schema", _schema),
    ("regex", _regex),
    ("lark", _lark),
)


class Keys(Target):
    """Mutated keys files, as JSON and as lines."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "keys"
        self._entries = [
            {"name": "a", "key": "sk-a", "priority": 2, "requests_per_minute": 5, "tokens_per_minute": 9, "concurrent": 1},
            {"name": "b", "key": "sk-b", "priority": None, "console": "write"},
        ]
        self._lines = b"a sk-a 2 requests_per_minute=5 # comment\nb sk-b tokens_per_minute=9 concurrent=1\n"

    def run(self, draw: Random) -> Outcome:
        """Reads one file."""
        if draw.random() < 0.6:
            content = encode_document(mutate_document(draw, json.loads(json.dumps(self._entries)), draw.choice((0, 1, 1, 2))))
        else:
            content = mutate_bytes(draw, self._lines)
        if draw.random() < 0.2:
            content = mutate_bytes(draw, content)
        self._file.write_bytes(content)
        try:
            keys = gather_keys([], self._file)
        except KeysUnreadable as error:
            if str(self._file) not in str(error) and "key" not in str(error) and "name" not in str(error):
                raise Defect(f"an error without the file: {error}") from error
            return "refused"
        wire.encode([key.priority for key in keys])
        return "accepted"


LOADERS: dict[str, Callable[[Path], Target]] = {"tokenizer": Tokenizers, "template": Templates, "grammar": Grammars, "keys": Keys}
