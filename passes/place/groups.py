"""Neighbouring layers in groups: where a chain is too long to place layer by layer."""

from __future__ import annotations

import numpy as np

from heterps_compile.cost_model import CostModel, Ints


def neighbour_groups(model: CostModel, most: int, strict: bool = False) -> Ints:
    """(L,): the number of the group of each layer, ascending from 0.

    Chains are cut where what is allowed changes, around layers that share a table, and where the relative speeds of the
    types change most. The first two can make more than ``most`` groups, unless ``strict``.
    """
    if model.num_layers <= most:
        return np.arange(model.num_layers)
    speed = np.log(model.terms[..., :4].sum(axis=2) + 1e-12)
    speed -= speed.mean(axis=1, keepdims=True)
    change = np.abs(np.diff(speed, axis=0)).sum(axis=1)
    change[(model.allowed[1:] != model.allowed[:-1]).any(axis=1)] = np.inf
    for group in model.bound:
        for index in group:
            change[max(index - 1, 0) : index + 1] = np.inf
    forced = 0 if strict else int(np.isinf(change).sum())
    cuts = np.argsort(-change, kind="stable")[: max(most - 1, forced)]
    return np.cumsum(np.isin(np.arange(model.num_layers), cuts + 1))
