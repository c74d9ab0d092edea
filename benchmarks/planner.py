"""The planner on random tables: seconds, cost and gap to the proven optimum or bound, from 7 to 1,000 layers.

    python benchmarks/planner.py --sizes 20x4 200x8 1000x8 --seeds 0 1 2 --small 200

Every long table has a floor that can be reached, and in half of them limits near what reaches it (``random_costs.py``).
``plan`` is what ``heterps plan`` does without a policy: rl and exact, whichever is cheaper; its seconds hold both. The
small tables, of up to 7 layers and 3 types, go through the command line and are compared with ``tests/brute_force.py``,
which shares no code with the package; a limit binds where the optimum without limits costs less. Last, how many
placements the vectorised evaluator scores per second: all sweep points, and the first four, as while learning.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from random_costs import FLOORS, Table, long_table, random_table

from heterps_compile.cli import main as command
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.passes.place import POLICIES, Found
from heterps_compile.passes.place.search import random_placements
from heterps_compile.planning import Request, plan_costs
from heterps_compile.provision import score

T = TypeVar("T")
SECONDS_EACH = 60.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy on one table: ``seconds`` on the clock and of the processor, ``bound`` proven, in USD as ``cost``."""

    size: str
    seed: int
    policy: str
    seconds: tuple[float, float]
    cost: float
    bound: float
    points: str = ""

    def text(self) -> str:
        """A line of the table."""
        gap = self.cost / self.bound - 1 if self.bound > 0 else float("inf")
        cells = f"{self.seconds[0]:.2f} | {self.seconds[1]:.2f} | {self.cost:.5g} | {max(gap, 0.0):.3%} | {self.points}"
        return f"| {self.size} | {self.seed} | {self.policy} | {cells} |"


def rows(size: str, seed: int) -> list[Row]:
    """exact and rl by themselves, and the plan that is the cheaper of both."""
    num_layers, num_types = (int(n) for n in size.split("x"))
    table, floor = long_table(num_layers, num_types, seed)
    costs = CostTable.from_dict(table)
    model = CostModel.of(costs, None, floor)
    found: dict[str, tuple[Found, tuple[float, float]]] = {}
    for policy in ("exact", "rl"):
        found[policy] = timed(lambda: POLICIES[policy](model, seed, SECONDS_EACH))  # noqa: B023 (called at once)
    plan, seconds = timed(lambda: plan_costs(costs, None, Request(min_throughput=floor, seed=seed)))
    bound = found["exact"][0].lower_bound
    named = [
        Row(size=size, seed=seed, policy=name, seconds=s, cost=f.cost, bound=bound, points=str(f.points or ""))
        for name, (f, s) in found.items()
    ]
    return [
        *named,
        Row(
            size=size,
            seed=seed,
            policy="plan",
            seconds=seconds,
            cost=plan.cost_usd_per_million_samples,
            bound=plan.optimum_usd_per_million_samples,
        ),
    ]


def timed(work: Callable[[], T]) -> tuple[T, tuple[float, float]]:
    """What ``work`` returns, with its seconds on the clock and of the processor: others may use the machine too."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - start, time.process_time() - cpu)


def against_brute_force(count: int) -> str:
    """Plan ``count`` small tables with ``heterps plan --policy rl``, whose plan also says what exact proved."""
    brute = load_brute_force()
    exact_gaps, rl_gaps, infeasible, binding = [], [], 0, 0
    for seed in range(count):
        table, floor = random_table(seed, most_layers=7), FLOORS[seed // 3 % 4]
        best, plan = brute.brute_force(table, floor), planned(table, floor, "rl")
        if plan["feasible"] != (best is not None):
            raise SystemExit(f"seed {seed}: feasible is {plan['feasible']}, brute force says otherwise")
        free = planned(unlimited(table), floor, "exact")
        if best is None:
            infeasible += 1
            continue
        binding += free["cost_usd_per_million_samples"] < best.cost * (1 - 1e-9)
        exact_gaps.append(abs(plan["optimum_usd_per_million_samples"] / best.cost - 1))
        rl_gaps.append(plan["cost_usd_per_million_samples"] / best.cost - 1)
    return (
        f"{count} tables of up to 7 layers x 3 types through `heterps plan`, {infeasible} out of reach, limits bind in "
        f"{binding} of the others.\nAgainst brute force: exact differs by at most {max(exact_gaps):.1e}, rl by "
        f"{min(rl_gaps):.1e} to {max(rl_gaps):.1e}."
    )


def planned(table: Table, floor: float, policy: str) -> Table:
    """The plan that the command prints as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(json.dumps(table), encoding="utf-8")
        printed = io.StringIO()
        arguments = ["plan", "--costs", str(path), "--min-throughput", str(floor), "--policy", policy, "--json", "-"]
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            command(arguments)
    plan: Table = json.loads(printed.getvalue())
    return plan


def unlimited(table: Table) -> Table:
    return {**table, "resources": [{**resource, "limit": 10_000} for resource in table["resources"]]}


def load_brute_force() -> Any:
    """``tests`` is no package, and a folder in it is named as ours."""
    spec = importlib.util.spec_from_file_location("brute_force", Path(__file__).parents[1] / "tests" / "brute_force.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def placements_per_s(steps: int, count: int = 4096, repeats: int = 5) -> float:
    """Median over ``repeats`` of the placements of 20 layers x 4 types scored per second of the processor."""
    table, floor = long_table(20, 4, 0)
    model = CostModel.of(CostTable.from_dict(table), None, floor)
    placements = random_placements(model, count, np.random.default_rng(0))
    seconds = [timed(lambda: score(model, placements, steps))[1][1] for _ in range(repeats)]
    return count / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=["20x4", "200x8", "1000x8"], help="layers x types")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--small", type=int, default=200, help="small tables compared with brute force")
    options = parser.parse_args()
    print("| layers x types | seed | policy | seconds | CPU seconds | USD per million samples | gap | sweep points |")
    print("|---" * 8 + "|")
    for size in options.sizes:
        for seed in options.seeds:
            for row in rows(size, seed):
                print(row.text(), flush=True)
    if options.small:
        print(f"\n{against_brute_force(options.small)}")
    rates = [f"{placements_per_s(steps):,.0f}" for steps in (20_000, 4, 1)]
    print(f"\nPlacements of 20 layers x 4 types scored per CPU second: {rates[0]} over all sweep points,")
    print(f"{rates[1]} over four, {rates[2]} at the floor alone.")


if __name__ == "__main__":
    main()
