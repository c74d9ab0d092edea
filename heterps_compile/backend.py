"""The entry of ``torch.compile(model, backend="heterps")``: one line per pass, in order.

Enters: a Dynamo graph, its example inputs, the user's options. Leaves: a callable over the flat inputs. Every pass
takes and returns values; the graph Dynamo made is never edited, so it is the way out when a pass fails: one warning
says which and why, and ``strict`` raises instead.
"""

from __future__ import annotations

import fnmatch
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from heterps_compile.adopt import adopt
from heterps_compile.assemble import assemble, uncompiled
from heterps_compile.capture import ended_by
from heterps_compile.compiled import CompiledGraph, alive, remember
from heterps_compile.errors import GraphError, HeterpsError, HeterpsWarning, InfeasibleError, LoweringError, OptionError
from heterps_compile.graph import LayerGraph
from heterps_compile.options import Options
from heterps_compile.passes.lower import Lower, inputs_read_whole
from heterps_compile.passes.profile import Profile
from heterps_compile.passes.split import Split
from heterps_compile.passes.trace import Trace
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan
from heterps_compile.site import Site

_ONE_AT_A_TIME = threading.RLock()
"""Dynamo may compile from several threads at once; layers are measured, and kernels compiled, one graph at a time."""


def heterps(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> CompiledGraph:
    """Compile one graph. Raises the :class:`HeterpsError` that names what the user asked for and cannot have."""
    settings = Options.parse(options, mode)
    with _ONE_AT_A_TIME:
        started = time.perf_counter()
        compiled = _compile_or_stay_eager(gm, example_inputs, settings)
        compile_s = time.perf_counter() - started
        compiled.report = replace(compiled.report, compile_s=compile_s, ended_by=ended_by(gm))
        return remember(compiled)


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> CompiledGraph:
    """Trace, profile, place (fuse and provision with it), split, lower, and join the stages into a pipeline."""
    site = Site.of(gm, example_inputs, options)
    graph = Trace()(gm, example_inputs)
    pins = {**site.pinned(graph, gm, example_inputs), **_pins_of(graph, options)}
    read_whole = inputs_read_whole(gm, graph)
    lower = Lower(strict=options.strict, lazy_tables=options.lazy_tables, read_whole=read_whole)
    if options.plan is not None:
        _say_infeasible(options.plan)
        plan = adopt(options.plan, graph, site.cluster, default=site.home_type)
    else:
        costs = Profile(mode=options.profile, runs_as=lambda stage: lower(stage).run)(gm, graph, site.cluster)
        request = Request(
            min_throughput=options.min_throughput,
            policy=options.policy,
            seed=options.seed,
            pin=pins,
            replicas=options.replicas,
            mode="full" if options.cluster is not None else "paper",  # only a fleet has links and units to run out of
            microbatches=options.microbatches,
            quick=True,
        )
        plan = plan_costs(costs, site.cluster, request)
        _demand_feasible(plan)
    stages = Split(home=site.home)(gm, graph, site.cuts(plan))
    lowered = [lower(stage) for stage in stages]
    return assemble(gm, example_inputs, graph, plan, lowered, site, options, read_whole)


def _pins_of(graph: LayerGraph, options: Options) -> dict[str, str]:
    """The user's pins that concern this graph: a model gives several, and each is planned alone."""
    found = {glob: kind for glob, kind in options.pin.items() if fnmatch.filter(graph.names(), glob)}
    for glob in options.pin.keys() - found.keys():
        message = f"pin {glob!r} matches no layer of a graph with layers {', '.join(graph.names()[:8])}"
        if options.strict:
            raise OptionError(message, hint="heterps_compile.explain(model) lists the layers; globs need [[] for a [")
        warnings.warn(f"{message}: it places nothing there", HeterpsWarning, stacklevel=2)
    return found


def _say_infeasible(plan: Plan) -> None:
    if not plan.feasible and plan.binds:
        warnings.warn(
            f"the plan does not reach the {plan.min_throughput or 0:g} samples/s it was asked for "
            f"({plan.throughput_samples_per_s:.4g}; what binds: {'; '.join(plan.binds)})",
            HeterpsWarning,
            stacklevel=2,
        )


def _demand_feasible(plan: Plan) -> None:
    if not plan.feasible:
        raise InfeasibleError(
            f"no plan reaches {plan.min_throughput:g} samples/s; the best here is "
            f"{plan.throughput_samples_per_s:.4g} (what binds: {'; '.join(plan.binds)})",
            hint="lower min_throughput, raise a limit of the cluster, or leave min_throughput out",
        )


def _compile_or_stay_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> CompiledGraph:
    reason: Exception
    try:
        return compile_graph(gm, example_inputs, options)
    except (GraphError, LoweringError) as error:
        reason = error
    except HeterpsError:
        raise  # the user asked for something that cannot be had: no substitute is right
    except Exception as error:  # a fault of ours must not stop a training job that eager can run
        reason = error
    if options.strict:
        raise reason
    if any(node.op not in ("placeholder", "output") for node in gm.graph.nodes):  # nothing to say of an empty graph
        warnings.warn(
            f"a graph of {len(gm.graph.nodes)} nodes runs in eager, unplanned: {type(reason).__name__}: {reason}",
            HeterpsWarning,
            stacklevel=2,
        )
    return uncompiled(gm, example_inputs, str(reason))


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``: stop the workers of every graph."""
    for compiled in alive():
        if compiled.close is not None:
            compiled.close()


heterps.reset = _reset  # type: ignore[attr-defined]
