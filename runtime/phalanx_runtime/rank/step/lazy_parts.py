"""Parts of a step's tensors that are made at first use."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

from torch import Tensor

T = TypeVar("T")


class LazyParts(Sequence[T]):
    """Bands or chunks, made at first use: GPU kernels use `Segments`."""

    __slots__ = ("_make", "_parts")

    def __init__(self, make: Callable[[], list[T]]) -> None:
        self._make = make
        self._parts: list[T] | None = None

    def __len__(self) -> int:
        return len(self._made())

    def __iter__(self) -> Iterator[T]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._made()[index]

    def _made(self) -> list[T]:
        if self._parts is None:
            self._parts = self._make()
        return self._parts


class LazyMasks(dict[int | None, Tensor | None]):
    """Masks by window, made at first use: some kernels use no mask."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int | None], Tensor | None]) -> None:
        self._make = make

    def __missing__(self, window: int | None) -> Tensor | None:
        self[window] = self._make(window)
        return self[window]
