"""Valid bodies of every route, from which requests are mutated."""

from typing import Any

from phalanx_frontend.app import NOT_SERVED

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_COMMON: dict[str, Any] = {
    "model": "tiny", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 3, "stop": ["zz", "é"],
    "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 1, "stream": False, "priority": 1, "deadline_ms": 1e6, "tenant": "t",
}  # fmt: skip
_SAMPLING: dict[str, Any] = {
    **_COMMON, "n": 2, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 1.5},
    "bad_words": ["bad"], "include_stop_str_in_output": True, "skip_special_tokens": False, "prompt_logprobs": 2,
    "return_gaps": True,
    "return_token_ids": True, "return_tokens_as_token_ids": True, "user": "u", "cache_salt": "s", "ttft_target_ms": 100.0,
    "tpot_target_ms": 10.0, "allowed_token_ids": [3, 4, 5, 6, 7, 8, 9, 10],
}  # fmt: skip
_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "once"}, {"type": "text", "text": "upon"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]
_CHAT: dict[str, Any] = {
    **_SAMPLING,
    "messages": _MESSAGES,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": [1]},
}
_IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_PLAIN: dict[str, Any] = {"max_tokens": 4, "messages": _MESSAGES[:2]}

UPLOADS = "/v1/files"
STORED = f"file-{'0' * 32}"
"""A file that the server has."""
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "once upon", "max_tokens": 4},
        {**_SAMPLING, "prompt": ["a", "b"], "logprobs": 3, "echo": True},
        {**_SAMPLING, **_STREAM, "prompt": [[1, 2], [3]]},
        {"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "a+"}},
        {"prompt": "x", "max_tokens": 3, "guided_choice": ["a", "b"]},
    ],
    "/v1/chat/completions": [
        _PLAIN,
        _CHAT,
        {**_CHAT, **_STREAM},
        {**_PLAIN, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {**_PLAIN, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}, **_STREAM},
        {**_PLAIN, "messages": [*_MESSAGES[:2], {"role": "assistant", "content": "a"}], "continue_final_message": True},
        {**_PLAIN, "max_completion_tokens": 4, "reasoning_effort": "low", "add_generation_prompt": True},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _IMAGE, "detail": "low"}},
                        {"type": "text", "text": "what"},
                    ],
                }
            ],
            "max_tokens": 2,
        },
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "once"}], "max_tokens": 2, "system": "s", "stream": True, "top_k": 4},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "once"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": ["b"]}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "c", "is_error": True}]},
            ],
            "max_tokens": 2,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "output_config": {"effort": "low"},
        },
    ],
    "/v1/messages/count_tokens": [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": _IMAGE.partition(",")[2]},
                        },
                        {"type": "image", "source": {"type": "url", "url": "https://127.0.0.1/a.png"}},
                    ],
                }
            ]
        },
        {"messages": [{"role": "user", "content": "once"}], "system": [{"type": "text", "text": "s"}]}],
    "/v1/responses": [
        {"input": "once", "max_output_tokens": 2, "stream": True, "include": ["message.output_text.logprobs"]},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "once"}]},
                {"role": "user", "content": [{"type": "input_image", "image_url": _IMAGE, "detail": "auto"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
            ],
            "max_output_tokens": 2,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
            "truncation": "auto",
            "metadata": {"a": "b"},
        },
        {"input": "once", "max_output_tokens": 2, "background": True, "stream": True, "store": True},
        {"input": "x", "previous_response_id": "resp_0", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
    ],
    "/v1/responses/resp_0/cancel": [{}],
    "/v1/responses/compact": [{"input": "once", "model": "tiny"}],
    "/v1/responses/input_tokens": [{"input": "once", "instructions": "s"}],
    "/v1/generate": [{**_COMMON, "prompt": "once"}, {"prompt_tokens": [1, 2, 3], "max_tokens": 2, "stream": True}],
    "/v1/batch": [{"requests": [{"prompt": "once", "max_tokens": 2}, {"prompt_tokens": [5], "max_tokens": 1, "seed": 4}]}],
    "/v1/score": [{"text_1": "once", "text_2": ["a", "b"]}, {"text_1": ["a", "b"], "text_2": ["c", "d"], "user": "u"}],
    "/v1/rerank": [{"query": "once", "documents": ["a", "b"], "top_n": 1, "return_documents": False}],
    "/v1/classify": [{"input": "once"}, {"input": ["a", "b"], "use_activation": False, "truncate_prompt_tokens": 5}],
    "/v1/embeddings": [
        {"input": "once"},
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "u", "truncate_prompt_tokens": 5},
        {"input": [[1, 2], [3]], "model": "tiny", "tenant": "t", "priority": 3, "cache_salt": "s"},
    ],
    "/tokenize": [{"prompt": "once", "return_token_strs": True}, {"messages": _MESSAGES, "tools": [_TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 3], "model": "tiny"}],
    UPLOADS: [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "once"}}],
    "/v1/batches": [
        {"input_file_id": STORED, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    ],
    f"/v1/batches/batch_{'0' * 32}/cancel": [{}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "a", "lora_int_id": 1}],
    "/v1/unload_lora_adapter": [{"lora_name": "a"}],
    "/score": [{"text_1": "once", "text_2": "a"}],
    "/rerank": [{"query": "once", "documents": [{"text": "a"}]}],
    "/v2/rerank": [{"query": "once", "documents": ["a", "b"], "top_n": 1, "model": "tiny"}],
    "/classify": [{"input": "once"}],
    **{path: [{"model": "tiny", "input": "once"}] for path in NOT_SERVED if path != "/v1/responses/compact"},
}  # fmt: skip
GETS = (
    *(
        "/health",
        "/healthz",
        "/ping",
        "/version",
        "/readyz",
        "/metrics",
        "/v1/health",
        "/v1/metrics",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models?limit=1&after_id=tiny&before_id=x&lifecycle[]=active",
        "/v1/responses/resp_0",
        "/v1/responses/resp_0?stream=true&starting_after=3",
        "/v1/responses/resp_0/input_items?limit=2&after=x",
        f"/v1/files/{STORED}",
        f"/v1/files/{STORED}/content",
        "/v1/files?purpose=batch&after=x&limit=2&order=asc",
        "/v1/batches?after=x&limit=2",
        f"/v1/batches/batch_{'0' * 32}",
        "/openapi.json",
    ),
    *("/docs", "/", "/v1", "/v1/models/%00%ff", "/v1/models/..%2f..", "//v1/models", "/v1/completions/"),
)
HEADERS: dict[str, tuple[bytes, ...]] = {
    "content-type": (
        *(b"application/json", b"application/json; charset=utf-8", b"application/json; charset=utf-16", b"text/plain", b""),
        *(
            b"multipart/form-data; boundary=x",
            b"application/x-www-form-urlencoded",
            b"\xff\xfe",
            b"a/b/c",
            b"application/vnd.x+json",
        ),
    ),
    "authorization": (b"Bearer x", b"Bearer", b"Basic eA==", b"bearer \xff", b"", b"Bearer " + b"x" * 5000),
    "anthropic-version": (b"2023-06-01", b"", b"\xff"),
    "x-api-key": (b"x", b"", b"\xff", b"x" * 5000),
    "x-request-id": (b"r1", b"", b"\xff", b"a b", b"x" * 4000, b"../..", b"a\x0bb"),
    "last-event-id": (b"x", b"a:1", b"1:2:3:4", b"\xff\xff", b":" * 900, b"-1", b"cmpl-1:0:99999999999999999999", b""),
    "traceparent": (
        b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
        b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
        b"ff",
        b"\xff",
        b"",
    ),
    "cache-control": (b"no-store", b"no-store,,,", b"\xff", b"max-age=99999999999999999999"),
    "accept": (b"text/event-stream", b"*/*;q=nan", b"application/openmetrics-text; version=1.0.0", b"\xff", b",,,,"),
    "accept-encoding": (b"gzip", b"identity;q=0", b"\xff"),
    "content-length": (b"5", b"-1", b"99999999999999999999", b"x", b"0"),
    "host": (b"a b", b"\xff", b"[::", b"x:99999", b""),
    "expect": (b"100-continue", b"x"),
    "cookie": (b"a=b; \xff=\x01",),
}
