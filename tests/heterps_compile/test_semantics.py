"""What a user may do around a compiled model: modes, instances, accumulation, copies, hooks, threads, wrong ids."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import heterps_compile
from heterps_compile import models
from heterps_compile.errors import OptionError, VerificationError

ROWS = (40, 7, 300, 5)


def batch(size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS], dim=1)
    return torch.rand(size, 13, generator=generator), ids


def dlrm(*, sparse: bool = True) -> models.DLRM:
    return models.DLRM(ROWS, 8, bottom=(16,), top=(16,), sparse=sparse)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="heterps", options=options or None)


def test_the_backend_is_registered_once() -> None:
    assert torch._dynamo.list_backends().count("heterps") == 1


def test_parameters_are_inputs_two_instances_and_replaced_parameters() -> None:
    first, second = dlrm(), dlrm()
    inputs = batch()
    for model in (first, second):
        torch.testing.assert_close(compiled(model)(*inputs), model(*inputs))
    first.output.weight = nn.Parameter(torch.randn_like(first.output.weight))
    first.embeddings.tables[0].weight = nn.Parameter(torch.randn_like(first.embeddings.tables[0].weight))
    torch.testing.assert_close(compiled(first)(*inputs), first(*inputs))


def test_inputs_changed_in_place_are_changed_as_in_eager() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            x.mul_(2)
            self.calls += 1
            return y + x

    model = Doubles()
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(ours), model(theirs))
    torch.testing.assert_close(ours, theirs)
    assert model.calls == 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(context: type) -> None:
    model = dlrm()
    with context():
        ours, theirs = compiled(model)(*batch()), model(*batch())
    torch.testing.assert_close(ours, theirs)
    assert ours.requires_grad == theirs.requires_grad
    assert ours.is_inference() == theirs.is_inference()


def test_autocast() -> None:
    model = dlrm()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(model)(*batch()), model(*batch())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)


def test_train_and_eval_with_dropout_and_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    reference = copy.deepcopy(model)
    ours = compiled(model)
    x = torch.randn(16, 4)
    for training in (True, False, True):
        for module in (model, reference):
            module.train(training)
        torch.manual_seed(3)
        mine = ours(x)
        torch.manual_seed(3)
        torch.testing.assert_close(mine, reference(x))
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("size", [0, 1, 5])
def test_batch_sizes_zero_one_and_uneven(size: int) -> None:
    model = dlrm()
    ours = compiled(model)
    for rows in (8, size):
        torch.testing.assert_close(ours(*batch(rows)), model(*batch(rows)))
    ours(*batch(size)).sum().backward()


def test_gradient_accumulation_sums_as_eager_does() -> None:
    model, reference = dlrm(), None
    reference = copy.deepcopy(model)
    for seed in range(3):
        compiled(model)(*batch(seed=seed)).sum().backward()
        reference(*batch(seed=seed)).sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), msg=lambda m, name=name: f"{name}: {m}")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_learning_rate_schedule_and_clipping() -> None:
    model = dlrm(sparse=False)
    reference = copy.deepcopy(model)
    ours = compiled(model)
    for forward, module in ((ours, model), (reference, reference)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for seed in range(5):
            optimizer.zero_grad()
            forward(*batch(seed=seed)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=2e-4, atol=2e-4)


def test_state_dicts_of_model_and_optimizer_move_to_eager_and_back() -> None:
    def train(forward: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            forward(*batch(seed=seed)).square().mean().backward()
            optimizer.step()

    reference = dlrm()
    expected = torch.optim.Adagrad(reference.parameters(), lr=0.1)
    model = copy.deepcopy(reference)
    train(reference, expected, range(6))

    ours = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train(compiled(model), ours, range(2))
    eager = dlrm()
    eager.load_state_dict(model.state_dict())
    middle = torch.optim.Adagrad(eager.parameters(), lr=0.1)
    middle.load_state_dict(ours.state_dict())
    train(eager, middle, range(2, 4))
    model.load_state_dict(eager.state_dict())
    ours.load_state_dict(middle.state_dict())
    train(compiled(model), ours, range(4, 6))
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=2e-4, atol=2e-4)
    for p, q in zip(ours.state_dict()["state"].values(), expected.state_dict()["state"].values(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-4)


def test_double_backward_equals_eager() -> None:
    model = dlrm()
    reference = copy.deepcopy(model)
    results = []
    for forward, module in ((compiled(model), model), (reference, reference)):
        dense, ids = batch()
        dense.requires_grad_()
        (gradient,) = torch.autograd.grad(forward(dense, ids).sum(), dense, create_graph=True)
        gradient.square().sum().backward()
        results.append([p.grad.to_dense() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(results[0], results[1])


def test_graph_breaks_give_several_graphs_and_explain_says_why() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(hidden.relu())

    model = Breaks()
    ours = compiled(model)
    x = torch.randn(5, 3)
    torch.testing.assert_close(ours(x), model(x))
    text = heterps_compile.explain(ours)
    assert "2 graphs" in text
    assert "graph break" in text


def test_a_pin_may_concern_one_graph_of_several() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.top = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.table(ids)
            torch._dynamo.graph_break()
            return self.top(rows)

    model, ids = Breaks(), torch.arange(5)
    with pytest.warns(heterps_compile.HeterpsWarning, match=r"pin 'emb\*' matches no layer of a graph with layers top"):
        ours = compiled(model, pin={"emb*": "cpu"})(ids)
    torch.testing.assert_close(ours, model(ids))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="pin 'emv' matches no layer"):
        compiled(model, pin={"emv": "cpu"}, strict=True)(ids)


def test_a_backward_hook_leaves_no_graph_and_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    model[2].register_full_backward_hook(lambda *_: None)
    with pytest.warns(heterps_compile.HeterpsWarning, match="2 has a full backward hook"):
        heterps_compile.compile_(model)
    model(torch.randn(5, 3)).sum().backward()
    assert not heterps_compile.is_planned(model)
    assert "full backward hook" in heterps_compile.explain(model)


def test_threads_share_a_compiled_model() -> None:
    model = dlrm()
    ours = compiled(model)
    expected = [model(*batch(size, size)) for size in (3, 8, 3, 8)]
    results: dict[int, Tensor] = {}

    def work(index: int, size: int) -> None:
        results[index] = ours(*batch(size, size))

    threads = [threading.Thread(target=work, args=(i, size)) for i, size in enumerate((3, 8, 3, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, value in enumerate(expected):
        torch.testing.assert_close(results[index], value)


def test_deepcopy_pickle_and_save_of_a_compiled_model() -> None:
    model = dlrm()
    heterps_compile.compile_(model)
    expected = model(*batch())
    torch.testing.assert_close(copy.deepcopy(model)(*batch()), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(*batch()), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = dlrm()
    fresh.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(fresh(*batch()), expected)
    assert not any(key.startswith("_orig_mod") for key in model.state_dict())


@pytest.mark.parametrize("wrong", [-1, 40, 10**12])
@pytest.mark.parametrize("sparse", [True, False])
def test_an_id_out_of_range_is_an_index_error_before_anything_is_written(wrong: int, sparse: bool) -> None:
    model = dlrm(sparse=sparse)
    ours = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours(*batch()).sum().backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    dense, ids = batch()
    ids[3, 0] = wrong
    with pytest.raises(IndexError, match=f"{wrong}"):
        ours(dense, ids)
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_troughput": 3}, "did you mean min_throughput"),
        ({"cluster": 7}, "option cluster is 7"),
        ({"policy": "r1"}, "did you mean 'rl'"),
        ({"microbatches": 0}, "whole number >= 1"),
        ({"verify": True}, "first_call"),
        ({"lazy_tables": 1}, "True or False"),
        ({"min_throughput": -1.0}, "number > 0"),
        ({"pin": "cpu"}, "layer glob"),
    ],
)
def test_wrong_options_name_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        heterps_compile.compile_(dlrm(), **options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(dlrm(), **options)(*batch())


def test_an_unsupported_mode_is_refused() -> None:
    ours = torch.compile(dlrm(), backend="heterps", mode="reduce-overhead")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="reduce-overhead"):
        ours(*batch())


def test_options_come_from_the_environment_where_torch_drops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERPS_OPTIONS", '{"min_troughput": 3}')
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean min_throughput"):
        torch.compile(dlrm(), backend="heterps")(*batch())


def test_verify_passes_and_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    reference = copy.deepcopy(model)
    x = torch.randn(16, 4)
    torch.manual_seed(3)
    ours = compiled(model, verify="first_call")(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, reference(x))
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_verify_raises_on_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from heterps_compile.passes import lower

    honest = lower.lookup_group
    monkeypatch.setattr(lower, "lookup_group", lambda *args: tuple(out * 1.01 for out in honest(*args)))
    with pytest.raises(VerificationError, match="differs from eager"):
        compiled(dlrm(), verify="first_call")(*batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(dlrm(), verify="never")(*batch())
