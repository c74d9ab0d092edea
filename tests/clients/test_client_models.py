"""Models of deepctr-torch and torch-rechub run unmodified under the backend: forward and gradients equal eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterps_compile
from heterps_compile.compiled import compiled_graphs

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:deepctr_torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_rechub"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]

BATCH = 6
SINGLE = ["WDL", "DeepFM", "xDeepFM", "DIFM", "IFM", "AutoInt", "DCN", "DCNMix", "FiBiNET", "NFM", "ONN", "AFN"]
SPARSE_ONLY = ["AFM", "CCPM"]
ONE_LIST = ["MLR", "PNN"]
MULTITASK = ["SharedBottom", "ESMM", "MMOE", "PLE"]
SEQUENCE = ["DIN", "DIEN"]
RECHUB = ["WideDeep", "DeepFM", "DCN", "DCNv2", "AutoInt"]


def deepctr(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    library = pytest.importorskip("deepctr_torch.models", reason="deepctr-torch is not installed")
    inputs = pytest.importorskip("deepctr_torch.inputs")
    ids = [inputs.SparseFeat(f"C{i}", vocabulary_size=100, embedding_dim=8) for i in range(26)]
    dense = [inputs.DenseFeat(f"I{i}", 1) for i in range(13)]
    x = torch.cat([torch.randint(0, 100, (BATCH, 26)).float(), torch.rand(BATCH, 13)], 1)
    build = getattr(library, name)
    if name in SINGLE:
        return build(ids + dense, ids + dense, task="binary"), (x,)
    if name in ONE_LIST:
        return build(ids + dense, task="binary"), (x,)
    if name in SPARSE_ONLY:
        return build(ids, ids, task="binary"), (x[:, :26].contiguous(),)
    return build(ids + dense, task_types=["binary"] * 2, task_names=["ctr", "ctcvr"]), (x,)


def deepctr_sequence(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    library = pytest.importorskip("deepctr_torch.models", reason="deepctr-torch is not installed")
    inputs = pytest.importorskip("deepctr_torch.inputs")
    history = inputs.VarLenSparseFeat(
        inputs.SparseFeat("hist_item_id", 50, 8, embedding_name="item_id"), maxlen=6, length_name="seq_length"
    )
    features = [
        inputs.SparseFeat("user", 10, 8),
        inputs.SparseFeat("gender", 3, 8),
        inputs.SparseFeat("item_id", 50, 8),
        inputs.DenseFeat("pay", 1),
        history,
    ]
    lengths = torch.randint(1, 7, (BATCH, 1))
    past = torch.randint(1, 50, (BATCH, 6)) * (torch.arange(6) < lengths)
    columns = [torch.randint(0, n, (BATCH, 1)) for n in (10, 3, 50)]
    x = torch.cat([*(c.float() for c in columns), torch.rand(BATCH, 1), past.float(), lengths.float()], 1)
    extra = {"gru_type": "GRU"} if name == "DIEN" else {}
    return getattr(library, name)(features, ["item_id"], **extra), (x,)


def rechub(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    library = pytest.importorskip("torch_rechub.models.ranking", reason="torch-rechub is not installed")
    features = pytest.importorskip("torch_rechub.basic.features")
    ids = [features.SparseFeature(f"C{i}", 100, 8) for i in range(26)]
    dense = [features.DenseFeature(f"I{i}") for i in range(13)]
    mlp = {"dims": [64, 32], "dropout": 0.0, "activation": "relu"}
    arguments = {
        "WideDeep": (ids, ids + dense, mlp),
        "DeepFM": (dense + ids, ids, mlp),
        "DCN": (ids + dense, 3, mlp),
        "DCNv2": (ids + dense, 3, mlp),
    }
    x = {f"C{i}": torch.randint(0, 100, (BATCH,)) for i in range(26)} | {f"I{i}": torch.rand(BATCH) for i in range(13)}
    if name == "AutoInt":
        return library.AutoInt(ids, dense, mlp_params=mlp), (x,)
    return getattr(library, name)(*arguments[name]), (x,)


CASES: list[tuple[str, Callable[[str], tuple[nn.Module, tuple[Any, ...]]]]] = [
    *((name, deepctr) for name in SINGLE + ONE_LIST + SPARSE_ONLY + MULTITASK),
    *((name, deepctr_sequence) for name in SEQUENCE),
    *((name, rechub) for name in RECHUB),
]


def run(model: nn.Module, forward: Callable[..., Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    output = forward(*inputs)
    output.square().sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "build"), CASES, ids=[f"{b.__name__}-{n}" for n, b in CASES])
def test_runs_unmodified_and_equals_eager(
    name: str, build: Callable[[str], tuple[nn.Module, tuple[Any, ...]]], record_property: Callable[..., None]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = build(name)
        reference = copy.deepcopy(model)
        output, gradients = run(model, torch.compile(model, backend="heterps"), inputs)
        expected, wanted = run(reference, reference, inputs)
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-4)
    assert gradients.keys() == wanted.keys()
    torch.testing.assert_close(gradients, wanted, rtol=2e-4, atol=2e-4)
    graphs = compiled_graphs(model)
    assert heterps_compile.is_planned(model)
    record_property("graphs", len(graphs))
    record_property("layers", sum(len(g.report.graph) for g in graphs))
