"""One layer on its own: its sub-graph, synthetic inputs of the right shapes, and timed training steps.

Enters: a Dynamo graph and one of its layers. Leaves: seconds of forward, backward and, given an optimizer, the update;
through torch, or through whatever the layer is lowered to. No tensor of the user's is read or written: parameters
and buffers are synthetic too. The caller's random state, thread count and autograd mode are as before. Raises what the
sub-graph raises, for instance where an integer input is an index whose bounds only the model knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from heterps_compile.fx.ops import op_name
from heterps_compile.fx.values import example, is_parameter, num_bytes, shape, size_hint
from heterps_compile.graph import Layer
from heterps_compile.stage_graph import Cut, StageGraph

Run = Callable[..., tuple[Any, ...]]
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

TABLE_BYTES = 2**28
"""Memory for all tables of a synthetic look-up layer: beyond the last cache, short of what would not fit."""
LEAST_REPEATS, REPEATS = 3, 5
BUDGET_S = 0.02
"""A measurement repeats up to ``REPEATS`` times; after ``LEAST_REPEATS`` only until this much time is spent."""


class LayerRun:
    """A layer's sub-graph as a module of its own, and the nodes its arguments stand for.

    The ids of look-ups are arguments, so that each table gets ids within its bounds; the views and casts that prepare
    them are left out.
    """

    def __init__(self, gm: fx.GraphModule, layer: Layer) -> None:
        nodes = {node.name: node for node in gm.graph.nodes}
        self._gm = gm
        self.layer = layer
        self._kept = [nodes[lookup.node] for lookup in layer.lookups] or [nodes[name] for name in layer.nodes]
        inside = set(self._kept)
        self.arguments = tuple(dict.fromkeys(a for node in self._kept for a in node.all_input_nodes if a not in inside))
        self.rows = {lookup.ids: shape(nodes[lookup.table])[0] for lookup in layer.lookups}
        self.key = _key(self._kept, self.arguments)

    @cached_property
    def module(self) -> fx.GraphModule:
        """Called with ``arguments``, gives every value that is read outside the layer."""
        graph = fx.Graph()
        inside = {argument: graph.placeholder(argument.name) for argument in self.arguments}
        for argument, new in inside.items():
            new.meta = dict(argument.meta)
        for node in self._kept:
            inside[node] = graph.node_copy(node, inside.__getitem__)
        graph.output(tuple(inside[node] for node in self._leaving))
        return fx.GraphModule(self._gm, graph)

    @property
    def _leaving(self) -> list[fx.Node]:
        inside = set(self._kept)
        return [node for node in self._kept if not node.users or any(user not in inside for user in node.users)]

    def stage(self, device: torch.device) -> StageGraph:
        """The layer as a stage of its own, to be lowered."""
        return StageGraph(
            cut=Cut(name=self.layer.name, layers=(self.layer.name,), resource="", device=device),
            layers=(self.layer,),
            module=self.module,
            inputs=tuple(argument.name for argument in self.arguments),
            outputs=tuple(node.name for node in self._leaving),
        )

    def parameters(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Those of ``inputs`` that stand for parameters that are trained."""
        pairs = zip(self.arguments, inputs, strict=True)
        return [value for node, value in pairs if is_parameter(node) and value.requires_grad]

    def inputs(self, batch: int, half: bool, device: torch.device) -> list[Any]:
        """Synthetic arguments; ``half`` halves the leading size of those whose leading size is ``batch``."""
        tables = sum(num_bytes(a) for a in self.arguments if a.op == "placeholder" and len(shape(a)) == 2)
        shrink = min(1.0, TABLE_BYTES / max(1, tables)) if self.rows else 1.0
        return [self._input(argument, batch, half, shrink, device) for argument in self.arguments]

    def _input(self, node: fx.Node, batch: int, half: bool, shrink: float, device: torch.device) -> Any:
        value = example(node)
        if isinstance(value, (tuple, list)):
            return type(value)(_synthetic(item, item.shape, 2, device) for item in value)
        if not isinstance(value, torch.Tensor):
            return size_hint(value) if isinstance(value, torch.SymInt) else value
        sizes = [size_hint(size) for size in value.shape]
        is_table = bool(self.rows) and node.op == "placeholder" and len(sizes) == 2 and value.requires_grad
        if is_table:
            sizes[0] = max(1, int(sizes[0] * shrink))
        elif half and sizes and sizes[0] == batch:
            sizes[0] //= 2
        rows = max(1, int(self.rows[node.name] * shrink)) if node.name in self.rows else 0
        if self.rows and not rows and not value.is_floating_point() and len(sizes) == 1:  # offsets of bags
            ids = max(shape(a)[0] for a in self.arguments if a.name in self.rows)
            return torch.arange(sizes[0], device=device, dtype=value.dtype) * (ids // max(1, batch))
        return _synthetic(value, sizes, rows or 2, device)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step: the median says what to expect, the best what the machine can do."""

    median_s: float
    best_s: float


def measure(
    run: LayerRun,
    variants: Sequence[tuple[Sequence[Any], int | None]],
    call: Run | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> list[Timing]:
    """Time the layer for each (inputs, number of cores or None for as many as now), after one warm-up each.

    ``call`` runs it in place of torch; ``make_optimizer`` makes what steps its parameters. The variants take turns, so
    that what else the machine does meanwhile falls on all of them alike.
    """
    times: list[list[float]] = [[] for _ in variants]
    with own_state():
        optimizers = {id(inputs): _optimizer(run, inputs, make_optimizer) for inputs, _ in variants}
        steps = [(training_step(call or run.module, i, optimizers[id(i)]), num_threads) for i, num_threads in variants]
        for step, _ in steps:
            step()
        while len(times[0]) < REPEATS and (
            len(times[0]) < LEAST_REPEATS or sum(map(sum, times)) < BUDGET_S * len(variants)
        ):
            for taken, (step, num_threads) in zip(times, steps, strict=True):
                if num_threads is not None:
                    torch.set_num_threads(num_threads)
                began = time.perf_counter()
                step()
                taken.append(time.perf_counter() - began)
    return [Timing(statistics.median(taken), min(taken)) for taken in times]


def _optimizer(run: LayerRun, inputs: Sequence[Any], make: MakeOptimizer | None) -> torch.optim.Optimizer | None:
    trained = run.parameters(inputs)
    return make(trained) if make and trained else None


def training_step(call: Run, inputs: Sequence[Any], optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Forward, backward from gradients of ones, the update if there is an optimizer, and gradients dropped."""

    def step() -> None:
        outputs = [out for out in call(*inputs) if isinstance(out, torch.Tensor) and out.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        if optimizer is not None:
            optimizer.step()
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.is_leaf:
                value.grad = None
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
            torch.cuda.synchronize()

    return step


@contextlib.contextmanager
def own_state() -> Iterator[None]:
    """Gradients on; random state and number of threads afterwards as before."""
    before = torch.get_num_threads()
    try:
        with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _synthetic(like: torch.Tensor, sizes: Sequence[int], bound: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = [size_hint(size) for size in sizes]
    if like.dtype is torch.bool or not (like.is_floating_point() or like.is_complex()):
        high = 2 if like.dtype is torch.bool else bound
        return torch.randint(0, high, numbers, generator=generator).to(device, like.dtype)
    if len(numbers) == 2 and numbers[0] * numbers[1] > 2**20:  # a table: its values do not matter, its pages must exist
        made = torch.full(numbers, 0.01, dtype=like.dtype, device=device)
    else:
        made = torch.randn(numbers, generator=generator).to(device, like.dtype)
    return made.requires_grad_(like.requires_grad)


def _key(kept: Sequence[fx.Node], arguments: Sequence[fx.Node]) -> str:
    """A content key: the operations, how they are wired, and the types of the arguments."""
    names: dict[fx.Node, str] = {node: f"a{index}" for index, node in enumerate(arguments)}
    lines = [f"{names[node]}: {_type(node)}" for node in arguments]
    for index, node in enumerate(kept):
        names[node] = f"n{index}"
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: names[a])
        home = getattr(node.target, "__module__", "") if callable(node.target) else ""
        lines.append(f"{names[node]} = {node.op} {home}.{op_name(node)} {args} {kwargs}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _type(node: fx.Node) -> str:
    value = example(node)
    if isinstance(value, torch.Tensor):
        return f"{shape(node)} {value.dtype} {value.requires_grad}"
    return f"{type(value).__name__} {shape(node)} {num_bytes(node)}"
