"""Prompts of conversations that are longer than the context, for `truncation: auto`."""

from collections.abc import Sequence

from phalanx_frontend.openai.prompt import chat_prompts
from phalanx_frontend.openai.schemas import ChatRequest, Message
from phalanx_frontend.openai.served_model import ServedModel

OUTPUT_SHARE = 8
"""Without `max_output_tokens` a truncated prompt leaves 1/8 of the context to the output."""


async def fitted_prompts(body: ChatRequest, model: ServedModel) -> list[list[int]]:
    """Returns the prompt, without as few of the oldest turns as make it fit. Raises ApiError 400."""
    prompts = await chat_prompts(body, model)
    context = model.assets.max_model_len
    longest = context - min(body.max_tokens or context // OUTPUT_SHARE, context // 2)
    starts = later_turns(body.messages)
    if len(prompts[0]) <= longest or not starts:
        return prompts
    first, last = 0, len(starts) - 1  # the last turn is kept, also if it does not fit
    while first < last:
        middle = (first + last) // 2
        prompts = await chat_prompts(without_turns(body, starts[middle]), model)
        first, last = (first, middle) if len(prompts[0]) <= longest else (middle + 1, last)
    return await chat_prompts(without_turns(body, starts[first]), model)


def later_turns(messages: Sequence[Message]) -> list[int]:
    """Returns the positions of the user's messages after the first: a conversation may begin at each."""
    return [position for position, message in enumerate(messages) if message.role == "user"][1:]


def without_turns(body: ChatRequest, start: int) -> ChatRequest:
    """Returns the chat without the messages before `start`, except for a system message."""
    system = [message for message in body.messages[:1] if message.role == "system"]
    return body.model_copy(update={"messages": [*system, *body.messages[start:]]})
