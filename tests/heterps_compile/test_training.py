"""``train_step`` and ``compile_``: a whole step equals eager, dense tables too, and readers see current rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import heterps_compile
from heterps_compile import models
from heterps_compile.errors import OptionError, StaleTableError

ROWS = (40, 7, 300, 5)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam with coupled decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
}


def batch(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS], dim=1)
    return torch.rand(size, 13, generator=generator), ids, (ids.sum(1) % 2).float()


def loss_of(model: nn.Module, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(dense, ids), labels)


@pytest.mark.filterwarnings("ignore::heterps_compile.errors.HeterpsWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_tables_train_as_eager_does(name: str) -> None:
    reference = models.DeepFM(ROWS, 8, deep=(16,))
    model = copy.deepcopy(reference)
    expected = OPTIMIZERS[name](reference.parameters())
    step = heterps_compile.train_step(loss_of, optimizer=OPTIMIZERS[name](model.parameters()))
    for seed in range(30):
        size = (16, 16, 5, 1)[seed % 4]
        ours = step(model, *batch(size, seed))
        expected.zero_grad()
        theirs = loss_of(reference, *batch(size, seed))
        theirs.backward()
        expected.step()
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)
    state, wanted = step.optimizer.state_dict()["state"], expected.state_dict()["state"]
    torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-6)


def test_every_hooked_reader_sees_rows_up_to_date() -> None:
    reference = models.DeepFM(ROWS, 8, deep=(16,))
    model = copy.deepcopy(reference)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)
    step = heterps_compile.train_step(loss_of, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    readers = {
        "state_dict": lambda: model.state_dict(),
        "deepcopy": lambda: dict(copy.deepcopy(model).named_parameters()),
        "eval": lambda: dict(model.eval().named_parameters()),
        "flush": lambda: (heterps_compile.flush(model), dict(model.named_parameters()))[1],
    }
    for seed, (name, read) in enumerate(readers.items()):
        model.train()
        for again in range(3):
            step(model, *batch(4, 10 * seed + again))
            expected.zero_grad()
            loss_of(reference, *batch(4, 10 * seed + again)).backward()
            expected.step()
        state = read()
        for key, value in reference.named_parameters():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_decorator_takes_a_function_and_keeps_its_name() -> None:
    model = models.DeepFM(ROWS, 8, deep=(16,))

    @heterps_compile.train_step(optimizer=torch.optim.Adam(model.parameters()))
    def step(model: nn.Module, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model, dense, ids, labels)

    first = step(model, *batch(16, 0))
    for _ in range(20):
        last = step(model, *batch(16, 0))
    assert step.__name__ == "step"
    assert last < first
    assert heterps_compile.is_planned(model)


def test_a_step_that_returns_no_single_loss_is_refused() -> None:
    model = models.DeepFM(ROWS, 8, deep=(16,))
    step = heterps_compile.train_step(
        lambda model, dense, ids: model(dense, ids), optimizer=torch.optim.Adam(model.parameters())
    )
    with pytest.raises(OptionError, match=r"a tensor of shape \(4,\)"):
        step(model, *batch(4, 0)[:2])


def test_an_optimizer_that_is_none_is_refused() -> None:
    with pytest.raises(OptionError, match=r"allowed: a torch\.optim\.Optimizer"):
        heterps_compile.train_step(loss_of, optimizer="adam")


def test_compile_in_place_reaches_a_model_with_a_compile_of_its_own() -> None:
    class Owned(models.DeepFM):
        def compile(self, optimizer: str) -> None:
            raise AssertionError("the library's own compile must not be called")

    model = Owned(ROWS, 8, deep=(16,))
    heterps_compile.compile_(model)
    model(*batch(4, 0)[:2])
    assert heterps_compile.is_planned(model)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = (models.DeepFM(ROWS, 8, deep=(16,)) for _ in range(2))
    step = heterps_compile.train_step(loss_of, optimizer=torch.optim.Adam(other.parameters()))
    with pytest.raises(OptionError, match="holds no parameter of the DeepFM"):
        step(model, *batch(4, 0))
    with pytest.raises(OptionError, match="got a Tensor first"):
        step(batch(4, 0)[0])


def test_strict_refuses_tables_that_have_to_stay_dense() -> None:
    model = models.DeepFM(ROWS, 8, deep=(16,))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    step = heterps_compile.train_step(loss_of, optimizer=optimizer, strict=True)
    with pytest.raises(heterps_compile.HeterpsWarning, match="weight_decay"):
        step(model, *batch(4, 0))


def test_what_is_no_model_cannot_be_explained() -> None:
    compiled = torch.compile(models.DeepFM(ROWS, 8, deep=(16,)), backend="heterps")
    for value in (3, torch.compile(compiled, backend="heterps")):
        with pytest.raises(OptionError, match="is no model"):
            heterps_compile.explain(value)


class Reader(nn.Module):
    """A look-up, or a read of the whole table that goes by no look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 1)
        self.whole = False

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table.weight if self.whole else self.table(ids)) @ self.head.weight.t()


def trained_reader(steps: int = 10) -> tuple[Reader, Reader]:
    reference = Reader()
    model = copy.deepcopy(reference)
    expected = torch.optim.Adam(reference.parameters(), lr=0.05)
    step = heterps_compile.train_step(
        lambda model, ids: model(ids).square().mean(), optimizer=torch.optim.Adam(model.parameters(), lr=0.05)
    )
    for seed in range(steps):
        ids = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(seed))
        step(model, ids)
        expected.zero_grad()
        reference(ids).square().mean().backward()
        expected.step()
    model.step = step  # keeps the optimizer alive
    return model, reference


def test_a_graph_without_look_ups_reads_a_whole_lazy_table_up_to_date() -> None:
    model, reference = trained_reader()
    model.whole = reference.whole = True
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(2)), reference(torch.arange(2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_a_model_makes_the_missed_steps_first(cast: str) -> None:
    model, reference = trained_reader()
    for module in (model, reference):
        getattr(module, cast)()
    tolerance = 1e-5 if cast == "double" else 1e-2
    ours, theirs = (module.state_dict()["table.weight"] for module in (model, reference))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_other_memory_under_a_table_with_rows_behind_is_refused() -> None:
    model, _ = trained_reader()
    model.table.weight.data = torch.ones(50, 8)
    with pytest.raises(StaleTableError, match="changed in place, cast or replaced"):
        heterps_compile.flush(model)
