"""Triton's interpreter without two things that take most of its time and change no result (Triton 3.9):

It replaces the functions of `triton.language` again at each call of a function by a kernel; once per launch is enough. And it
computes for each sum and product of integers whether it overflows, for assertions that it does not make unless it debugs.
"""

import sys
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any


class _Launch:
    """The replacements of one launch: those of the kernel, then those that its functions need. `restore` undoes all."""

    def __init__(self) -> None:
        self.languages: frozenset[str] = frozenset()
        """Modules with replaced functions."""
        self.scopes: list[Any] = []

    def restore(self) -> None:
        """Ends the launch."""
        while self.scopes:
            self.scopes.pop().restore()
        self.languages = frozenset()


def quicken_interpreter() -> None:
    """Changes the interpreter of this process, if it is imported and not changed yet. Launches must not overlap."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter, "_phalanx_launch"):
        return  # not imported, of a version that restores nothing, or changed
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    functions, launch = vars(interpreter), _Launch()
    patch = functions["_patch_lang"]

    def patch_new(function: FunctionType) -> _Launch:
        languages = _languages(function)
        if not languages <= launch.languages:
            launch.scopes.append(patch(function))
            launch.languages |= languages
        return launch

    functions |= {"_patch_lang": patch_new, "_phalanx_launch": launch}


@cache
def _languages(function: FunctionType) -> frozenset[str]:
    """Returns the modules that Triton changes for this function."""
    modules = (value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType))
    return frozenset(modules) & {"triton.language", "triton.language.core"}
