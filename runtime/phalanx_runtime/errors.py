"""Errors of the runtime."""

from collections.abc import Mapping


class PeerLost(Exception):
    """Another rank failed. This process exits; the group starts a new incarnation."""


class DraftLost(Exception):
    """The draft failed while other ranks wait. This process exits; the next incarnation has no speculation."""


class StepOutOfMemory(Exception):
    """This rank has no memory for a step. It is alone, so that the step can be taken back and repeated with fewer requests."""


class RowStateLost(Exception):
    """Rows lack the state of the tokens before a step. All ranks of the stage raise it; with other stages they end."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        """rows: the reason of each row."""
        super().__init__("; ".join(rows.values()))
        self.rows = rows


class ModelError(Exception):
    """The model cannot be loaded. The user must change the model or the flags."""


class Unsupported(ModelError):
    """The model is valid, but has an unsupported feature."""
