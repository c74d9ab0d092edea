"""Two plans side by side: the answer first, then what differs."""

from __future__ import annotations

from dataclasses import replace

from heterps_compile.cluster import ResourceType
from heterps_compile.plan_facts import PlanFacts, Stage
from heterps_compile.report.what_if_text import what_if_text


def fact(placement: dict[str, str], provision: dict[str, int], cost: float, price: float) -> PlanFacts:
    return PlanFacts(
        placement=placement,
        stages=tuple(Stage(resource=kind, layers=()) for kind in provision),
        provision=provision,
        min_throughput=1e5,
        throughput_samples_per_s=1.2e5,
        price_usd_per_h=price,
        cost_usd_per_million_samples=cost,
        resources=tuple(
            ResourceType(name=name, device="cpu", price_usd_per_h=1, limit=99) for name in ("cpu", "v100", "t4")
        ),
    )


BASE = fact({"emb": "cpu", "mlp": "v100"}, {"cpu": 20, "v100": 2}, 0.02, 6.0)
DEARER = fact({"emb": "cpu", "mlp": "cpu"}, {"cpu": 80}, 0.025, 7.5)


def test_a_dearer_answer_is_said_in_these_words() -> None:
    assert what_if_text(["limit.v100=0"], BASE, DEARER).splitlines() == [
        "With limit.v100=0 a million samples cost $0.025 instead of $0.02 (+25.0%): rent 80 cpu for $7.50/h.",
        "",
        "                       as asked  changed  difference",
        "$ per million samples     $0.02   $0.025      +25.0%",
        "$/h                       $6.00    $7.50      +25.0%",
        "samples/s               120,000  120,000",
        "reaches the floor           yes      yes",
        "units of cpu                 20       80         +60",
        "units of v100                 2        0          -2",
        "stages                        2        1          -1",
        "",
        "1 of 2 layers move:",
        "  mlp  v100  ->  cpu",
    ]


def test_nothing_changes() -> None:
    text = what_if_text(["limit.t4=9"], BASE, BASE)
    assert text.startswith("With limit.t4=9 a million samples cost the same, $0.02: the same plan is cheapest.")
    assert text.endswith("No layer moves to another type.")


def test_the_floor_becomes_reachable_or_stays_out_of_reach() -> None:
    stuck = replace(BASE, feasible=False, min_throughput=1e6, binds=("limit of v100 (2)",))
    freed = what_if_text(["limit.v100=32"], stuck, DEARER)
    assert freed.startswith("With limit.v100=32 the floor is reached: rent 80 cpu for $7.50/h")
    assert freed.endswith("In the way of 1,000,000 samples/s as asked: limit of v100 (2).")
    lost = what_if_text(["floor=1e6"], BASE, stuck)
    assert lost.startswith("With floor=1e6 no plan reaches 1,000,000 samples/s; the best reaches 120,000.")
    assert lost.endswith("In the way of 1,000,000 samples/s with floor=1e6: limit of v100 (2).")


def test_no_plan_at_all_says_why() -> None:
    text = what_if_text(["limit.cpu=0"], BASE, None, "layer 'emb' can run on no resource type of the cluster")
    assert text.splitlines() == [
        "With limit.cpu=0 there is no plan at all: layer 'emb' can run on no resource type of the cluster.",
        "As asked: rent 20 cpu and 2 v100 for $6.00/h.",
    ]


def test_at_most_eight_moves_are_named_and_the_whole_training_is_priced() -> None:
    many = {f"layer_{i}": "v100" for i in range(30)}
    base = replace(BASE, placement=many, samples=1e9)
    text = what_if_text(["x"], base, replace(DEARER, placement=dict.fromkeys(many, "t4"), samples=1e9))
    assert "30 of 30 layers move:" in text
    assert text.count("v100  ->  t4") == 8
    assert text.endswith("  and 22 more")
    assert "whole training           $20.00   $25.00      +25.0%" in text
    assert len(text.splitlines()) < 60
