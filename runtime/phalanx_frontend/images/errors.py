"""Refusals of images."""


class ImageRefused(Exception):
    """An image of a request is refused; a 400 for the client."""

    def __init__(self, param: str, message: str, code: str) -> None:
        super().__init__(message)
        self.param = param  # field with the image
        self.message = message
        self.code = code


class NoImageMemory(Exception):
    """The images of open requests use all memory for images; a 429."""
