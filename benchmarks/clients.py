"""Table of other people's models under the backend: graphs, layers, first call, and whether they equal eager.

    python benchmarks/clients.py [--inductor]

The first call of each model is timed in this process after one model has warmed Dynamo and the kernel cache up.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from heterps_compile.compiled import compiled_graphs

from client_models import CASES, Built, deepctr


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def step(forward: Callable[..., Tensor], inputs: Sequence[object]) -> Tensor:
    torch.manual_seed(7)
    output = forward(*inputs)
    output.square().sum().backward()
    return output.detach()


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)), default=0.0)


def first_call_s(model: nn.Module, inputs: Sequence[object], backend: str) -> float:
    torch._dynamo.reset()
    started = time.perf_counter()
    step(torch.compile(model, backend=backend), inputs)
    return time.perf_counter() - started


def row(name: str, build: Callable[[str], Built], *, inductor: bool) -> list[str]:
    torch.manual_seed(0)
    model, inputs = build(name)
    reference, other = copy.deepcopy(model), copy.deepcopy(model)
    expected = step(reference, inputs)
    torch._dynamo.reset()
    started = time.perf_counter()
    output = step(torch.compile(model, backend="heterps"), inputs)
    elapsed_s = time.perf_counter() - started
    graphs = compiled_graphs(model)
    difference = largest_difference([output, *gradients(model)], [expected, *gradients(reference)])
    cells = [
        build.__name__.split("_")[0],
        name,
        str(len(graphs)),
        str(sum(len(g.report.graph) for g in graphs)),
        f"{sum(g.report.compile_s for g in graphs):.2f}",
        f"{elapsed_s:.2f}",
        f"{difference:.1e}",
    ]
    return [*cells, f"{first_call_s(other, inputs, 'inductor'):.1f}"] if inductor else cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action="store_true", help="also time Inductor's first call (minutes)")
    inductor = parser.parse_args().inductor
    warnings.simplefilter("ignore")
    row("WDL", deepctr, inductor=False)
    titles = ["package", "model", "graphs", "layers", "heterps s", "first call s", "difference"]
    titles += ["Inductor first call s"] if inductor else []
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for name, build in CASES:
        print("| " + " | ".join(row(name, build, inductor=inductor)) + " |", flush=True)


if __name__ == "__main__":
    main()
