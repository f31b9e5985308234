"""Small chat templates that write calls in the manner of each family: what they need of ids, arguments and messages."""

_EACH = "{% for m in messages %}{% if m.role == 'tool' %}RESULT {{ m.tool_call_id }} {{ m.content }}\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_UNSHOWN = "{% endfor %}{% endfor %} {{ messages | length }} messages"
_END = _UNSHOWN + "{% if tools %} {{ tools | length }} tools{% for t in tools %} {{ t.function.name }}{% endfor %}{% endif %}"
_SINGLE = "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
_VALUE = (
    "{% macro value(v, q) %}{% if v is string %}{{ q + v + q }}{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}"
    "{{ k }}:{{ value(x, q) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}"
    "{{ value(x, q) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)

FAMILY_TEMPLATES = {
    "hermes": _EACH
    + "{{ m.content }}"
    + _CALLS
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n'
    + _END,
    "llama3_json": "{# ipython #}"
    + _EACH
    + _SINGLE
    + _CALLS
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}};'
    + _END,
    "mistral": _EACH
    + _CALLS
    + "{% if c.id | length != 9 %}{{ raise_exception('an id must have nine characters') }}{% endif %}"
    + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
    + _END,
    "qwen3_coder": _EACH
    + _CALLS
    + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
    + "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n"
    + _END,
    "glm45": _EACH
    + _CALLS
    + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    + "<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>\n{% endfor %}</tool_call>\n"
    + _END,
    "deepseek_v3": _EACH
    + "{% if m.role == 'system' %}{{ m['content'] }}\n{% endif %}"
    + "{% if m.role == 'assistant' and m['content'] is not none %}SAID {{ m['content'] }}\n{% endif %}"
    + "{% if m.role == 'assistant' and m['content'] is none %}"
    + _CALLS
    + "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    + "{# <｜tool▁calls▁begin｜> #}{% endfor %}{% endif %}"
    + _UNSHOWN.removeprefix("{% endfor %}"),
    "deepseek_v31": _EACH
    + "{% if m.role == 'system' %}{{ m['content'] }}\n{% endif %}"
    + "{% if m.role == 'assistant' and m['tool_calls'] is defined %}"
    + "{% if m['content'] is not none %}SAID {{ m['content'] }}\n{% endif %}"
    + _CALLS
    + "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
    + "{# <｜tool▁calls▁begin｜> #}{% endfor %}{% endif %}"
    + _UNSHOWN.removeprefix("{% endfor %}"),
    "kimi_k2": _EACH
    + "{# <|tool_calls_section_begin|> #}"
    + _CALLS
    + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + "{{ f.arguments if f.arguments is string else f.arguments | tojson }}<|tool_call_end|>"
    + _END,
    "openai": _EACH
    + _SINGLE
    + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}"
    + "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    + _CALLS
    + "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} json<|message|>{{ f.arguments | tojson }}<|call|>"
    + _END
    + "{% for tool in tools or [] %}{{ '// ' + tool.function.description + '\n' }}{% endfor %}",
    "granite": _EACH
    + "{# <|start_of_role|> #}"
    + "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    + _CALLS
    + _END,
    "phi4_mini_json": _EACH
    + "{{ m.tools and '<|tool|>' + m.tools + '<|/tool|>' }}"
    + "{% if m.tool_calls %}functools{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    + _CALLS
    + _UNSHOWN,
    "functiongemma": _VALUE
    + "{% for m in messages %}{% if m.role == 'tool' %}{% if 'name' not in m %}"
    + "{{ raise_exception('a result needs a name') }}{% endif %}RESULT {{ m.name }} {{ m.content }}\n{% endif %}"
    + _CALLS
    + "<start_function_call>call:{{ f.name }}{{ value(f.arguments, '<escape>') }}<end_function_call>"
    + _END,
    "gemma4": _VALUE
    + "{% for m in messages %}<|turn>{{ m.role }}\n"
    + _CALLS
    + "<|tool_call>call:{{ f.name }}{{ value(f.arguments, '<|\"|>') }}<tool_call|>{% endfor %}"
    + "{% for r in m['tool_responses'] or [] %}RESULT {{ r['name'] }} {{ r['response'] }}\n{% endfor %}{{ m.content }}"
    + "{# <|channel>thought <channel|> #}"
    + _END.removeprefix("{% endfor %}"),
}
"""By format. Results have a line each, messages and tools are counted at the end. Those of
DeepSeek and Phi read no tools, as in the families."""
