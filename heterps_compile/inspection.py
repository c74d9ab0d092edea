"""Ask a model what was decided for it: ``is_planned`` and ``explain`` on a compiled model.

Enters: a model compiled with backend heterps, after its first call. Leaves: text a person reads, naming device, stage
and reason of each layer, and why there is more than one graph.
"""

from __future__ import annotations

from torch import nn

from heterps_compile.capture import why_no_graph
from heterps_compile.compiled import CompiledGraph, compiled_graphs
from heterps_compile.errors import OptionError
from heterps_compile.report.columns import align


def is_planned(model: nn.Module) -> bool:
    """Whether at least one graph of ``model`` has run under a heterps plan."""
    return any(graph.calls for graph in compiled_graphs(_original(model)))


def explain(model: nn.Module) -> str:
    """Every graph of a compiled model: its plan, then layer by layer where it runs and how."""
    original = _original(model)
    graphs = compiled_graphs(original)
    if not graphs:
        return f"{type(original).__name__} has no heterps plan: call it once after compiling. {why_no_graph(original)}"
    parts = [f"{type(original).__name__}: {len(graphs)} graph{'s' * (len(graphs) > 1)}"]
    return "\n\n".join([*parts, *(_explain_graph(index, graph) for index, graph in enumerate(graphs))])


def _explain_graph(index: int, compiled: CompiledGraph) -> str:
    report = compiled.report
    lines = [
        f"graph {index}: {len(report.graph)} layers, {len(report.plan.stages)} stages, compiled in "
        f"{report.compile_s:.2f} s, called {compiled.calls} times",
        f"microbatches: {report.microbatches}",
    ]
    if report.ended_by:
        lines.append(f"ends at a {report.ended_by}")
    lines += [f"note: {note}" for note in report.notes]
    rows = [("layer", "kind", "stage", "type", "device", "runs as")]
    rows += [(r.layer, report.graph[r.layer].kind, r.stage, r.resource, r.device, r.lowering) for r in report.layers]
    lines += align(rows)
    if len(report.plan.resources) > 1:
        lines.append(report.plan.explain())
    return "\n".join(lines)


def _original(model: nn.Module) -> nn.Module:
    original = getattr(model, "_orig_mod", model)
    if not isinstance(original, nn.Module):
        raise OptionError(
            f"{type(model).__name__} is no model (allowed: an nn.Module, or what torch.compile made of one)",
            hint="compile a model once: torch.compile of a compiled model gives a plain function",
        )
    return original
