"""Lazy tables against torch's dense steps: the same weights and state, whoever reads them and however."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_compile import optim
from heterps_compile.errors import HeterpsWarning, StaleTableError
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare

ROWS, DIM, FIELDS = 60, 8, 3
SPEC = GroupSpec(lookups=tuple(LookupSpec(table=k) for k in range(FIELDS)), lazy=True)
NONE = [None] * FIELDS


@pytest.fixture(autouse=True)
def built(kernel_cache) -> None:
    assert prepare([(DIM, torch.float32)], strict=True)
    optim.install()


class Model(nn.Module):
    """Three tables whose look-ups go through kernels, as lowering would have it, or through eager."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))
        self.out = nn.Linear(FIELDS * DIM, 1)
        self.lazy = lazy

    def weights(self) -> list[nn.Parameter]:
        return [table.weight for table in self.tables]

    def forward(self, ids: Tensor, used: tuple[int, ...] = tuple(range(FIELDS))) -> Tensor:
        columns = list(ids.unbind(1))
        if self.lazy:
            weights = self.weights()
            optim.track(weights, lazy=True)
            optim.catch_up(weights, columns)
            rows = lookup_group(SPEC, weights, columns, NONE, NONE)
        else:
            rows = [F.embedding(column, weight) for column, weight in zip(columns, self.weights(), strict=True)]
        return self.out(torch.cat([rows[k] if k in used else rows[k].detach() for k in range(FIELDS)], 1)).tanh()


def make_models() -> tuple[Model, Model]:
    ours = Model(lazy=True)
    eager = Model(lazy=False)
    eager.load_state_dict(ours.state_dict())
    optim.keep_current(ours)
    return ours, eager


def batch() -> Tensor:
    """Few rows of many, some often: rows rest for up to dozens of steps."""
    return (torch.rand(6, FIELDS).square() * ROWS).long()


def train(model: Model, optimizer: torch.optim.Optimizer, ids: Tensor, **options) -> Tensor:
    optimizer.zero_grad()
    loss = (model(ids, **options) - 0.5).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_equal(ours: Model, eager: Model, tolerance: float = 2e-5) -> None:
    for a, b in zip(ours.weights(), eager.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)


def assert_same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=1e-3, atol=1e-5)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8),
    "dampening-maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, dampening=0.3, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "nesterov-maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, nesterov=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-maximize": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.9), maximize=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_seventy_steps_equal_torch(name: str) -> None:
    ours, eager = make_models()
    a, b = (OPTIMIZERS[name](list(model.parameters())) for model in (ours, eager))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20) for o in (a, b)]
    for step in range(70):
        ids = batch()
        losses = [train(model, optimizer, ids) for model, optimizer in ((ours, a), (eager, b))]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for schedule in schedules:
            schedule.step()
        if step in (20, 45):
            optim.flush(ours.parameters())
            assert_equal(ours, eager)
    assert_same_state(a, b)  # state_dict flushes by itself
    assert_equal(ours, eager)


def test_rows_do_wait() -> None:
    """The test of the tests: without a flush, a row that rested is behind."""
    ours, eager = make_models()
    a, b = (OPTIMIZERS["adam"](list(model.parameters())) for model in (ours, eager))
    for _ in range(5):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    assert not torch.allclose(ours.weights()[0], eager.weights()[0], rtol=1e-4, atol=1e-5)


def test_rates_and_betas_that_change_every_step() -> None:
    ours, eager = make_models()
    a, b = (OPTIMIZERS["adamw"](list(model.parameters())) for model in (ours, eager))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=40) for o in (a, b)]
    for _ in range(40):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
        for schedule in schedules:
            schedule.step()
    optim.flush()
    assert_equal(ours, eager)


@pytest.mark.parametrize("name", ["adam", "momentum", "rmsprop"])
def test_a_long_rest(name: str) -> None:
    """Beyond the horizon, where momentum is spent, only decay is applied."""
    ours, eager = make_models()
    a, b = (OPTIMIZERS[name](ours.weights()), OPTIMIZERS[name](eager.weights()))
    train(ours, a, torch.full((2, FIELDS), 7))
    train(eager, b, torch.full((2, FIELDS), 7))
    for _ in range(400):
        ids = torch.full((1, FIELDS), 9)
        train(ours, a, ids)
        train(eager, b, ids)
    assert_same_state(a, b)
    assert_equal(ours, eager)


@pytest.mark.parametrize("name", ["adam", "momentum", "rmsprop", "adagrad"])
def test_tables_that_sit_out_some_steps(name: str) -> None:
    """A table without gradient makes no step at all, in eager and here."""
    ours, eager = make_models()
    a, b = (OPTIMIZERS[name](list(model.parameters())) for model in (ours, eager))
    for step in range(24):
        ids, used = batch(), ((0, 1, 2), (0, 2), (1,))[step % 3]
        train(ours, a, ids, used=used)
        train(eager, b, ids, used=used)
    assert_same_state(a, b)
    assert_equal(ours, eager)


def test_param_groups_with_rates_of_their_own() -> None:
    ours, eager = make_models()
    a, b = (
        torch.optim.AdamW(
            [{"params": m.weights()[:1], "lr": 0.05, "weight_decay": 0}, {"params": m.weights()[1:], "eps": 1e-3}],
            lr=0.01,
        )
        for m in (ours, eager)
    )
    for _ in range(15):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    assert_same_state(a, b)
    assert_equal(ours, eager)


def test_accumulated_and_scaled_gradients() -> None:
    ours, eager = make_models()
    a, b = (OPTIMIZERS["adam"](list(model.parameters())) for model in (ours, eager))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for _ in range(10):
        parts = [batch(), batch()]
        for model, optimizer, scaler in ((ours, a, scalers[0]), (eager, b, scalers[1])):
            optimizer.zero_grad()
            for ids in parts:
                scaler.scale(model(ids).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_closure() -> None:
    ours, eager = make_models()
    a, b = (OPTIMIZERS["adam"](list(model.parameters())) for model in (ours, eager))
    for _ in range(8):
        ids = batch()
        for model, optimizer in ((ours, a), (eager, b)):

            def closure(model=model, optimizer=optimizer, ids=ids) -> Tensor:
                optimizer.zero_grad()
                loss = model(ids).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def trained(name: str = "adam") -> tuple[Model, Model, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Models after a few steps: rows of ``ours`` are behind."""
    ours, eager = make_models()
    a, b = (OPTIMIZERS[name](list(model.parameters())) for model in (ours, eager))
    for _ in range(6):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    return ours, eager, a, b


READERS: dict[str, Callable[[Model], list[Tensor]]] = {
    "state_dict": lambda m: [m.state_dict()[f"tables.{k}.weight"] for k in range(FIELDS)],
    "state_dict of a submodule": lambda m: [table.state_dict()["weight"] for table in m.tables],
    "eval": lambda m: m.eval().weights(),
    "deepcopy": lambda m: copy.deepcopy(m).weights(),
    "deepcopy of a submodule": lambda m: [copy.deepcopy(table).weight for table in m.tables],
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).weights(),
    "torch.save": lambda m: _saved(m).weights(),
    "forward of a table in eager": lambda m: [table(torch.arange(ROWS)) for table in m.tables],
    "flush": lambda m: (optim.flush(m.parameters()), m.weights())[1],
    "planned forward": lambda m: planned_rows(m),
}


def planned_rows(model: Model) -> list[Tensor]:
    ids = [torch.arange(ROWS)] * FIELDS
    optim.catch_up(model.weights(), ids)
    return list(lookup_group(SPEC, model.weights(), ids, NONE, NONE))


def _saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", READERS)
def test_no_reader_finds_a_row_behind(how: str) -> None:
    ours, eager, *_alive = trained()
    for a, b in zip(READERS[how](ours), eager.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_an_optimizer_are_current(how: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> None:
    _ours, _, a, b = trained()
    torch.testing.assert_close(how(a).state_dict()["state"], b.state_dict()["state"], rtol=1e-4, atol=1e-6)


def test_a_copied_model_trains_on() -> None:
    ours, eager, a, b = trained()
    twin = copy.deepcopy(ours)
    optim.keep_current(twin)
    c = OPTIMIZERS["adam"](list(twin.parameters()))
    c.load_state_dict(copy.deepcopy(a.state_dict()))  # torch would share the tensors
    ids = batch()
    for model, optimizer in ((ours, a), (eager, b), (twin, c)):
        train(model, optimizer, ids)
    optim.flush()
    assert_equal(ours, eager)
    assert_equal(twin, eager)


def test_checkpoints_move_both_ways() -> None:
    ours, eager, a, b = trained()
    mine, theirs = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
    a.load_state_dict(theirs)
    b.load_state_dict(mine)
    ours.load_state_dict(eager.state_dict())
    for _ in range(6):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_the_optimizer_goes_but_its_steps_are_made() -> None:
    ours, eager, a, _ = trained()
    del a
    gc.collect()
    assert_equal(ours, eager)


def test_a_second_optimizer_takes_over() -> None:
    ours, eager, a, b = trained()
    c, d = (OPTIMIZERS["momentum"](list(model.parameters())) for model in (ours, eager))
    for step in range(6):
        ids = batch()
        train(ours, (a, c)[step % 2], ids)
        train(eager, (b, d)[step % 2], ids)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_a_write_to_a_table_with_rows_behind_is_refused() -> None:
    ours, *_alive = trained()
    with torch.no_grad():
        ours.weights()[1].mul_(2)
    with pytest.raises(StaleTableError, match="changed in place, cast or replaced while rows of it were behind"):
        ours(batch())


def test_a_write_after_a_flush_is_fine() -> None:
    ours, eager, a, b = trained()
    optim.flush(ours.parameters())
    with torch.no_grad():
        ours.weights()[1].mul_(2)
        eager.weights()[1].mul_(2)
    for _ in range(3):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_a_dense_gradient_in_between() -> None:
    ours, eager, a, b = trained()
    for step in range(4):
        ids = batch()
        if step == 1:
            for model, optimizer in ((ours, a), (eager, b)):
                optimizer.zero_grad()
                optim.flush(model.parameters())
                sum(weight.square().sum() for weight in model.weights()).backward()
                optimizer.step()
        else:
            train(ours, a, ids)
            train(eager, b, ids)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_an_id_out_of_range_writes_nothing() -> None:
    ours, *_alive = trained()
    before = [weight.detach().clone() for weight in ours.weights()]
    with pytest.raises(IndexError, match="id 60 at position 1 is outside table 2"):
        ours(torch.tensor([[1, 2, 3], [1, 2, ROWS]]))
    assert all(torch.equal(a, b) for a, b in zip(ours.weights(), before, strict=True))


REFUSED: dict[str, tuple[Make, str]] = {
    "coupled decay": (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay=0.1 of Adam moves every row"),
    "sgd decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "weight_decay=0.1 of SGD moves every row"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
    "centered": (lambda p: torch.optim.RMSprop(p, centered=True), "centered=True"),
    "rmsprop momentum": (lambda p: torch.optim.RMSprop(p, momentum=0.9), "RMSprop with momentum"),
    "another": (lambda p: torch.optim.NAdam(p), "NAdam is not one of"),
    "no eps": (lambda p: torch.optim.Adam(p, eps=0), "eps=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_stays_dense_and_says_so_once(name: str) -> None:
    make, reason = REFUSED[name]
    ours, eager = make_models()
    a, b = (make(model.weights()) for model in (ours, eager))
    ids = torch.arange(ROWS)[:, None].expand(ROWS, FIELDS) if name == "no eps" else batch()
    with pytest.warns(HeterpsWarning, match=reason) as caught:  # noqa: PT031  (three steps, one warning)
        for _ in range(3):
            train(ours, a, ids)
    assert len(caught) == 1
    assert "hint: " in str(caught[0].message)
    for _ in range(3):
        train(eager, b, ids)
    assert ours.weights()[0].grad.layout is torch.strided
    assert_equal(ours, eager)


def test_rows_do_not_wait_where_nobody_watches() -> None:
    ours, eager = Model(lazy=True), Model(lazy=False)
    eager.load_state_dict(ours.state_dict())
    a, b = (OPTIMIZERS["adam"](model.weights()) for model in (ours, eager))
    ids = batch()
    with pytest.warns(HeterpsWarning, match="nothing watches who reads it"):
        train(ours, a, ids)
    train(eager, b, ids)
    train(ours, a, ids)
    train(eager, b, ids)
    assert_equal(ours, eager)


def test_threads_read_whole_rows() -> None:
    ours, eager, *_alive = trained()
    ids = torch.arange(ROWS)[:, None].expand(ROWS, FIELDS).repeat(20, 1)
    outputs: list[Tensor] = []

    def read() -> None:
        with torch.no_grad():
            outputs.append(ours(ids))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        wanted = eager(ids)
    for output in outputs:
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def test_history_starts_anew_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heterps_compile.optim.lazy.MAX_STEPS", 4)
    ours, eager = make_models()
    a, b = (OPTIMIZERS["adam"](list(model.parameters())) for model in (ours, eager))
    for _ in range(14):
        ids = batch()
        train(ours, a, ids)
        train(eager, b, ids)
    optim.flush(ours.parameters())
    assert_equal(ours, eager)


def test_bits_do_not_depend_on_threads() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        ours, _ = make_models()
        optimizer = OPTIMIZERS["adam"](ours.weights())
        for _ in range(8):
            train(ours, optimizer, batch())
        optim.flush(ours.parameters())
        results.append([weight.detach().clone() for weight in ours.weights()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
