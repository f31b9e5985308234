"""The fit of copy times: known coefficients are found again, from any copies it stays a time, and outliers weigh little."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.core.copy_fit import CopyFit, CopyTimes

SECONDS = st.floats(1e-5, 1e3)
COPIES = st.lists(st.tuples(st.integers(1, 10_000), SECONDS), min_size=1, max_size=60)


def fitted(copies: list[tuple[int, float]]) -> CopyFit:
    fit = CopyFit()
    for num_pages, seconds in copies:
        fit = fit.after(num_pages, seconds)
    return fit


def times(copies: list[tuple[int, float]]) -> CopyTimes:
    found = fitted(copies).times()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(4, 0.04)], CopyTimes(0.0, 0.01)),
        ([(4, 0.04), (4, 0.04), (4, 0.04)], CopyTimes(0.0, 0.01)),
        ([(1, 0.011), (10, 0.02), (100, 0.11)] * 9, CopyTimes(0.01, 0.001)),
        ([(1, 0.02), (100, 0.02)] * 9, CopyTimes(0.02, 0.0)),
        ([(4, 0.04), (0, 9.0), (7, 0.0)], CopyTimes(0.0, 0.01)),
        ([(2, 0.02)] * 9 + [(2, 0.2)] * 60, CopyTimes(0.0, 0.1)),
        ([(200, 0.21)] * 9 + [(1, 0.002)] + [(1, 0.011), (200, 0.21)] * 40, CopyTimes(0.01, 0.001)),
    ],
    ids=["one copy", "one size", "fixed and page", "fixed alone", "no pages, no time", "slower from now on", "first small one"],
)
def test_copy_times_are_fixed_and_per_page(copies: list[tuple[int, float]], expected: CopyTimes) -> None:
    found = times(copies)
    assert found.fixed_s == pytest.approx(expected.fixed_s, rel=0.03)
    assert found.page_s == pytest.approx(expected.page_s, rel=0.1, abs=1e-5)


def test_nothing_is_known_without_copies() -> None:
    assert CopyFit().times() is None and CopyFit().mean_page_s is None
    assert CopyFit().declined() == CopyFit()


@settings(max_examples=60)
@given(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0), st.integers(1, 50), st.integers(8, 50))
def test_exact_copies_are_predicted(fixed_s: float, page_s: float, least: int, ratio: int) -> None:
    found = times([(n, fixed_s + page_s * n) for n in (least, least * ratio) * 10])
    for num_pages, error in ((least, 0.03), (least * ratio, 0.03), (10 * least * ratio, 0.3)):
        assert found.predict(num_pages) == pytest.approx(fixed_s + page_s * num_pages, rel=error)


@settings(max_examples=100)
@given(COPIES, st.floats(0.1, 10.0))
def test_any_copies_give_positive_scaled_times(copies: list[tuple[int, float]], scale: float) -> None:
    found, scaled = times(copies), times([(n, scale * seconds) for n, seconds in copies if scale * seconds > 1e-6])
    mean_page_s = fitted(copies).mean_page_s
    assert mean_page_s is not None and mean_page_s > 0
    assert found.fixed_s >= 0 and found.page_s >= 0 and found.predict(0) == 0.0 < found.predict(1)
    assert scaled.predict(7) == pytest.approx(scale * found.predict(7), rel=1e-6)


@settings(max_examples=60)
@given(st.sampled_from([1, 8, 64]), st.floats(2.0, 1e6), st.integers(1, 5))
def test_one_slow_copy_weighs_little(num_pages: int, factor: float, declines: int) -> None:
    usual = fitted([(n, 0.002 + 0.001 * n) for n in (1, 8, 64) * 20])
    after = usual.after(num_pages, factor * (0.002 + 0.001 * num_pages))
    found, before = after.times(), usual.times()
    assert found is not None and before is not None
    assert before.predict(num_pages) <= found.predict(num_pages) <= 1.5 * before.predict(num_pages)
    for _ in range(declines):
        after = after.declined()
    less = after.times()
    assert less is not None and less.predict(9) == pytest.approx(0.99**declines * found.predict(9))


@pytest.mark.parametrize("num_former", [1, 60])
def test_slow_copies_are_rare_and_soon_forgotten(num_former: int) -> None:
    """A prompt copies 4 pages if that is predicted to take less than 1 s."""

    def copies_of(fit: CopyFit, copy_s: float) -> tuple[CopyFit, int]:
        num_copies = 0
        for _ in range(600):
            found = fit.times()
            is_copied = found is not None and found.predict(4) < 1.0
            fit, num_copies = (fit.after(4, copy_s), num_copies + 1) if is_copied else (fit.declined(), num_copies)
        return fit, num_copies

    fit, num_slow = copies_of(fitted([(4, 20.0)] * num_former), 20.0)
    assert num_slow <= 2
    _, num_fast = copies_of(fit, 0.5)
    assert num_fast >= 200


def test_copies_are_measured_after_any_number_of_declines() -> None:
    fit = fitted([(4, 0.04)] * 20)
    for _ in range(3000):
        fit = fit.declined()
    least = fit.times()
    assert least is not None and 0 < least.predict(4) < 1e-6 and fit.declined() == fit
    found = fit.after(4, 0.06).times()
    assert found is not None and found.predict(4) == pytest.approx(0.06)
