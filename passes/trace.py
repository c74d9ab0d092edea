"""Turn a Dynamo graph into a graph of layers.

Enters: a torch-level ``fx.GraphModule`` whose placeholders include the parameters, and its example inputs. Leaves: a
:class:`~heterps_compile.graph.LayerGraph` in which every compute node is in exactly one layer. Nothing runs: all facts
come from Dynamo's example values. Refused: graphs without a compute node.

Nodes are grouped in this order: what must stay together (mode regions, writes with the owner of the memory, calls of a
leaf module), look-ups of one kind, cheap operations with a neighbour, and, above ``max_layers``, cheap neighbours.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx

from heterps_compile.errors import GraphError, OptionError
from heterps_compile.fx.cut_order import Tensor, shorter
from heterps_compile.fx.layers import describe_layers
from heterps_compile.fx.lookups import parse_lookup
from heterps_compile.fx.ops import CHEAP, is_random, mode_regions, op_kind, written
from heterps_compile.fx.quotient import Quotient, components
from heterps_compile.fx.values import call_stack, example, num_bytes, parameter_names, requires_grad, shape, storages
from heterps_compile.fx.work import node_work
from heterps_compile.graph import LayerGraph, Lookup

SMALL_CALL = 2
"""A leaf module that holds at most this many cheap operations is no layer of its own (an activation, a bias)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Group the nodes of a graph into layers and annotate them.

    ``max_layers`` bounds the number of layers; cheap neighbours are merged to reach it. Tables of up to
    ``small_table_bytes`` form look-up layers apart from larger ones, so that they can be placed apart.
    """

    max_layers: int = 64
    small_table_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.max_layers < 1:
            raise OptionError(f"max_layers is {self.max_layers} (allowed: a whole number >= 1)")

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> LayerGraph:
        """Raises :class:`GraphError` for a graph without a compute node."""
        facts = _Facts(gm, parameter_names(gm, example_inputs))
        if not facts.nodes:
            raise GraphError("the graph computes nothing: it returns its inputs as they are")
        groups = _layers(facts, self)
        return describe_layers(
            gm, [[facts.nodes[i] for i in group] for group in groups], facts.order_edges(), facts.parameters
        )


class _Facts:
    """The compute nodes of a graph by position, and what constrains them."""

    def __init__(self, gm: fx.GraphModule, parameters: frozenset[str]) -> None:
        self.gm = gm
        self.parameters = parameters
        self.nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.position = {node: position for position, node in enumerate(self.nodes)}
        self.kinds = [op_kind(node) for node in self.nodes]
        parsed = ((i, parse_lookup(node, parameters)) for i, node in enumerate(self.nodes) if self.kinds[i] == "lookup")
        self.lookups: dict[int, Lookup] = {i: lookup for i, lookup in parsed if lookup}

    @cached_property
    def data_edges(self) -> list[tuple[int, int]]:
        """Producer to consumer."""
        place = self.position
        return [(place[a], place[b]) for b in self.nodes for a in b.all_input_nodes if a in place]

    @cached_property
    def effects(self) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Edges that keep writes, reads and random draws in order, and sets of nodes that share written memory.

        A write stays with the node that made the memory: a boundary between them might copy, or cut the autograd graph
        where an in-place operation is not allowed. Memory of an input that is written stays with all who read it later.
        """
        edges: list[tuple[int, int]] = []
        together: list[list[int]] = []
        owner: dict[int, int] = {}
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        draw: int | None = None
        keys = {node: storages(node) for node in self.gm.graph.nodes}
        for i, node in enumerate(self.nodes):
            writes = list(dict.fromkeys(key for target in written(node) for key in keys[target]))
            sources = node.all_input_nodes
            # A tuple's getitem, and any other node that views one value, touches but its own memory.
            alone = not writes and len(sources) == 1 and keys[node] and set(keys[node]) <= set(keys[sources[0]])
            read = list(dict.fromkeys(keys[node] if alone else (key for source in sources for key in keys[source])))
            for key in read:
                if key in writer:
                    edges.append((writer[key], i))
                    if key not in owner:
                        together.append([writer[key], i])
                readers[key].append(i)
            for key in writes:
                edges += [(reader, i) for reader in readers[key] if reader != i]
                if key in owner and owner[key] != i:
                    together.append([owner[key], i])
                writer[key], readers[key] = i, []
            owner.update((key, i) for key in keys[node] if key not in owner and key not in read)
            if is_random(node, self.gm):
                edges += [(draw, i)] if draw is not None else []
                draw = i
        return edges, together

    def order_edges(self) -> list[tuple[fx.Node, fx.Node]]:
        """Ordering edges as nodes."""
        return [(self.nodes[a], self.nodes[b]) for a, b in self.effects[0]]

    def producers(self, items: Sequence[int]) -> Iterator[int]:
        """Positions of the nodes whose values ``items`` read."""
        return (self.position[a] for i in items for a in self.nodes[i].all_input_nodes if a in self.position)

    def weight(self, items: Sequence[int]) -> float:
        """Rough cost of a group in bytes: what it moves, and a tenth of its FLOPs."""
        work = [node_work(self.nodes[i]) for i in items]
        return sum(w.forward_bytes + 0.1 * w.forward_flops for w in work)

    @cached_property
    def calls(self) -> dict[str, list[int]]:
        """Nodes of each call of a module that calls no other module and looks nothing up."""
        calls: dict[str, list[int]] = defaultdict(list)
        containers: set[str] = set()
        for i, node in enumerate(self.nodes):
            keys = [key for key, _, _ in call_stack(node)]
            containers.update(keys[:-1])
            if keys:
                calls[keys[-1]].append(i)
        leaves = {key: items for key, items in calls.items() if key not in containers}
        return {key: items for key, items in leaves.items() if not any(i in self.lookups for i in items)}

    def unpacked(self) -> Iterator[list[int]]:
        """Each node that gives a tuple, with the nodes that take it apart: what crosses a boundary is a tensor."""
        for i, node in enumerate(self.nodes):
            if isinstance(example(node), (tuple, list)):
                yield [i, *(self.position[user] for user in node.users if user in self.position)]

    def is_cheap(self, group: Sequence[int]) -> bool:
        """Whether a group clings to a neighbour: no heavy operation, and no module of the user's own with a body."""
        if any(self.kinds[i] not in CHEAP for i in group):
            return False
        if sum(self.kinds[i] != "view" for i in group) <= SMALL_CALL:
            return True
        stack = call_stack(self.nodes[group[0]])
        return not stack or stack[-1][0] not in self.calls or stack[-1][2].__module__.startswith("torch.nn.")


def _layers(facts: _Facts, options: Trace) -> list[list[int]]:
    """Positions of the nodes of each layer, layers in the order they run (look-ups first where free)."""
    effect_edges, shared = facts.effects
    edges = facts.data_edges + effect_edges
    together = [*mode_regions(facts.nodes), *shared, *facts.calls.values(), *facts.unpacked()]
    atoms = components(len(facts.nodes), edges, together)
    merged = _merge_lookups(facts, atoms, edges, options.small_table_bytes)
    quotient = Quotient(merged, edges)
    lookups = {group for group, items in quotient.members.items() if all(i in facts.lookups for i in items)}
    cheap = {group for group, items in quotient.members.items() if facts.is_cheap(items)}
    _absorb(quotient, facts, cheap, lookups)
    _coarsen(quotient, facts, lookups, options.max_layers)
    early: set[int] = set()
    for group in quotient.ranked():
        if group in lookups and quotient.predecessors[group] <= early:
            early.add(group)
    first = {group: min(items) for group, items in quotient.members.items()}
    order = quotient.order(lambda g: (g not in early, first[g]))
    later = shorter(order[len(early) :], quotient.predecessors, _tensors(facts, quotient, early))
    return [sorted(quotient.members[group]) for group in [*order[: len(early)], *later]]


def _tensors(facts: _Facts, quotient: Quotient, early: set[int]) -> list[Tensor]:
    """What crosses between the groups that may still change places; a look-up that runs first is no maker here."""
    found = []
    for node in facts.nodes:
        maker = quotient.owner[facts.position[node]]
        readers = {quotient.owner[facts.position[user]] for user in node.users if user in facts.position} - {maker}
        if readers and maker not in early:
            found.append(Tensor(maker, frozenset(readers), float(num_bytes(node))))
    return found


def _merge_lookups(
    facts: _Facts, atoms: list[list[int]], edges: list[tuple[int, int]], small_table_bytes: int
) -> list[list[int]]:
    """Merge independent look-ups of one kind.

    The level of a look-up counts the look-ups before it on the longest path. Two look-ups of one level cannot reach
    each other, and what a group of one level reaches has a higher level: merging makes no cycle. A table that is read
    at several levels stays apart from others, which it would tie to its type.
    """
    alone = Quotient(atoms, edges)
    level: dict[int, int] = {}
    read_at: dict[str, set[int]] = defaultdict(set)
    for group in alone.ranked():
        own = all(i in facts.lookups for i in alone.members[group])
        before = max((level[earlier] for earlier in alone.predecessors[group]), default=0)
        level[group] = before + own
        if own:
            read_at[facts.lookups[alone.members[group][0]].table].add(before)
    classes: dict[object, list[int]] = defaultdict(list)
    for group in alone.ranked():
        items = alone.members[group]
        if not all(i in facts.lookups for i in items):
            classes[group].append(group)
            continue
        table = facts.lookups[items[0]].table
        again = table if len(read_at[table]) > 1 else ""
        classes[(level[group], again, *_table_class(facts, items, small_table_bytes))].append(group)
    return [sorted(i for group in groups for i in alone.members[group]) for groups in classes.values()]


def _table_class(facts: _Facts, items: Sequence[int], small_table_bytes: int) -> tuple[object, ...]:
    lookup = facts.lookups[items[0]]
    table = next(node for node in facts.nodes[items[0]].all_input_nodes if node.name == lookup.table)
    dtype = table.meta["example_value"].dtype
    small = num_bytes(table) <= small_table_bytes
    renormed = items[0] if lookup.max_norm is not None else -1  # writes to its table: stays alone
    return lookup.mode, shape(table)[-1], dtype, lookup.sparse, small, renormed


def _absorb(quotient: Quotient, facts: _Facts, cheap: set[int], lookups: set[int]) -> None:
    """Contract every cheap group into a neighbour, where one may take it."""
    bare = _read_only_inputs(quotient, cheap)
    quotient.rerank(_lookups_first(quotient, bare, lookups))
    for group in reversed(quotient.ranked()):
        after = quotient.first_successor(group)
        if group in bare and after is not None and not (after in lookups and _learns(facts, quotient, group)):
            quotient.contract(after, group)
    for group in quotient.ranked():
        before = quotient.last_predecessor(group)
        if group not in cheap - bare or before is None or before in lookups:
            continue
        if any(quotient.owner[a] == before for a in facts.producers(quotient.members[group])):
            quotient.contract(before, group)
    first = next((group for group in quotient.ranked() if group not in lookups), None)
    for group in cheap & set(quotient.members):  # dead code and the like: tied to nothing, safe anywhere
        if first not in (None, group) and not quotient.predecessors[group] and not quotient.successors[group]:
            quotient.contract(first, group)
    for group in reversed(quotient.ranked()):  # cheap work on looked-up rows, for one reader
        after = quotient.first_successor(group)
        if group in cheap and len(quotient.successors[group]) == 1 and after is not None and after not in lookups:
            quotient.contract(after, group)


def _read_only_inputs(quotient: Quotient, cheap: set[int]) -> set[int]:
    """Cheap groups before which there is nothing but such groups."""
    bare: set[int] = set()
    for group in quotient.ranked():
        if group in cheap and quotient.predecessors[group] <= bare:
            bare.add(group)
    return bare


def _lookups_first(quotient: Quotient, bare: set[int], lookups: set[int]) -> Callable[[int], tuple[bool, int]]:
    """Priority that ranks the look-ups on graph inputs, with what prepares their ids, before all else.

    With the lowest ranks they are never the last predecessor of a group that has another one.
    """
    early = {group for group in lookups if quotient.predecessors[group] <= bare}
    for group in reversed(quotient.ranked()):
        if group in bare and quotient.successors[group] & early:
            early.add(group)
    first = {group: items[0] for group, items in quotient.members.items()}
    return lambda group: (group not in early, first[group])


def _learns(facts: _Facts, quotient: Quotient, group: int) -> bool:
    return any(requires_grad(facts.nodes[i]) for i in quotient.members[group])


def _coarsen(quotient: Quotient, facts: _Facts, lookups: set[int], max_layers: int) -> None:
    """Merge the cheapest group with its cheaper neighbour until few enough are left; look-ups last of all."""
    if len(quotient) <= max_layers:
        return
    weight = {group: facts.weight(items) for group, items in quotient.members.items()}
    heap = [(weight[group], group) for group in quotient.members if group not in lookups]
    heapq.heapify(heap)
    while len(quotient) > max_layers and heap:
        cost, group = heapq.heappop(heap)
        if group not in quotient.members or cost != weight[group]:
            continue
        keep = _neighbour(quotient, group, weight, lookups)
        if keep is not None:
            quotient.contract(keep, group)
            weight[keep] += cost
            heapq.heappush(heap, (weight[keep], keep))
    while len(quotient) > max_layers:
        ranked = quotient.ranked()
        keep, gone = min(pairwise(ranked), key=lambda pair: weight[pair[0]] + weight[pair[1]])
        quotient.contract(keep, gone)
        weight[keep] += weight[gone]


def _neighbour(quotient: Quotient, group: int, weight: dict[int, float], lookups: set[int]) -> int | None:
    """The lightest neighbour that is safe to contract with; one only next in rank, without an edge, counts double."""
    linked = (quotient.last_predecessor(group), quotient.first_successor(group))
    near = {other: 2.0 for other in quotient.beside(group) if other not in lookups}
    near.update((other, 1.0) for other in linked if other is not None and other not in lookups)
    return min(near, key=lambda other: (near[other] * weight[other], quotient.rank[other]), default=None)
