"""The problems of ``heterps bench paper``: a model of the paper, a cluster of 2, 4 or 8 types, a throughput floor.

Costs are estimated from the traced model and the catalog's rates, so no GPU is needed and nothing of the model runs.
The paper gives prices of its two types (a core 0.04, a V100 2.42 USD per hour), which are used here; limits and floors
it does not give. Ours: as many units as a large tenant could rent, and, per model, the smallest of ``FLOOR_MULTIPLES``
of the throughput of one V100 at which the cheapest plan on cores and V100s needs both. The three clusters of a model
have the same floor, so their costs can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import CostModel, stage_time_s, throughput_samples_per_s
from heterps_compile.costs import CostTable
from heterps_compile.models import PAPER_MODELS
from heterps_compile.passes.place import POLICIES
from heterps_compile.planner import model_costs

TYPES = ("cpu", "v100", "t4", "a10g", "l4", "a100-40", "h100", "kunlun")
"""Names of the catalog; a cluster of n types holds the first n."""
NUM_TYPES = (2, 4, 8)
PAPER_PRICES_USD_PER_H = {"cpu": 0.04, "v100": 2.42}
LIMITS = {"cpu": 9600}
CARD_LIMIT = 256
FLOOR_MULTIPLES = tuple(range(5, 45, 5))
FLOOR_TIME_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One problem. ``floor_multiple`` is the floor over the throughput of one V100 that holds the whole model."""

    model: str
    problem: CostModel
    floor_multiple: float

    @property
    def name(self) -> str:
        """``matchnet, 4 types``."""
        return f"{self.model}, {self.problem.num_types} types"

    @property
    def min_throughput(self) -> float:
        """The floor in samples per second."""
        assert self.problem.min_throughput is not None
        return self.problem.min_throughput


def cases(models: Sequence[str], num_types: Sequence[int]) -> Iterator[Case]:
    """Every model on every cluster; each model is traced once."""
    for name in models:
        model, inputs = PAPER_MODELS[name]()
        costs = model_costs(model, inputs, cluster(len(TYPES)), "estimate")
        multiple, floor = floor_of(costs)
        for count in num_types:
            problem = CostModel.of(costs, cluster(count), floor)
            yield Case(model=name, problem=problem, floor_multiple=multiple)


def cluster(num_types: int) -> Cluster:
    """The first ``num_types`` types with the catalog's rates, the paper's prices where it has them, and our limits."""
    entries = []
    for name in TYPES[:num_types]:
        entry = {"name": name, "limit": LIMITS.get(name, CARD_LIMIT)}
        if name in PAPER_PRICES_USD_PER_H:
            entry["price_usd_per_h"] = PAPER_PRICES_USD_PER_H[name]
        entries.append(entry)
    return Cluster.from_dict({"resources": entries})


def floor_of(costs: CostTable) -> tuple[float, float]:
    """The floor of a model: its multiple of one V100's throughput, and samples per second.

    Where no multiple makes the cheapest plan use both types, the largest that can be reached.
    """
    problem = CostModel.of(costs, cluster(2))
    one = one_unit_samples_per_s(problem, "v100")
    reachable = FLOOR_MULTIPLES[0]
    for multiple in FLOOR_MULTIPLES:
        found = POLICIES["exact"](replace(problem, min_throughput=multiple * one), 0, FLOOR_TIME_LIMIT_S)
        if found.chosen is None:
            break
        reachable = multiple
        if len(np.unique(found.chosen)) > 1:
            break
    return float(reachable), reachable * one


def one_unit_samples_per_s(problem: CostModel, kind: str) -> float:
    """Throughput of a single unit that holds every layer."""
    terms = problem.terms[:, problem.types.index(kind)].sum(axis=0)
    return throughput_samples_per_s(float(stage_time_s(terms, np.ones(()))))
