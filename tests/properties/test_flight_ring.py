"""The ring of the flight recorder."""

from hypothesis import example, given, strategies

from phalanx_api.flight.ring import MIN_BYTES, SEGMENTS, RingWriter, read_ring

PAYLOADS = strategies.lists(strategies.binary(min_size=1, max_size=300), min_size=1, max_size=200)


def written(payloads: list[bytes], size: int = MIN_BYTES) -> bytearray:
    buffer = bytearray(size)
    writer = RingWriter(memoryview(buffer), lambda: 5.0)
    for payload in payloads:
        writer.append(payload)
    return buffer


@given(PAYLOADS)
def test_a_ring_keeps_the_latest_records_in_order(payloads: list[bytes]) -> None:
    buffer = written(payloads)
    found = [record.payload for record in read_ring(bytes(buffer))]
    assert found == payloads[len(payloads) - len(found) :] and found
    assert len(buffer) == MIN_BYTES, "the size is the bound"
    largest = MIN_BYTES // SEGMENTS
    if sum(len(payload) + 8 for payload in payloads) < largest // 2:
        assert found == payloads, "nothing is lost before the first overwrite"


@given(PAYLOADS, strategies.integers(0, MIN_BYTES - 1), strategies.integers(1, 255))
@example([b"a"] * 50, 20, 1)
def test_torn_bytes_lose_records_and_invent_none(payloads: list[bytes], position: int, change: int) -> None:
    buffer = written(payloads)
    intact = [record.payload for record in read_ring(bytes(buffer))]
    buffer[position] ^= change
    found = [record.payload for record in read_ring(bytes(buffer))]
    rest = iter(intact) if position % (MIN_BYTES // SEGMENTS) >= 20 else iter(sorted(intact))
    found = found if position % (MIN_BYTES // SEGMENTS) >= 20 else sorted(found)
    assert all(payload in rest for payload in found), "a subsequence; a torn header may also change the order of segments"


@given(PAYLOADS, PAYLOADS)
def test_a_reopened_ring_continues_after_the_old_records(before: list[bytes], after: list[bytes]) -> None:
    buffer = written(before, 4 * MIN_BYTES)
    writer = RingWriter(memoryview(buffer), lambda: 7.0)
    for payload in after:
        writer.append(payload)
    records = read_ring(bytes(buffer))
    found, both = [record.payload for record in records], before + after
    assert found == both[len(both) - len(found) :]
    assert records[-1].clock_offset_s == 7.0
    if sum(len(payload) + 8 for payload in both) < MIN_BYTES:
        assert [record.clock_offset_s for record in records[: len(before)]] == [5.0] * len(before)


def test_a_record_longer_than_a_segment_is_dropped() -> None:
    buffer = bytearray(MIN_BYTES)
    writer = RingWriter(memoryview(buffer), lambda: 0.0)
    writer.append(b"x" * (MIN_BYTES // SEGMENTS))
    writer.append(b"next")
    assert [record.payload for record in read_ring(bytes(buffer))] == [b"next"]
