"""Images of a chat: from its messages into the prompt. Functions raise ApiError 400 or 429."""

from collections.abc import Callable, Mapping, Sequence

from phalanx_api import wire
from phalanx_frontend.errors import ApiError, invalid
from phalanx_frontend.images.decoding import Picture
from phalanx_frontend.images.errors import ImageRefused, NoImageMemory
from phalanx_frontend.images.parts import ImagePart, MessageContent, MixedContent, TextPart
from phalanx_frontend.images.spans import prompt_images, with_placeholders
from phalanx_frontend.openai.schemas import Message
from phalanx_frontend.openai.served_model import ServedModel
from phalanx_frontend.text.chat import ContentForm

RETRY_S = 5.0
Pictures = Mapping[ImagePart, Picture]


async def read_pictures(messages: Sequence[Message], model: ServedModel) -> Pictures:
    """Returns the images of the messages; equal ones are read once."""
    fields = dict[ImagePart, str]()
    count = 0
    for position, message in enumerate(messages):
        for part in message.content.images if isinstance(message.content, MixedContent) else ():
            fields.setdefault(part, part.field or f"messages[{position}].content")
            count += 1
    if not fields:
        return {}
    taken = model.image_input(next(iter(fields.values())))
    try:
        model.images.check_number(count, "messages")
        pictures = await model.images.read([(field, part) for part, field in fields.items()], taken.among(count))
    except ImageRefused as refused:
        raise api_error_of_image(refused) from refused
    except NoImageMemory as error:
        why = "images of open requests use the memory that this server has for them, or for those of one tenant: retry"
        raise ApiError(429, why, code="image_memory_full", retry_after_s=RETRY_S) from error
    return dict(zip(fields, pictures, strict=True))


def has_images(messages: Sequence[Message]) -> bool:
    """Returns whether a message has an image."""
    return any(isinstance(message.content, MixedContent) for message in messages)


def least_image_tokens(messages: Sequence[Message], model: ServedModel) -> int:
    """Returns how many prompt tokens the images have at least, beside those in the rendered text."""
    contents, taken = [message.content for message in messages], model.taken_images
    count = sum(len(content.images) for content in contents if isinstance(content, MixedContent))
    return 0 if taken is None else count * (taken.tile_tokens - 1)


def pictures_of(messages: Sequence[Message], pictures: Pictures) -> list[Picture]:
    """Returns the images in the order of the messages."""
    contents = [message.content for message in messages]
    return [pictures[part] for content in contents if isinstance(content, MixedContent) for part in content.images]


def with_pictures(text: str, pictures: Sequence[Picture], model: ServedModel) -> str:
    """Returns the rendered text with the placeholders of the images, which no message may spell."""
    taken = model.taken_images
    if not pictures and (taken is None or not taken.is_spelled(text)):
        return text
    try:
        return with_placeholders(text, model.image_input("messages"), pictures)
    except ImageRefused as refused:
        raise api_error_of_image(refused) from refused


def images_of(tokens: Sequence[int], pictures: Sequence[Picture], model: ServedModel) -> list[wire.Image]:
    """Returns the images of a prompt with their tokens."""
    if not pictures:
        return []
    try:
        return prompt_images(tokens, model.image_input("messages"), pictures)
    except ImageRefused as refused:
        raise api_error_of_image(refused) from refused


def check_copies(images: Sequence[wire.Image], num_choices: int, model: ServedModel) -> None:
    """Refuses more images, or choices of a prompt, than may carry the pixels: each choice is a request of its own."""
    num_bytes, most = sum(len(image.pixels) for image in images), model.images.bounds.max_tile_bytes
    if num_bytes > most:  # although each was read once
        raise invalid("messages", f"the images have {num_bytes} bytes of pixels, at most {most}: send fewer", "image_too_large")
    if num_choices * num_bytes > most:
        message = f"{num_choices} choices carry {num_choices * num_bytes} bytes of images, at most {most}: ask for fewer"
        raise invalid("n", message, "image_too_large")


def api_error_of_image(refused: ImageRefused) -> ApiError:
    """Converts a refusal."""
    return invalid(refused.param, refused.message, refused.code)


def shown_content(model: ServedModel) -> Callable[[MessageContent], object]:
    """Returns how the chat template receives the content of a message: as text, or as parts."""
    taken = model.taken_images
    form: ContentForm = "text" if taken is None else model.chat_template().content_form

    def shown(content: MessageContent) -> object:
        if form == "parts":
            return _parts(content)
        if isinstance(content, MixedContent):
            token = "" if taken is None else taken.token
            return "\n".join(part.text if isinstance(part, TextPart) else token for part in content.parts)
        return content or ""

    return shown


def _parts(content: MessageContent) -> list[dict[str, str]]:
    parts = content.parts if isinstance(content, MixedContent) else [] if content is None else [TextPart(content)]
    return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in parts]
