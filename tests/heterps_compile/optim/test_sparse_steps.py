"""Fused SGD and Adagrad on sparse gradients against torch's own steps: weights, state, and everything around a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_compile import optim
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare

ROWS, DIM, FIELDS = 30, 8, 3
SPEC = GroupSpec(lookups=tuple(LookupSpec(table=k, sparse=True) for k in range(FIELDS)))
Optimize = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def built(kernel_cache) -> None:
    assert prepare([(DIM, torch.float32)], strict=True)
    optim.install()


def make_tables() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Equal tables, the first for kernels and the second for eager."""
    values = [torch.randn(ROWS, DIM) for _ in range(FIELDS)]
    ours, eager = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optim.track(ours)
    return ours, eager


def loss_of(outputs: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat(list(outputs), 1).sin().square().sum()


def ours_loss(tables: list[nn.Parameter], ids: Tensor) -> Tensor:
    none = [None] * FIELDS
    return loss_of(lookup_group(SPEC, tables, list(ids.unbind(1)), none, none))


def eager_loss(tables: list[nn.Parameter], ids: Tensor) -> Tensor:
    return loss_of([F.embedding(ids[:, k], table, sparse=True) for k, table in enumerate(tables)])


def assert_equal(ours: list[nn.Parameter], eager: list[nn.Parameter]) -> None:
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same_state(ours: torch.optim.Optimizer, eager: torch.optim.Optimizer) -> None:
    a, b = ours.state_dict(), eager.state_dict()
    assert a["param_groups"] == b["param_groups"]
    for mine, theirs in zip(a["state"].values(), b["state"].values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if value is not None:
                torch.testing.assert_close(mine[key].to_dense(), value.to_dense(), rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-all": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2, eps=1e-3, maximize=True, foreach=True
    ),
    "adagrad-tensor-lr": lambda p: torch.optim.Adagrad(p, lr=torch.tensor(0.1)),
    "groups": lambda p: torch.optim.Adagrad([{"params": p[:1], "lr": 0.5}, {"params": p[1:], "eps": 0.1}], lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),  # torch does this one
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_torch(name: str) -> None:
    ours, eager = make_tables()
    a, b = OPTIMIZERS[name](ours), OPTIMIZERS[name](eager)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (a, b)]
    for _ in range(12):
        ids = torch.randint(0, ROWS, (20, FIELDS))
        for optimizer, loss in ((a, ours_loss(ours, ids)), (b, eager_loss(eager, ids))):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert_equal(ours, eager)
    assert_same_state(a, b)


def test_equal_gradients_give_equal_bits() -> None:
    """SGD to the last bit; Adagrad in its state, and in its rows up to the square root of torch's vector library."""
    for make in (OPTIMIZERS["sgd"], OPTIMIZERS["adagrad"]):
        ours, eager = make_tables()
        a, b = make(ours), make(eager)
        for _ in range(4):
            for p, q in zip(ours, eager, strict=True):
                rows, values = torch.randint(0, ROWS, (1, 9)), torch.randn(9, DIM)
                q.grad = torch.sparse_coo_tensor(rows, values, (ROWS, DIM), check_invariants=True).coalesce()
                p.grad = q.grad.clone()
            a.step(), b.step()
        for p, q in zip(ours, eager, strict=True):
            if type(a) is torch.optim.SGD:
                assert torch.equal(p, q)
            else:
                assert torch.equal(a.state[p]["sum"], b.state[q]["sum"])
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_the_stock_step_is_spared_and_grad_comes_back() -> None:
    ours, _ = make_tables()
    optimizer = torch.optim.Adagrad(ours)
    ours_loss(ours, torch.randint(0, ROWS, (20, FIELDS))).backward()
    grads, seen = [p.grad for p in ours], []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.extend(p.grad for p in ours))
    optimizer.step()
    assert seen == [None] * FIELDS
    assert all(p.grad is g for p, g in zip(ours, grads, strict=True))


def test_accumulated_gradients() -> None:
    ours, eager = make_tables()
    a, b = torch.optim.Adagrad(ours), torch.optim.Adagrad(eager)
    for _ in range(3):
        for _ in range(2):
            ids = torch.randint(0, ROWS, (20, FIELDS))
            ours_loss(ours, ids).backward()
            eager_loss(eager, ids).backward()
        assert not ours[0].grad.is_coalesced()
        a.step(), b.step()
        a.zero_grad(), b.zero_grad()
    assert_equal(ours, eager)


@pytest.mark.parametrize("by_name", [False, True])
def test_closure(by_name: bool) -> None:
    ours, eager = make_tables()
    a, b = torch.optim.Adagrad(ours), torch.optim.Adagrad(eager)

    def closure(optimizer, loss_function, tables, ids):
        optimizer.zero_grad()
        loss = loss_function(tables, ids)
        loss.backward()
        return loss

    for _ in range(3):
        ids = torch.randint(0, ROWS, (20, FIELDS))
        losses = []
        for optimizer, function, tables in ((a, ours_loss, ours), (b, eager_loss, eager)):
            run = lambda o=optimizer, f=function, t=tables: closure(o, f, t, ids)  # noqa: E731, B023
            losses.append(optimizer.step(closure=run) if by_name else optimizer.step(run))
        torch.testing.assert_close(losses[0], losses[1])
        assert ours[0].grad is not None
    assert_equal(ours, eager)


def test_state_moves_both_ways() -> None:
    ours, eager = make_tables()
    a, b = torch.optim.Adagrad(ours), torch.optim.Adagrad(eager)
    for step in range(4):
        ids = torch.randint(0, ROWS, (20, FIELDS))
        for optimizer, loss in ((a, ours_loss(ours, ids)), (b, eager_loss(eager, ids))):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step == 1:  # swap checkpoints
            states = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
            a.load_state_dict(states[1])
            b.load_state_dict(states[0])
    assert_equal(ours, eager)


def test_a_stale_graph_is_found_out() -> None:
    ours, _ = make_tables()
    optimizer = torch.optim.SGD(ours, lr=0.1)
    stale = (ours[0] * ours[0]).sum()
    ours_loss(ours, torch.randint(0, ROWS, (20, FIELDS))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize("scale", [1.0, float("inf")])
def test_grad_scaler(scale: float) -> None:
    ours, eager = make_tables()
    a, b = torch.optim.SGD(ours, lr=0.1), torch.optim.SGD(eager, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(3):
        ids = torch.randint(0, ROWS, (20, FIELDS))
        for scaler, optimizer, loss in zip(
            scalers, (a, b), (ours_loss(ours, ids), eager_loss(eager, ids)), strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(loss * (scale if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert torch.isfinite(ours[0]).all()
    assert_equal(ours, eager)


def test_what_eager_refuses_is_refused_and_grads_come_back() -> None:
    ours, _ = make_tables()
    optimizer = torch.optim.Adagrad([{"params": ours[:1]}, {"params": ours[1:], "weight_decay": 0.1}])
    ours_loss(ours, torch.randint(0, ROWS, (20, FIELDS))).backward()
    with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
        optimizer.step()
    optimizer.param_groups[1]["weight_decay"] = 0
    optimizer.step()
    assert all(p.grad is not None for p in ours)


def test_what_nobody_tracks_is_left_to_torch() -> None:
    table = nn.Parameter(torch.randn(ROWS, DIM))
    optimizer = torch.optim.Adagrad([table])
    F.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()
    seen: list[Tensor | None] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(table.grad))
    optimizer.step()
    assert seen[0] is table.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    values = torch.randn(ROWS, DIM).to(dtype)
    ours, wide = nn.Parameter(values.clone()), nn.Parameter(values.double())
    optim.track([ours])
    a, b = torch.optim.Adagrad([ours], eps=1e-3), torch.optim.Adagrad([wide], eps=1e-3)
    ids, factor = torch.tensor([0, 3, 3, 29]), torch.tensor([1.0, 0.5, 0.25, -1.0])[:, None]
    for table, optimizer in ((ours, a), (wide, b)):
        (F.embedding(ids, table, sparse=True) * factor.to(table.dtype)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.double(), wide, rtol=1e-2, atol=1e-3)
