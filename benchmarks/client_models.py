"""Builders of the models of deepctr-torch and torch-rechub that must run unmodified: each gives (model, inputs).

Used by the client tests and by ``clients.py``, which prints a table of them. Raises ImportError where the package is
not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]

BATCH = 6
SINGLE = ["WDL", "DeepFM", "xDeepFM", "DIFM", "IFM", "AutoInt", "DCN", "DCNMix", "FiBiNET", "NFM", "ONN", "AFN"]
SPARSE_ONLY = ["AFM", "CCPM"]
ONE_LIST = ["MLR", "PNN"]
MULTITASK = ["SharedBottom", "ESMM", "MMOE", "PLE"]
SEQUENCE = ["DIN", "DIEN"]
RECHUB = ["WideDeep", "DeepFM", "DCN", "DCNv2", "AutoInt"]


def deepctr(name: str) -> Built:
    library = import_module("deepctr_torch.models")
    inputs = import_module("deepctr_torch.inputs")
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


def deepctr_sequence(name: str) -> Built:
    library = import_module("deepctr_torch.models")
    inputs = import_module("deepctr_torch.inputs")
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


def rechub(name: str) -> Built:
    library = import_module("torch_rechub.models.ranking")
    features = import_module("torch_rechub.basic.features")
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


CASES: list[tuple[str, Callable[[str], Built]]] = [
    *((name, deepctr) for name in SINGLE + ONE_LIST + SPARSE_ONLY + MULTITASK),
    *((name, deepctr_sequence) for name in SEQUENCE),
    *((name, rechub) for name in RECHUB),
]
