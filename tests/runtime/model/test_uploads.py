"""Arrays packed into one copy come out as they went in."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.copies import ALIGNMENT, Array, pack, unpack, upload
from tests.runtime.model.gpu.launches import launches_of

drawn = st.lists(
    st.sampled_from([np.int32, np.int64, np.float32, np.bool_]).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
    ),
    max_size=5,
)


@given(drawn)
def test_unpacked_arrays_equal_the_packed_ones(parts: list[Array]) -> None:
    packed = torch.from_numpy(pack(parts))
    tensors = unpack(packed, parts)
    assert len(tensors) == len(parts)
    for tensor, part in zip(tensors, parts, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), part)
        assert not part.size or (tensor.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0


def test_arrays_reach_a_device_in_one_copy() -> None:
    with FakeTensorMode():
        parts = (np.zeros((2, 3), np.int32), np.zeros(5, np.int64))
        launches = launches_of(lambda: upload(parts, torch.device("cuda")))
        found = upload(parts, torch.device("cuda"))
    assert launches == ["aten::_to_copy"]
    assert [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in found] == [
        ((2, 3), torch.int32, "cuda"),
        ((5,), torch.int64, "cuda"),
    ]
