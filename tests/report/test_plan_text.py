"""``explain`` says what to rent and why, in fewer than 60 lines whatever the plan."""

from __future__ import annotations

from heterps_compile.costs import CostTable
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan


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


def test_a_small_plan_is_explained_in_full() -> None:
    plan = plan_costs(table(3), None, Request(min_throughput=20_000.0, policy="exact"))
    text = plan.explain()
    first = text.splitlines()[0]
    assert first.startswith("Rent ")
    assert "samples/s (asked: 20,000)" in first
    assert "proven optimum" in text
    for layer in plan.placement:
        assert layer in text
    assert "measured" in text or "estimated" in text
    assert "cpu-only" in text
    assert Plan.from_json(plan.to_json()).explain() == text


def test_a_long_plan_stays_short() -> None:
    text = plan_costs(table(120), None, Request(min_throughput=2_000.0, policy="greedy")).explain()
    lines = text.splitlines()
    assert len(lines) < 60
    assert max(len(line) for line in lines) <= 130


def test_pins_and_notes_are_shown() -> None:
    plan = plan_costs(table(3), None, Request(min_throughput=20_000.0, policy="exact", pin={"layer_0": "v100"}))
    assert "no choice (pinned, or one type only): 1 layers: layer_0" in plan.explain()
