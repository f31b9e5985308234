"""Chat templates of models."""

import json
from datetime import UTC, datetime

import pytest

from phalanx_frontend.text import sandbox
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
        ("{{ '{5}'.format(1) }}", "index out of range"),
    ],
    ids=["refusal", "type error", "escape", "mutation", "index"],
)
def test_template_error_is_reported(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        template(source).render(USER, True, {})


ENDLESS = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "sums": "{{ ([[0] * 10000] * 10000) | sum(start=[]) }}",
    "blocks": "{% for a in range(99999) %}{% block b scoped %}{% for c in range(99999) %}{% endfor %}{% endblock %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_template_without_an_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_S", 0.05)
    with pytest.raises(ChatTemplateError, match=r"more than 0\.05 s of processor time"):
        template(source).render(USER, True, {})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10000000000 }}", "longer than"),
        ("{{ ([1] * 100000) * 100000 }}", "longer than"),
        ("{% set ns = namespace(x='xy') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "longer than"),
        ("{% set ns = namespace(x='xy') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "longer than"),
        ("{% for i in range(999) %}{{ 'x' * 100000 }}{% endfor %}", "longer than"),
        ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}", "longer than"),
        ("{{ ('a' * 100000).replace('a', 'b' * 100000) }}", "longer than"),
        ("{{ range(100000) | join('b' * 100000) }}", "longer than"),
        ("{{ ('b' * 100000).join(['a'] * 100000) }}", "longer than"),
        ("{{ ('x' * 1000000) | wordwrap(1) }}", "to wrap"),
        ("{{ ('x' * 10000) | wordwrap(1, wrapstring='x' * 10000) }}", "longer than"),
        ("{{ ('x\n' * 10000) | indent(10000) }}", "longer than"),
        ("{{ ('x\n' * 10000) | indent('x' * 10000) }}", "longer than"),
        ("{{ ('\t' * 10000).expandtabs(99999) }}", "longer than"),
        ("{{ [[['x'] * 1000] * 1000] * 1000 }}", "longer than"),
        ("{{ ([[['x'] * 1000] * 1000] * 1000) ~ '' }}", "longer than"),
        ("{{ ([{'a': ['x' * 1000] * 1000}] * 1000) | string }}", "longer than"),
        ("{{ ([{'a': ['x' * 1000] * 1000}] * 1000) | upper | length }}", "longer than"),
        ("{{ ([{'a': ['x' * 1000] * 1000}] * 1000) | tojson }}", "longer than"),
        ("{{ ([[0] * 1000] * 1000) | tojson(indent=1000) }}", "longer than"),
        ("{{ 9 ** 9999 }}", "bits"),
        ("{{ 10 ** 400 * 10 ** 900 * 10 ** 400 }}", "bits"),
        ("{{ 'x' | center(1000000000) }}", "width"),
        ("{{ 'x'.ljust(1000000000) }}", "width"),
        ("{{ messages | tojson(indent=1000000000) }}", "width"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%(a)1000000000d' % {'a': 1} }}", "width"),
        ("{{ '%(a(b))1000000000d' % {'a(b)': 1} }}", "parentheses"),
        ("{{ '%5%%1000000000d' % 1 }}", "width"),
        ("{{ '%.1000000000f' % 1 }}", "width"),
        ("{{ ('%(a)99999d' * 1000) % {'a': 1} }}", "longer than"),
        ("{{ ('%(a)s' * 1000) % {'a': 'x' * 100000} }}", "longer than"),
        ("{{ ('%(a)d' * 100000) % {'a': 10 ** 1000} }}", "longer than"),
        ("{% set n = namespace(x='x' * 100000) %}{{ ('{0.x}' * 1000).format(n) }}", "namespace"),
        ("{{ ('{0}' * 1000).format('x' * 100000) }}", "longer than"),
        ("{{ ('{0:99999}' * 1000).format('x') }}", "longer than"),
        ("{{ '{0[}]:>1000000000}'.format({'}': 1}) }}", "width"),
        ("{{ strftime_now('%1%f%f%fd') }}", "width"),
        ("{{ strftime_now('%-%f%f%fd') }}", "width"),
        ("{{ strftime_now('%c' * 1000000) }}", "longer than"),
        ("{{ '%*d' | format(1000000000, 1) }}", "width"),
        ("{{ '{:>1000000000}'.format(1) }}", "width"),
        ("{{ '{:>{}}'.format('x', 1000000000) }}", "width"),
        ("{{ strftime_now('%1000000000d') }}", "width"),
    ],
)
def test_template_makes_no_huge_text(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        template(source).render(USER, True, {})


def test_bounded_operations_keep_their_meaning() -> None:
    source = "{{ 'a' ~ 1 ~ none }} {{ 2 ** 3 * 2 }} {{ [1] + [2] }} {{ '%s' % 'x' }} {{ '%03d' | format(7) }} {{ 'a' * 3 }}"
    assert template(source).render(USER, True, {}) == "a1None 16 [1, 2] x 007 aaa"
    source = (
        "{{ messages | map(attribute='role') | join(',') }} {{ messages | join('-', attribute='role') }} {{ ','.join('ab') }}"
    )
    assert template(source).render(USER * 2, True, {}) == "user,user user-user a,b"
    assert template("{{ '{:>3} {}'.format(1, 'a') }} {{ '%5s' % 'a' }}").render(USER, True, {}) == "  1 a     a"
    assert template("{{ 'aXa' | replace('a', 'b', 1) }} {{ 'aXa'.replace('a', 'c') }}").render(USER, True, {}) == "bXa cXc"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'on 20240101: %s' % 'x' }}", "on 20240101: x"),
        ("{{ '%d%% of 1000000, %-5s|%+.2f' % (5, 'a', 1) }}", "5% of 1000000, a    |+1.00"),
        ("{{ 'id 1234567 %(a)s' | format(a=1) }}", "id 1234567 1"),
        ("{{ 'on 20240101: {:>3}'.format('x') }}", "on 20240101:   x"),
        ("{{ '{{20240101: 1}} {a}'.format(a=2) }}", "{20240101: 1} 2"),
        ("{{ strftime_now('%Y%m%d of 20240101, 100%%, %-d') }}", "20260301 of 20240101, 100%, 1"),
    ],
)
def test_numbers_outside_of_directives_are_no_widths(source: str, expected: str) -> None:
    assert template(source).render(USER, True, {}) == expected


def test_bounded_filters_keep_their_meaning() -> None:
    source = "{{ [[1], [2]] | sum(start=[]) }} {{ messages | sum(attribute='n') }} {{ 'ab cd' | wordwrap(2) }}"
    assert template(source).render([{"n": 1}, {"n": 2}], True, {}) == "[1, 2] 3 ab\ncd"
    source = "{{ [{'n': 1}] | string }} {{ [1, 'b'] | upper }} {{ 'a\tb'.expandtabs(2) }} {{ 'a\nb' | indent(1) }}"
    assert template(source).render(USER, True, {}) == "[{'n': 1}] [1, 'B'] a b a\n b"
    assert template("{{ [1, {'a': 2}] | tojson(indent=1) }}").render(USER, True, {}) == '[\n 1,\n {\n  "a": 2\n }\n]'


def test_methods_of_texts_work_in_loops_and_blocks() -> None:
    calls = "{{ m.role.replace('u', 'U') }} {{ ','.join(m.role) }} {{ m.role.ljust(5) }}|{{ '{}'.format(m.role) }}"
    expected = "User u,s,e,r user |user"
    assert template(f"{{% for m in messages %}}{calls}{{% endfor %}}").render(USER, True, {}) == expected
    block = f"{{% block b %}}{{% set m = messages[0] %}}{calls}{{% endblock %}}"
    assert template(block).render(USER, True, {}) == expected


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000, "{% for a in b %}" * 50 + "{% endfor %}" * 50, "{% break %}", "{% for %}"]
)
def test_template_that_does_not_compile_is_broken(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="fix chat_template"):
        template(source)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": b"{"},
        {"tokenizer_config.json": b"[]"},
        {"tokenizer_config.json": b'{"chat_template": [1]}'},
        {"tokenizer_config.json": b"[" * 100_000},
        {"chat_template.jinja": b"\xff"},
    ],
    ids=["no JSON", "no object", "no names", "deep", "no UTF-8"],
)
def test_unreadable_files_are_named(files: dict[str, bytes]) -> None:
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json or chat_template\.jinja cannot be read"):
        read_chat_template(files)


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
