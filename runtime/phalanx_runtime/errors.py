"""Errors of the runtime, by who can act on them."""


class PeerLost(Exception):
    """Another rank of the group is gone: this process leaves, and the group starts a new incarnation."""


class DraftLost(Exception):
    """What drafts failed where other ranks wait: why. This process leaves, and the group's next start is without a draft."""


class ModelError(Exception):
    """The model cannot be loaded: what, where, what was expected. The user must change the model or the flags."""


class Unsupported(ModelError):
    """The model is sound, but what it computes is not known to the level that was to compute it."""
