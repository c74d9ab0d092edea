"""The simulated accelerator: CPU numbers bit for bit, a real accelerator's manners about devices."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterps_compile.devices import sim
from heterps_compile.errors import DeviceError

DEVICE = sim.install()


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x)[0]
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 1)), lambda: torch.randn(7, 6)),
    "batchnorm": (lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU()), lambda: torch.randn(7, 6)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 2)), lambda: torch.randn(7, 6)),
    "attention": (Attention, lambda: torch.randn(2, 9, 6)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True),
        lambda: torch.randn(2, 9, 6),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(2, 4, 6)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(2, 4, 6)),
    "embedding": (lambda: nn.Embedding(10, 3), lambda: torch.randint(0, 10, (4, 5))),
    "embedding-sparse": (lambda: nn.Embedding(10, 3, sparse=True), lambda: torch.randint(0, 10, (4, 5))),
    "bag": (lambda: nn.EmbeddingBag(10, 3, mode="mean"), lambda: torch.randint(0, 10, (4, 5))),
    "bag-sparse": (lambda: nn.EmbeddingBag(10, 3, mode="sum", sparse=True), lambda: torch.randint(0, 10, (4, 5))),
}


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Two steps without an update: both outputs, all gradients and the buffers, brought to the CPU."""
    torch.manual_seed(3)
    outputs = []
    for _ in range(2):
        outputs.append(model(x))
        outputs[-1].square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [*outputs, *(g.to_dense() for g in gradients if g is not None), *model.buffers()]
    return [value.detach().cpu() for value in values]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_numbers_equal_the_cpus_bit_for_bit(name: str, training: bool) -> None:
    build, data = MODELS[name]
    model, x = build().train(training), data()
    twin = copy.deepcopy(model).to(DEVICE)
    assert {tensor.device for tensor in twin.state_dict().values()} == {DEVICE}
    for ours, theirs in zip(train(twin, x.to(DEVICE)), train(model, x), strict=True):
        assert torch.equal(ours, theirs)
    with torch.inference_mode():
        assert torch.equal(twin.eval()(x.to(DEVICE)).cpu(), model.eval()(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(3, 2, device=device),
        lambda device: torch.full((2,), 3.5, device=device),
        lambda device: torch.arange(1, 9, 2, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.rand(4, device=device),
        lambda device: torch.randn(4, device=device).normal_(),
        lambda device: torch.randperm(9, device=device),
        lambda device: torch.randint(0, 9, (5,), device=device),
        lambda device: torch.rand(2, device=device, generator=torch.Generator().manual_seed(1)),
        lambda device: torch.tensor([[1.0, 2.0]], device=device),
        lambda device: torch.as_tensor(np.ones((2, 2)), device=device),
        lambda device: torch.ones(2, 3, device=device).new_tensor([1, 2]),
        lambda device: torch.zeros_like(torch.ones(2, 3), device=device),
        lambda device: torch.empty(0, device=device).resize_(2, 2).fill_(4),
        lambda device: torch.add(torch.ones(2, device=device), 1, out=torch.empty(0, device=device)),
    ],
)
def test_factories_make_what_the_cpu_makes(make: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(5)
    ours = make("sim")
    torch.manual_seed(5)
    theirs = make("cpu")
    assert (ours.device, ours.dtype, ours.shape, ours.stride()) == (DEVICE, theirs.dtype, theirs.shape, theirs.stride())
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[:, 1].mul_(3),
        lambda t: t.t()[0].fill_(7),
        lambda t: t.view(-1)[4:].copy_(torch.ones(2)),
        lambda t: t.as_strided((2, 2), (1, 2)).zero_(),
        lambda t: t.expand(2, 2, 3)[0].sub_(1),
        lambda t: t.transpose_(0, 1).clamp_(min=0),
        lambda t: t.unsqueeze_(0).neg_(),
        lambda t: t.__setitem__((0, slice(1, 3)), 5.0),
        lambda t: t.index_put_((torch.tensor([1]),), torch.tensor(2.0)),
        lambda t: torch._foreach_add_([t, t], 1.0),
        lambda t: t.set_(torch.full_like(t, 2)),
        lambda t: t.detach().exp_(),
        lambda t: setattr(t, "data", t * 2),
    ],
)
def test_views_and_changes_in_place_share_memory_as_on_the_cpu(change: Callable[[Tensor], Any]) -> None:
    theirs = torch.arange(6.0).view(2, 3)
    ours = theirs.to("sim")
    change(ours)
    change(theirs)
    assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
    assert torch.equal(ours.cpu(), theirs)


def test_a_view_tells_torch_whose_memory_it_is() -> None:
    ours = torch.ones(2, 3, device="sim")
    assert torch._C._is_alias_of(ours, ours[0])  # what AOTAutograd asks of its inputs
    assert not torch._C._is_alias_of(ours, ours.clone())


def test_a_change_in_place_that_a_backward_needs_is_noticed() -> None:
    w = torch.ones(3, device="sim", requires_grad=True)
    y = (w * w).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_moving_copies_and_is_counted() -> None:
    x = torch.arange(6.0).view(2, 3)
    before = sim.transfers()
    ours = x.to("sim")
    assert ours.to("sim") is ours
    assert ours.to(torch.float64).device == DEVICE
    assert (sim.transfers() - before) == sim.Transfers(num_to_sim=1, bytes_to_sim=24)
    ours.add_(1)
    assert torch.equal(x, torch.arange(6.0).view(2, 3))
    back = torch.empty(2, 3)
    back.copy_(ours)
    assert ours[0, 0].item() == 1.0
    assert ours.tolist() == (x + 1).tolist() == back.tolist()
    assert (sim.transfers() - before) == sim.Transfers(
        num_to_sim=1, bytes_to_sim=24, num_to_cpu=3, bytes_to_cpu=24 + 4 + 24
    )


@pytest.mark.parametrize(
    ("mix", "operator"),
    [
        (lambda ours, theirs: ours + theirs, r"aten\.add"),
        (lambda ours, theirs: theirs @ ours.t(), r"aten\.(mm|matmul)"),
        (lambda ours, theirs: torch.cat([ours, theirs]), r"aten\.cat"),
        (lambda ours, theirs: theirs.add_(ours), r"aten\.add_"),
        (lambda ours, theirs: F.embedding(theirs[0].long(), ours), r"aten\.embedding"),
        (lambda ours, theirs: F.mse_loss(ours, theirs), r"aten\.(mse_loss|broadcast_tensors)"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"])
def test_operands_on_two_devices_are_refused_by_name(
    mix: Callable[[Tensor, Tensor], Any], operator: str, mode: Callable[[], Any]
) -> None:
    with mode():
        ours, theirs = torch.ones(2, 3, device="sim"), torch.ones(2, 3)
        with pytest.raises(DeviceError, match=rf"{operator}.*two devices: sim:0, and cpu \(shape \([23]"):
            mix(ours, theirs)


def test_cpu_scalars_are_read_but_never_written() -> None:
    ours, scalar = torch.ones(2, device="sim"), torch.tensor(2.0)
    assert (ours * scalar).tolist() == [2.0, 2.0]
    assert ours[torch.tensor([0])].device == DEVICE
    with pytest.raises(DeviceError, match=r"aten\.add_\.Tensor would write numbers of sim:0 into a tensor on cpu"):
        scalar.add_(ours.sum())


def test_what_needs_host_memory_says_so() -> None:
    ours = torch.ones(2, device="sim")
    with pytest.raises(DeviceError, match=r"tensor\.cpu\(\)\.numpy\(\)"):
        ours.numpy()
    assert ours.numpy(force=True).tolist() == [1.0, 1.0]
    with pytest.raises(DeviceError, match="move_in_place"):
        ours.data = torch.ones(2)


def test_printing() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], device="sim"))
    assert repr(weight) == "Parameter containing:\ntensor([1., 2.], device='sim:0', requires_grad=True)"
    assert repr(weight * 2) == "tensor([2., 4.], device='sim:0', grad_fn=<MulBackward0>)"
    assert f"{weight.sum():.1f}" == "3.0"


def test_deepcopy_keeps_the_device_and_shared_memory() -> None:
    base = torch.arange(4.0).to("sim")
    weight = nn.Parameter(torch.ones(2, device="sim"))
    weight.note = "mine"  # type: ignore[attr-defined]
    weight.grad = torch.ones(2, device="sim")
    twin, twin_base, twin_view = copy.deepcopy([weight, base, base[:2]])
    assert isinstance(twin, nn.Parameter)
    assert (twin.note, twin.device, twin.grad.tolist(), twin.requires_grad) == ("mine", DEVICE, [1.0, 1.0], True)
    twin_view.zero_()
    assert twin_base.tolist() == [0.0, 0.0, 2.0, 3.0]
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 2)


def test_saved_tensors_come_back_on_the_cpu_and_load_into_either_device() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to("sim")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    twin, plain = copy.deepcopy(model), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    nn.init.zeros_(twin[0].weight)
    for target in (twin, plain):
        target.load_state_dict(state)
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor.cpu(), state[name])
    plain.load_state_dict(model.state_dict())
    weight = pickle.loads(pickle.dumps(model[0].weight))
    assert type(weight) is nn.Parameter
    assert weight.requires_grad


def test_a_file_loads_where_the_device_is_unknown(tmp_path: Any) -> None:
    torch.save({"w": nn.Parameter(torch.ones(2, device="sim"))}, tmp_path / "model.pt")
    code = f"import torch; print(torch.load({str(tmp_path / 'model.pt')!r})['w'].tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1.0, 1.0]", done.stderr


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
    ],
    ids=["sgd", "adagrad", "adam", "adamw", "rmsprop"],
)
def test_optimizers_step_alike(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    twin = copy.deepcopy(model).to("sim")
    x = torch.randn(5, 3)
    for net, data in ((model, x), (twin, x.to("sim"))):
        optimizer = build(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.SparseAdam], ids=["sgd", "sparse-adam"])
def test_sparse_gradients_stay_sparse_and_update_alike(build: Callable[..., torch.optim.Optimizer]) -> None:
    table = nn.Embedding(6, 2, sparse=True)
    twin = copy.deepcopy(table).to("sim")
    ids = torch.tensor([1, 1, 4])
    for net, data in ((table, ids), (twin, ids.to("sim"))):
        net(data).square().sum().backward()
        assert net.weight.grad is not None
        assert net.weight.grad.is_sparse
        build(list(net.parameters()), lr=0.1).step()
    assert twin.weight.grad is not None
    assert twin.weight.grad.device == DEVICE
    assert torch.equal(twin.weight.cpu(), table.weight)


def test_clipping_and_scaling_over_both_devices() -> None:
    cpu = nn.Parameter(torch.tensor([3.0]))
    ours = nn.Parameter(torch.tensor([4.0], device="sim"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([cpu, ours], lr=1.0)
    loss = (cpu.square() / 2 + ours.cpu().square() / 2).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert (cpu.grad.tolist(), ours.grad.tolist()) == ([3.0], [4.0])  # type: ignore[union-attr]
    norm = nn.utils.clip_grad_norm_([cpu, ours], 1.0)
    assert norm.item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    assert cpu.item() == pytest.approx(2.4, abs=1e-5)
    assert ours.item() == pytest.approx(3.2, abs=1e-5)


def test_autocast_casts_what_it_casts_on_the_cpu() -> None:
    model, x, target = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3)
    twin = copy.deepcopy(model).to("sim")
    results = {}
    for kind, net in (("cpu", model), ("sim", twin)):
        with torch.autocast(kind, dtype=torch.bfloat16):
            y = net(x.to(kind))
            both = torch.cat([y, target.to(kind)])
            loss = F.mse_loss(y, y.detach().relu())
        loss.backward()
        results[kind] = [y, both, loss, net.weight.grad]
    for ours, theirs in zip(results["sim"], results["cpu"], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twin(x.to("sim")).dtype is torch.float32  # as for CUDA tensors: another device's autocast
        assert Attention().to("sim")(torch.ones(1, 2, 6, device="sim")).dtype is torch.float32


def test_compiled_code_is_cached_by_what_it_was_compiled_for() -> None:
    first, same, other = (torch.ones(rows, 2, device="sim")._stable_hash_for_caching() for rows in (3, 3, 4))
    assert first == same
    assert first != other


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamo_traces_through(backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    twin, x = copy.deepcopy(model).to("sim"), torch.randn(6, 4)
    compiled = torch.compile(twin, backend=backend)
    assert torch.equal(compiled(x.to("sim")).cpu(), model(x))
    compiled(x.to("sim")).sum().backward()
    model(x).sum().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.cpu(), theirs.grad)


def test_double_backward_through_an_operator_run_whole() -> None:
    grids = {}
    for kind in ("cpu", "sim"):
        torch.manual_seed(1)
        cell, x = nn.RNN(3, 2).to(kind), torch.ones(2, 3, device=kind, requires_grad=True)
        (slope,) = torch.autograd.grad(cell(x)[0].square().sum(), x, create_graph=True)
        grids[kind] = torch.autograd.grad(slope.square().sum(), list(cell.parameters()))
    for ours, theirs in zip(grids["sim"], grids["cpu"], strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_the_generator_is_the_cpus() -> None:
    with torch.random.fork_rng():
        inside = torch.rand(2, device="sim")
    assert torch.equal(torch.rand(2), inside.cpu())


def test_importing_installs_nothing_and_installing_twice_is_once() -> None:
    code = (
        "import torch, heterps_compile, heterps_compile.devices.sim as sim;"
        "assert not sim.is_installed() and not hasattr(torch, 'sim');"
        "assert sim.install() == sim.install() == torch.device('sim:0') and sim.is_installed()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_taken_device_type_is_named() -> None:
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('npu');"
        "import heterps_compile.devices.sim as sim; sim.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DeviceError: the simulated accelerator needs" in done.stderr
    assert "'npu' holds" in done.stderr


def test_inference_mode_knows_both_devices() -> None:
    with torch.inference_mode():
        ours = torch.ones(2, 3).to("sim")
        assert ours.to("sim") is ours
        assert ours.to(torch.float32) is ours
        assert ours.cpu().device.type == "cpu"
        assert ours.to(torch.zeros(1)).device.type == "cpu"
        assert ours[0].expand_as(torch.zeros(4, 3)).shape == (4, 3)
        assert ours.new_zeros(2, device="cpu").device.type == "cpu"
        ours.square_().reshape(-1)[0] = 5
        assert ours.tolist()[0][0] == 5.0
        model = nn.LSTM(3, 2)
        with pytest.raises(DeviceError, match=r"aten\.lstm.*two devices"):
            model(ours)
    with pytest.raises(DeviceError, match=r"aten\.lstm.*two devices"):
        model(torch.ones(2, 3, device="sim"))


def test_installing_after_the_first_backward_says_what_to_do() -> None:
    code = (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()\n"
        "from heterps_compile.devices import sim\n"
        "sim.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DeviceError: the simulated accelerator came too late" in done.stderr
    assert "at the start of the program" in done.stderr
