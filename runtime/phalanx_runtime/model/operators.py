"""Kernel launches as torch operators: fake tensors pass through them, and a dispatch mode counts them."""

import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from phalanx_runtime.model.kernels.folder import usable_folder
from phalanx_runtime.model.kernels.variant import is_observed

_LIBRARY = torch.library.Library("phalanx", "DEF")  # type: ignore[no-untyped-call]

_INTERPRETER = threading.Lock()

Launch = Callable[..., None]


@cache
def launch_obstacle() -> str | None:
    """Returns why Triton cannot launch kernels on this machine's GPU, if there is one. An image may have all that gcc makes."""
    if not torch.cuda.is_available() or usable_folder() is not None:
        return None
    return compiler_obstacle(os.environ, Path(sysconfig.get_paths()["include"]))


def compiler_obstacle(environment: Mapping[str, str], include: Path) -> str | None:
    """Returns what is missing for Triton's C modules: its access to the driver, before 3.7 also a launcher for each kernel."""
    path = environment.get("PATH")
    if "CC" not in environment and shutil.which("gcc", path=path) is None and shutil.which("clang", path=path) is None:
        return "Triton finds no C compiler: install gcc or set CC"
    if not (include / "Python.h").exists():
        return f"Triton needs Python's headers, and {include} has no Python.h"
    return None


def operator(schema: str, *, num_pinned: int = 0) -> Callable[[Launch], Launch]:
    """Registers a launch as the operator `phalanx::<name>` and returns the function that calls it.

    `schema`: name and arguments in torch's notation, with `Tensor(a!)` for tensors that the kernel writes. A launch has no
    result: its memory is the caller's. On a CPU Triton's interpreter runs it. `num_pinned`: leading arguments that may
    be in pinned memory of the host, which a GPU reads and writes over its bus.
    """

    def register(launch: Launch) -> Launch:
        name = schema.partition("(")[0]
        _LIBRARY.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, launch, "CUDA")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, _in_turn(launch), "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"phalanx::{name}", partial(_launch_nothing, launch, num_pinned), lib=_LIBRARY)
        return partial(_call, launch, getattr(torch.ops.phalanx, name).default)

    return register


def _call(launch: Launch, dispatched: Launch, *arguments: object, **named: object) -> None:
    """Launches on a GPU without torch's dispatch, which each launch would pay on the host, unless a mode observes it."""
    first = arguments[0] if arguments else next(iter(named.values()))
    if type(first) is torch.Tensor and first.is_cuda and not torch._C._len_torch_dispatch_stack():
        launch(*arguments, **named)
    else:
        _check_numbers((arguments, named))
        dispatched(*arguments, **named)


def _check_numbers(arguments: object) -> None:
    """Raises TypeError for numbers of numpy, which torch's dispatch converts and a direct launch refuses."""
    found = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, np.generic)]
    if found:
        raise TypeError(f"a kernel launch has numbers of numpy: {found}")


def _in_turn(launch: Launch) -> Launch:
    """Returns a launch for the interpreter, which has the position in the grid once per process: not for several threads."""

    def interpret(*arguments: object) -> None:
        with _INTERPRETER:
            launch(*arguments)

    return interpret


def _launch_nothing(launch: Launch, num_pinned: int, *arguments: object) -> None:
    """Raises ValueError if the tensors are on several devices, which a real launch would read as garbage."""
    devices = {argument.device for argument in tree_leaves(arguments[num_pinned:]) if isinstance(argument, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"a kernel launch mixes tensors on {sorted(map(str, devices))}")
    if is_observed():
        launch(*arguments)
