"""Token ids of prompts and of rendered conversations. Functions raise ApiError 400."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from phalanx_api import wire
from phalanx_frontend.errors import invalid
from phalanx_frontend.images.parts import MessageContent, joined
from phalanx_frontend.openai.pictures import (
    Pictures,
    images_of,
    least_image_tokens,
    pictures_of,
    read_pictures,
    shown_content,
    with_pictures,
)
from phalanx_frontend.openai.sampling import refuse_unsupported
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, Message, TokenizeRequest
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.openai.tools import Tool, ToolChoice, check_tools, shown_calls, shown_tools
from phalanx_frontend.text.chat import ChatTemplateError
from phalanx_frontend.text.formats.conversation import SYSTEM_TOOLS, fitted, fitted_tools

REQUEST_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Template variables that fields of the request set, after checks."""
CONTINUATION_MARK = "[continuation]"
"""Marks the end of the last message, where its rendered text is cut: a template may write that text elsewhere too."""
OUTPUT_SHARE = 8
"""Without `max_output_tokens` a truncated prompt leaves 1/8 of the context to the output."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI. Many templates drop messages with an unknown one."""


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """One prompt."""

    tokens: list[int]
    images: list[wire.Image] = field(default_factory=list)
    rendered: str = ""
    """A conversation as the chat template writes it."""


async def completion_prompts(body: CompletionRequest, model: ServedModel) -> list[ReadyPrompt]:
    """Returns each prompt. Only text gets special tokens. Raises ApiError 400."""
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            ids = await model.encode(prompt, body.add_special_tokens is not False, "prompt")
        else:
            ids = model.checked_ids(prompt, "prompt")
        if not ids:
            raise invalid("prompt", "the prompt has no tokens")
        prompts.append(ReadyPrompt(ids))
    return prompts


async def chat_prompts(body: ChatRequest, model: ServedModel) -> list[ReadyPrompt]:
    """Returns a conversation as one prompt. The template writes the special tokens. Raises ApiError 400."""
    return [await _chat_prompt(body, model, await read_pictures(body.messages, model))]


async def least_tokens(body: ChatRequest, model: ServedModel, *, can_drop: bool) -> int:
    """Returns how many prompt tokens a conversation has at least, before its images are read. Raises ApiError 400.

    `can_drop`: without the turns that `fitted_prompts` may drop.
    """
    turns = later_turns(body.messages) if can_drop else []
    kept = without_turns(body, turns[-1]) if turns else body
    ids = await model.encode(_rendered(kept, model), bool(body.add_special_tokens), "messages")
    return len(ids) + least_image_tokens(kept.messages, model)


def _rendered(body: ChatRequest, model: ServedModel) -> str:
    options = template_options(body)
    if body.tools or body.tool_choice:
        options |= tool_options(body.tools or [], body.tool_choice, model)
    return _conversation(body, body.messages, model, options)


def _conversation(
    body: ChatRequest | TokenizeRequest, messages: Sequence[Message], model: ServedModel, options: Mapping[str, Any]
) -> str:
    """Returns the text of a conversation, with the begin of an answer or up to the end of the last message."""
    if not body.continue_final_message:
        return render(model, messages, body.add_generation_prompt is not False, options)
    if body.add_generation_prompt:
        raise invalid("add_generation_prompt", "add_generation_prompt: must be false with continue_final_message")
    last = messages[-1]
    if last.role != "assistant" or not isinstance(last.content, str) or not last.content or last.tool_calls:
        why = "continue_final_message: the last message must be the assistant's, with text and without tool_calls"
        raise invalid("continue_final_message", why)
    marked = last.model_copy(update={"content": last.content + CONTINUATION_MARK})
    text, mark, _ = render(model, [*messages[:-1], marked], False, options).rpartition(CONTINUATION_MARK)
    if not mark:
        raise invalid("continue_final_message", "the model's chat template does not show the end of the last message")
    return text


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns the variables of `chat_template_kwargs` and `reasoning_effort`. Raises ApiError 400."""
    options = dict(body.chat_template_kwargs or {})
    for name in REQUEST_FIELDS:
        if name in options:
            raise invalid(f"chat_template_kwargs.{name}", f"{name} is a field of the request, not of chat_template_kwargs")
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        options = {**thinking_switch(False), **options}
    return options


def thinking_switch(is_on: bool) -> dict[str, bool]:
    """Returns the template variables that switch reasoning: Qwen3 and GLM-4.5 have one, DeepSeek V3.1 and Granite the other."""
    return {"enable_thinking": is_on, "thinking": is_on}


async def _chat_prompt(body: ChatRequest, model: ServedModel, pictures: Pictures) -> ReadyPrompt:
    own = pictures_of(body.messages, pictures)
    text = with_pictures(_rendered(body, model), own, model)
    ids = await model.encode(text, bool(body.add_special_tokens), "messages")
    if not ids:
        raise invalid("messages", "the chat template made an empty prompt of these messages; change messages")
    return ReadyPrompt(ids, images_of(ids, own, model), text)


async def fitted_prompts(body: ChatRequest, model: ServedModel) -> list[ReadyPrompt]:
    """Returns the prompt, without as few of the oldest turns as make it fit. Raises ApiError 400."""
    pictures = await read_pictures(body.messages, model)
    prompt = await _chat_prompt(body, model, pictures)
    context = model.assets.max_model_len
    longest = context - min(body.max_tokens or context // OUTPUT_SHARE, context // 2)
    starts = later_turns(body.messages)
    if len(prompt.tokens) <= longest or not starts:
        return [prompt]
    first, last = 0, len(starts) - 1  # the last turn is kept, also if it does not fit
    while first < last:
        middle = (first + last) // 2
        prompt = await _chat_prompt(without_turns(body, starts[middle]), model, pictures)
        first, last = (first, middle) if len(prompt.tokens) <= longest else (middle + 1, last)
    return [await _chat_prompt(without_turns(body, starts[first]), model, pictures)]


def later_turns(messages: Sequence[Message]) -> list[int]:
    """Returns the positions of the user's messages after the first: a conversation may begin at each."""
    return [position for position, message in enumerate(messages) if message.role == "user"][1:]


def without_turns(body: ChatRequest, start: int) -> ChatRequest:
    """Returns the chat without the messages before `start`, except for a system message."""
    system = [message for message in body.messages[:1] if message.role == "system"]
    return body.model_copy(update={"messages": [*system, *body.messages[start:]]})


def tool_options(tools: Sequence[Tool], choice: ToolChoice | None, model: ServedModel) -> dict[str, Any]:
    """Returns the template variable `tools`. Raises ApiError 400."""
    check_tools(tools, choice)
    shown = shown_tools(tools, choice)
    if not shown:
        return {}
    format = model.chat_template().tool_format
    if format is None:
        raise invalid("tools", "this model's chat template has no tool calls, or an unsupported format; leave tools out")
    if format not in SYSTEM_TOOLS and not model.chat_template().shows_tools:
        raise invalid("tools", "this model's chat template does not show tools to the model; leave tools out")
    return {"tools": fitted_tools(shown, format)}


async def tokenize_prompt(body: TokenizeRequest, model: ServedModel) -> list[int]:
    """Returns the token ids as a completion or chat would use them. Raises ApiError 400."""
    refuse_unsupported(body.model_extra or {})
    if body.messages is not None and body.prompt is None:
        options = template_options(body) | tool_options(body.tools or [], None, model)
        text = _conversation(body, body.messages, model, options)
        pictures = pictures_of(body.messages, await read_pictures(body.messages, model))
        return await model.encode(with_pictures(text, pictures, model), bool(body.add_special_tokens), "messages")
    if body.prompt is None or body.messages is not None:
        raise invalid("prompt", "exactly one of prompt and messages must be given")
    if body.tools:
        raise invalid("tools", "tools are only allowed with messages, not with prompt")
    return await model.encode(body.prompt, body.add_special_tokens is not False, "prompt")


async def bad_word_ids(words: Sequence[str], model: ServedModel) -> list[list[int]]:
    """Returns the token sequences of each word, at the start of a text and after a space."""
    sequences: list[list[int]] = []
    for word in words:
        bare = await model.encode(word.lstrip() or word, False, "bad_words")
        spaced = await model.encode(" " + word.lstrip(), False, "bad_words")
        # A space that is its own token would only repeat the bare sequence.
        is_other = len(spaced) == len(bare) and spaced[0] != bare[0] if bare and spaced else False
        sequences += [ids for ids in ([bare, spaced] if is_other else [bare]) if ids and ids not in sequences]
    return sequences


def render(model: ServedModel, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]) -> str:
    """Returns the text of a conversation. Raises ApiError 400."""
    template = model.chat_template()
    shown = shown_content(model)
    for position, message in enumerate(messages):
        if message.role not in ROLES and template.drops_role(message.role):
            why = f"the model's chat template drops messages of the role {message.role[:40]!r}; use one of {', '.join(ROLES)}"
            raise invalid(f"messages[{position}].role", why)
    plain = [_plain(message, position, shown) for position, message in enumerate(messages)]
    tools = options.get("tools") or ()
    unshown = tools if template.tool_format in SYSTEM_TOOLS and not template.shows_tools else ()
    fit = fitted(plain, template.tool_format, unshown, template.source(bool(tools)))
    try:
        return template.render(fit, add_generation_prompt, options)
    except ChatTemplateError as error:
        raise invalid("messages", str(error)) from error


def merged_turns(messages: Iterable[Message]) -> list[Message]:
    """Returns the messages, those of the user or of the assistant in a row as one: many chat templates refuse two."""
    merged = list[Message]()
    for role, run in groupby(messages, lambda message: message.role):
        turns = list(run)
        merged += [_one_turn(turns)] if role in ("user", "assistant") and len(turns) > 1 else turns
    return merged


def _one_turn(turns: Sequence[Message]) -> Message:
    return Message(
        role=turns[0].role,
        content=joined([turn.content for turn in turns]),
        reasoning_content="\n".join(turn.reasoning_content for turn in turns if turn.reasoning_content) or None,
        tool_calls=[call for turn in turns for call in turn.tool_calls or ()] or None,
    )


def _plain(message: Message, position: int, shown: Callable[[MessageContent], object]) -> dict[str, Any]:
    """Returns the message as the template receives it."""
    if message.model_extra and message.model_extra.get("function_call"):
        raise invalid(
            f"messages[{position}].function_call", "function_call is not supported; use tool_calls", "unsupported_parameter"
        )
    # Some templates read the first part of any message, others write a new line between content and calls.
    content = message.content or (None if message.tool_calls else "")
    fields: dict[str, Any] = {"role": message.role, "content": shown(content)}
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = shown_calls(message.tool_calls)
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
