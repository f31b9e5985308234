"""Tool calls as models of each format write them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a model writes calls in a format."""

    write: Callable[[Sequence[Call]], str]
    has_text: bool = True
    """Whether text may precede the calls."""


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [dumps({"name": name, key: arguments}) for name, arguments in calls]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects(calls))


def as_list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(objects(calls))}]"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_with_ids(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abc{i:06}[ARGS]{dumps(a)}" for i, (name, a) in enumerate(calls))


def qwen3_coder(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        shown = value if isinstance(value, str) else dumps(value) if isinstance(value, list | dict) else str(value)
        return f"<parameter={key}>\n{shown}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{''.join(parameter(k, v) for k, v in arguments.items())}</function>\n</tool_call>"
        for name, arguments in calls
    )


def qwen3_without_outer_tag(calls: Sequence[Call]) -> str:
    return qwen3_coder(calls).replace("<tool_call>\n<function", "<function")


def glm45(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else dumps(value)}</arg_value>\n"

    return "\n".join(f"<tool_call>{n}\n{''.join(parameter(k, v) for k, v in a.items())}</tool_call>" for n, a in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    body = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def pythonic(calls: Sequence[Call]) -> str:
    def written(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(written(*call) for call in calls)}]"


@dataclass(frozen=True, slots=True)
class Gemma:
    """Writes calls with these marks."""

    begin: str
    end: str
    quote: str

    def __call__(self, calls: Sequence[Call]) -> str:
        return "".join(f"{self.begin}call:{name}{self.value(arguments, is_outer=True)}{self.end}" for name, arguments in calls)

    def value(self, value: Any, is_outer: bool = False) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, list):
            return f"[{','.join(map(self.value, value))}]"
        if isinstance(value, dict):
            quote = "" if is_outer else self.quote
            return "{" + ",".join(f"{quote}{key}{quote}:{self.value(item)}" for key, item in value.items()) + "}"
        return dumps(value)


WRITINGS: dict[str, list[Writing]] = {
    "hermes": [Writing(hermes), Writing(lambda calls: f"<tool_call>{as_list(calls)}</tool_call>")],
    "llama3_json": [
        Writing(lambda calls: "; ".join(objects(calls, "parameters")), has_text=False),
        Writing(lambda calls: f"<|python_tag|>{';'.join(objects(calls, 'parameters'))}", has_text=False),
    ],
    "llama4_pythonic": [
        Writing(pythonic, has_text=False),
        Writing(lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
        Writing(lambda calls: "\n".join(objects(calls, "parameters")), has_text=False),
    ],
    "pythonic": [Writing(pythonic, has_text=False)],
    "mistral": [Writing(mistral), Writing(mistral_with_ids), Writing(lambda calls: f"[TOOL_CALLS] {as_list(calls)}")],
    "qwen3_coder": [Writing(qwen3_coder), Writing(qwen3_without_outer_tag)],
    "qwen3_xml": [Writing(qwen3_coder)],
    "deepseek_v3": [Writing(deepseek_v3)],
    "deepseek_v31": [Writing(deepseek_v31)],
    "openai": [Writing(harmony)],
    "phi4_mini_json": [
        Writing(lambda calls: f"functools{as_list(calls)}"),
        Writing(lambda calls: f"<|tool_call|>{as_list(calls)}<|/tool_call|>"),
    ],
    "granite": [
        Writing(hermes),
        Writing(lambda calls: f"<|tool_call|>{as_list(calls)}"),
        Writing(lambda calls: f"<tool_call>{as_list(calls)}"),
    ],
    "glm45": [Writing(glm45)],
    "kimi_k2": [Writing(kimi)],
    "functiongemma": [Writing(Gemma("<start_function_call>", "<end_function_call>", "<escape>"))],
    "gemma4": [Writing(Gemma("<|tool_call>", "<tool_call|>", '<|"|>'))],
}
