"""When nothing pays: for how many steps nothing is even looked at, and when one proposal is tried all the same.

    looked    nothing paid     for LOOK_EVERY steps nothing is looked at, while the step has as many decodes
    tried     after `PROBE_EVERY` such steps one request gets a proposal: shares and costs change. After a dear one the next
              waits until it took `PROBE_SHARE` of the time, at most twice as long as the last did
    in vain   the more probes there were since something paid, the less of the time they take
    goes on   what a draft lacks is computed in step after step, and costs as one probe with the proposal behind it

Counts steps and reads no clock.
"""

import math

PROBE_EVERY = 16
"""Steps without a proposal, though some were offered, after which one request gets one."""
PROBE_SHARE = 0.01
"""Of the time, at most, that dear probes take."""
VAIN = 4
"""Probes since something paid that halve that share; three times as many halve it again, and so on."""
LONGEST_REST = 512
LOOK_EVERY = 8
"""Steps after which what did not pay is looked at again: contexts grow, costs are measured anew."""


def tokens_after(over: float, rest: int, num_vain: int) -> int:
    """Steps until the next probe, behind one that took `over` plain steps more than a plain one would have.

    rest: how many there were before it; num_vain: probes since something paid, this one not counted.
    """
    share = PROBE_SHARE / (1 + num_vain / VAIN)
    return min(max(PROBE_EVERY, math.ceil(over / share)), 2 * rest, LONGEST_REST)


class Probing:
    """Of one engine."""

    __slots__ = ("_barren", "_decodes", "_is_part", "_looked", "_over", "_probed", "_rest", "_unpaid", "_vain")

    def __init__(self) -> None:
        self._barren = 0
        """Steps since the last proposal, in which some were offered."""
        self._rest = PROBE_EVERY
        """How many these are until the next probe."""
        self._vain = 0
        """Probes since something paid."""
        self._unpaid = 0
        """Steps since drafts paid, in which some were offered."""
        self._probed: int | None = None
        """The step of the latest probe."""
        self._is_part = False
        self._over = 0.0
        """Whether it only computed what the draft lacks, and what such steps took before it, in plain steps."""
        self._looked: int | None = None
        """The step at which nothing was found to pay, and how many decodes it had."""
        self._decodes = 0

    @property
    def is_due(self) -> bool:
        """Whether one proposal is to be tried now."""
        return self._barren > self._rest

    @property
    def is_next(self) -> bool:
        """Whether one will be if nothing pays in this step either."""
        return self._barren >= self._rest

    @property
    def drafts_pay(self) -> bool:
        """Whether drafts paid of late, or nobody knows yet."""
        return self._unpaid < PROBE_EVERY

    def sleeps(self, step: int, decodes: int) -> bool:
        """Whether nothing is to be looked at in this step, which then counts as one without a proposal."""
        is_known = self._looked is not None and step - self._looked < LOOK_EVERY and decodes == self._decodes
        if not is_known or self.is_next:
            return False
        self._barren += 1
        self._unpaid += 1
        return True

    def paid(self, drafts: bool) -> None:
        """Something is proposed because it pays; whether drafts are among it."""
        self._rest, self._looked = max(PROBE_EVERY, self._rest // 2), None
        self._vain //= 2
        self._unpaid = 0 if drafts else self._unpaid + 1

    def found_nothing(self, step: int, decodes: int, may_sleep: bool) -> None:
        """Of what was offered nothing pays. may_sleep: that will be so until costs or shares change."""
        self._barren += 1
        self._unpaid += 1
        self._looked, self._decodes = step if may_sleep else None, decodes

    def proposed(self) -> None:
        """Something is proposed."""
        self._barren, self._looked = 0, None

    def goes_on(self) -> None:
        """Something is computed so that it can be proposed later: the next step is looked at, and what is due stays so."""
        self._looked = None

    def probes(self, step: int, is_part: bool = False) -> None:
        """This step tries a proposal that does not seem to pay, or computes a part of what one needs."""
        self._probed, self._is_part = step, is_part

    def took(self, over: float) -> None:
        """A probe took so many plain steps more than none would have."""
        self._over += over
        if not self._is_part:
            self._rest = tokens_after(self._over, self._rest, self._vain)
            self._vain += 1
            self._over = 0.0

    def was_probe(self, step: int) -> bool:
        """Whether this step was the latest probe."""
        return step == self._probed
