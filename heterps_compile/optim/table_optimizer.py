"""What our own optimizers share: gradients dense or sparse in rows, and state wider than a half-precision table.

Enters: parameters of any floating dtype and shape; the first dimension counts rows. Leaves: an eager step, which is
the definition of the fused one. Refuses complex parameters, and gradients that are sparse in more than rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from heterps_compile.errors import OptionError

Group = Mapping[str, Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over many steps are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class TableOptimizer(Optimizer):
    """An optimizer whose step is one formula for some rows, so that rows without gradient need not be visited.

    State lies in ``state[p]`` in float32 (float64 for float64 parameters) and is made at the first step of ``p``.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.check_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses what ``check_group`` refuses."""
        super().add_param_group(param_group)
        self.check_group(self.param_groups[-1])

    def check_group(self, group: Group) -> None:
        """Raises :class:`OptionError` for an option or a parameter that the formula has no meaning for."""
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise OptionError(
                    f"{type(self).__name__} got a parameter of {parameter.dtype} (allowed: real floating dtypes)",
                    hint="give it to one of torch.optim",
                )

    def check(self, ok: bool, name: str, value: object, allowed: str) -> None:
        """Raises :class:`OptionError` unless ``ok``."""
        if not ok:
            raise OptionError(
                f"{type(self).__name__}({name}={value!r}) is not {allowed}", hint=f"pass {name} that is {allowed}"
            )

    @staticmethod
    @abstractmethod
    def new_state(group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """State before the first step; the first dimension of every tensor counts rows."""

    @staticmethod
    @abstractmethod
    def update_rows(group: Group, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        """One step of rows in place; every tensor in the wide dtype, ``grad`` signed so that it is to be descended."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient; returns what ``closure`` returned, if there was one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(group, parameter, parameter.grad)
        return loss

    def _step_parameter(self, group: Group, parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(group, parameter))
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = self._rows_of(grad), grad.values()
            held = {name: tensor[rows] for name, tensor in state.items()}
            weight = parameter[rows].to(wide(parameter.dtype))
            self._update(group, weight, values, held)
            parameter[rows] = weight.to(parameter.dtype)
            for name, tensor in held.items():
                state[name][rows] = tensor
        else:
            weight = parameter.to(wide(parameter.dtype))
            self._update(group, weight, grad, state)
            parameter.copy_(weight)

    def _update(self, group: Group, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        if weight.numel():
            signed = grad.to(weight.dtype)
            self.update_rows(group, weight, -signed if group["maximize"] else signed, state)

    def _rows_of(self, grad: Tensor) -> Tensor:
        if grad.sparse_dim() != 1:
            raise OptionError(
                f"{type(self).__name__} got a gradient of {tuple(grad.shape)} that is sparse in {grad.sparse_dim()} "
                "dimensions (allowed: sparse in rows, as nn.Embedding(sparse=True) makes it)",
                hint="use to_dense()",
            )
        return grad.indices()[0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts state to the dtype of its parameter; here it stays as wide as it was saved."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, ours, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if self.state[parameter][name].dtype is not wide(parameter.dtype):
                    self.state[parameter][name] = value.to(parameter.device, wide(parameter.dtype), copy=True)
