"""Chunks of prompts with images whose tokens attend to each other: one step computes all such tokens of an image.

A chunk may start within such an image, after tokens that other requests computed with the whole image.
"""

from phalanx_runtime.core.request import Request


def whole_end(request: Request, start: int, end: int, last: int) -> int:
    """Returns the end of a chunk from `start`: `end`, unless that is within an image.

    Then before the image; if the chunk has no token before it, after the image, or `start` if that is beyond `last`.
    """
    for image in request.params.images:
        for first, count in image.spans if image.attends_within else ():
            if first < end < first + count:
                return first if first > start else first + count if first + count <= last else start
    return end
