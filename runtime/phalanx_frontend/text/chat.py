"""Renders a conversation with the model's chat template, in a sandbox with the environment of Transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx_frontend.text.parts import THINK_END
from phalanx_frontend.text.tool_calls import detect_tool_format

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplateError(Exception):
    """The template fails on this conversation."""


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def utc_now() -> datetime:
    """Returns the current time in UTC."""
    return datetime.now(UTC)


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = utc_now) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._tokens = dict(tokens)
        self.tool_format = detect_tool_format(source)
        self.can_reason = THINK_END in source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}; fix chat_template") from error

    def render(self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, options: Mapping[str, object]) -> str:
        """Returns the prompt. `options`: further variables. Raises ChatTemplateError."""
        variables = {**self._tokens, **options, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        # A template is a program over the client's messages.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def read_chat_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """Reads chat_template.jinja, else tokenizer_config.json."""
    config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens(config))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found
