"""What rank 0 asks of the rank that draws, where that is another one, so that no step compiles a grammar. Records only.

Compile(number)  rank 0 -> drawer     among the plans; the drawer compiles beside its steps
Compiled(number) drawer -> rank 0     among the results; from now on the drawer holds the grammar, until its number is dropped
"""

import msgspec

from phalanx_api import wire


class Compile(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Compile and hold this grammar; hold those of the `dropped` numbers no longer."""

    number: int
    grammar: wire.Grammar
    dropped: list[int] = []


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """The grammar is held; or it is not, for the reason told. `is_bug`: not the grammar's fault; the drawer's log says more."""

    number: int
    why: str = ""
    is_bug: bool = False
