"""Prove that a graph treats every row of its batch alone, so that a batch may be cut into microbatches.

Enters: a Dynamo graph and its example inputs. Leaves: a :class:`BatchVerdict` with the :class:`RowSplit` the runtime
carries out, or the operation that stands in the way. Nothing is computed: the graph runs on fake tensors, with a batch
size no literal in it can stand for, while ``fx.rows_trial.Trial`` follows the batch. What is not proved is refused:
sums, normalisation or softmax over the batch inside a graph, writes to buffers, batch sizes written as literals.

Random masks drawn per element (dropout) pass: rows stay independent, though other rows get other numbers than unsplit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import HigherOrderOperator  # tried on torch 2.13.0
from torch._subclasses.fake_tensor import FakeTensorMode  # torch 2.13.0: no public name; Dynamo's own fake mode

from heterps_compile.fx.lookups import parse_lookup
from heterps_compile.fx.ops import mode_switch, op_kind, op_name, written
from heterps_compile.fx.rows import Batch, NotRowwise, Offsets, Partial, Ragged, Rows
from heterps_compile.fx.rows_trial import Trial
from heterps_compile.fx.values import (
    batch_size,
    call_stack,
    example,
    module_path,
    parameter_names,
    placeholders,
    shape,
    size_hint,
)
from heterps_compile.graph import Lookup
from heterps_compile.row_split import Bags, Merge, RowSplit


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchVerdict:
    """``row_split`` says how to cut when it is safe; ``reason`` says why it is not."""

    row_split: RowSplit | None
    reason: str = ""

    @property
    def safe(self) -> bool:
        """Whether microbatches give the results of the whole batch."""
        return self.row_split is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAxis:
    """The proof as a pass."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BatchVerdict:
        """Never raises: what goes wrong in the trial is the reason."""
        trial = _Graph(gm, example_inputs)
        try:
            return BatchVerdict(row_split=trial.row_split())
        except NotRowwise as problem:
            return BatchVerdict(row_split=None, reason=str(problem))


@dataclass
class _Graph:
    """One trial run of a graph."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    sized: set[fx.Node] = field(default_factory=set)
    """Nodes that are numbers made from the batch size."""

    def __post_init__(self) -> None:
        self.parameters = parameter_names(self.gm, self.example_inputs)
        self.by_name = {node.name: node for node in self.gm.graph.nodes}
        self.bags = {bags.offsets: bags for bags in self._find_bags()}
        lengths = [shape(self.by_name[name])[0] - bags.include_last_offset for name, bags in self.bags.items()]
        self.batch = lengths[0] if lengths else batch_size(self.gm, self.parameters)
        roles = {node: self._role(node) for node in placeholders(self.gm)}
        self.symbols = {str(example(node).shape[0]) for node, role in roles.items() if isinstance(role, Rows)}
        self.trial = Trial(_prime_above(self._largest()))

    def row_split(self) -> RowSplit:
        """Run the trial. Raises :class:`NotRowwise`."""
        if self.batch < 2:
            raise NotRowwise(f"a batch of {self.batch} has no rows to cut")
        with _undisturbed(), FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as entered:
            for node, given in zip(placeholders(self.gm), self.example_inputs, strict=True):
                self.values[node] = self._input(node, given)
            with self.trial:
                for node in self.gm.graph.nodes:
                    if node.op not in ("placeholder", "output"):
                        self.values[node] = self._run(node, entered)
        output = next(node for node in reversed(self.gm.graph.nodes) if node.op == "output")
        marked = [(node, self.trial.batch_of(self.values[node])) for node in placeholders(self.gm)]
        return RowSplit(
            split=tuple(node.name for node, batch in marked if isinstance(batch, Rows)),
            merge=tuple(self._merge(value) for value in output.args[0]),
            rows=tuple(node.name for node, _ in marked if node in self.sized),
            bags=tuple(self.bags.values()),
        )

    def _largest(self) -> int:
        """Above every size and every integer in the graph; the batch itself counts too."""
        sizes = [size for node in self.gm.graph.nodes for size in shape(node)]
        numbers: list[int] = []
        for node in self.gm.graph.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), lambda a: numbers.append(a) if type(a) is int else None)
        return max([1000, *sizes, *(number for number in numbers if number < 2**31)])

    def _find_bags(self) -> Iterator[Bags]:
        """Inputs that only ``embedding_bag`` with offsets reads, straight or through one-by-one operations."""
        values: dict[str, dict[str, None]] = {}
        last: dict[str, bool] = {}
        for node in self.gm.graph.nodes:
            lookup = parse_lookup(node, self.parameters) if op_kind(node) == "lookup" else None
            if lookup is None or lookup.offsets is None:
                continue
            offsets = self._source(lookup.offsets)
            for name in (lookup.ids, lookup.per_sample_weights):
                if name is not None and offsets and (source := self._source(name)):
                    values.setdefault(offsets, {})[source] = None
                    last[offsets] = lookup.include_last_offset
        for offsets, names in values.items():
            yield Bags(offsets=offsets, values=tuple(names), include_last_offset=last[offsets])

    def _source(self, name: str) -> str | None:
        """The input a value is made from by operations of one tensor; None where there are others."""
        node = self.by_name[name]
        while node.op != "placeholder":
            read = [a for a in node.all_input_nodes if isinstance(example(a), torch.Tensor)]
            if len(read) != 1 or len(shape(node)) != 1 or shape(node) != shape(read[0]):
                return None
            node = read[0]
        return None if node.name in self.parameters else node.name

    def _input(self, node: fx.Node, given: Any) -> Any:
        value = example(node) if example(node) is not None else given
        if isinstance(value, torch.SymInt):
            if str(value) in self.symbols:
                self.sized.add(node)
                return self.trial.rows
            lengths = {
                str(example(self.by_name[name]).shape[0]) for b in self.bags.values() for name in (b.offsets, *b.values)
            }
            if str(value) in lengths and node.users:
                raise NotRowwise(
                    f"input {node.name} is the number of ids in all bags, and the graph calculates with it"
                )
            return size_hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        sizes, batch = [size_hint(size) for size in value.shape], self._role(node)
        if isinstance(batch, Rows):
            sizes[0] = self.trial.rows
        elif isinstance(batch, Offsets):
            sizes[0] = self.trial.rows + self.bags[node.name].include_last_offset
        return self.trial.give(torch.empty(sizes, dtype=value.dtype, device=value.device), batch)

    def _role(self, node: fx.Node) -> Batch | None:
        sizes = shape(node)
        if node.name in self.parameters or not sizes:
            return None
        if node.name in self.bags:
            return Offsets(node.name)
        owner = next((bags.offsets for bags in self.bags.values() if node.name in bags.values), None)
        if owner is not None:
            return Ragged(owner)
        return Rows(0) if sizes[0] == self.batch else None

    def _run(self, node: fx.Node, entered: contextlib.ExitStack) -> Any:
        try:
            if node.op == "get_attr":
                value = getattr(self.gm, str(node.target))
                return self.trial.give(value, None) if isinstance(value, torch.Tensor) else value
            if mode_switch(node):
                return _switch(node, entered)
            self._sizes_only(node)
            if op_name(node) == "item":
                return self._number(node)
            if written(node) and _in_batch_norm(node):
                raise NotRowwise("batch_norm in training mode normalises over the batch and writes to its buffers")
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
            if node.target is F.embedding_bag:
                return self._embedding_bag(node)
            if isinstance(node.target, HigherOrderOperator):
                return _call_body(op_name(node), args)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)
        except NotRowwise as problem:
            raise NotRowwise(f"{problem} ({_place(node)})") from None
        except Exception as error:  # sizes that no longer fit: the batch size is in the graph as a number
            text = " ".join(str(error).split())[:160]
            only = f"{op_name(node)} works for a batch of {self.batch} only, or cannot be followed: {text}"
            raise NotRowwise(f"{only} ({_place(node)})") from None

    def _sizes_only(self, node: fx.Node) -> None:
        """Numbers made from the batch size may make other numbers and sizes, but not take part in arithmetic."""
        if not any(a in self.sized for a in node.all_input_nodes):
            return
        if not isinstance(example(node), torch.Tensor):
            self.sized.add(node)
        elif op_kind(node) not in ("view", "mode") and op_name(node).removeprefix("new_") not in _FROM_SIZES:
            raise NotRowwise(f"{op_name(node)} calculates with the batch size")

    def _number(self, node: fx.Node) -> Any:
        """``item()`` of an input that no row has a part in: modules' floats under dynamic shapes."""
        value, source = example(node), node.args[0]
        if isinstance(source, fx.Node) and self.trial.batch_of(self.values[source]) is not None:
            raise NotRowwise("item reads a value of the batch")
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.has_hint():
            return value.node.hint
        given = dict(zip(placeholders(self.gm), self.example_inputs, strict=True))
        if not isinstance(source, fx.Node) or source not in given:
            raise NotRowwise("item reads a value that the graph calculates")
        return given[source].item()

    def _embedding_bag(self, node: fx.Node) -> torch.Tensor:
        """At torch level: below it 2-D ids become offsets, which would hide the rows."""
        lookup = parse_lookup(node, self.parameters)
        if lookup is None:
            raise NotRowwise("embedding_bag on a table that is no parameter")
        if lookup.scale_grad_by_freq or lookup.max_norm is not None:
            option = "scale_grad_by_freq" if lookup.scale_grad_by_freq else "max_norm"
            raise NotRowwise(f"embedding_bag with {option} does what other rows of the batch decide")
        expected = self._bag_roles(lookup)
        for name, role in expected.items():
            if self.trial.batch_of(self.values[self.by_name[name]]) != role:
                raise NotRowwise("embedding_bag on ids, offsets or weights that are not cut by the same rows")
        table = self.values[self.by_name[lookup.table]]
        result = torch.empty(self.trial.rows, table.shape[1], dtype=table.dtype, device=table.device)
        self.trial.mark(result, Rows(0))
        return result

    def _bag_roles(self, lookup: Lookup) -> dict[str, Batch]:
        weights = [lookup.per_sample_weights] if lookup.per_sample_weights else []
        if lookup.offsets is None:
            return {name: Rows(0) for name in [lookup.ids, *weights]}
        source = self._source(lookup.offsets)
        if source is None or source not in self.bags:
            raise NotRowwise("embedding_bag with offsets that are calculated in the graph")
        return {lookup.offsets: Offsets(source), **{name: Ragged(source) for name in [lookup.ids, *weights]}}

    def _merge(self, value: Any) -> Merge:
        if not isinstance(value, fx.Node):
            return Merge(kind="same")
        if value in self.sized:
            raise NotRowwise(f"output {value.name} is the batch size")
        result = self.values[value]
        if isinstance(result, (tuple, list)):
            raise NotRowwise(f"output {value.name} is a tuple")
        batch = self.trial.batch_of(result)
        if batch is None:
            return Merge(kind="same")
        if isinstance(batch, Partial):
            return Merge(kind=batch.kind)
        if isinstance(batch, Rows) and batch.outer == 1:
            return Merge(kind="concat", dim=batch.dim)
        raise NotRowwise(f"output {value.name} holds the batch inside a flattened dimension")


_FROM_SIZES = ("zeros", "ones", "full", "empty", "rand", "randn", "arange", "repeat")


def _in_batch_norm(node: fx.Node) -> bool:
    stack = call_stack(node)
    return bool(stack) and "batchnorm" in str(stack[-1][2].__name__).lower()


def _switch(node: fx.Node, entered: contextlib.ExitStack) -> None:
    """Autocast as the graph has it, left again whatever happens; other modes do not matter to the trial."""
    if op_name(node) == "_enter_autocast":
        arguments: tuple[Any, ...] = node.args
        kind, dtype, enabled, caches = arguments
        entered.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches))
    elif op_name(node) == "_exit_autocast":
        entered.pop_all().close()


def _call_body(name: str, args: Sequence[Any]) -> Any:
    """A checkpointed region runs like any other code; other higher-order operations are not followed."""
    if name != "tag_activation_checkpoint":
        raise NotRowwise(f"{name} is not followed")
    return args[0](*args[1:])


def _place(node: fx.Node) -> str:
    stack = call_stack(node)
    module = module_path(stack[-1][1])[1] if stack else ""
    return f"node {node.name}" + (f" in module {module}" if module else "")


def _prime_above(number: int) -> int:
    candidate = number + 1 + number % 2
    while any(candidate % factor == 0 for factor in range(3, math.isqrt(candidate) + 1, 2)):
        candidate += 2
    return candidate


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers as they were; the caller's inference mode out of the way."""
    with torch.random.fork_rng(devices=()), torch.inference_mode(False), torch.no_grad():
        yield
