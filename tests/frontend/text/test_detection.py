"""The formats of a checkpoint by its chat template, and the flags that choose others."""

import json
from pathlib import Path

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.text.chat import read_chat_template
from phalanx_frontend.text.formats.detection import detect_reasoning_format, detect_tool_format
from phalanx_frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS

# What templates of these models have in common with no other family: the marks that they write around earlier calls.
TEMPLATES = [
    ("Hermes 2 Pro, Qwen2.5", "{% if tools %}return in <tool_call></tool_call> tags{% endif %}", "hermes", None),
    ("Qwen3", "{% if tools %}<tool_call>{% endif %}{% if '</think>' in content %}<think>{% endif %}", "hermes", "qwen3"),
    ("Qwen3-Coder", "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>{% endif %}", "qwen3_coder", None),
    ("SmolLM3", "{% if xml_tools %}<tool_call>{% endif %}{% if think %}<think></think>{% endif %}", "hermes", "qwen3"),
    (
        "Llama 3.1",
        'ipython {% if tools %}{"name": f, "parameters": d}<|python_tag|>{% endif %}',
        "llama3_json",
        None,
    ),
    ("Llama 3.2", '{% if tools %}Environment: ipython{"name": f, "parameters": d}{% endif %}', "llama3_json", None),
    ("Llama 4", "<|header_start|>{% for tool in tools %}{% endfor %}<|python_start|><|python_end|>", "llama4_pythonic", None),
    ("ToolACE", "{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic", None),
    ("Mistral 7B v0.3", "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", "mistral", None),
    ("Magistral", "[TOOL_CALLS]{{ name }}[ARGS]{% if think %}[THINK]{{ t }}[/THINK]{% endif %}", "mistral", "mistral"),
    ("DeepSeek V3", "<｜tool▁calls▁begin｜><｜tool▁sep｜>{{ name }}\n```json\n<｜Assistant｜>", "deepseek_v3", None),
    ("DeepSeek R1", "<｜Assistant｜>{{ c.split('</think>')[-1] }}<｜tool▁calls▁begin｜>```json", "deepseek_v3", "deepseek_r1"),
    ("R1 distilled", "<｜Assistant｜><think>\\n{{ c.split('</think>')[-1] }}", None, "deepseek_r1"),
    (
        "DeepSeek V3.1",
        "{% if thinking %}<｜Assistant｜></think>{% endif %}<｜tool▁calls▁begin｜>",
        "deepseek_v31",
        "deepseek_v3",
    ),
    ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>", "openai", "openai_gptoss"),
    ("Phi-4-mini", "<|system|>{{ content }}<|tool|>{{ message['tools'] }}<|/tool|>", "phi4_mini_json", None),
    ("Granite 3.1", "<|start_of_role|>tools<|end_of_role|>{% if tools %}<|tool_call|>{% endif %}", "granite", None),
    ("Granite 3.2", "<|start_of_role|>{% if tools %}{% endif %}write 'Here is my thought process:'", "granite", "granite"),
    ("Granite 3.3", "<|start_of_role|>{% if tools %}{% endif %}<think></think> and <response></response>", "granite", "granite"),
    ("Seed-OSS", "{% if tools %}<seed:tool_call>\n<function=f>{% endif %}<seed:think></seed:think>", None, None),
    ("Granite 4", "<|start_of_role|>{% if tools %}<tool_call></tool_call>{% endif %}", "granite", None),
    ("GLM-4.5", "{% if tools %}<tool_call>{name}\n<arg_key>k</arg_key>{% endif %}<think></think>", "glm45", "glm45"),
    ("Kimi K2", "{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>{% endif %}", "kimi_k2", None),
    ("Kimi K2 Thinking", "<|tool_calls_section_begin|><think>{{ rc }}</think>", "kimi_k2", "kimi_k2"),
    ("FunctionGemma", "{% if tools %}<start_function_call>call:f{<escape>}<end_function_call>{% endif %}", "functiongemma", None),
    ("Gemma 4", "{% if tools %}<|tool_call>call:f{}<tool_call|>{% endif %}<|channel>thought<channel|>", "gemma4", "gemma4"),
    ("Gemma 3", "<start_of_turn>model\n{{ messages }}", None, None),
]


@pytest.mark.parametrize(("model", "template", "tools", "reasoning"), TEMPLATES, ids=[row[0] for row in TEMPLATES])
def test_formats_follow_from_the_template(model: str, template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect_tool_format(template) == tools
    assert detect_reasoning_format(template) == reasoning
    assert tools is None or tools in TOOL_FORMATS
    assert reasoning is None or reasoning in REASONING_FORMATS


def test_tokens_decide_where_the_template_does_not() -> None:
    assert detect_tool_format("{{ tools }}", ["[TOOL_CALLS]"]) == "mistral"
    assert detect_tool_format("{{ messages }}", ["[TOOL_CALLS]"]) is None


@pytest.mark.parametrize(
    ("parsers", "tools", "reasoning"),
    [
        (wire.ParserNames(), "hermes", "qwen3"),
        (wire.ParserNames(tool_call="pythonic"), "pythonic", "qwen3"),
        (wire.ParserNames(tool_call="none", reasoning="none"), None, None),
        (wire.ParserNames(reasoning="deepseek_r1"), "hermes", "deepseek_r1"),
    ],
)
def test_flags_override_the_checkpoint(parsers: wire.ParserNames, tools: str | None, reasoning: str | None) -> None:
    source = b"{% if tools %}<tool_call>{% endif %}<think></think>"
    template = read_chat_template({"chat_template.jinja": source, wire.PARSERS_FILE: msgspec.json.encode(parsers)})
    assert template is not None
    assert (template.tool_format, template.reasoning_format) == (tools, reasoning)


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs/tool-formats.md").read_text()
    assert not [name for name in (*TOOL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in page]


def test_tools_have_a_template_of_their_own() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "<tool_call> of {{ tools }}"}]
    template = read_chat_template({"tokenizer_config.json": json.dumps({"chat_template": named}).encode()})
    assert template is not None
    assert template.tool_format == "hermes"
    assert template.render([], True, {}) == "plain"
    assert template.render([], True, {"tools": ["f"]}) == "<tool_call> of ['f']"
