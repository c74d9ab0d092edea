"""Follow one small DLRM through every pass and print what each makes of it (docs/one-graph.md is this output).

    python examples/one_graph.py

The fleet is the simulated accelerator beside this machine's cores, so the plan also runs here.
"""

import torch

from heterps_compile import explain
from heterps_compile.capture import capture
from heterps_compile.cluster import Cluster
from heterps_compile.devices import sim
from heterps_compile.models import DLRM
from heterps_compile.passes.fuse import Fuse
from heterps_compile.passes.lower import Lower
from heterps_compile.passes.place import Place
from heterps_compile.passes.profile import Profile
from heterps_compile.passes.split import Split
from heterps_compile.passes.trace import Trace
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan
from heterps_compile.report.graph_table import layer_table
from heterps_compile.stage_graph import Cut

ROWS = (20_000, 5_000, 300, 40)
BATCH_SIZE = 2048
MIN_THROUGHPUT = 100_000
PIN = {"emb*": "cpu"}  # the tables stay in host memory
CLUSTER = Cluster.from_dict(
    {
        "version": 1,
        "resources": [
            {"name": "cpu", "price_usd_per_h": 0.04, "limit": 32},
            {"name": "sim", "price_usd_per_h": 0.25, "limit": 8, "network_bytes_per_s": 1.25e9},
        ],
    }
)


def title(text: str) -> None:
    print(f"\n## {text}\n\n```")


def end(note: str = "") -> None:
    print("```" + (f"\n\n{note}" if note else ""))


def first_lines(text: str, count: int) -> str:
    lines = text.strip().splitlines()
    more = [f"... ({len(lines) - count} lines more)"] if len(lines) > count else []
    return "\n".join(line[:150] for line in [*lines[:count], *more])


def show_costs(plan: Plan, costs: object) -> None:
    for name in plan.placement:
        cells = [
            f"{kind} {cost.compute_s * 1e3:8.3f} + {cost.communication_s * 1e3:6.3f} ms ({cost.source})"
            for kind, cost in costs[name].items()
        ]
        print(f"{name:20} " + "   ".join(cells))


def main() -> None:
    torch.manual_seed(0)
    sim.install()
    model = DLRM(ROWS, 16, sparse=True)
    inputs = (torch.rand(BATCH_SIZE, 13), torch.stack([torch.randint(rows, (BATCH_SIZE,)) for rows in ROWS], dim=1))
    (captured,) = capture(model, inputs)
    gm, example_inputs = captured.gm, captured.example_inputs

    title("Dynamo: the graph as it arrives")
    operations = [node for node in gm.graph.nodes if node.op.startswith("call")]
    print(f"{len(gm.graph.nodes)} nodes, {len(operations)} of them operations; the parameters are inputs")
    print(first_lines("\n".join(node.format_node() or "" for node in operations), 8))
    end()

    title("trace: nodes become layers")
    graph = Trace()(gm, example_inputs)
    print(layer_table(graph, CLUSTER))
    end("As Graphviz (`LayerGraph.dot`):")
    print("\n```\n" + graph.dot() + "\n```")

    title("profile: what each layer costs on one unit (compute + communication, one batch)")
    costs = Profile(mode="auto")(gm, graph, CLUSTER)
    plan = plan_costs(costs, CLUSTER, Request(min_throughput=MIN_THROUGHPUT, pin=PIN))
    show_costs(plan, costs)
    end()

    title("place: layer -> resource type")
    placement = Place(policy="rl", seed=0)(costs, CLUSTER, MIN_THROUGHPUT, PIN)
    print("\n".join(f"{layer:20} -> {kind}" for layer, kind in placement.items()))
    end()

    title("fuse: neighbours on one type become a stage")
    for stage in Fuse()(placement, costs):
        print(f"{stage.resource}: {', '.join(stage.layers)}")
    end()

    title("provision: the plan")
    print(plan.explain())
    end()

    title("split: one graph per stage")
    home = torch.device("cpu")
    devices = {"cpu": home, "sim": torch.device("sim", 0)}
    cuts = [
        Cut(name=f"stage{index}", layers=stage.layers, resource=stage.resource, device=devices[stage.resource])
        for index, stage in enumerate(plan.stages)
    ]
    stages = Split(home=home)(gm, graph, cuts)
    for stage in stages:
        print(f"{stage.cut.name} on {stage.cut.resource}: {len(stage.inputs)} inputs -> {', '.join(stage.outputs)}")
    end()

    title("lower: what each layer runs as")
    for stage in stages:
        for layer, how in Lower()(stage).how.items():
            print(f"{layer:20} {how}")
    end()

    title("run: the plan on this machine, checked against eager once")
    compiled = torch.compile(model, backend="heterps", options={"plan": plan, "verify": "first_call"})
    loss = compiled(*inputs).square().mean()
    loss.backward()
    print(explain(compiled).split("\nRent")[0])
    end()


if __name__ == "__main__":
    main()
