"""How many examples a property test draws: all of them in `make test-all`, a third elsewhere.

Each run draws other examples, so that runs of `make test` add up.
"""

import os

ALL_EXAMPLES = "PHALANX_ALL_EXAMPLES"
"""Variable that `make test-all` sets."""
MIN_EXAMPLES = 5


def examples(count: int) -> int:
    """Returns how many of `count` examples to draw: at least `MIN_EXAMPLES`, if `count` is not less."""
    return count if os.environ.get(ALL_EXAMPLES) else min(count, max(MIN_EXAMPLES, count // 3))
