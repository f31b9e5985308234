"""The formats of tool calls and of reasoning, by the names that vLLM has for their parsers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx_frontend.text.formats import json_calls, literals, reasoning, tagged_calls
from phalanx_frontend.text.formats.harmony import MARKS as HARMONY_MARKS
from phalanx_frontend.text.formats.harmony import harmony
from phalanx_frontend.text.formats.json_calls import DEEPSEEK, KIMI, marked, sections
from phalanx_frontend.text.formats.literals import FUNCTION_GEMMA, GEMMA4, gemma
from phalanx_frontend.text.formats.reader import Format, FormatParser, Functions
from phalanx_frontend.text.formats.reasoning import ReasoningMarks


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    format: Format
    marks: tuple[str, ...]
    """Marks that the parser reads, also where they are special tokens."""

    def parser(self, functions: Functions) -> FormatParser:
        """Returns the parser of one answer."""
        return FormatParser(self.format, functions)


_HERMES_MARKS = (json_calls.HERMES_BEGIN, json_calls.HERMES_END)
_TOOL_CALL_MARKS = (json_calls.TOOL_CALL, *json_calls.TOOL_CALL_ENDS)
_HERMES = ToolFormat(marked((json_calls.HERMES_BEGIN,), (json_calls.HERMES_END,)), _HERMES_MARKS)
_GRANITE_MARKS = (*_HERMES_MARKS, *_TOOL_CALL_MARKS)
_GRANITE = marked((json_calls.HERMES_BEGIN, json_calls.TOOL_CALL), (json_calls.HERMES_END, *json_calls.TOOL_CALL_ENDS))
_PHI4 = marked((json_calls.FUNCTOOLS, json_calls.TOOL_CALL), json_calls.TOOL_CALL_ENDS)
_LLAMA4_MARKS = (literals.PYTHON_BEGIN, literals.PYTHON_END)
_MISTRAL_MARKS = (json_calls.MISTRAL_BEGIN, json_calls.MISTRAL_ID, json_calls.MISTRAL_ARGS)
_QWEN3_CODER = ToolFormat(tagged_calls.qwen3_coder, _HERMES_MARKS)
_GLM45_MARKS = (*_HERMES_MARKS, tagged_calls.KEY, tagged_calls.KEY_END, tagged_calls.VALUE, tagged_calls.VALUE_END)

HARMONY: Final = "openai"
"""Also the format of the reasoning of its models."""
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": _HERMES,
    "llama3_json": ToolFormat(json_calls.llama, (json_calls.LLAMA_MARK,)),
    "llama4_pythonic": ToolFormat(literals.llama4, _LLAMA4_MARKS),
    "pythonic": ToolFormat(literals.pythonic, ()),
    "mistral": ToolFormat(json_calls.mistral, _MISTRAL_MARKS),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "deepseek_v3": ToolFormat(sections(DEEPSEEK, json_calls.deepseek_v3_call), DEEPSEEK.all),
    "deepseek_v31": ToolFormat(sections(DEEPSEEK, json_calls.deepseek_v31_call), DEEPSEEK.all),
    HARMONY: ToolFormat(harmony, HARMONY_MARKS),
    "phi4_mini_json": ToolFormat(_PHI4, _TOOL_CALL_MARKS),
    "granite": ToolFormat(_GRANITE, _GRANITE_MARKS),
    "glm45": ToolFormat(tagged_calls.glm45, _GLM45_MARKS),
    "kimi_k2": ToolFormat(sections(KIMI, json_calls.kimi_call), KIMI.all),
    "functiongemma": ToolFormat(gemma(FUNCTION_GEMMA), FUNCTION_GEMMA.all),
    "gemma4": ToolFormat(gemma(GEMMA4), GEMMA4.all),
}
"""By name."""
HARMONY_REASONING: Final = "openai_gptoss"
REASONING_FORMATS: Final[Mapping[str, ReasoningMarks | None]] = {
    "deepseek_r1": reasoning.DEEPSEEK_R1,
    "deepseek_v3": reasoning.THINK,
    "qwen3": reasoning.THINK,
    "glm45": reasoning.THINK,
    "kimi_k2": reasoning.KIMI_K2,
    "granite": reasoning.GRANITE,
    "mistral": reasoning.MISTRAL,
    "gemma4": reasoning.GEMMA4,
    HARMONY_REASONING: None,
}
"""By name; null where the format of tool calls has the reasoning."""
