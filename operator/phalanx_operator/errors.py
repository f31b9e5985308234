"""What can go wrong with the API server, by who can act."""


class KubeError(Exception):
    """An answer that is no success. The message says what was asked, of which object, and what came back."""


class Retry(KubeError):
    """Ours, later: the server is away, busy, or not there yet."""


class Rejected(KubeError):
    """The user's: the API server refuses an object for what the spec says."""


class Conflict(KubeError):
    """Normal life: someone else was first. Look again."""


class Gone(KubeError):
    """Normal life: the object is not there any more, or the watch must start again."""


class Denied(KubeError):
    """The installer's: the operator lacks a right."""
