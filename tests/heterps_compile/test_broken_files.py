"""Broken cluster, cost and plan files on the command line: one line that says where and what is allowed; exit 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heterps_compile.cli import main

PLANNING = ("plan", "--min-throughput", "10")
CLUSTER = {
    "version": 1,
    "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 8}, {"name": "v100", "limit": 2}],
    "links": [{"between": ["cpu", "v100"], "bandwidth_bytes_per_s": 1e10}],
}
COSTS = {
    "version": 1,
    "batch_size": 100,
    "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 8}],
    "layers": [{"name": "emb"}, {"name": "fc"}],
    "costs": {"emb": {"cpu": {"compute_s": 0.1, "compute_parallel": 0.9}}, "fc": {"cpu": {"compute_s": 0.2}}},
    "edges": [["emb", "fc", 64]],
    "bound": [["emb", "fc"]],
}
PLAN = {
    "version": 1,
    "placement": {"emb": "cpu", "fc": "cpu"},
    "stages": [{"resource": "cpu", "layers": ["emb", "fc"], "replicas": 2}],
    "provision": {"cpu": 2},
}
KINDS = {"fleet.json": CLUSTER, "costs.json": COSTS, "plan.json": PLAN}


def changed(values: Any, path: tuple[str | int, ...], value: object) -> Any:
    copy = json.loads(json.dumps(values))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def complaint(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command that reads a file of this name says on stderr: checked to be one line, with exit code 2."""
    costs = path.with_name("good.json")
    costs.write_text(json.dumps(COSTS))
    commands = {
        "fleet": (*PLANNING, "--costs", str(costs), "--cluster", str(path)),
        "costs": (*PLANNING, "--costs", str(path)),
        "plan": ("explain", str(path)),
    }
    assert main(commands[path.stem]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"heterps: error: {path}")
    return err.removeprefix(f"heterps: error: {path}").rstrip("\n")


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("fleet.json", ("version",), 2, ":2: version is 2 (allowed: 1)"),
        ("fleet.json", ("resources",), ..., ":1: resources is missing (allowed: a list with at least one entry)"),
        (
            "fleet.json",
            ("resources", 0, "limit"),
            ...,
            ":4: resources[0].limit is missing (allowed: a whole number >= 0)",
        ),
        (
            "fleet.json",
            ("resources", 0, "limit"),
            "many",
            ':7: resources[0].limit is "many" (allowed: a whole number >= 0)',
        ),
        ("fleet.json", ("resources", 0, "limit"), 1.5, ":7: resources[0].limit is 1.5 (allowed: a whole number >= 0)"),
        (
            "fleet.json",
            ("resources", 0, "limit"),
            True,
            ":7: resources[0].limit is true (allowed: a whole number >= 0)",
        ),
        ("fleet.json", ("resources", 0, "limit"), 10**400, ":7: resources[0].limit is 1000"),
        (
            "fleet.json",
            ("resources", 0, "price_usd_per_h"),
            -1,
            ":6: resources[0].price_usd_per_h is -1 (allowed: a number >= 0)",
        ),
        (
            "fleet.json",
            ("resources", 0, "price_usd_per_h"),
            float("nan"),
            ":6: resources[0].price_usd_per_h is NaN (allowed: a number >= 0)",
        ),
        ("fleet.json", ("resources", 0, "price_usd_per_h"), 10**400, ":6: resources[0].price_usd_per_h is 1000"),
        (
            "fleet.json",
            ("resources", 0, "memory_byte"),
            1,
            "resources[0].memory_byte: unknown field (allowed: name, device,",
        ),
        ("fleet.json", ("resources", 0, "memory_byte"), 1, "; did you mean memory_bytes"),
        (
            "fleet.json",
            ("resources", 1, "name"),
            "cpu",
            ':10: resources[1].name is "cpu" a second time (allowed: each name once)',
        ),
        ("fleet.json", ("resources", 1, "like"), "v10", 'resources[1].like is "v10" (allowed: one of cpu, v100, '),
        ("fleet.json", ("resources", 1, "spot"), "yes", 'resources[1].spot is "yes" (allowed: true or false)'),
        ("fleet.json", ("resources", 1, "unit"), "box", 'resources[1].unit is "box" (allowed: one of card, core)'),
        ("fleet.json", ("resources", 1), ["v100"], ':9: resources[1] is ["v100"] (allowed: a mapping of fields)'),
        (
            "fleet.json",
            ("links", 0, "between"),
            ["cpu", "tpu"],
            'links[0].between is ["cpu", "tpu"] (allowed: two of cpu, v100)',
        ),
        (
            "fleet.json",
            ("links", 0, "bandwidth_bytes_per_s"),
            0,
            "links[0].bandwidth_bytes_per_s is 0 (allowed: a number >= 1)",
        ),
        ("costs.json", ("batch_size",), 0, ":3: batch_size is 0 (allowed: a whole number >= 1)"),
        ("costs.json", ("layers", 1, "name"), "emb", 'layers[1].name is "emb" a second time (allowed: each name once)'),
        ("costs.json", ("costs", "tail"), {}, "costs.tail: unknown field (allowed: emb, fc)"),
        ("costs.json", ("costs", "fcc"), {}, "costs.fcc: unknown field (allowed: emb, fc; did you mean fc?)"),
        ("costs.json", ("costs", "fc"), ..., "costs.fc is missing (allowed: a cost for at least one of cpu)"),
        ("costs.json", ("costs",), ..., "costs.emb is missing (allowed: a cost for at least one of cpu)"),
        (
            "costs.json",
            ("costs", "fc", "gpu"),
            {"compute_s": 1},
            "costs.fc.gpu: unknown field (allowed: cpu; did you mean cpu?)",
        ),
        ("costs.json", ("costs", "fc", "cpu"), 0.2, "costs.fc.cpu is 0.2 (allowed: a mapping of fields)"),
        (
            "costs.json",
            ("costs", "fc", "cpu", "compute_s"),
            None,
            "costs.fc.cpu.compute_s is missing (allowed: a number >= 0)",
        ),
        (
            "costs.json",
            ("costs", "fc", "cpu", "compute_s"),
            float("inf"),
            "costs.fc.cpu.compute_s is Infinity (allowed: a number >= 0)",
        ),
        (
            "costs.json",
            ("costs", "emb", "cpu", "compute_parallel"),
            1.2,
            "compute_parallel is 1.2 (allowed: a number in [0, 1])",
        ),
        ("costs.json", ("bound", 0, 1), "top", "bound[0] is ['emb', 'top'] (allowed: a list of layer names)"),
        (
            "costs.json",
            ("edges", 0, 1),
            "top",
            "edges[0] is ['emb', 'top', 64] (allowed: [layer, layer, bytes per sample",
        ),
        ("costs.json", ("edges", 0, 2), -1, "edges[0] is ['emb', 'fc', -1] (allowed: [layer, layer, bytes per sample"),
        ("plan.json", ("stages",), [], "stages is [] (allowed: a list with at least one entry)"),
        ("plan.json", ("stages", 0, "replicas"), 0, "stages[0].replicas is 0 (allowed: a whole number >= 1)"),
        (
            "plan.json",
            ("stages", 0, "layers"),
            "emb",
            'stages[0].layers is "emb" (allowed: a list with at least one entry)',
        ),
        ("plan.json", ("provision", "cpu"), -2, "provision.cpu is -2 (allowed: a whole number >= 0)"),
        ("plan.json", ("placement",), ["cpu"], 'placement is ["cpu"] (allowed: a mapping of fields)'),
        ("plan.json", ("mode",), "fast", 'mode is "fast" (allowed: one of paper, full)'),
        ("plan.json", ("stage",), [], "stage: unknown field (allowed: version,"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_named_with_its_place(
    name: str, path: tuple[str | int, ...], value: object, message: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(changed(KINDS[name], path, value), indent=1))
    assert message in complaint(file, capsys)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": the file is empty (allowed: a mapping of fields)"),
        ("\n \n", ": the file is empty (allowed: a mapping of fields)"),
        ("[1, 2]", "the file is [1, 2] (allowed: a mapping of fields)"),
        ("hello", 'the file is "hello" (allowed: a mapping of fields)'),
        ('{"version": 1,\n "layers": [}', ":2: not valid JSON: "),
        ('{"version": 1', ":1: not valid JSON: "),
        (b"\x80\x02}q\x00\xff\xfe", ": cannot be read: not UTF-8 text"),
        (b"PK\x03\x04\x00\x00", ": not valid YAML: unacceptable character #x0003"),
        ("[" * 600, ": nested too deeply"),
        ('{"resources": ' * 100_000, ": nested too deeply"),
    ],
)
def test_a_file_of_another_kind_says_so(
    name: str, content: str | bytes, message: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in complaint(file, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("resources:\n\t- {name: cpu}\n", ":2: not valid YAML: found character '\\t' that cannot start any token"),
        ("resources:\n  - {name: cpu, limit: 4\n", ":3: not valid YAML: "),
        ("resources: &a [*a]\n", "resources[0] is"),
        (
            "resources:\n  - {name: cpu, limit: 4}\nresources:\n  - {name: v100, limit: 1}\n",
            ":3: resources is there twice",
        ),
        ("resources:\n  - {name: cpu, limit: 4, date: 2026-13-45}\n", ": month must be in 1..12"),
        ("1: 2\n", "the file is 1 (allowed: text as field names)"),
        (
            "resources:\n  - {name: cpu, limit: .inf}\n",
            ":2: resources[0].limit is Infinity (allowed: a whole number in [0, 9007199254740992])",
        ),
        ("resources: !!python/object:os.system []\n", ":1: not valid YAML: could not determine a constructor"),
    ],
)
def test_broken_yaml_names_its_line(content: str, message: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(content)
    assert message in complaint(file, capsys)


@pytest.mark.parametrize("name", KINDS)
def test_a_field_given_twice_is_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(KINDS[name], indent=1).replace("{", '{\n "version": 1,', 1))
    assert ": version is there twice (allowed: each field once)" in complaint(file, capsys)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_file_and_a_folder_say_so(name: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / name
    assert complaint(file, capsys) == ": cannot be read: No such file or directory"
    file.mkdir()
    assert complaint(file, capsys) == ": cannot be read: Is a directory"


@pytest.mark.parametrize("name", ["costs.json", "fleet.json", "plan.json"])
def test_the_files_these_are_made_from_are_good(name: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    (tmp_path / name).write_text(json.dumps(KINDS[name]))
    costs = (*PLANNING, "--policy", "exact", "--costs", str(tmp_path / "costs.json"))
    commands = {"costs.json": costs, "fleet.json": (*costs, "--cluster", str(tmp_path / name))}
    assert main(commands.get(name, ("explain", str(tmp_path / name)))) == 0
    assert "cpu" in capsys.readouterr().out


def test_an_edge_against_the_order_of_layers_is_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(changed(COSTS, ("edges", 0), ["fc", "emb", 64]), indent=1))
    assert "edges[0] is ['fc', 'emb', 64]" in complaint(file, capsys)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("placement", "fc"), "v100", "placement.fc"),
        (("provision", "cpu"), 3, "provision"),
        (("placement", "top"), "cpu", "top"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    path: tuple[str | int, ...], value: object, message: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(PLAN, path, value), indent=1))
    assert message in complaint(file, capsys)
