"""What a comparison of all policies holds."""

from __future__ import annotations

import pytest

from heterps_compile.costs import CostTable
from heterps_compile.planning import Request, decision, plan_costs

TABLE = {
    "batch_size": 1000,
    "resources": [
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 64},
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 8},
    ],
    "layers": [{"name": "emb", "kind": "embedding", "touched_bytes_per_sample": 100.0}, {"name": "fc"}],
    "costs": {
        "emb": {"cpu": {"compute_s": 0.1}, "v100": {"compute_s": 0.05}},
        "fc": {"cpu": {"compute_s": 2.0}, "v100": {"compute_s": 0.01}},
    },
}


def test_a_comparison_holds_every_policy_and_the_fixed_ratios() -> None:
    plan = plan_costs(CostTable.from_dict(TABLE), None, Request(min_throughput=100_000.0, compare=True))
    assert {"exact", "genetic", "cpu-only", "rl-rnn", "bayesian"} <= set(plan.alternatives)
    ratio = plan.alternatives["rl, units by StaRatio"]
    # balanced: 10 cpu and 1 v100; in the ratio of the limits, 8 to 1, two boxes are needed for the 10
    assert plan.provision == {"cpu": 10, "v100": 1}
    assert ratio.price_usd_per_h == pytest.approx(16 * 0.04 + 2 * 2.42)
    assert (ratio.cost_usd_per_million_samples or 0) > plan.cost_usd_per_million_samples
    assert "rl, units by StaPSRatio" in plan.alternatives


def test_a_comparison_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "available", lambda: False)
    plan = plan_costs(CostTable.from_dict(TABLE), None, Request(min_throughput=100_000.0, compare=True))
    assert "bayesian" not in plan.alternatives
    assert any("policy bayesian is left out" in note for note in plan.notes)
