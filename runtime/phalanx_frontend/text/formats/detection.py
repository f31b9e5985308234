"""Which formats a checkpoint uses, by the marks in its chat template and the tokens of its tokenizer."""

from collections.abc import Collection
from typing import Final

from phalanx_frontend.text.formats.registry import HARMONY, HARMONY_REASONING

_TOOL_MARKS: Final = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    (HARMONY, ("<|channel|>", "<|start|>")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "tools")),
    ("granite", ("<|start_of_role|>", "tools")),
    ("phi4_mini_json", ("<|tool|>",)),
    ("phi4_mini_json", ("functools",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ('"parameters"', "tools", "ipython")),
    ("llama3_json", ('"parameters"', "tools", "<|python_tag|>")),
    ("pythonic", ("func_name1(",)),
)
"""Formats, and texts that a template with them has; the first format that fits is chosen."""
_REASONING_MARKS: Final = (
    (HARMONY_REASONING, ("<|channel|>", "<|start|>")),
    ("mistral", ("[/THINK]",)),
    ("gemma4", ("<channel|>",)),
    ("granite", ("Here is my thought process",)),
    ("granite", ("</think>", "<response>")),
    ("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    ("glm45", ("</think>", "<arg_key>")),
    ("deepseek_v3", ("</think>", "<｜Assistant｜>", "thinking")),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)
_TOKEN_MARKS: Final = (("mistral", "[TOOL_CALLS]"), ("kimi_k2", "<|tool_calls_section_begin|>"), ("gemma4", "<|tool_call>"))
"""Formats that a tokenizer's tokens reveal where the template shows tools without the marks of calls."""


def detect_tool_format(template: str, tokens: Collection[str] = ()) -> str | None:
    """Returns the name of the format of tool calls, if any. `tokens`: added tokens of the tokenizer."""
    found = _first(_TOOL_MARKS, template)
    if found is None and "tools" in template:
        return next((name for name, token in _TOKEN_MARKS if token in tokens), None)
    return found


def detect_reasoning_format(template: str) -> str | None:
    """Returns the name of the format of reasoning, if any."""
    return _first(_REASONING_MARKS, template)


def chosen(name: str, detected: str | None) -> str | None:
    """Returns the format that `phalanx_api.wire.ParserNames` or the checkpoint chooses."""
    return detected if name == "auto" else None if name == "none" else name


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, marks in table if all(mark in template for mark in marks)), None)
