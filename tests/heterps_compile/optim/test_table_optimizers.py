"""Our own optimizers against their formulas, one number at a time, and around a step as any of torch's behaves."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import heterps_compile
from heterps_compile.errors import OptionError
from heterps_compile.optim import FTRL, RowWiseAdagrad

ROWS, DIM = 7, 5
Step = Callable[[list[float], list[float], dict[str, list[float]]], None]


def rowwise_row(weights: list[float], grads: list[float], state: dict[str, list[float]]) -> None:
    state["sum"][0] += sum(g * g for g in grads) / len(grads)
    for d, g in enumerate(grads):
        weights[d] -= 0.1 * g / (math.sqrt(state["sum"][0]) + 1e-3)


def ftrl_row(weights: list[float], grads: list[float], state: dict[str, list[float]]) -> None:
    """Algorithm 1 as printed, with z itself."""
    alpha, beta, l1, l2 = 0.2, 0.7, 3.0, 0.1
    for d, g in enumerate(grads):
        if g == 0:
            continue
        n, z = state["n"][d], state["z"][d]
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z, n = z + g - sigma * weights[d], n + g * g
        state["n"][d], state["z"][d] = n, z
        weights[d] = 0.0
        if abs(z) > l1:
            weights[d] = -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)


CASES = {
    "rowwise": (lambda p: RowWiseAdagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5), rowwise_row),
    "ftrl": (lambda p: FTRL(p, lr=0.2, beta=0.7, l1=3.0, l2=0.1), ftrl_row),
}


def first_state(name: str, weights: list[float]) -> dict[str, list[float]]:
    if name == "rowwise":
        return {"sum": [0.5]}
    return {"z": [-0.7 / 0.2 * w for w in weights], "n": [0.0] * DIM}


def some_gradient() -> Tensor:
    """Dense, with whole rows and single numbers at 0."""
    return torch.randn(ROWS, DIM, dtype=torch.float64) * (torch.rand(ROWS, 1) < 0.6) * (torch.rand(ROWS, DIM) < 0.8)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_thirty_steps_follow_the_formula(name: str, sparse: bool) -> None:
    make, step_row = CASES[name]
    table = nn.Parameter(torch.randn(ROWS, DIM, dtype=torch.float64) * (torch.rand(ROWS, 1) < 0.7))
    optimizer = make([table])
    weights = table.tolist()
    states = [first_state(name, row) for row in weights]
    for _ in range(30):
        grad = some_gradient()
        table.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()
        for row, values, state in zip(weights, grad.tolist(), states, strict=True):
            step_row(row, values, state)
    torch.testing.assert_close(table.detach(), torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert name != "ftrl" or ((table == 0).sum() > 3 and (table != 0).sum() > 3)


@pytest.mark.parametrize("name", CASES)
def test_repeated_rows_are_summed_first(name: str) -> None:
    tables = [nn.Parameter(value.clone()) for value in [torch.randn(ROWS, DIM)] * 2]
    rows, values = torch.tensor([[3, 1, 3, 3]]), torch.randn(4, DIM)
    grad = torch.sparse_coo_tensor(rows, values, (ROWS, DIM), check_invariants=True)
    for table, value in zip(tables, (grad, grad.to_dense()), strict=True):
        table.grad = value
        CASES[name][0]([table]).step()
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize("name", CASES)
def test_every_shape_of_parameter(name: str) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((), (4,), (3, 2), (2, 3, 4), (0, 3), (3, 0))]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = CASES[name][0](parameters)
    sum(parameter.square().sum() for parameter in parameters).backward()
    optimizer.step()
    for old, new in zip(before, parameters, strict=True):
        assert old.shape == new.shape
        assert (new.abs() < old.abs()).all()


def test_of_one_dimension_rowwise_adagrad_is_adagrad() -> None:
    values = torch.randn(6)
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    a = RowWiseAdagrad([ours], lr=0.1, weight_decay=0.2, maximize=True)
    b = torch.optim.Adagrad([theirs], lr=0.1, weight_decay=0.2, maximize=True)
    for _ in range(5):
        ours.grad = torch.randn(6)
        theirs.grad = ours.grad.clone()
        a.step(), b.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_keeps_wide_state_through_a_checkpoint(name: str) -> None:
    table = nn.Parameter(torch.randn(ROWS, DIM, dtype=torch.bfloat16))
    optimizer = CASES[name][0]([table])
    for _ in range(3):
        table.grad = torch.randn(ROWS, DIM).bfloat16()
        optimizer.step()
    twin = copy.deepcopy(table)
    again = CASES[name][0]([twin])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, value in optimizer.state[table].items():
        assert value.dtype is torch.float32
        assert torch.equal(value, again.state[twin][key])
        assert not torch.equal(value, value.bfloat16().float())
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_ftrl_takes_a_rate_of_zero_and_a_schedule_leaves_weights_where_they_are() -> None:
    table = nn.Parameter(torch.randn(ROWS, DIM))
    before = table.detach().clone()
    optimizer = FTRL([table], lr=0.0)
    for lr in (0.0, 0.1, 0.01):
        optimizer.param_groups[0]["lr"] = lr
        table.grad = torch.full((ROWS, DIM), 1e-6)
        optimizer.step()
        torch.testing.assert_close(table.detach(), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_closure_is_run_with_gradients_and_its_loss_comes_back(name: str) -> None:
    table = nn.Parameter(torch.ones(ROWS, DIM))
    optimizer = CASES[name][0]([table])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = table.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == ROWS * DIM
    assert (table < 1).all()


WRONG = {
    "RowWiseAdagrad(lr=-1) is not 0 or more": lambda p: RowWiseAdagrad(p, lr=-1),
    "RowWiseAdagrad(eps=0) is not positive": lambda p: RowWiseAdagrad(p, eps=0),
    "RowWiseAdagrad(weight_decay=-0.1) is not 0 or more": lambda p: RowWiseAdagrad(p, weight_decay=-0.1),
    "FTRL(beta=0) is not positive": lambda p: FTRL(p, beta=0),
    "FTRL(l1=-2) is not 0 or more": lambda p: FTRL([{"params": p, "l1": -2}]),
    "FTRL got a parameter of torch.complex64": lambda p: FTRL([*p, nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_has_no_meaning_is_refused(message: str) -> None:
    with pytest.raises(OptionError) as caught:
        WRONG[message]([nn.Parameter(torch.ones(2, 2))])
    assert message in str(caught.value)


def test_gradients_without_a_meaning_are_refused() -> None:
    table = nn.Parameter(torch.ones(ROWS, DIM))
    table.grad = torch.ones(ROWS, DIM).to_sparse(1)
    with pytest.raises(OptionError, match="it would decay some rows and not others"):
        RowWiseAdagrad([table], weight_decay=0.1).step()
    table.grad = torch.ones(ROWS, DIM).to_sparse()
    with pytest.raises(OptionError, match="sparse in 2 dimensions"):
        FTRL([table]).step()


def test_they_are_found_where_the_readme_says() -> None:
    assert heterps_compile.optim.FTRL is FTRL
    assert heterps_compile.optim.RowWiseAdagrad is RowWiseAdagrad
