"""Kernel variants: what Triton compiles a kernel for. A launch may use listed variants only, so that no step compiles.

Triton compiles a kernel for each combination of

    pointer      dtype, and whether the address is a multiple of 16 bytes
    integer      32 or 64 bits, and whether it is 1 or a multiple of 16
    constant     value (names in upper case)
    options      warps and stages

and for `do_not_specialize` arguments by type alone. A variant has one representative of each class as its arguments.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNMENT = 16
"""Bytes of an aligned pointer; an integer that is its multiple is aligned too."""
_WIDE = 1 << 40
"""Added to a 64-bit integer's representative."""


@dataclass(frozen=True, slots=True)
class Unaligned:
    """A pointer whose address is no multiple of `ALIGNMENT`."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Returns an address as Triton asks for it."""
        return ALIGNMENT // 2


Argument = torch.dtype | Unaligned | int | float
"""A dtype is an aligned pointer."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A kernel with what it is compiled for."""

    kernel: Any
    arguments: tuple[tuple[str, Argument], ...]
    """In the kernel's order, each a representative of its class."""
    options: tuple[tuple[str, int], ...]
    """Of the compilation: `num_warps`, `num_stages`."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        """Compiles or loads it for the current target of Triton, without a launch, and returns Triton's compiled kernel.

        A launch of the variant on this device then finds it in memory.
        """
        return self.kernel.warmup(*(value for _, value in self.arguments), grid=(1,), **dict(self.options))


def variant_of(kernel: Any, arguments: Mapping[str, Any], **options: int) -> KernelVariant:
    """Returns the variant that a launch with these arguments uses. Tensors may be given as their dtypes."""
    constants, early = _early(kernel)
    arguments, options = {**arguments, **constants}, {**options, **early}
    generic = _unspecialized(kernel)
    values = tuple((name, _representative(name, arguments[name], name in generic)) for name in kernel.arg_names)
    return KernelVariant(kernel, values, tuple(options.items()))


def pointer(dtype: torch.dtype, offset: int) -> torch.dtype | Unaligned:
    """Returns the class of a pointer to an element of an aligned tensor."""
    return dtype if offset * dtype.itemsize % ALIGNMENT == 0 else Unaligned(dtype)


def _unspecialized(kernel: Any) -> frozenset[str]:
    """Returns the arguments that a kernel is not specialised for; the interpreter keeps them as keywords."""
    keywords = getattr(kernel, "kwargs", None)
    return frozenset((kernel.do_not_specialize if keywords is None else keywords.get("do_not_specialize")) or ())


def _representative(name: str, value: Any, is_generic: bool) -> Argument:
    if isinstance(value, Tensor):
        value = pointer(value.dtype, int(value.storage_offset()))  # allocators align storage
    if isinstance(value, Unaligned) and is_generic:
        return value.dtype
    if name.isupper() or isinstance(value, torch.dtype | Unaligned):
        known: Argument = value
        return known
    if isinstance(value, float):
        return 0.5
    if value == 1 and not is_generic:
        return 1
    is_wide = not -(2**31) <= value < 2**31
    return (_WIDE if is_wide else 0) + (ALIGNMENT if value % ALIGNMENT == 0 and not is_generic else ALIGNMENT + 1)


_OBSERVERS: list[Callable[[KernelVariant], None]] = []


@contextmanager
def observed_launches() -> Iterator[list[KernelVariant]]:
    """Gives the list of variants that are launched within, on fake tensors too."""
    found = list[KernelVariant]()
    _OBSERVERS.append(found.append)
    try:
        yield found
    finally:
        _OBSERVERS.remove(found.append)


def is_observed() -> bool:
    """Returns whether launches are observed."""
    return bool(_OBSERVERS)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int) -> None:
    """Launches a kernel. Fake tensors launch nothing."""
    if _OBSERVERS:
        variant = variant_of(kernel, arguments, **options)
        for observe in _OBSERVERS:
            observe(variant)
        if any(isinstance(value, FakeTensor) for value in arguments.values()):
            return
    constants, early = _early(kernel)
    kernel[grid](**arguments, **constants, **options, **early)


def _early(kernel: Any) -> tuple[dict[str, bool], dict[str, int]]:
    """Returns constants and options of a kernel that may call `arithmetic.await_inputs`: it does where the device supports it."""
    if not _may_start_early(kernel):
        return {}, {}
    import triton  # which CPU ranks do without

    try:
        is_early = _starts_early(triton.runtime.driver.active)
    except RuntimeError:  # no device
        is_early = False
    return {"IS_EARLY": is_early}, {"launch_pdl": True} if is_early else {}


@cache
def _may_start_early(kernel: Any) -> bool:
    return "IS_EARLY" in kernel.arg_names


@cache
def _starts_early(driver: Any) -> bool:
    """Returns whether a device starts kernels before the preceding ones end, if these allow it."""
    target = driver.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`, which is positive.

    Triton's own functions for sizes take twenty times as long on the host, which each launch would pay.
    """
    return 1 << (size - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    """Returns the blocks that cover `size`."""
    return -(-size // block)
