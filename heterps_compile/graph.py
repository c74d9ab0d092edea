"""The layer graph: what is placed, and every fact the planner knows about it.

Enters: layers made by ``passes/trace.py``. Leaves: an immutable, acyclic graph in execution order. It refuses duplicate
names and cycles. Amounts are per sample of the batch, so that they hold for any batch size; units end the names.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from heterps_compile.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import networkx as nx

LayerKind = Literal[
    "embedding", "linear", "conv", "matmul", "attention", "recurrent", "norm", "pointwise", "reduction", "loss", "other"
]
"""What a layer mostly does. ``matmul`` is a product of two activations (the dot interaction of DLRM, for one)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """One call of ``F.embedding`` or ``F.embedding_bag``: FX node names and the static arguments of the call.

    ``mode`` is ``"none"`` for ``F.embedding`` and ``"sum" | "mean" | "max"`` for ``F.embedding_bag``.
    """

    node: str
    table: str
    ids: str
    mode: Literal["none", "sum", "mean", "max"] = "none"
    offsets: str | None = None
    per_sample_weights: str | None = None
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    include_last_offset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The smallest unit that is placed: one module call or functional op with what clings to it.

    ``nodes`` are FX node names in graph order; ``parameters`` the placeholders it reads that are parameters or buffers.
    ``touched_bytes_per_sample`` counts the parameter bytes one sample reads (table rows for a look-up).
    """

    name: str
    kind: LayerKind
    nodes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    module: str = ""
    parameter_bytes: int = 0
    touched_bytes_per_sample: float = 0.0
    input_bytes_per_sample: float = 0.0
    output_bytes_per_sample: float = 0.0
    forward_flops_per_sample: float = 0.0
    backward_flops_per_sample: float = 0.0
    forward_bytes_per_sample: float = 0.0
    backward_bytes_per_sample: float = 0.0

    @property
    def intensity_flop_per_byte(self) -> float:
        """FLOPs over bytes moved, forward and backward together; 0 for a layer that moves nothing."""
        moved = self.forward_bytes_per_sample + self.backward_bytes_per_sample
        return (self.forward_flops_per_sample + self.backward_flops_per_sample) / moved if moved else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Activation bytes per sample that flow from one layer to another (0 for an ordering constraint)."""

    source: str
    target: str
    bytes_per_sample: float


@dataclass(frozen=True)
class LayerGraph:
    """Layers in execution order, the tensors between them, and the sets that must share a resource type.

    ``bound`` lists groups of layers that read one table or parameter and so cannot be placed apart.
    Raises :class:`GraphError` for duplicate names, unknown ends of an edge, or an edge against the order.
    """

    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...] = ()
    bound: tuple[tuple[str, ...], ...] = ()
    batch_size: int = 1
    _by_name: dict[str, Layer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {layer.name: layer for layer in self.layers}
        if len(by_name) != len(self.layers):
            raise GraphError(f"layer names are not unique: {[layer.name for layer in self.layers]}")
        position = {name: index for index, name in enumerate(by_name)}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in position:
                    raise GraphError(f"edge {edge.source} -> {edge.target} names no layer {end!r}")
            if position[edge.source] >= position[edge.target]:
                raise GraphError(f"edge {edge.source} -> {edge.target} runs against the order of the layers")
        object.__setattr__(self, "_by_name", by_name)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> Layer:
        return self._by_name[name]

    def names(self) -> tuple[str, ...]:
        """Layer names in execution order."""
        return tuple(self._by_name)

    def with_lazy_tables(self) -> LayerGraph:
        """The same graph where gradients of tables hold the rows that were looked up, as under ``train_step``."""
        layers = tuple(
            replace(
                layer, backward_bytes_per_sample=min(layer.backward_bytes_per_sample, layer.forward_bytes_per_sample)
            )
            if layer.lookups
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def digraph(self) -> nx.DiGraph[str]:
        """A networkx copy of the graph: nodes carry ``layer``, edges ``bytes_per_sample``."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        for layer in self.layers:
            graph.add_node(layer.name, layer=layer)
        for edge in self.edges:
            graph.add_edge(edge.source, edge.target, bytes_per_sample=edge.bytes_per_sample)
        return graph

    def signature(self) -> str:
        """A content key: equal for graphs with the same layers, facts and edges, whatever the process."""
        return hashlib.sha256(repr((self.layers, self.edges, self.bound)).encode()).hexdigest()[:16]

    def dot(self, classes: dict[str, str] | None = None) -> str:
        """Graphviz source: one box per layer, bytes per sample on the edges; ``classes`` adds a line per layer."""
        lines = ["digraph layers {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
        for layer in self.layers:
            label = f"{layer.name}\\n{layer.kind}, {layer.intensity_flop_per_byte:.2f} FLOP/byte"
            if classes:
                label += f"\\n{classes[layer.name]}"
            lines.append(f'  "{layer.name}" [label="{label}"];')
        lines += [
            f'  "{edge.source}" -> "{edge.target}" [label="{edge.bytes_per_sample:.0f} B"];' for edge in self.edges
        ]
        return "\n".join([*lines, "}"])
