"""Ridge regression in one pass: the affine map from x to y with the least squared error, from sums that are kept in float64.

    A = sum [x 1]^T [x 1]    B = sum [x 1]^T y    (A + penalty I) [W; b] = B

The penalty is a share of the mean diagonal of A, and the bias has none.
"""

import torch
from torch import Tensor

PENALTY = 1e-4
"""Share of the mean square of a component of x. It only matters where there are few tokens for each component."""


class Ridge:
    """The sums over all pairs so far."""

    def __init__(self, width_in: int, width_out: int, device: torch.device) -> None:
        self.num_pairs = 0
        self._squares = torch.zeros((width_in + 1, width_in + 1), dtype=torch.float64, device=device)
        self._products = torch.zeros((width_in + 1, width_out), dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Takes in pairs: [n, in] and [n, out]."""
        wide = torch.cat((x.double(), torch.ones((len(x), 1), dtype=torch.float64, device=x.device)), 1)
        self._squares.addmm_(wide.t(), wide)
        self._products.addmm_(wide.t(), y.double())
        self.num_pairs += len(x)

    def solve(self, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
        """Weight [out, in] and bias [out], in float64. Raises torch.linalg.LinAlgError when there are no pairs."""
        diagonal = self._squares.diagonal()
        added = torch.full_like(diagonal, penalty * float(diagonal[:-1].mean()))
        added[-1] = 0.0
        solved: Tensor = torch.linalg.solve(self._squares + torch.diag(added), self._products)
        return solved[:-1].t().contiguous(), solved[-1].contiguous()
