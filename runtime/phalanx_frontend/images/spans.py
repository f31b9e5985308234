"""Puts images into the text and the tokens of a prompt. Functions raise ImageRefused."""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_frontend.images.decoding import Picture
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.tiling import num_tokens, placeholder


def with_placeholders(text: str, taken: wire.ImageInput, pictures: Sequence[Picture]) -> str:
    """Returns the text of a conversation with the placeholders of each image."""
    pieces = text.split(taken.token)
    if len(pieces) != len(pictures) + 1 or (taken.run_token and taken.run_token in text):
        names = " or ".join(name for name in (taken.token, taken.run_token) if name)
        why = f"a text contains {names}, or the chat template does not show each image once"
        raise ImageRefused("messages", f"{why}: change messages", "invalid_image")
    marks = [placeholder(picture.taken, picture.cut) for picture in pictures]
    return "".join(piece + mark for piece, mark in zip(pieces, [*marks, ""], strict=True))


def prompt_images(tokens: Sequence[int], taken: wire.ImageInput, pictures: Sequence[Picture]) -> list[wire.Image]:
    """Returns the images of a prompt with their tokens."""
    places = [at for at, token in enumerate(tokens) if token == taken.token_id]
    counts = [num_tokens(picture.taken, picture.cut) for picture in pictures]
    if len(places) != sum(counts):
        why = f"the tokenizer makes {len(places)} tokens of the {sum(counts)} placeholders of images"
        raise ImageRefused("messages", f"{why}: this model takes no images", "invalid_image")
    images, first = list[wire.Image](), 0
    for picture, count in zip(pictures, counts, strict=True):
        images.append(
            wire.Image(
                digest=picture.digest,
                num_tiles=picture.cut.num_tiles,
                height=picture.height,
                width=picture.width,
                pixels=picture.pixels,
                spans=_runs(places[first : first + count]),
                attends_within=taken.attends_within,
                grid=_grid(taken, picture),
                size=picture.size,
            )
        )
        first += count
    return images


def _grid(taken: wire.ImageInput, picture: Picture) -> tuple[int, int] | None:
    return (picture.height // taken.height, picture.width // taken.width) if taken.layout == "grid" else None


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns start and length of each run of consecutive places."""
    runs: list[tuple[int, int]] = []
    for place in places:
        start, count = runs[-1] if runs else (place, 0)
        if start + count == place:
            runs[-1:] = [(start, count + 1)]
        else:
            runs.append((place, 1))
    return runs
