"""A plan with cpu and sim stages: parameters on both devices, results equal to eager, layers explained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import heterps_compile
from heterps_compile import models

ROWS = (40, 7, 300, 5)
CLUSTER = {
    "version": 1,
    "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 4}, {"name": "sim", "limit": 4, "device": "sim"}],
}


def batch(size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS], dim=1)
    return torch.rand(size, 13, generator=generator), ids


def pins(model: nn.Module) -> dict[str, str]:
    """Look-ups on cpu, everything else on sim."""
    from heterps_compile.planner import model_graph

    graph = model_graph(model, batch())
    return {layer.name: "cpu" if layer.lookups else "sim" for layer in graph}


@pytest.mark.parametrize("build", [models.DLRM, models.DeepFM], ids=["dlrm", "deepfm"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_trains_as_eager_with_parameters_on_both_devices(build: type[nn.Module], microbatches: int) -> None:
    sizes = {"bottom": (16,), "top": (16,)} if build is models.DLRM else {"deep": (16,)}
    reference = build(ROWS, 8, sparse=True, **sizes)
    model = copy.deepcopy(reference)
    options = {"cluster": CLUSTER, "pin": pins(model), "microbatches": microbatches}
    compiled = torch.compile(model, backend="heterps", options=options)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.05) for m in (model, reference)]
    for seed, size in enumerate((8, 8, 5, 1, 8)):
        outputs = [forward(*batch(size, seed)) for forward in (compiled, reference)]
        assert outputs[0].device.type == "cpu"
        torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-4, atol=2e-4)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
    devices = {name: p.device.type for name, p in model.named_parameters()}
    assert {kind for name, kind in devices.items() if "tables" in name} == {"cpu"}
    assert {kind for name, kind in devices.items() if "tables" not in name} == {"sim"}
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=2e-4, atol=2e-4, msg=lambda m, n=name: f"{n} {m}")
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(*batch(6, 9)), reference.eval()(*batch(6, 9)), rtol=2e-4, atol=2e-4)
    text = heterps_compile.explain(compiled)
    assert f"microbatches: {microbatches}" in text
    assert "sim:0" in text
    assert "generated C++" in text


def test_a_type_without_a_device_here_is_rehearsed_with_one_warning_or_refused() -> None:
    model = models.DLRM(ROWS, 8, bottom=(16,), top=(16,))
    cluster = {"version": 1, "resources": [{"name": "cpu", "limit": 4}, {"name": "v100", "limit": 4}]}
    options = {"cluster": cluster, "pin": {name: kind.replace("sim", "v100") for name, kind in pins(model).items()}}
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.warns(heterps_compile.HeterpsWarning, match="no 'cuda' device"):
        ours = torch.compile(model, backend="heterps", options=options)(*batch())
    torch.testing.assert_close(ours, model(*batch()))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="run the plan where the device is"):
        torch.compile(model, backend="heterps", options={**options, "strict": True})(*batch())


def test_a_layer_that_writes_into_an_input_stays_where_the_input_is() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            hidden = self.first(x).relu()
            seen.add_(hidden.detach().sum(0))
            return self.second(hidden)

    model = Writes()
    x, ours, theirs = torch.randn(5, 3), torch.zeros(4), torch.zeros(4)
    expected = model(x, theirs)
    compiled = torch.compile(model, backend="heterps", options={"cluster": CLUSTER, "pin": {"second": "sim"}})
    torch.testing.assert_close(compiled(x, ours), expected)
    torch.testing.assert_close(ours, theirs)
    assert model.second.weight.device.type == "sim"


def test_tensors_made_inside_a_stage_are_made_on_its_device() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.second(self.first(x).relu())
            weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
            return (
                nn.functional.cross_entropy(hidden @ hidden.t(), torch.arange(hidden.shape[0]))
                + (hidden * weights).sum()
            )

    model, x = Makes(), torch.randn(5, 3)
    expected = model(x)
    compiled = torch.compile(model, backend="heterps", options={"cluster": CLUSTER, "pin": {"*": "sim"}})
    for rows in (5, 3, 4):
        result = compiled(x[:rows])
        if rows == 5:
            torch.testing.assert_close(result, expected)
    assert model.second.weight.device.type == "sim"


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    model = models.DLRM(ROWS, 8, bottom=(16,), top=(16,))
    plan = heterps_compile.plan(model, batch(), cluster=CLUSTER, profile="estimate").to_dict()
    plan["stages"][0]["layers"][0] = "no such layer"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="allowed: a layer of a stage"):
        torch.compile(model, backend="heterps", options={"plan": plan})(*batch())
