"""Chat templates of models."""

import json
from datetime import UTC, datetime

import pytest

from phalanx_frontend.text.chat import ChatTemplate, ChatTemplateError, read_chat_template

USER = [{"role": "user", "content": "hé <b>"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 3, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}\n  {{ m.role }}:{{ m['content'] }}\n{% endfor %}", "<s>  user:hé <b>\n"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hé <b>"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "hé <b>"\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ tools is defined }} {{ enable_thinking }}", "False True"),
    ],
    ids=["loop and trimming", "generation prompt", "tojson", "tojson indented", "date", "loop control", "generation", "options"],
)
def test_a_template_finds_the_environment_it_is_written_for(source: str, expected: str) -> None:
    assert template(source).render(USER, True, {"enable_thinking": True}) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
    ids=["refusal", "type error", "escape", "mutation"],
)
def test_template_error_is_reported(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        template(source).render(USER, True, {})


def test_options_do_not_replace_the_messages() -> None:
    assert template("{{ messages[0].role }}").render(USER, True, {"messages": [{"role": "other"}]}) == "user"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "{{ eos_token }}", "tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, "</s>"),
        ({"tokenizer_config.json": {"chat_template": "config {{ bos_token }}", "bos_token": "<s>"}}, "config <s>"),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "config"}}, "file"),
        ({"tokenizer_config.json": {"chat_template": [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}
        ]}}, "yes"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
    ids=["file", "config", "file before config", "named", "none", "no files"],
)  # fmt: skip
def test_the_template_is_found_where_models_keep_it(files: dict[str, object], expected: str | None) -> None:
    raw = {name: (value if isinstance(value, str) else json.dumps(value)).encode() for name, value in files.items()}
    found = read_chat_template(raw)
    assert (found and found.render(USER, True, {})) == expected


def test_invalid_jinja_template_is_reported() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        read_chat_template({"chat_template.jinja": b"{% if %}"})
