"""The response document: what the client asked for, and the state of the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from phalanx_frontend.errors import invalid
from phalanx_frontend.openai_responses.schemas import ResponsesRequest
from phalanx_frontend.stream.formats import ChunkHeader
from phalanx_frontend.stream.reply import Reply


def echoed_fields(body: ResponsesRequest) -> Mapping[str, Any]:
    """Returns the fields that a response repeats, encoded. Raises ApiError 400 for tools and schemas that JSON cannot have."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning: dict[str, str | None] = {"effort": None, "summary": None}
    if body.reasoning is not None:
        reasoning = {"effort": body.reasoning.effort, "summary": body.reasoning.summary}
    tools = [{"strict": True, **tool.model_dump(exclude_unset=True)} for tool in body.tools or ()]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "text": _encoded("text.format.schema", text),
        "tool_choice": _choice(body),
        "tools": _encoded("tools", tools),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _choice(body: ResponsesRequest) -> Any:
    rule = body.tool_choice
    if rule is None or rule.type in ("auto", "none", "required"):
        return "auto" if rule is None else rule.type
    return rule.model_dump(exclude_none=True)


def _encoded(param: str, value: object) -> orjson.Fragment:
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        raise invalid(param, f"{param} must be JSON with valid Unicode, numbers of 64 bits and few levels: {error}") from error


def response_document(
    head: ChunkHeader, echoed: Mapping[str, Any], status: str, output: Sequence[Any], usage: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the document of a response."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": output,
        **echoed,
        "usage": usage,
    }


def usage_of(num_prompt: int, reply: Reply, num_reasoning: int) -> dict[str, Any]:
    """Returns the token counts of an ended answer."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": min(reply.cached_tokens, num_prompt), "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + reply.completion_tokens,
    }
