"""FTRL-proximal, the optimizer of sparse linear models: rates per coordinate, and weights that are exactly 0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from heterps_compile.optim.table_optimizer import Group, TableOptimizer, wide


class FTRL(TableOptimizer):
    """Algorithm 1 of McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), with alpha as ``lr``::

        sigma = (sqrt(n + g**2) - sqrt(n)) / lr          n += g**2
        z    += g - sigma * w
        w     = -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)    and 0 where |z| <= l1

    for every coordinate with a gradient other than 0 (the paper's set I); the others stay. Three things differ in
    writing only, or where the paper is silent:

    - ``state["z"]`` holds ``lr * z``. A schedule then changes how far later gradients reach, and a rate of 0 is
      allowed; dividing z by a new rate would scale all weights.
    - The paper's weights start at 0. For others its definition of z, the sum of ``g - sigma * w`` where the sigmas
      add up to ``(beta + sqrt(n)) / lr``, starts at ``-beta * w / lr``: without a gradient w is a fixed point.
    - ``n``, ``z`` are float32 (float64 for float64 parameters), whatever the table.

    Args:
        lr: the paper's alpha, not negative.
        beta: positive; the paper uses 1.
        l1, l2: strengths of the penalties ``l1 * |w|`` and ``l2 / 2 * w**2``, not negative.
        maximize: ascend.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2, "maximize": maximize})

    def check_group(self, group: Group) -> None:
        """Raises :class:`OptionError` for a rate or penalty below 0, and for ``beta=0``."""
        super().check_group(group)
        for name in ("lr", "l1", "l2"):
            self.check(float(group[name]) >= 0, name, group[name], "0 or more")
        self.check(group["beta"] > 0, "beta", group["beta"], "positive")

    @staticmethod
    def new_state(group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """``z`` and ``n``, both of the shape of the parameter."""
        z = parameter.detach().to(wide(parameter.dtype), memory_format=torch.contiguous_format) * -group["beta"]
        return {"z": z, "n": torch.zeros_like(z)}

    @staticmethod
    def update_rows(group: Group, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        """The formula above."""
        lr, z, n = float(group["lr"]), state["z"], state["n"]
        before = n.sqrt()
        n += grad.square()
        after = n.sqrt()
        z += lr * grad - (after - before) * weight
        over = (z.abs() - lr * group["l1"]).clamp_min(0)
        moved = -over.copysign(z) / (group["beta"] + after + lr * group["l2"])
        weight.copy_(torch.where(grad != 0, moved, weight))
