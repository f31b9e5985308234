"""A chat with a tool: template, request, and a generated answer with reasoning and two calls."""

from typing import Any

TOOLS_TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} Call as <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>\n{% endif %}{% endif %}"
    "{# reasoning precedes </think> #}"
)
CALL = '{"name": "weather", "arguments": {"city": "Paris }"}}'
ANSWER = f"<think>\nhm, a tool\n</think>\n\nLet me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER: Any = [{"role": "user", "content": "weather?"}]
