"""Renders a conversation with the model's chat template, in a sandbox with the environment of Transformers."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from jinja2.meta import find_undeclared_variables

from phalanx_api import wire
from phalanx_frontend.text.formats.detection import chosen, detect_reasoning_format, detect_tool_format
from phalanx_frontend.text.sandbox import BoundedEnvironment

AUTO = wire.ParserNames()
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


ContentForm = Literal["text", "parts"]
"""How a template reads the content of a message: as a string, or as a list of parts."""
_PROBE = "phalanx probe"
_PROBE_NAME = "phalanx_probe"
_PROBE_TOOL = {"name": _PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}}


class ChatTemplateError(Exception):
    """The template fails on this conversation."""


def utc_now() -> datetime:
    """Returns the current time in UTC."""
    return datetime.now(UTC)


class ChatTemplate:
    """One model's template, compiled once. `with_tools`: that of conversations with tools, if it is another."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        now: Callable[[], datetime] = utc_now,
        with_tools: str | None = None,
        parsers: wire.ParserNames = AUTO,
        added_tokens: Collection[str] = (),
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """`defaults`: variables that an option replaces."""
        self._sources = (source, source if with_tools is None else with_tools)
        self._tokens = {**tokens, **defaults}
        self.tool_format = chosen(parsers.tool_call, detect_tool_format(with_tools or source, added_tokens))
        self.reasoning_format = chosen(parsers.reasoning, detect_reasoning_format(source))
        try:
            environment = BoundedEnvironment(now)
            self._template = environment.from_string(source)
            self._with_tools = self._template if with_tools is None else environment.from_string(with_tools)
        except Exception as error:  # the compiler of Jinja, and that of Python
            raise ChatTemplateError(f"the model's chat template is broken: {error}; fix chat_template") from error

    @cached_property
    def content_form(self) -> ContentForm:
        """How the template reads content: parts, if it shows the text of one, and nothing of its structure."""
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}], True, {})
        except ChatTemplateError:
            return "text"
        return "parts" if _PROBE in text and "'text'" not in text else "text"

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes tools into the prompt; those of DeepSeek read none."""
        turns = [{"role": role, "content": _PROBE} for role in ("system", "user")]
        options = {"tools": [{"type": "function", "function": _PROBE_TOOL}]}
        try:
            return any(_PROBE_NAME in self.render(messages, True, options) for messages in (turns[1:], turns))
        except ChatTemplateError:
            return True

    def source(self, has_tools: bool) -> str:
        """Returns the text of the template that renders conversations with tools, or without."""
        return self._sources[has_tools]

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        environment = BoundedEnvironment(utc_now)
        return frozenset(name for source in self._sources for name in find_undeclared_variables(environment.parse(source)))

    def drops_role(self, role: str) -> bool:
        """Returns whether the template leaves messages of this role out: it neither names the role nor writes every one."""
        is_named = any(f"'{role}'" in source or f'"{role}"' in source for source in self._sources)
        return not is_named and self._drops_unknown_roles

    @cached_property
    def _drops_unknown_roles(self) -> bool:
        """Whether the template ignores a message whose role it does not name; it may refuse it."""
        turns = [("user", "?"), (_PROBE_NAME, _PROBE)]
        is_parts = self.content_form == "parts"
        messages = [{"role": role, "content": [{"type": "text", "text": text}] if is_parts else text} for role, text in turns]
        try:
            return _PROBE not in self.render(messages, False, {})
        except ChatTemplateError:
            return False

    def render(self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, options: Mapping[str, object]) -> str:
        """Returns the prompt. `options`: further variables. Raises ChatTemplateError."""
        variables = {**self._tokens, **options, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return (self._with_tools if options.get("tools") else self._template).render(variables)
        except Exception as error:  # a template is a program over the client's messages
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def read_chat_template(files: Mapping[str, bytes], added_tokens: Collection[str] = ()) -> ChatTemplate | None:
    """Reads chat_template.jinja, else chat_template.json, else tokenizer_config.json. Raises ChatTemplateError."""
    parsers = msgspec.json.decode(files.get(wire.PARSERS_FILE, b"{}"), type=wire.ParserNames)
    defaults = msgspec.json.decode(files.get(wire.TEMPLATE_KWARGS_FILE, b"{}"), type=dict[str, Any])
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        if "chat_template.jinja" in files:
            source = files["chat_template.jinja"].decode()
        else:
            source = json.loads(files.get("chat_template.json", b"{}")).get("chat_template") or config.get("chat_template")
        with_tools = None
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source, with_tools = named.get("default"), named.get("tool_use")
        if not isinstance(source, str):
            return None
        return ChatTemplate(
            source,
            special_tokens(config),
            with_tools=with_tools,
            parsers=parsers,
            added_tokens=added_tokens,
            defaults=defaults,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ChatTemplateError(
            f"the model's tokenizer_config.json or chat_template.jinja cannot be read: {error}; correct the file"
        ) from error


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found
