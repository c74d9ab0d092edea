"""One call of a group of look-ups: the tensors of this call, where their outputs lie, and what goes back.

Enters: a spec and the tensors. Leaves: a :class:`GroupCall`, or None if this call is one for the reference as a whole
(unusual ids, offsets or weights; eager then answers, or says what is wrong). Outputs of one shape come from one
allocation. "Served" look-ups are those that kernels do; lists per served look-up follow ``Layout.served``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from heterps_compile.errors import IdRangeError
from heterps_compile.kernels import reference
from heterps_compile.kernels.cpu_lookup import BAD_OFFSETS, CALL_FIELDS, FIXED_FIELDS, TableGradient, call_fields, place
from heterps_compile.kernels.group_layout import Layout, Part, make_layout, table_key
from heterps_compile.kernels.specs import GroupSpec, LookupSpec

MAX_IDS = 2**31 - 1


class BadOffsets(Exception):  # not an error a user meets: the reference then says what is wrong
    """Offsets that do not cut the ids into bags."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """A call, checked as far as it can be without reading ids.

    ``bags`` are the output rows of each served look-up; ``calls`` the structs of each part, ``read`` the tensors they
    point into, ``side_by_side`` whether outputs lie in one buffer, and ``one_buffer`` whether that is the output.
    """

    spec: GroupSpec
    layout: Layout
    tables: Sequence[Tensor]
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    bags: Sequence[int]
    calls: Sequence[array[int]]
    read: Sequence[Tensor]
    side_by_side: bool
    one_buffer: bool

    # ------------------------------------------------------------ forward

    def forward(self) -> tuple[Tensor, ...]:
        """Outputs of the served look-ups, in the order of the spec; with ``one_buffer`` a single tensor."""
        outputs, addresses, strides = self._allocate_side_by_side() if self.side_by_side else self._allocate()
        for part, calls in zip(self.layout.parts, self.calls, strict=True):
            place(calls, [addresses[slot] for slot in part.slots], [strides[slot] for slot in part.slots])
            fault = part.kernels.forward(part.fixed, calls)
            if fault:
                self._raise_fault(part, *fault)
        return outputs

    def complete(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All outputs of the group: those of :meth:`forward` and, between them, those of the reference."""
        if self.one_buffer:
            return outputs
        if self.layout.leftover:
            served = dict(zip(self.layout.served, outputs, strict=True))
            outputs = tuple(
                served[index] if index in served else self._reference(index) for index in range(len(self.spec.lookups))
            )
        return (torch.cat(outputs, -1),) if self.spec.layout == "concat" else outputs

    def _raise_fault(self, part: Part, status: int, at: int, position: int, value: int) -> None:
        if status == BAD_OFFSETS:
            raise BadOffsets
        lookup, ids = self.spec.lookups[part.lookups[at]], self.ids[part.lookups[at]]
        place_of_id = divmod(position, ids.shape[1]) if ids.dim() == 2 else position
        name = f" ({lookup.name})" if lookup.name else ""
        rows = part.fixed[at * FIXED_FIELDS + 1]
        raise IdRangeError(
            f"id {value} at position {place_of_id} is outside table {lookup.table}{name}, which has {rows} rows",
            hint="ids must be in [0, rows); check the vocabulary size, or hash ids into the table",
        )

    def _reference(self, index: int) -> Tensor:
        lookup = self.spec.lookups[index]
        return reference.lookup_one(
            lookup,
            self.tables[lookup.table],
            self.ids[index],
            self.offsets[index],
            self.weights[index],
            sparse=lookup.sparse,
        )

    def _shapes(self) -> list[tuple[int, ...]]:
        return [
            (*self.ids[index].shape, dim) if self.spec.lookups[index].mode == "none" else (bags, dim)
            for index, dim, bags in zip(self.layout.served, self.layout.dims, self.bags, strict=True)
        ]

    def _allocate(self) -> tuple[tuple[Tensor, ...], list[int], Sequence[int]]:
        """Outputs to be filled, and the address and row stride of each.

        Parts of one buffer are taken with ``.data``: a plain view would share one version counter among all outputs,
        and autograd would forbid in-place operations on each of several views.
        """
        shapes, dtype = self._shapes(), self.layout.dtype
        if dtype is not None and len(shapes) > 1 and shapes.count(shapes[0]) == len(shapes):
            buffer = torch.empty((len(shapes), *shapes[0]), dtype=dtype)
            start, step = buffer.data_ptr(), buffer.stride(0) * dtype.itemsize
            addresses = [start + k * step for k in range(len(shapes))]
            return tuple([view.data for view in buffer.unbind()]), addresses, self.layout.dims
        outputs = [
            torch.empty(shape, dtype=self.tables[self.spec.lookups[index].table].dtype)
            for index, shape in zip(self.layout.served, shapes, strict=True)
        ]
        return tuple(outputs), [output.data_ptr() for output in outputs], self.layout.dims

    def _allocate_side_by_side(self) -> tuple[tuple[Tensor, ...], list[int], Sequence[int]]:
        dims, dtype = self.layout.dims, self.layout.dtype
        assert dtype is not None
        leading = self._shapes()[0][:-1] if self.one_buffer else self.bags[:1]
        buffer = torch.empty((*leading, sum(dims)), dtype=dtype)
        addresses, strides = _side_by_side(buffer, dims)
        if self.one_buffer:
            return (buffer,), addresses, strides
        views = zip(torch.split(buffer, list(dims), 1), self._shapes(), strict=True)
        return tuple([view.view(shape).data for view, shape in views]), addresses, strides

    # ------------------------------------------------------------ backward

    def read_in_backward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Tensors the gradients depend on; tables only if per-sample weights need a gradient, as in eager."""
        if any(weight is not None and weight.requires_grad for weight in self.weights):
            return [*self.read, *inputs[: len(self.tables)]]
        return list(self.read)

    def differentiable_backward(
        self, grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of all inputs by the reference, with a graph of their own if grad mode is on."""
        inputs = [*self.tables, *(weight for weight in self.weights if weight is not None)]
        with torch.enable_grad():
            outputs = tuple(self._reference(index) for index in self.layout.served)
            if self.one_buffer:
                outputs = (torch.cat(outputs, -1),)
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        targets = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
        if not pairs or not targets:
            return (None,) * len(inputs)
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                targets,
                [grad for _, grad in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return tuple(next(found) if want else None for want in wanted)

    def backward(self, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of the tables, then of the per-sample weights; None where none is wanted or nothing came back."""
        for grad in grads:
            if grad is not None and not (type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided):
                return self.differentiable_backward(grads, wanted)
        rows, addresses, strides = self._gradient_places(grads)
        found: list[Tensor | None] = [None] * len(self.tables)
        for part, calls in zip(self.layout.parts, self.calls, strict=True):
            calls = calls[:]  # a graph that is kept may go backward again
            place(calls, [addresses[slot] for slot in part.slots], [strides[slot] for slot in part.slots])
            tables, positions, kinds = self._wanted_jobs(part, addresses, wanted)
            if not tables:
                continue
            fixed = part.fixed
            if len(positions) < len(part.lookups):
                fixed, calls = _chosen(fixed, FIXED_FIELDS, positions), _chosen(calls, CALL_FIELDS, positions)
            for table, gradient in zip(tables, part.kernels.table_gradients(fixed, calls, kinds), strict=True):
                found[table] = gradient
        weights = self._weights_backward(addresses, strides, wanted[len(self.tables) :])
        del rows  # kept until here: the kernels read them by address
        return *found, *weights

    def _wanted_jobs(
        self, part: Part, addresses: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[list[int], list[int], list[TableGradient]]:
        """Tables of a part that get a gradient, the look-ups that give it, and its kind."""
        tables, positions, kinds = [], [], []
        for job in part.jobs:
            if wanted[job.table]:
                lookups = [at for at in job.lookups if addresses[part.slots[at]]]
                if lookups:
                    tables.append(job.table)
                    positions.extend(lookups)
                    kinds.append(job.gradient.of(len(lookups)))
        return tables, positions, kinds

    def _gradient_places(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int], list[int]]:
        """Gradients as rows, and the address and row stride of each served look-up's; address 0 for None."""
        dims, rows = self.layout.dims, []
        if self.one_buffer:
            grad = grads[0]
            if grad is None:
                return [], [0] * len(dims), [0] * len(dims)
            rows.append(_as_rows(grad, sum(dims)))
            return rows, *_side_by_side(rows[0], dims)
        addresses, strides = [0] * len(dims), [0] * len(dims)
        for slot, grad in enumerate(grads):
            if grad is not None:
                row = _as_rows(grad, dims[slot])
                rows.append(row)
                addresses[slot] = row.data_ptr() or 1  # no rows, no address, but still a gradient
                strides[slot] = row.stride(0)
        return rows, addresses, strides

    def _weights_backward(
        self, addresses: Sequence[int], strides: Sequence[int], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        present = [index for index, weight in enumerate(self.weights) if weight is not None]
        found: dict[int, Tensor | None] = dict.fromkeys(present)
        if not any(wanted):
            return list(found.values())
        if self.layout != make_layout(self.spec, tuple(table_key(table) for table in self.tables)):
            raise RuntimeError("a table was moved between forward and backward (by .data?), and its old rows are gone")
        for part, calls in zip(self.layout.parts, self.calls, strict=True):
            calls = calls[:]
            place(calls, [addresses[slot] for slot in part.slots], [strides[slot] for slot in part.slots])
            targets = array("q", bytes(8 * len(part.lookups)))
            for at, index in enumerate(part.lookups):
                weight = self.weights[index]
                if weight is not None and wanted[present.index(index)] and addresses[part.slots[at]]:
                    gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format)
                    found[index] = gradient
                    targets[at] = gradient.data_ptr()
            if any(targets):
                part.kernels.weights_backward(part.fixed, calls, targets)
        return list(found.values())


def _side_by_side(buffer: Tensor, dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """Address and row stride of each block of ``dims`` columns of a buffer."""
    addresses, address, size = [], buffer.data_ptr() or 1, buffer.element_size()
    for dim in dims:
        addresses.append(address)
        address += dim * size
    return addresses, [buffer.stride(-2)] * len(dims)


def _chosen(structs: array[int], num_fields: int, positions: Sequence[int]) -> array[int]:
    chosen = array("q")
    for at in positions:
        chosen.extend(structs[at * num_fields : (at + 1) * num_fields])
    return chosen


def _as_rows(grad: Tensor, dim: int) -> Tensor:
    """``(rows, dim)`` with adjacent columns: a view where the layout allows it, else a copy."""
    if grad.dim() != 2:
        grad = grad.reshape(-1, dim)
    return grad if grad.stride(1) == 1 else grad.resolve_neg().contiguous()


def make_call(
    spec: GroupSpec,
    tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> GroupCall | None:
    """The call, or None if the reference has to serve it as a whole."""
    layout = make_layout(spec, tuple([table_key(table) for table in tables]))
    if not layout.parts:
        return None
    bags: list[int] = [0] * len(layout.served)
    read: list[Tensor] = []
    calls: list[array[int]] = []
    for part in layout.parts:
        structs: list[int] = []
        for index, slot in zip(part.lookups, part.slots, strict=True):
            fields = _fields(spec.lookups[index], part, ids[index], offsets[index], weights[index], read)
            if fields is None:
                return None
            structs += fields
            bags[slot] = fields[7]
        calls.append(array("q", structs))
    side_by_side = spec.layout != "separate" and layout.dtype is not None and bags.count(bags[0]) == len(bags)
    one_buffer = side_by_side and spec.layout == "concat" and not layout.leftover and _same_shape(spec, ids, bags)
    return GroupCall(spec, layout, tables, ids, offsets, weights, bags, calls, read, side_by_side, one_buffer)


def _same_shape(spec: GroupSpec, ids: Sequence[Tensor], bags: Sequence[int]) -> bool:
    """Whether outputs agree in all dimensions but the last."""
    leading = [
        i.shape if lookup.mode == "none" else torch.Size((rows,))
        for lookup, i, rows in zip(spec.lookups, ids, bags, strict=True)
    ]
    return len(leading[0]) in (1, 2) and leading.count(leading[0]) == len(leading)


def _is_index(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.dtype in (torch.int64, torch.int32)


def _fields(
    lookup: LookupSpec, part: Part, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, read: list[Tensor]
) -> tuple[int, ...] | None:
    """The struct of one look-up, its tensors added to ``read``; None if it is one for the reference."""
    if not _is_index(ids) or ids.numel() > MAX_IDS:
        return None
    if lookup.mode == "none":
        if offsets is not None or weights is not None:
            return None
        if not 0 < ids.dim() < 3:
            ids = ids.reshape(-1)
        read.append(ids)
        return call_fields(ids, None, None, None, ids.numel())
    if ids.dim() == 2 and offsets is None and ids.shape[1] > 0:
        bags = ids.shape[0]
    elif ids.dim() == 1 and offsets is not None and _is_index(offsets) and offsets.dim() == 1:
        bags = offsets.shape[0] - lookup.include_last_offset
        if bags < 0:
            return None
        if not lookup.include_last_offset:
            offsets = torch.cat((offsets, offsets.new_tensor((ids.shape[0],))))
        offsets = offsets.to(torch.int64).contiguous()
        read.append(offsets)
    else:
        return None
    read.append(ids)
    if weights is not None:
        plain = type(weights) in (Tensor, Parameter) and weights.is_cpu
        if not plain or weights.dtype is not part.dtype or weights.shape != ids.shape:
            return None
        weights = weights.detach().reshape(-1).contiguous()
        read.append(weights)
    winners = None
    if lookup.mode == "max":
        winners = torch.empty(bags, part.dim, dtype=torch.int64)
        read.append(winners)
    return call_fields(ids, offsets, weights, winners, bags)
