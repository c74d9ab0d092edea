"""Moving in place: one Python object before and after, and nothing that held it is left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from heterps_compile.devices import sim
from heterps_compile.devices.move import move_in_place, move_optimizer_state, tracing_across_devices
from heterps_compile.errors import DeviceError

DEVICE = sim.install()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(self.table(ids)).relu()).squeeze(1)
        return out


def move_dense(model: Net, device: torch.device | str) -> None:
    for parameter in (*model.hidden.parameters(), *model.out.parameters()):
        move_in_place(parameter, device)


def on_both(model: Net, ids: Tensor) -> Tensor:
    x = model.table(ids).to("sim")
    return model.out(model.hidden(x).relu()).squeeze(1).cpu()


def test_identity_class_attributes_and_gradient_stay() -> None:
    weight = nn.Parameter(torch.arange(4.0))
    weight.note = "mine"  # type: ignore[attr-defined]
    weight.grad = torch.ones(4)
    before, reference = id(weight), weakref.ref(weight)
    for _ in range(2):
        move_in_place(weight, "sim")
        assert (id(weight), reference()) == (before, weight)
        assert (weight.device, weight.grad.device, weight.is_leaf, weight.requires_grad) == (DEVICE, DEVICE, True, True)
        assert isinstance(weight, nn.Parameter)
        move_in_place(weight, "cpu")
        assert type(weight) is nn.Parameter
        assert weight.__dict__ == {"note": "mine"}
        assert (weight.tolist(), weight.grad.tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0] * 4)
    move_in_place(weight, "cpu")  # already there


def test_buffers_move_and_stay_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    for tensor in (*norm.parameters(), *norm.buffers()):
        move_in_place(tensor, "sim")
    assert norm.running_mean is mean
    assert set(dict(norm.named_buffers())) == {"running_mean", "running_var", "num_batches_tracked"}
    x = torch.randn(5, 3)
    assert torch.equal(norm(x.to("sim")).cpu(), nn.BatchNorm1d(3)(x))
    assert type(copy.deepcopy(norm).running_mean) is type(mean)


def test_training_goes_on_with_the_optimizer_made_before() -> None:
    model = Net()
    twin, ids = copy.deepcopy(model), torch.tensor([1, 2, 2, 7])
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1, weight_decay=0.01) for m in (model, twin)]
    for step in range(4):
        if step == 2:
            move_dense(model, "sim")
            move_optimizer_state(optimizers[0])
        for out, optimizer in zip(
            ((on_both if step > 1 else Net.forward)(model, ids), twin(ids)), optimizers, strict=True
        ):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert model.hidden.weight.device == DEVICE
    plain = copy.deepcopy(twin)
    plain.load_state_dict(model.state_dict())
    torch.optim.Adagrad(plain.parameters()).load_state_dict(optimizers[0].state_dict())


def test_step_counters_stay_where_the_optimizer_keeps_them() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    move_in_place(weight, "sim")
    move_optimizer_state(optimizer)
    places = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert places == {"step": "cpu", "exp_avg": "sim", "exp_avg_sq": "sim"}
    weight.grad = torch.ones(2, device="sim")
    optimizer.step()


def test_a_graph_recorded_before_the_move_sends_its_gradient_after() -> None:
    model, ids = Net(), torch.tensor([1, 2])
    loss = model(ids).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    move_dense(model, "sim")
    loss.backward(retain_graph=True)
    (loss + on_both(model, ids).sum()).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.device == parameter.device
        torch.testing.assert_close(parameter.grad.cpu(), 3 * gradient)


def test_an_old_graph_keeps_the_numbers_it_was_recorded_with() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    loss = weight.square().sum()
    move_in_place(weight, "sim")
    with torch.no_grad():
        weight.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0]


def test_hooks_move_along_and_can_still_be_removed() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), list[str]()

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.device.type)
        return gradient * 2

    handle = weight.register_hook(double)
    late = weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    move_in_place(weight, "sim")
    weight.sum().backward()
    assert seen == ["sim", "after"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
    handle.remove()
    late.remove()
    weight.sum().backward()
    assert seen == ["sim", "after"]


def test_what_cannot_be_moved_unnoticed_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(
        DeviceError, match=r"(?s)result of an operation to sim in place: \(2,\) on cpu.*tensor = tensor\.to\(device\)"
    ):
        move_in_place(weight * 2, "sim")
    with pytest.raises(DeviceError, match=r"(?s)nn\.parameter\.UninitializedParameter.*pin the layers"):
        move_in_place(nn.UninitializedParameter(), "sim")
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    loss = weight.square().sum()
    with pytest.raises(DeviceError, match=r"(?s)post-accumulate-grad hooks and is in a live graph.*backward\(\)"):
        move_in_place(weight, "sim")
    loss.backward()
    del loss
    move_in_place(weight, "sim")
    assert weight.device == DEVICE


def test_old_memory_is_freed() -> None:
    weight = nn.Parameter(torch.ones(2))
    storage = weakref.ref(weight.untyped_storage())
    move_in_place(weight, "sim")
    gc.collect()
    assert storage() is None


def placing_backend(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Moves what the linear layers read at the first call, and inserts the transfers Split would insert."""

    class Crossing(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            linear = target in (F.linear, torch._C._nn.linear)
            return super().call_function(target, tuple(a.to("sim") for a in args) if linear else args, kwargs)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)

        @torch.compiler.disable
        def call(*args: Any) -> tuple[Any, ...]:
            for parameter in [arg for arg in args if isinstance(arg, nn.Parameter)][1:]:
                move_in_place(parameter, "sim")
            return tuple(out.cpu() for out in Crossing(gm).run(*args))

        return call

    return backend


def test_dynamo_traces_again_once_parameters_sit_on_two_devices() -> None:
    model, graphs = Net(), list[fx.GraphModule]()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=placing_backend(graphs))
    for rows in (3, 3, 4, 6):
        ids = torch.arange(rows)
        ours, theirs = compiled(ids), twin(ids)
        assert torch.equal(ours, theirs)
        for net, out in ((model, ours), (twin, theirs)):
            net.zero_grad()
            out.sum().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert torch.equal(mine.grad.cpu(), other.grad)  # type: ignore[arg-type]
    assert len(graphs) == 3  # all on the CPU; on both devices; with a dynamic batch
    devices = {
        node.name: node.meta["example_value"].device.type for node in graphs[1].graph.nodes if node.op != "output"
    }
    assert set(devices.values()) == {"cpu", "sim"}


def test_the_preferred_device_type_holds_while_tracing_only() -> None:
    seen = list[str | None]()

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(torch._functorch.config.fake_tensor_prefer_device_type)
        return gm.forward

    tracing_across_devices("cuda")
    tracing_across_devices("cuda")
    from torch._dynamo.callback import callback_handler

    assert len(callback_handler.start_callbacks) == len(callback_handler.end_callbacks) == 1
    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == ["cuda"]
    assert torch._functorch.config.fake_tensor_prefer_device_type is None

    def broken(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        torch.compile(lambda x: x * 3, backend=broken)(torch.ones(2))
    assert torch._functorch.config.fake_tensor_prefer_device_type is None


@pytest.mark.gpu
def test_the_same_on_cuda() -> None:
    model, ids = Net(), torch.tensor([1, 2])
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    expected = model(ids)
    move_dense(model, "cuda")
    tracing_across_devices("cuda")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    out = model.out(model.hidden(model.table(ids).to("cuda")).relu()).squeeze(1).cpu()
    torch.testing.assert_close(out, expected)
