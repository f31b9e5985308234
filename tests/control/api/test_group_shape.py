import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.spec.inference_service import GroupShape


@pytest.mark.parametrize(
    ("tensor", "gpus_per_pod", "pods", "ranks_per_pod"),
    [(1, 0, 1, 1), (8, 0, 1, 8), (8, 8, 1, 8), (16, 8, 2, 8), (3, 1, 3, 1)],
)
def test_ranks_fill_one_pod_after_the_other(tensor: int, gpus_per_pod: int, pods: int, ranks_per_pod: int) -> None:
    shape = GroupShape(tensor, gpus_per_pod)
    assert (shape.pods, shape.ranks_per_pod) == (pods, ranks_per_pod)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 4))
def test_equal_pods_have_all_ranks(tensor: int, gpus_per_pod: int, pipeline: int) -> None:
    if gpus_per_pod and tensor * pipeline % gpus_per_pod:
        with pytest.raises(ValueError, match="does not divide"):
            GroupShape(tensor, gpus_per_pod, pipeline)
        return
    shape = GroupShape(tensor, gpus_per_pod, pipeline)
    assert shape.pods * shape.ranks_per_pod == shape.ranks == tensor * pipeline


@pytest.mark.parametrize("shape", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_counts_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        GroupShape(*shape)
