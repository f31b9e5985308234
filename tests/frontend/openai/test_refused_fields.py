"""Fields of OpenAI, vLLM and SGLang with an effect that Phalanx does not have, at every endpoint that would drop them."""

from typing import Any

import pytest

from phalanx_frontend.openai.prompt import ROLES
from phalanx_frontend.openai.sampling import FORMS
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets
from tests.frontend.posting import client_of, post
from tests.frontend.tool_chat import TOOLS_TEMPLATE, USER

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "weather?"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/embeddings": {"input": "weather?"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
EFFECTS: dict[str, Any] = {
    "lora_path": "french", "stop_regex": "a+", "no_stop_trim": True, "custom_logit_processor": "x", "custom_params": {"a": 1},
    "separate_reasoning": False, "return_hidden_states": True, "session_params": {"id": "s"}, "thinking_token_budget": 5,
    "logprob_token_ids": [1], "logits_processors": ["x"], "kv_transfer_params": {"do_remote_decode": True},
    "mm_processor_kwargs": {"a": 1}, "repetition_detection": {"a": 1}, "vllm_xargs": {"a": 1}, "moderation": {"model": "omni"},
}  # fmt: skip


def backend() -> FakeBackend:
    return FakeBackend(text_script("yes", finish="stop"), tiny_assets(chat_template=TOOLS_TEMPLATE))


@pytest.mark.parametrize("path", BODIES)
async def test_fields_with_an_effect_are_refused(path: str) -> None:
    server = backend()
    async with client_of(server) as client:
        for name, value in EFFECTS.items():
            answer = await client.post(path, json={**BODIES[path], name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert not server.requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_neutral_values_change_nothing(path: str) -> None:
    neutral = dict.fromkeys(EFFECTS) | {"separate_reasoning": True, "no_stop_trim": False, "mm_processor_kwargs": {}}
    assert (await post(backend(), path, **BODIES[path], **neutral)).status_code == 200


EACH = "{% for m in messages %}{% if True %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSING = "{% for m in messages if m.role != 'user' %}{{ raise_exception('no') }}{% endfor %}x"
ROLE_TEMPLATES = {
    EACH: None,
    EACH.replace("m.content", "m.content[0].text"): None,
    EACH.replace("True", "m.role in ['user', 'observation']"): None,
    EACH.replace("True", "m.role == 'user'"): "messages[1].role",
    REFUSING: "messages",
}
"""Which field an `observation` of each template is refused for."""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_roles_that_templates_drop_are_refused(path: str) -> None:
    for template, param in ROLE_TEMPLATES.items():
        server = FakeBackend(assets=tiny_assets(chat_template=template))
        messages = [*USER, {"role": "observation", "content": "x"}]
        answer = await post(server, path, messages=messages, max_tokens=2)
        assert answer.status_code == (400 if param else 200) and (param is None or answer.json()["error"]["param"] == param)
    for template in ("{{ messages }}", "x"):
        server = FakeBackend(assets=tiny_assets(chat_template=template))
        for role in ROLES:
            assert (await post(server, path, messages=[{"role": role, "content": "x"}] * 2, max_tokens=2)).status_code == 200


async def test_tokenize_counts_the_prompt_of_the_chat() -> None:
    server = FakeBackend(assets=tiny_assets(chat_template="{{ messages[0].content }}{{ reasoning_effort }}"))
    body = {"messages": USER, "reasoning_effort": "high"}
    async with client_of(server) as client:
        count = (await client.post("/tokenize", json=body)).json()["count"]
        await client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
        for name, value in {"chat_template": "x", "truncate_prompt_tokens": 2}.items():
            answer = await client.post("/tokenize", json={**body, name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert count == len(server.requests[0].prompt)


async def test_only_completions_echo() -> None:
    answer = await post(backend(), "/v1/chat/completions", messages=USER, echo=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
    assert (await post(backend(), echo=True)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_refuse_forms_of_chats(path: str) -> None:
    async with client_of(backend()) as client:
        for name in FORMS:
            answer = await client.post(path, json={**BODIES[path], name: "a+"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "lark"), ({"json_schema": '{"type": "object"}'}, "json_schema")],
)
async def test_forms_of_sglang_constrain_the_output(path: str, fields: dict[str, Any], kind: str) -> None:
    server = FakeBackend(text_script("yes", finish="stop"))  # its template has no reasoning, which would wrap the grammar
    assert (await post(server, path, **BODIES[path], **fields)).status_code == 200
    grammar = server.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == kind
