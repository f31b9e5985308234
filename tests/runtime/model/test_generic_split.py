"""Modules that a plan of `transformers` splits over ranks, against the whole modules."""

import copy

import pytest
import torch
from torch import Tensor, nn

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.generic.split import Splitter
from tests.runtime.ranks import with_group

HEADS, WIDTH, INNER = 4, 12, 16


class Packed(nn.Module):
    """Two matrices in each linear; the second one multiplies both halves of the first one's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER, dtype=torch.float64)
        self.down = nn.Linear(2 * INNER, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        down: Tensor = self.down(torch.cat((first.sigmoid(), second.tanh()), -1))
        return down


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_packed_rows_add_up_to_the_whole_module(ranks: int) -> None:
    torch.manual_seed(0)
    whole, x = Packed(), torch.randn(5, WIDTH, dtype=torch.float64)

    def part(group: Collective) -> tuple[Tensor, int]:
        model = copy.deepcopy(whole)
        splitter = Splitter(model, {"up": "packed_colwise", "down": "packed_rowwise"}, HEADS, group)
        splitter.split()
        with torch.no_grad():
            for name, cut in splitter.cuts.items():
                model.get_parameter(name).data = cut.apply(model.get_parameter(name).data)
            for name in splitter.zeroed:
                model.get_parameter(name).zero_()
            return model(x), model.down.weight.shape[1]

    with torch.no_grad():
        expected = whole(x)
    found = with_group([ranks], part)
    assert sum(width for _, width in found) == 2 * INNER
    for y, _ in found:
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
