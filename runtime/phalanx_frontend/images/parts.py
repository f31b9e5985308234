"""Content of a message with images, as clients write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IMAGE_TYPES = ("image_url", "input_image")
"""`type` of a part with an image: of chats, and of the Responses API."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image by its data: or https: URL."""

    url: str
    field: str = field(default="", compare=False)
    """Of the body, for errors, if it is not that of a chat's message."""


@dataclass(frozen=True, slots=True)
class MixedContent:
    """Parts in order, at least one of which is an image."""

    parts: tuple[TextPart | ImagePart, ...]

    @property
    def images(self) -> list[ImagePart]:
        """The images in order."""
        return [part for part in self.parts if isinstance(part, ImagePart)]


MessageContent = str | MixedContent | None


def content_of(parts: Sequence[TextPart | ImagePart]) -> str | MixedContent:
    """Returns the content: text parts joined by newlines, unless there is an image."""
    if any(isinstance(part, ImagePart) for part in parts):
        return MixedContent(tuple(parts))
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def joined(contents: Sequence[MessageContent]) -> str | MixedContent:
    """Returns the contents as one. Empty ones are left out."""
    parts = list[TextPart | ImagePart]()
    for content in contents:
        if isinstance(content, MixedContent):
            parts += content.parts
        elif content:
            parts.append(TextPart(content))
    return content_of(parts)


def image_url(part: Mapping[str, object]) -> str | None:
    """Returns the URL of a part with an image: its `image_url`, which chats write as an object with `url`."""
    value = part.get("image_url")
    if isinstance(value, Mapping):
        value = value.get("url")
    return value if isinstance(value, str) else None
