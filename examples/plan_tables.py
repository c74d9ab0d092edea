"""Plan a population of embedding tables, as TorchRec's planner prints it, for CPU cores and two types of cards.

    python examples/plan_tables.py STATISTICS.txt[.gz] [--min-throughput 20000] [--batch-size 8192]

The file is the text that ``EmbeddingShardingPlanner`` logs ("--- Planner Statistics ---"); only the lines of its tables
are read: rows, width, ids per sample, pooled or not. Tables are ranked by how often a byte of them is read and cut
into groups, so that hot small ones may sit on a card while large cold ones stay in the memory of CPU cores; a group
that no unit can hold is shared row by row. The dense part, which the text does not describe, is a network of given
widths.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from heterps_compile.cluster import Cluster
from heterps_compile.costs import CostLayer, CostTable, LayerCost
from heterps_compile.graph import Edge, Layer
from heterps_compile.passes.profile import estimate
from heterps_compile.planning import Request, plan_costs

FLEET = {
    "resources": [  # rates, memory and prices of these names come from the catalog
        {"name": "cpu-aws", "limit": 4000},
        {"name": "a100-80", "limit": 256},
        {"name": "h100", "limit": 128},
    ]
}
SHARDINGS = "RW|CW|TW|DP|TWRW|TWCW|GRID"
TABLE_LINE = re.compile(rf"#\s+(?P<name>\S+)\s+(?:{SHARDINGS})\s+\S+\s.*\)\s.*\b(?P<kind>pooled|sequence)\b")
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """``ids_per_sample`` rows of ``dim`` values are read for a sample; pooled, they become one."""

    name: str
    rows: int
    dim: int
    ids_per_sample: float
    pooled: bool

    @property
    def num_bytes(self) -> float:
        """Of all rows."""
        return float(self.rows * self.dim * FLOAT_BYTES)

    @property
    def touched_bytes(self) -> float:
        """Of the rows one sample reads."""
        return self.ids_per_sample * self.dim * FLOAT_BYTES

    @property
    def output_bytes(self) -> float:
        """Of what one sample looks up, pooled or not."""
        return (1.0 if self.pooled else self.ids_per_sample) * self.dim * FLOAT_BYTES


def read_tables(path: Path) -> list[Table]:
    """The tables of a log, in its order."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        found = [table for line in lines if (table := read_table(line))]
    if not found:
        sys.exit(f"{path} holds no line of a table (allowed: the text of TorchRec's planner statistics)")
    return found


def read_table(line: str) -> Table | None:
    """One line, whose columns stand apart by two spaces or more; None for any other line."""
    match = TABLE_LINE.match(line)
    if match is None:
        return None
    columns = re.split(r"\s{2,}", line.strip("# \n"))
    return Table(
        name=columns[0],
        rows=int(columns[14]),
        dim=int(columns[13].split()[0]),
        ids_per_sample=float(columns[6]),
        pooled=match["kind"] == "pooled",
    )


def grouped(tables: Sequence[Table], num_groups: int) -> list[list[Table]]:
    """Tables by density, bytes read per byte held, cut where a group has its share of either kind of bytes."""
    ranked = sorted(tables, key=lambda t: t.touched_bytes / t.num_bytes)
    share = 2 / num_groups
    held, read = sum(t.num_bytes for t in tables) * share, sum(t.touched_bytes for t in tables) * share
    groups: list[list[Table]] = [[]]
    for table in ranked:
        group = [*groups[-1], table]
        if groups[-1] and (sum(t.num_bytes for t in group) > held or sum(t.touched_bytes for t in group) > read):
            groups.append([])
        groups[-1].append(table)
    return groups


def table_layer(index: int, group: Sequence[Table]) -> Layer:
    """One look-up of a whole group; backward reads gradients, and reads and writes rows and optimizer state."""
    touched, output = sum(t.touched_bytes for t in group), sum(t.output_bytes for t in group)
    return Layer(
        name=f"tables {index} ({len(group)})",
        kind="embedding",
        nodes=("lookup",),
        parameter_bytes=int(sum(t.num_bytes for t in group)),
        touched_bytes_per_sample=touched,
        input_bytes_per_sample=8 * sum(t.ids_per_sample for t in group),
        output_bytes_per_sample=output,
        forward_flops_per_sample=touched / FLOAT_BYTES,
        backward_flops_per_sample=2 * touched / FLOAT_BYTES,
        forward_bytes_per_sample=touched + output,
        backward_bytes_per_sample=output + 4 * touched,
    )


def dense_layers(inputs: int, widths: Sequence[int]) -> list[Layer]:
    """Linear layers; backward has twice the products of forward."""
    layers = []
    for index, (before, after) in enumerate(pairwise([inputs, *widths])):
        flops, moved = 2.0 * before * after, float(FLOAT_BYTES * (before + after))
        layers.append(
            Layer(
                name=f"dense.{index}",
                kind="linear",
                nodes=("linear",),
                parameter_bytes=FLOAT_BYTES * before * after,
                input_bytes_per_sample=FLOAT_BYTES * before,
                output_bytes_per_sample=FLOAT_BYTES * after,
                forward_flops_per_sample=flops,
                backward_flops_per_sample=2 * flops,
                forward_bytes_per_sample=moved,
                backward_bytes_per_sample=2 * moved,
            )
        )
    return layers


def planned(layer: Layer) -> CostLayer:
    """What the planner reads of a layer."""
    return CostLayer(
        name=layer.name,
        kind=layer.kind,
        parameter_bytes=layer.parameter_bytes,
        touched_bytes_per_sample=layer.touched_bytes_per_sample,
        input_bytes_per_sample=layer.input_bytes_per_sample,
        output_bytes_per_sample=layer.output_bytes_per_sample,
    )


def population_costs(tables: Sequence[Table], cluster: Cluster, batch_size: int, widths: Sequence[int]) -> CostTable:
    """Every group feeds the first dense layer; a sequence enters it as its mean."""
    groups = [table_layer(index, group) for index, group in enumerate(grouped(tables, 40))]
    dense = dense_layers(sum(table.dim for table in tables), widths)
    layers = [*groups, *dense]
    costs: dict[str, dict[str, LayerCost]] = {
        layer.name: {resource.name: estimate(layer, resource, batch_size) for resource in cluster} for layer in layers
    }
    return CostTable(
        batch_size=batch_size,
        resources=cluster.resources,
        layers=tuple(planned(layer) for layer in layers),
        costs=costs,
        edges=tuple(
            Edge(source=a.name, target=b.name, bytes_per_sample=a.output_bytes_per_sample)
            for a, b in [*((group, dense[0]) for group in groups), *pairwise(dense)]
        ),
    )


def main() -> int:
    """Read, group, plan, explain; 1 when no plan reaches the floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("statistics", type=Path)
    parser.add_argument("--cluster", type=Path, help="cluster file; default: CPU cores, A100s and H100s of one cloud")
    parser.add_argument("--min-throughput", type=float, default=20_000.0)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 512, 1], help="of the dense layers")
    parser.add_argument("--optimizer", default="adagrad")
    arguments = parser.parse_args()
    cluster = Cluster.load(arguments.cluster) if arguments.cluster else Cluster.from_dict(FLEET)
    tables = read_tables(arguments.statistics)
    held, read = sum(t.num_bytes for t in tables), sum(t.touched_bytes for t in tables)
    print(f"{len(tables):,} tables, {held / 1e12:.2f} TB of rows, {read / 1e6:.1f} MB of them read per sample\n")
    costs = population_costs(tables, cluster, arguments.batch_size, arguments.widths).trained_with(arguments.optimizer)
    request = Request(min_throughput=arguments.min_throughput, mode="full", time_limit_s=25)
    plan = plan_costs(costs, cluster, request)
    print(plan.explain())
    return 0 if plan.feasible else 1


if __name__ == "__main__":
    sys.exit(main())
