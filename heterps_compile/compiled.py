"""One compiled graph: what the backend hands back to Dynamo, and what a user can later ask of it.

Enters: the plan, the layer graph, and a callable over the flat graph inputs. Leaves: the flat outputs. Parameters are
always taken from the call, never kept: one compiled graph serves several instances of a module and replaced parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from heterps_compile.graph import LayerGraph
from heterps_compile.plans import Plan

Run = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """Where a layer runs and why: its stage, resource type, device, and how it was lowered."""

    layer: str
    stage: str
    resource: str
    device: str
    lowering: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was decided for one graph; ``ended_by`` says why Dynamo broke the graph there, empty at a plain return."""

    plan: Plan
    graph: LayerGraph
    layers: tuple[LayerReport, ...]
    microbatches: str
    ended_by: str = ""
    compile_s: float = 0.0
    notes: tuple[str, ...] = ()


@final
@dataclass(kw_only=True, eq=False)
class CompiledGraph:
    """Callable with the flat inputs of the Dynamo graph.

    ``prepare`` runs before each call where parameters must sit on another device than the caller's (None otherwise);
    ``first_call`` replaces the first run (verification). ``static_inputs`` are the positions of parameters and buffers
    among the inputs.
    """

    report: Report
    run: Run
    prepare: Callable[[tuple[Any, ...]], None] | None = None
    first_call: Run | None = None
    close: Callable[[], None] | None = None
    static_inputs: tuple[int, ...] = ()
    calls: int = 0
    _owners: list[weakref.ref[Any]] = field(default_factory=list)
    _last_owner: Callable[[], Any] | None = None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the graph once."""
        self.calls += 1
        if self.static_inputs and (self._last_owner is None or self._last_owner() is not args[self.static_inputs[0]]):
            self._note_owners(args)
        if self.prepare is not None:
            self.prepare(args)
        if self.first_call is not None:
            run, self.first_call = self.first_call, None
            return run(*args)
        return self.run(*args)

    def _note_owners(self, args: tuple[Any, ...]) -> None:
        known = {id(ref()) for ref in self._owners}
        self._owners += [weakref.ref(args[i]) for i in self.static_inputs if id(args[i]) not in known]
        self._last_owner = weakref.ref(args[self.static_inputs[0]])

    def serves(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether the graph has run with one of these parameters or buffers (a mapping from ``id``)."""
        return any((tensor := ref()) is not None and tensors.get(id(tensor)) is tensor for ref in self._owners)


_COMPILED: list[weakref.ref[CompiledGraph]] = []
"""Every graph compiled and still alive, oldest first. Dynamo owns them and tells a backend nothing of the module they
belong to, so this is the only way from a model to its plans; entries vanish with ``torch._dynamo.reset()``."""


def remember(compiled: CompiledGraph) -> CompiledGraph:
    """Make a graph findable from the model whose parameters it runs with."""
    _COMPILED[:] = [ref for ref in _COMPILED if ref() is not None]
    _COMPILED.append(weakref.ref(compiled))
    return compiled


def alive() -> tuple[CompiledGraph, ...]:
    """Every compiled graph that Dynamo still holds, oldest first."""
    return tuple(compiled for ref in _COMPILED if (compiled := ref()) is not None)


def compiled_graphs(model: nn.Module) -> tuple[CompiledGraph, ...]:
    """The graphs that have run with parameters or buffers of ``model``, oldest first."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return tuple(compiled for compiled in alive() if compiled.serves(tensors))
