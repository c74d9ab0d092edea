"""Every fused optimizer with its options against the same optimizer in eager: 30 steps, any dtype, width and layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from heterps_compile import optim
from heterps_compile.errors import HeterpsWarning
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare
from heterps_compile.optim import FTRL, RowWiseAdagrad, marks

ROWS = 64
Make = Callable[[Sequence[nn.Parameter]], Optimizer]


@pytest.fixture(autouse=True)
def built(kernel_cache) -> None:
    assert prepare([(8, torch.float32), (5, torch.float32), (8, torch.bfloat16)], strict=True)
    optim.install()


def groups(kind: Any, first: dict[str, Any], **rest: Any) -> Make:
    """An optimizer whose first table has options of its own."""
    return lambda p: kind([{"params": p[:1], **first}, {"params": p[1:]}], **rest)


EVERYWHERE: dict[str, Make] = {
    "sgd": groups(SGD, {"lr": 0.3, "maximize": True}, lr=0.1, foreach=True),
    "adagrad": groups(Adagrad, {"eps": 1e-3, "lr_decay": 0.2}, lr=0.1, maximize=True, foreach=True),
    "rowwise": groups(RowWiseAdagrad, {"eps": 1e-2}, lr=0.1, initial_accumulator_value=0.1, maximize=True),
    "rowwise-tensor-lr": groups(RowWiseAdagrad, {"maximize": True}, lr=torch.tensor(0.1)),
    "ftrl": groups(FTRL, {"l1": 0.5, "beta": 0.5}, lr=0.2, l2=0.3, maximize=True),
    "ftrl-sparse-weights": lambda p: FTRL(p, lr=0.2, l1=2.0),
}
SPARSE = EVERYWHERE | {
    "sparse-adam": groups(SparseAdam, {"eps": 1e-2, "betas": (0.5, 0.9)}, lr=0.1),
    "sparse-adam-maximize": lambda p: SparseAdam(p, lr=torch.tensor(0.05), maximize=True),
}
DENSE = EVERYWHERE | {
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.7, nesterov=True, fused=True),
    "adagrad-fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "momentum": groups(SGD, {"momentum": 0.5, "dampening": 0.2}, lr=0.05, momentum=0.9, foreach=False),
    "rmsprop": groups(RMSprop, {"alpha": 0.8, "maximize": True}, lr=0.01, foreach=True),
    "adam": groups(Adam, {"betas": (0.6, 0.9), "eps": 1e-4, "maximize": True}, lr=0.01, foreach=True),
    "adam-fused": groups(Adam, {"lr": 0.05}, lr=0.01, fused=True),
    "adamw-fused": groups(AdamW, {"weight_decay": 0.3}, lr=0.01, weight_decay=0.1, fused=True, maximize=True),
}


def make_tables(dim: int, dtype: torch.dtype, kind: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    values = [torch.randn(ROWS, dim).to(dtype) for _ in range(2)]
    ours, eager = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optim.track(ours, lazy=kind == marks.LAZY)
    for table in ours:
        marks.watch(table)
    return ours, eager


def some_gradient(table: Tensor, count: int) -> Tensor:
    """Sparse, rows repeated and out of order; few rows of many, so that some rest for long."""
    rows = (torch.rand(1, count).square() * ROWS).long()
    values = torch.randn(count, table.shape[1]).to(table.dtype)
    return torch.sparse_coo_tensor(rows, values, table.shape, check_invariants=True)


def train(make: Make, ours: list[nn.Parameter], eager: list[nn.Parameter], *, dense: bool) -> tuple[Optimizer, ...]:
    """30 steps under a schedule, the last ones by closure, every seventh on an empty batch."""
    optimizers = make(ours), make(eager)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=31, cycle_momentum=False) for o in optimizers
    ]
    hidden: list[bool] = []
    optimizers[0].register_step_pre_hook(lambda *_: hidden.append(ours[0].grad is None))
    for step in range(30):
        grads = [some_gradient(table, 0 if step % 7 == 3 else 9).coalesce() for table in ours]
        for optimizer, tables, densely in zip(optimizers, (ours, eager), (False, dense), strict=True):

            def closure(tables=tables, densely=densely) -> Tensor:
                for table, grad in zip(tables, grads, strict=True):  # noqa: B023
                    table.grad = grad.to_dense() if densely else grad.clone()
                return torch.tensor(3.0)

            if step < 25:
                closure()
                optimizer.step()
            else:
                assert optimizer.step(closure) == 3
        for schedule in schedules:
            schedule.step()
    assert all(hidden[:25])  # the kernels did it, not the optimizer
    optim.flush(ours)
    return optimizers


def assert_equal(optimizers: tuple[Optimizer, ...], ours: list[nn.Parameter], eager: list[nn.Parameter]) -> None:
    torch.testing.assert_close(list(ours), list(eager), rtol=2e-5, atol=2e-6)
    a, b = (optimizer.state_dict() for optimizer in optimizers)
    assert a["param_groups"] == b["param_groups"]
    for mine, theirs in zip(a["state"].values(), b["state"].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert [type(value) for value in mine.values()] == [type(value) for value in theirs.values()]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tables(name: str, dim: int) -> None:
    ours, eager = make_tables(dim, torch.float32, marks.SPARSE)
    assert_equal(train(SPARSE[name], ours, eager, dense=False), ours, eager)


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("name", DENSE)
def test_lazy_tables(name: str, dim: int) -> None:
    ours, eager = make_tables(dim, torch.float32, marks.LAZY)
    assert_equal(train(DENSE[name], ours, eager, dense=True), ours, eager)


def test_lazy_tables_step_as_sparse_ones_under_sparse_adam() -> None:
    ours, eager = make_tables(8, torch.float32, marks.LAZY)
    assert_equal(train(SPARSE["sparse-adam"], ours, eager, dense=False), ours, eager)


HALF: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam-eps": lambda p: Adam(p, lr=0.01, eps=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.3),
}


@pytest.mark.parametrize("name", HALF)
def test_lazy_bfloat16_has_the_bits_of_eager(name: str) -> None:
    """torch rounds after every operation: 0.999 * v rounds back to v. One rounding for many steps is another number."""
    ours, eager = make_tables(8, torch.bfloat16, marks.LAZY)
    a, b = train(HALF[name], ours, eager, dense=True)
    assert all(torch.equal(p, q) for p, q in zip(ours, eager, strict=True))
    for p, q in zip(ours, eager, strict=True):
        for key, value in a.state.get(p, {}).items():
            assert torch.equal(value, b.state[q][key])


def test_bfloat16_rows_do_not_depend_on_when_they_are_read() -> None:
    results = []
    for reads in (False, True):
        torch.manual_seed(1)
        ours, _ = make_tables(8, torch.bfloat16, marks.LAZY)
        optimizer = HALF["adamw"](ours)
        for _ in range(20):
            for table in ours:
                table.grad = some_gradient(table, 9).coalesce()
            optimizer.step()
            if reads:
                optim.flush(ours)
        optim.flush(ours)
        results.append(ours)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["sparse-adam", "rowwise", "ftrl"])
def test_sparse_bfloat16(name: str) -> None:
    ours, eager = make_tables(8, torch.bfloat16, marks.SPARSE)
    train(SPARSE[name], ours, eager, dense=False)
    torch.testing.assert_close(list(ours), list(eager), rtol=1e-2, atol=1e-2)
    if name == "sparse-adam":
        assert all(torch.equal(p, q) for p, q in zip(ours, eager, strict=True))


def test_an_eps_that_float16_does_not_have_stays_dense() -> None:
    ours, eager = make_tables(8, torch.float16, marks.LAZY)
    a, b = Adam(ours, eps=1e-8), Adam(eager, eps=1e-8)
    for p, q in zip(ours, eager, strict=True):
        p.grad = some_gradient(p, 9).coalesce()
        q.grad = p.grad.to_dense()
    with pytest.warns(HeterpsWarning, match="eps=1e-08\\) divides 0 by 0"):
        a.step()
    b.step()
    torch.testing.assert_close(list(ours), list(eager), equal_nan=True, rtol=0, atol=0)
    assert ours[0].isnan().any()


def test_fused_under_a_grad_scaler_is_left_to_torch() -> None:
    ours, eager = make_tables(8, torch.float32, marks.LAZY)
    a, b = Adam(ours, fused=True), Adam(eager, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    grads = [some_gradient(table, 9).coalesce() for table in ours]
    for scaler, tables in zip(scalers, (ours, eager), strict=True):
        scaler.scale(torch.ones(1))
        for table, grad in zip(tables, grads, strict=True):
            table.grad = grad.clone() if tables is ours else grad.to_dense()
    with pytest.warns(HeterpsWarning, match="fused=True under a GradScaler"):
        scalers[0].step(a)
    scalers[1].step(b)
    torch.testing.assert_close(list(ours), list(eager))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["sparse-adam", "rowwise", "ftrl"])
def test_through_look_ups_with_padding(name: str, dtype: torch.dtype) -> None:
    ours, eager = make_tables(8, torch.float32, marks.SPARSE)
    spec = GroupSpec(lookups=tuple(LookupSpec(table=k, sparse=True, padding_idx=2) for k in range(2)))
    optimizers = SPARSE[name](ours), SPARSE[name](eager)
    for step in range(10):
        ids = [(torch.rand(0 if step == 4 else 12) * 9).to(dtype) for _ in range(2)]
        theirs = [F.embedding(i, table, padding_idx=2, sparse=True) for i, table in zip(ids, eager, strict=True)]
        for optimizer, rows in zip(
            optimizers, (lookup_group(spec, ours, ids, [None] * 2, [None] * 2), theirs), strict=True
        ):
            optimizer.zero_grad()
            torch.cat(list(rows), 1).sin().square().sum().backward()
            optimizer.step()
    assert_equal(optimizers, ours, eager)


@pytest.mark.parametrize("name", SPARSE)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    values, results = torch.randn(4000, 8), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        tables = [nn.Parameter(values.clone()) for _ in range(2)]
        optim.track(tables)
        optimizer = SPARSE[name](tables)
        for _ in range(2):
            for table in tables:
                rows = torch.randint(0, 4000, (1, 3000))
                table.grad = torch.sparse_coo_tensor(rows, torch.randn(3000, 8), table.shape, check_invariants=True)
            optimizer.step()
        results.append(tables)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["sparse-adam", "rowwise", "ftrl"])
def test_state_moves_both_ways(name: str) -> None:
    ours, eager = make_tables(8, torch.float32, marks.SPARSE)
    a, b = SPARSE[name](ours), SPARSE[name](eager)
    for step in range(4):
        for p, q in zip(ours, eager, strict=True):
            p.grad = some_gradient(p, 9)
            q.grad = p.grad.clone()
        a.step(), b.step()
        if step == 1:
            states = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            a.load_state_dict(states[1])
            b.load_state_dict(states[0])
    assert_equal((a, b), ours, eager)
