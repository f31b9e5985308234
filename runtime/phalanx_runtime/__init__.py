"""The runtime: one tensor-parallel group that serves a model. `LLM` is the same engine in a user's process."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx_runtime.llm import LLM as LLM
    from phalanx_runtime.offline.params import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]
_HOMES = {"LLM": "phalanx_runtime.llm", "SamplingParams": "phalanx_runtime.offline.params"}


def __getattr__(name: str) -> object:
    """The class of that name, imported when it is first asked for: the server's processes import this package too."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
