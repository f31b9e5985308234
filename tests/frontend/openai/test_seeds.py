"""Seeds of sibling requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.wire.router import SEED_MASK, choice_seed

SEEDS = st.integers(0, SEED_MASK)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, choice=st.integers(0, 10_000))
def test_seed_is_stable_and_the_first_choice_keeps_it(seed: int, choice: int) -> None:
    assert 0 <= choice_seed(seed, choice) <= SEED_MASK
    assert choice_seed(seed, 0) == seed


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_choices_of_near_seeds_do_not_meet(seed: int) -> None:
    near = {(seed + step) & SEED_MASK for step in range(20)}
    assert len({choice_seed(start, choice) for start in near for choice in range(20)}) == 20 * len(near)


def test_the_function_never_changes() -> None:
    assert [choice_seed(7, choice) for choice in range(3)] == [7, 7191089600892374487, 309689372594955804]
