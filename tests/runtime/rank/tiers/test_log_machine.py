"""Random operations, faults and damage: never a wrong page, never too many bytes, and the log always opens."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from tests.runtime.rank.tiers.faulty_files import BROKEN, FULL, READ_ONLY, FaultyFiles, Killed
from tests.runtime.rank.tiers.logs import LAYOUT, MAX_BYTES, get, key_of, open_log, page_of, put, segments, size_on_disk

NUMBERS = st.integers(0, 150)
WIDE = 60
"""Pages of a burst: two fill the log."""


def offsets(size: int) -> st.SearchStrategy[int]:
    """Offsets in a file of a segment with bytes: of the header, a record or a page, without the padding."""
    return st.sampled_from([*range(min(size, LAYOUT.record_at(LAYOUT.slots))), *range(LAYOUT.pages_at, size)])


class LogMachine(RuleBasedStateMachine):
    """A log beside a dictionary.

    live: version of each page that the log has        put: all versions of each page that were ever put
    Damage to files and failed operations make `live` an upper bound, or unknown after a restart.
    """

    policy: EvictionPolicy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.files = FaultyFiles()
        self.log = open_log(self.folder, eviction=self.policy, files=self.files)
        self.live: dict[bytes, int] = {}
        self.put: dict[bytes, set[bytes]] = {}
        self.is_exact = True
        """No file is damaged, no operation failed."""
        self.now_s = 0.0
        self.version = 0
        self.foreign: dict[Path, bytes] = {}

    def teardown(self) -> None:
        self.files.errors.clear()
        self.reopen()
        for key in self.log.keys():
            self.read(key)
        self.log.close()
        shutil.rmtree(self.folder)

    @initialize(count=st.sampled_from([0, WIDE, 2 * WIDE]))
    def fill(self, count: int) -> None:
        self.put_burst(0, count)

    @rule(number=NUMBERS)
    def put_page(self, number: int) -> None:
        self.version += 1
        key = key_of(number)
        is_new = key not in self.log
        self.put.setdefault(key, set()).add(page_of(key, self.version))
        dropped = put(self.log, number, self.version)
        if is_new:
            self.live[key] = self.version
        for lost in dropped:
            del self.live[lost]

    @rule(start=NUMBERS, count=st.integers(1, WIDE))
    def put_burst(self, start: int, count: int) -> None:
        for number in range(start, start + count):
            self.put_page(number)

    @rule(number=NUMBERS)
    def get_page(self, number: int) -> None:
        self.read(key_of(number))

    def read(self, key: bytes) -> None:
        was_live = key in self.log
        page = get(self.log, key)
        if page is None:
            assert not (was_live and self.is_exact)
            assert key not in self.log
            self.live.pop(key, None)
        elif self.is_exact:
            assert page == page_of(key, self.live[key])
        else:
            assert page in self.put[key]

    @rule(seconds=st.floats(0, 2), calls=st.integers(1, 20))
    def compact(self, seconds: float, calls: int) -> None:
        for _ in range(calls):
            self.now_s += seconds
            dropped = self.log.compact(self.now_s)
            assert not (dropped and self.is_exact)
            for key in dropped:
                del self.live[key]

    @rule()
    def reopen(self) -> None:
        self.files.errors.clear()
        self.log.close()
        before = set(self.live)
        self.log = open_log(self.folder, eviction=self.policy, files=self.files)
        if self.is_exact:
            assert set(self.log.keys()) == before
        assert set(self.log.keys()) <= set(self.put)
        self.live = {key: self.live.get(key, 0) for key in self.log.keys()}

    @rule(life=st.integers(0, 3000), start=NUMBERS)
    def kill(self, life: int, start: int) -> None:
        was_exact, before = self.is_exact, dict(self.live)
        self.files.life = life
        try:
            self.put_burst(start, WIDE)
            self.compact(1.0, 20)
        except Killed:
            self.is_exact = False
        finally:
            self.files.life = None
        self.reopen()
        if was_exact and not self.is_exact:
            self.settle(before)

    def settle(self, before: dict[bytes, int]) -> None:
        """After a kill all pages are whole: finds their versions."""
        for key in self.log.keys():
            page = get(self.log, key)
            assert page is not None, "no page is torn"
            versions = range(self.version, -1, -1)
            self.live[key] = next(version for version in versions if page == page_of(key, version))
            assert self.live[key] >= before.get(key, 0), "no version comes back"
        self.is_exact = True

    @rule(
        operation=st.sampled_from(["create", "write", "remove", "open", "read"]), error=st.sampled_from([FULL, BROKEN, READ_ONLY])
    )
    def fail(self, operation: str, error: int) -> None:
        self.files.errors[operation] = error
        self.is_exact = False

    @rule()
    def repair(self) -> None:
        self.files.errors.clear()

    @precondition(lambda self: bool(segments(self.folder)))
    @rule(data=st.data(), flip=st.integers(1, 255))
    def change_byte(self, data: st.DataObject, flip: int) -> None:
        path = data.draw(st.sampled_from(segments(self.folder)))
        if path.stat().st_size and path not in self.foreign:
            content = bytearray(path.read_bytes())
            content[data.draw(offsets(len(content)))] ^= flip
            path.write_bytes(content)
            self.is_exact = False

    @precondition(lambda self: bool(segments(self.folder)))
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(segments(self.folder)))
        if path.stat().st_size and path not in self.foreign:
            os.truncate(path, data.draw(offsets(path.stat().st_size)))
            self.is_exact = False

    @rule(name=st.sampled_from(["notes", "00000500.pages", "00000003.pages"]), content=st.sampled_from([b"", b"text", b"PHX!"]))
    def drop_foreign_file(self, name: str, content: bytes) -> None:
        path = next(self.folder.iterdir()) / name
        if not path.exists() and content:
            path.write_bytes(content)
            self.foreign[path] = content

    @invariant()
    def foreign_files_stay(self) -> None:
        assert all(path.read_bytes() == content for path, content in self.foreign.items())

    @invariant()
    def the_bound_holds(self) -> None:
        foreign = sum(path.stat().st_size for path in segments(self.folder) if path in self.foreign)
        assert self.log.bytes_on_disk <= MAX_BYTES
        if self.is_exact:
            assert size_on_disk(self.folder) - foreign <= self.log.bytes_on_disk

    @invariant()
    def the_keys_are_those_of_the_model(self) -> None:
        assert set(self.log.keys()) == set(self.live) and len(self.live) <= self.log.capacity


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_no_operation_returns_a_wrong_page(policy: EvictionPolicy) -> None:
    machine = type("Machine", (LogMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None))
