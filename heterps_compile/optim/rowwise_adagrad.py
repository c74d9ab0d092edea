"""Row-wise Adagrad: one accumulator per row, so a table's state is a ``dim``-th of Adagrad's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from heterps_compile.errors import OptionError
from heterps_compile.optim.table_optimizer import Group, TableOptimizer, wide


class RowWiseAdagrad(TableOptimizer):
    """Adagrad whose accumulator is the mean of squared gradients over a row::

        sum[r]    += mean(grad[r] ** 2)
        weight[r] -= lr / (sqrt(sum[r]) + eps) * grad[r]

    FBGEMM's ``OptimType.EXACT_ROWWISE_ADAGRAD`` without weight decay (``rowwise_adagrad`` in ``fbgemm_gpu/codegen``);
    "exact" says that the gradients of a repeated id are summed before they are squared. A row is an entry of the first
    dimension; a parameter of one dimension gets Adagrad itself.

    Args:
        lr: learning rate, not negative.
        eps: positive.
        initial_accumulator_value: what ``sum`` starts at, not negative.
        weight_decay: adds ``weight_decay * weight`` to dense gradients; sparse ones are refused, as torch's Adagrad
            refuses them.
        maximize: ascend.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        """Raises :class:`OptionError` for a rate, sum or decay below 0, and for ``eps=0``."""
        super().check_group(group)
        for name in ("lr", "initial_accumulator_value", "weight_decay"):
            self.check(float(group[name]) >= 0, name, group[name], "0 or more")
        self.check(group["eps"] > 0, "eps", group["eps"], "positive")

    @staticmethod
    def new_state(group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """``sum``, one number per row."""
        start = group["initial_accumulator_value"]
        shape = parameter.shape[:1]
        return {"sum": torch.full(shape, start, dtype=wide(parameter.dtype), device=parameter.device)}

    @staticmethod
    def update_rows(group: Group, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        """The formula above."""
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * weight
        rest = tuple(range(1, grad.dim()))
        square = grad.square()
        state["sum"] += square.mean(rest) if rest else square
        scale = float(group["lr"]) / (state["sum"].sqrt() + group["eps"])
        weight -= scale.reshape(scale.shape + (1,) * len(rest)) * grad

    def _step_parameter(self, group: Group, parameter: Tensor, grad: Tensor) -> None:
        if grad.is_sparse and group["weight_decay"]:
            raise OptionError(
                f"RowWiseAdagrad(weight_decay={group['weight_decay']}) got a sparse gradient of "
                f"{tuple(grad.shape)}: it would decay some rows and not others",
                hint="put the tables in a param group of their own with weight_decay=0",
            )
        super()._step_parameter(group, parameter, grad)
