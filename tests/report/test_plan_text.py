"""``explain`` says what to rent and why, in fewer than 60 lines whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heterps_compile.cluster import ResourceType
from heterps_compile.costs import CostTable
from heterps_compile.plan_facts import Alternative, Reason, Stage
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan
from heterps_compile.report.plan_text import explain


def table(num_layers: int) -> CostTable:
    types = {"cpu": 0.04, "v100": 2.42}
    return CostTable.from_dict(
        {
            "batch_size": 1000,
            "resources": [{"name": name, "price_usd_per_h": price, "limit": 400} for name, price in types.items()],
            "layers": [{"name": f"layer_{i}"} for i in range(num_layers)],
            "costs": {
                f"layer_{i}": {
                    "cpu": {"compute_s": 0.12 if i % 3 else 0.01, "communication_s": 0.05, "source": "measured"},
                    "v100": {"compute_s": 0.002, "communication_s": 0.04, "source": "estimated"},
                }
                for i in range(num_layers)
            },
        }
    )


def hand_plan(**changes: Any) -> Plan:
    """Tables on 30 cores, the rest on a card: what a planner would say, written by hand."""
    facts: dict[str, Any] = {
        "placement": {"emb": "cpu", "mlp": "v100", "out": "v100"},
        "stages": (
            Stage(resource="cpu", layers=("emb",), replicas=30, throughput_samples_per_s=80_000.0, bound_by="memory"),
            Stage(resource="v100", layers=("mlp", "out"), throughput_samples_per_s=60_000.0, bound_by="communication"),
        ),
        "provision": {"cpu": 30, "v100": 1},
        "policy": "rl",
        "min_throughput": 50_000.0,
        "throughput_samples_per_s": 60_000.0,
        "price_usd_per_h": 3.62,
        "cost_usd_per_million_samples": 0.01676,
        "optimum_usd_per_million_samples": 0.01676,
        "optimum_proven": True,
        "resources": tuple(
            ResourceType(name=name, device=device, price_usd_per_h=price, limit=limit)
            for name, device, price, limit in (
                ("cpu", "cpu", 0.04, 480),
                ("v100", "cuda", 2.42, 4),
                ("t4", "cuda", 0.5, 9),
            )
        ),
        "reasons": (
            Reason(layer="emb", pinned=True),
            Reason(layer="mlp", elsewhere={"cpu": 0.05028, "t4": 0.01843}),
            Reason(layer="out", transfer_bound=True, bound=True, elsewhere={"cpu": 0.01676}),
        ),
        "alternatives": {
            "gpu-only": Alternative(feasible=False),
            "greedy": Alternative(
                feasible=True, cost_usd_per_million_samples=0.02, throughput_samples_per_s=55e3, price_usd_per_h=3.96
            ),
        },
        "sources": {"cpu": "measured", "v100": "estimated"},
    }
    return Plan(**{**facts, **changes})


def test_a_plan_by_hand_is_said_in_these_words() -> None:
    assert hand_plan().explain().splitlines() == [
        "Rent 30 cpu and 1 v100 for $3.62/h: 60,000 samples/s (asked: 50,000), $0.01676 per million samples.",
        "No plan is cheaper: this is the proven optimum. Found by policy rl (seed 0, paper cost model) in 0.00 s.",
        "",
        "rent  units  limit  unused  $/unit/h   $/h  times are",
        "cpu      30    480     450      0.04  1.20  measured",
        "v100      1      4       3      2.42  2.42  estimated",
        "not used at all: t4 (9)",
        "",
        "stage  runs on   could do/s  busy  limited by             layers, in order",
        "1      30 x cpu      80,000   75%  memory                 emb",
        "2      1 x v100      60,000  100%  moving data (slowest)  2: mlp and out",
        "",
        "why  is on  bound by     if it moved to another type, the whole plan would cost",
        "mlp  v100   computing    t4 +10.0%; cpu 3.0 x",
        "out  v100   moving data  with what shares its table: cpu same cost; t4: cannot, or too slow",
        "no choice (pinned, or one type only): 1 layers: emb",
        "",
        "instead   $/million  against this            samples/s   $/h",
        "greedy         0.02  +19.3%                     55,000  3.96",
        "gpu-only          -  cannot reach the floor          -     -",
    ]


def test_the_whole_training_is_priced_where_its_samples_are_known() -> None:
    """4.32 billion samples at 60,000 a second are 20 hours, at 3.62 USD each; rounded cents come from the figure."""
    text = hand_plan(samples=4.32e9).explain()
    assert "The whole training of 4,320,000,000 samples: $72.40 in 20 h." in text
    assert "whole training" not in hand_plan().explain()


def test_memory_and_filling_are_shown_where_the_cost_model_counts_them() -> None:
    full = hand_plan()
    stages = (replace(full.stages[0], memory_bytes=3.2e9), full.stages[1])
    text = hand_plan(mode="full", stages=stages, microbatches=4, throughput_samples_per_s=48_000.0).explain()
    assert "1      30 x cpu      80,000   60%       3.2 GB  memory" in text
    assert "(4 microbatches a batch) costs 20% of the slowest stage's speed" in text
    assert "memory/unit" not in hand_plan().explain()


def test_an_infeasible_plan_says_what_is_in_the_way_and_what_can_be_asked_for() -> None:
    text = hand_plan(feasible=False, min_throughput=9e5, binds=("limit of v100 (4)",)).explain()
    first, second, third = text.splitlines()[:3]
    assert first == "No plan reaches 900,000 samples/s. In the way: limit of v100 (4)."
    assert second.startswith("The fastest reachable: rent 30 cpu and 1 v100 for $3.62/h: 60,000 samples/s, ")
    assert third == "Ask for that or less, or change what is in the way."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gap_to_optimum": 0.031}, "3.10% above the proven optimum."),
        (
            {"optimum_proven": False, "gap_to_optimum": 0.2},
            "At most 20.00% above the optimum, which is at least $0.01676",
        ),
        ({"optimum_proven": False, "optimum_usd_per_million_samples": 0.0}, "optimum is not known"),
    ],
)
def test_the_gap_is_never_said_to_be_smaller_than_it_is(changes: dict[str, Any], words: str) -> None:
    assert words in hand_plan(**changes).explain()


def test_side_by_side_lists_every_policy_with_its_gap() -> None:
    lines = explain(hand_plan(), side_by_side=True).splitlines()[-4:]
    assert lines == [
        "policy    reaches it  $/million  above optimum   $/h  samples/s",
        "rl        yes           0.01676          0.00%  3.62     60,000  <- this plan",
        "greedy    yes              0.02         19.33%  3.96     55,000",
        "gpu-only  no                  -              -     -          -",
    ]


def test_a_planned_table_names_every_layer_and_reads_the_same_after_json() -> None:
    plan = plan_costs(table(3), None, Request(min_throughput=20_000.0, policy="exact"))
    text = plan.explain()
    assert all(layer in text for layer in plan.placement)
    assert "measured" in text or "estimated" in text
    assert Plan.from_json(plan.to_json()).explain() == text


def crowded() -> Plan:
    """More of everything than fits: long names, 12 types, 200 stages, reasons, policies, notes."""
    types = [f"a-resource-type-with-a-long-name-{i}" for i in range(12)]
    layers = [f"tower.{i}.a_block_of_layers_with_a_very_long_name_indeed.{i}" for i in range(400)]
    stages = tuple(
        Stage(
            resource=types[i % 12],
            layers=tuple(layers[2 * i : 2 * i + 2]),
            throughput_samples_per_s=1e6 + i,
            memory_bytes=1e9,
            bound_by="communication",
        )
        for i in range(200)
    )
    elsewhere = dict.fromkeys(types, 0.5)
    return hand_plan(
        placement={name: stage.resource for stage in stages for name in stage.layers},
        stages=stages,
        provision=dict.fromkeys(types, 17),
        samples=1e12,
        resources=tuple(ResourceType(name=n, device="cuda", price_usd_per_h=1, limit=20) for n in [*types, "x", "y"]),
        reasons=tuple(Reason(layer=name, elsewhere=elsewhere, pinned=name == layers[0]) for name in layers),
        alternatives={f"policy-{i}": Alternative(feasible=False) for i in range(9)},
        notes=tuple(f"note {i} is long, {'very ' * 30}long" for i in range(6)),
    )


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_crowded_plan_stays_short_and_counts_what_it_leaves_out(side_by_side: bool) -> None:
    lines = explain(crowded(), side_by_side=side_by_side).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    for part in ("190 more stages", "4 more types", "more layers, for which", "more lines of notes", "whole training"):
        assert part in text


def test_pins_are_shown() -> None:
    plan = plan_costs(table(3), None, Request(min_throughput=20_000.0, policy="exact", pin={"layer_0": "v100"}))
    assert "no choice (pinned, or one type only): 1 layers: layer_0" in plan.explain()
