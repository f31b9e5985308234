"""The runtime: a group of ranks that serves a model. `LLM` is its engine in a user's process."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx_runtime.llm import LLM as LLM
    from phalanx_runtime.offline.records import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]
_MODULES = {"LLM": "phalanx_runtime.llm", "SamplingParams": "phalanx_runtime.offline.records"}


def __getattr__(name: str) -> object:
    """Imports the class on first use: the server imports this package too."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
