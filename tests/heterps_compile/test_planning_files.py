"""Cluster, cost and plan files: what is written reads back equal, and what is broken says where in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from heterps_compile.catalog import CATALOG
from heterps_compile.cluster import Cluster, ResourceType
from heterps_compile.costs import CostLayer, CostTable, LayerCost
from heterps_compile.errors import FileFormatError, OptionError, PlanError
from heterps_compile.planning import Mode, Request, plan_costs
from heterps_compile.plans import Alternative, Plan, Reason, Stage

FLEET = """\
version: 1
resources:
  - {name: cpu, device: cpu, price_usd_per_h: 0.04, limit: 480, memory_bytes: 4.0e+9}
  - {name: v100, limit: 32}
links:
  - {between: [cpu, v100], bandwidth_bytes_per_s: 1.25e+10, latency_s: 2.0e-5}
"""


def table() -> dict[str, Any]:
    return {
        "version": 1,
        "batch_size": 1000,
        "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 480, "memory_bytes": 4e9}],
        "layers": [{"name": "emb", "kind": "embedding", "parameter_bytes": 1e9}, {"name": "fc"}],
        "costs": {
            "emb": {"cpu": {"compute_s": 0.1, "communication_s": 0.02, "compute_parallel": 0.99}},
            "fc": {"cpu": {"compute_s": 0.3, "source": "measured"}},
        },
        "edges": [["emb", "fc", 64.0]],
        "bound": [["emb", "fc"]],
    }


def test_a_fleet_file_takes_from_the_catalog_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    cluster = Cluster.load(path)
    assert cluster["cpu"].limit == 480
    assert cluster["v100"].price_usd_per_h == 2.42
    assert cluster["v100"].flops_per_s == CATALOG["v100"]["flops_per_s"]
    assert cluster.link("v100", "cpu").bandwidth_bytes_per_s == 1.25e10
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_this_machine_is_a_cluster() -> None:
    cluster = Cluster.local(simulated=2)
    assert cluster["cpu"].limit >= 1
    assert (cluster["sim"].device, cluster["sim"].limit) == ("sim", 2)
    assert "sim" not in Cluster.local()


def test_limits_can_be_asked_about() -> None:
    cluster = Cluster.from_dict({"resources": [{"name": "cpu", "limit": 4}]})
    assert cluster.with_limits({"cpu": 9})["cpu"].limit == 9
    with pytest.raises(OptionError, match="'tpu' is not in the cluster"):
        cluster.with_limits({"tpu": 1})


def broken_fleet(old: str, new: str) -> str:
    assert old in FLEET
    return FLEET.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            broken_fleet("limit: 480", "limit: -1"),
            r"fleet.yaml:3: resources\[0\].limit is -1 \(allowed: a whole number",
        ),
        (broken_fleet("limit: 480", "limit: many"), r'resources\[0\].limit is "many" \(allowed: a whole number >= 0\)'),
        (broken_fleet(", limit: 32", ""), r"fleet.yaml:4: resources\[1\].limit is missing"),
        (broken_fleet("0.04", "-0.04"), r"resources\[0\].price_usd_per_h is -0.04 \(allowed: a number >= 0\)"),
        (broken_fleet("0.04", ".nan"), r"price_usd_per_h is NaN"),
        (
            broken_fleet("price_usd_per_h", "price"),
            r"resources\[0\].price: unknown field .*did you mean price_usd_per_h",
        ),
        (
            broken_fleet("name: v100", "name: cpu"),
            r'resources\[1\].name is "cpu" a second time \(allowed: each name once\)',
        ),
        (broken_fleet("[cpu, v100]", "[cpu, a100]"), r"links\[0\].between is .*allowed: two of cpu, v100"),
        (broken_fleet("1.25e+10", "0"), r"links\[0\].bandwidth_bytes_per_s is 0 \(allowed: a number >= 1\)"),
        (broken_fleet("version: 1", "version: 2"), r"fleet.yaml:1: version is 2 \(allowed: 1\)"),
        ("resources: []", r"resources is \[\] \(allowed: a list with at least one entry\)"),
        ("resources: 3", "resources is 3"),
        ("- a", "the file is .* a mapping of fields"),
        ("resources: [", r"fleet.yaml:\d+: not valid YAML"),
    ],
)
def test_a_broken_fleet_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message) as caught:
        Cluster.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        Cluster.load(tmp_path / "none.yaml")


def test_a_cost_table_reads_back_equal(tmp_path: Path) -> None:
    costs = CostTable.from_dict(table())
    costs.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == costs
    assert CostTable.from_json(json.dumps(costs.to_dict())).signature() == costs.signature()
    assert costs["emb"]["cpu"].communication_parallel == 1.0
    assert costs.sources() == {"cpu": "mixed"}


def change(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    changed = table()
    inner: Any = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (change(("batch_size",), 0), r"batch_size is 0 \(allowed: a whole number >= 1\)"),
        (change(("batch_size",), None), "batch_size is missing"),
        (change(("layers",), []), "layers is"),
        (change(("layers", 1, "name"), "emb"), r'layers\[1\].name is "emb" a second time'),
        (change(("costs", "fc"), {}), r"costs.fc is {} \(allowed: a cost for at least one of cpu\)"),
        (change(("costs", "tail"), {}), "costs.tail: unknown field"),
        (change(("costs", "fc", "tpu"), {"compute_s": 1.0}), r"costs.fc.tpu: unknown field \(allowed: cpu"),
        (change(("costs", "fc", "cpu"), {}), r"costs.fc.cpu.compute_s is missing"),
        (change(("costs", "fc", "cpu", "compute_s"), "fast"), r'costs.fc.cpu.compute_s is "fast" \(allowed: a number'),
        (
            change(("costs", "fc", "cpu", "compute_parallel"), 1.5),
            r"compute_parallel is 1.5 \(allowed: a number in \[0, 1\]",
        ),
        (change(("costs", "fc", "cpu", "source"), "guess"), r"source is .* one of given, measured, estimated"),
        (change(("edges",), [["emb", "tail", 1]]), r"edges\[0\] is .*allowed: \[layer, layer, bytes per sample"),
        (change(("bound",), [["emb", "tail"]]), r"bound\[0\] is .*allowed: a list of layer names"),
        (change(("layers", 0, "size"), 3), r"layers\[0\].size: unknown field"),
    ],
)
def test_a_broken_cost_file_is_one_line(broken: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(broken, indent=1))
    with pytest.raises(FileFormatError, match=message) as caught:
        CostTable.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_json_syntax_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"batch_size": 1,\n "layers": [}')
    with pytest.raises(FileFormatError, match=r"costs.json:2: not valid JSON"):
        CostTable.load(path)


def test_merging_keeps_measured_times_and_adds_types() -> None:
    here = CostTable.from_dict(table())
    v100 = ResourceType(name="v100", device="cuda", price_usd_per_h=2.42, limit=4)
    there = replace(
        here,
        resources=(*here.resources, v100),
        costs={
            "emb": {"cpu": LayerCost(compute_s=9.0, source="estimated"), "v100": LayerCost(compute_s=0.2)},
            "fc": {"cpu": LayerCost(compute_s=9.0, source="estimated"), "v100": LayerCost(compute_s=0.1)},
        },
    )
    merged = here.merge(there)
    assert merged.resource_names() == ("cpu", "v100")
    assert merged["fc"]["cpu"] == here["fc"]["cpu"]
    assert merged["emb"]["v100"].compute_s == 0.2
    with pytest.raises(FileFormatError, match="layers differ between the tables to merge: fc"):
        here.merge(
            CostTable(
                batch_size=1000,
                resources=here.resources,
                layers=(CostLayer(name="emb"),),
                costs={"emb": here["emb"]},
            )
        )


names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=6)
amounts = st.floats(0, 1e12, allow_nan=False)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    stages, placement = [], {}
    for index, layer in enumerate(layers):
        resource = f"t{index % 3}"
        placement[layer] = resource
        stages.append(
            Stage(
                resource=resource,
                layers=(layer,),
                replicas=draw(st.integers(1, 99)),
                throughput_samples_per_s=draw(amounts),
            )
        )
    units: dict[str, int] = {}
    for stage in stages:
        units[stage.resource] = units.get(stage.resource, 0) + stage.replicas
    return Plan(
        placement=placement,
        stages=tuple(stages),
        provision=units,
        policy="rl",
        seed=draw(st.integers(0, 9)),
        feasible=draw(st.booleans()),
        min_throughput=draw(st.none() | st.floats(1, 1e9)),
        throughput_samples_per_s=draw(amounts),
        price_usd_per_h=draw(amounts),
        cost_usd_per_million_samples=draw(amounts),
        optimum_usd_per_million_samples=draw(amounts),
        gap_to_optimum=draw(amounts),
        alternatives={
            "cpu-only": Alternative(feasible=False),
            "exact": Alternative(feasible=True, price_usd_per_h=1.0),
        },
        resources=(ResourceType(name="t0", device="sim", price_usd_per_h=draw(amounts), limit=3),),
        reasons=(Reason(layer=layers[0], pinned=True, elsewhere={"t1": draw(amounts)}),),
        binds=("limit of t0 (3)",),
        notes=("a note",),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def small_plan() -> tuple[Plan, CostTable, Cluster]:
    costs = replace(CostTable.from_dict(table()), bound=())
    v100 = ResourceType(name="v100", device="cuda", price_usd_per_h=2.42, limit=4)
    plan = Plan(
        placement={"emb": "cpu", "fc": "v100"},
        stages=(Stage(resource="cpu", layers=("emb",), replicas=3), Stage(resource="v100", layers=("fc",))),
        provision={"cpu": 3, "v100": 1},
    )
    return plan, costs, Cluster(resources=(*costs.resources, v100))


def test_the_validator_accepts_a_plan_that_fits() -> None:
    plan, costs, cluster = small_plan()
    plan.validate(costs, cluster)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": (Stage(resource="cpu", layers=("emb",)),)}, r"missing: \['fc'\]"),
        ({"placement": {"emb": "v100", "fc": "v100"}}, "'emb' is placed on 'v100' but staged on 'cpu'"),
        ({"provision": {"cpu": 2, "v100": 1}}, "is not the sum of the stages' replicas"),
        (
            {
                "stages": (
                    Stage(resource="cpu", layers=("emb",), replicas=481),
                    Stage(resource="v100", layers=("fc",)),
                ),
                "provision": {"cpu": 481, "v100": 1},
            },
            "rents 481 units of cpu, over its limit 480",
        ),
        (
            {
                "stages": (Stage(resource="tpu", layers=("emb", "fc")),),
                "placement": {"emb": "tpu", "fc": "tpu"},
            },
            "is on 'tpu', which the cluster lacks",
        ),
        (
            {
                "stages": (Stage(resource="cpu", layers=("emb",)), Stage(resource="cpu", layers=("fc",))),
                "placement": {"emb": "cpu", "fc": "cpu"},
            },
            "neighbours on cpu",
        ),
        (
            {"stages": (Stage(resource="v100", layers=("fc",)), Stage(resource="cpu", layers=("emb",)))},
            "stages are out of order",
        ),
    ],
)
def test_the_validator_names_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    plan, costs, cluster = small_plan()
    with pytest.raises(PlanError, match=message):
        replace(plan, **changes).validate(costs, cluster)


def test_the_validator_holds_shared_tables_together() -> None:
    plan, costs, cluster = small_plan()
    with pytest.raises(PlanError, match="emb, fc share a parameter but are placed on cpu, v100"):
        plan.validate(replace(costs, bound=(("emb", "fc"),)), cluster)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stages", [], "stages is"),
        ("stages", [{"resource": "cpu"}], r"stages\[0\].layers is missing"),
        ("stages", [{"resource": "cpu", "layers": ["a"], "replicas": 0}], r"stages\[0\].replicas is 0"),
        ("mode", "quick", "mode is .* one of paper, full"),
        ("colour", "red", "colour: unknown field"),
        ("feasible", "yes", "feasible is .* true or false"),
    ],
)
def test_a_broken_plan_file_is_one_line(field: str, value: object, message: str) -> None:
    plan, _, _ = small_plan()
    with pytest.raises(FileFormatError, match=message) as caught:
        Plan.from_dict({**plan.to_dict(), field: value})
    assert "\n" not in str(caught.value)


def test_the_files_of_the_documentation_load_and_plan() -> None:
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(yaml|json)\n(.*?)```", page, re.DOTALL))
    assert len(Cluster.from_dict(yaml.safe_load(blocks["yaml"]))) == 4
    table = CostTable.from_json(blocks["json"])
    for mode in get_args(Mode):
        assert plan_costs(table, None, Request(min_throughput=20_000.0, mode=mode)).feasible
