"""One call of a group of look-ups: the tensors of this call, where their outputs lie, and what goes back.

Enters: a spec and the tensors. Leaves: a :class:`GroupCall`, or None if this call is one for the reference as a whole
(unusual ids, offsets or weights; eager then answers, or says what is wrong). Outputs of one shape come from one
allocation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from heterps_compile.kernels import reference
from heterps_compile.kernels.cpu_lookup import Request, TableGradient
from heterps_compile.kernels.group_layout import Layout, Part, make_layout, table_key
from heterps_compile.kernels.specs import GroupSpec, LookupSpec

MAX_IDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupCall:
    """A call, checked as far as it can be without reading ids. ``requests[k]`` is None for a look-up of the
    reference.
    """

    spec: GroupSpec
    layout: Layout
    tables: Sequence[Tensor]
    ids: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    requests: Sequence[Request | None]

    # ------------------------------------------------------------ forward

    def forward(self) -> tuple[Tensor, ...]:
        """Outputs of the look-ups that kernels serve, in the order of the spec; layout "concat" may make it one
        tensor.
        """
        outputs, places = self._allocate()
        for part in self.layout.parts:
            requests = self._requests(part)
            calls = array("q")
            for index, request in zip(part.lookups, requests, strict=True):
                calls.extend(request.fields(*places[index]))
            part.kernels.forward(part.fixed, calls, requests)
        return outputs

    def complete(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All outputs of the group: those of :meth:`forward` and, between them, those of the reference."""
        if self._is_one_buffer():
            return outputs
        if self.layout.leftover:
            from_kernels = iter(outputs)
            outputs = tuple(
                self._reference(index) if request is None else next(from_kernels)
                for index, request in enumerate(self.requests)
            )
        return (torch.cat(outputs, -1),) if self.spec.layout == "concat" else outputs

    def _requests(self, part: Part) -> list[Request]:
        requests = [self.requests[index] for index in part.lookups]
        return [request for request in requests if request is not None]

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

    def _dims(self) -> dict[int, int]:
        """Dim of every look-up that kernels serve, in the order of the spec."""
        tables, lookups = self.tables, self.spec.lookups
        return {k: tables[lookups[k].table].shape[1] for k, request in enumerate(self.requests) if request is not None}

    def _is_side_by_side(self) -> bool:
        requests = [request for request in self.requests if request is not None]
        return (
            self.spec.layout != "separate"
            and len({part.dtype for part in self.layout.parts}) == 1
            and len({request.bags for request in requests}) == 1
        )

    def _is_one_buffer(self) -> bool:
        """Whether layout "concat" needs no copy."""
        return (
            self.spec.layout == "concat"
            and not self.layout.leftover
            and self._is_side_by_side()
            and all(
                lookup.mode != "none" or ids.dim() == 1 for lookup, ids in zip(self.spec.lookups, self.ids, strict=True)
            )
        )

    def _shape(self, index: int, dim: int) -> tuple[int, ...]:
        request = self.requests[index]
        assert request is not None
        return (*self.ids[index].shape, dim) if request.spec.mode == "none" else (request.bags, dim)

    def _allocate(self) -> tuple[tuple[Tensor, ...], dict[int, tuple[int, int]]]:
        """Outputs to be filled, and the address and row stride of each.

        Parts of one buffer are taken with ``.data``: a plain view would share one version counter among all outputs,
        and autograd would forbid in-place operations on each of several views.
        """
        dims = self._dims()
        if self._is_side_by_side():
            return self._allocate_side_by_side(dims)
        shapes = {index: self._shape(index, dim) for index, dim in dims.items()}
        dtypes = {index: self.tables[self.spec.lookups[index].table].dtype for index in dims}
        if len(dims) > 1 and len(set(shapes.values())) == 1 and len(set(dtypes.values())) == 1:
            shape, dtype = next(iter(shapes.values())), next(iter(dtypes.values()))
            outputs = tuple(view.data for view in torch.empty((len(dims), *shape), dtype=dtype).unbind())
        else:
            outputs = tuple(torch.empty(shapes[index], dtype=dtypes[index]) for index in dims)
        places = {index: (output.data_ptr(), dim) for (index, dim), output in zip(dims.items(), outputs, strict=True)}
        return outputs, places

    def _allocate_side_by_side(self, dims: dict[int, int]) -> tuple[tuple[Tensor, ...], dict[int, tuple[int, int]]]:
        first = self.requests[next(iter(dims))]
        assert first is not None
        width, dtype = sum(dims.values()), self.layout.parts[0].dtype
        buffer = torch.empty(first.bags, width, dtype=dtype)
        places, address = {}, buffer.data_ptr()
        for index, dim in dims.items():
            places[index] = (address, width)
            address += dim * dtype.itemsize
        if self._is_one_buffer():
            return (buffer,), places
        views = buffer.split(tuple(dims.values()), 1)
        outputs = [
            view.data if len(shape) == 2 else view.view(shape).data
            for view, shape in zip(views, (self._shape(index, dim) for index, dim in dims.items()), strict=True)
        ]
        return tuple(outputs), places

    # ------------------------------------------------------------ backward

    def read_in_backward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Tensors whose values the gradients depend on; tables only if per-sample weights need a gradient, as in
        eager.
        """
        read = [tensor for request in self.requests if request is not None for tensor in request.tensors()]
        if any(weight is not None and weight.requires_grad for weight in self.weights):
            read.extend(inputs[: len(self.tables)])
        return read

    def differentiable_backward(
        self, grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of all inputs by the reference, with a graph of their own."""
        inputs = [*self.tables, *(weight for weight in self.weights if weight is not None)]
        with torch.enable_grad():
            outputs = tuple(self._reference(k) for k, request in enumerate(self.requests) if request is not None)
            if self._is_one_buffer():
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
        if any(grad is not None and not _is_plain(grad) for grad in grads):
            return self.differentiable_backward(grads, wanted)
        rows, places = self._gradient_places(grads)  # rows keeps copies alive while the kernels read them
        found: list[Tensor | None] = [None] * len(self.tables)
        for part in self.layout.parts:
            jobs = [job for job in part.jobs if wanted[job.table]]
            kept = [(job, [at for at in job.lookups if part.lookups[at] in places]) for job in jobs]
            kept = [(job, lookups) for job, lookups in kept if lookups]
            if not kept:
                continue
            positions = [at for _, lookups in kept for at in lookups]
            fixed, calls, requests = self._structs(part, positions, places)
            tables = [
                TableGradient(self.tables[job.table].shape, part.dtype, len(lookups), job.sparse, job.by_frequency)
                for job, lookups in kept
            ]
            for (job, _), gradient in zip(
                kept, part.kernels.table_gradients(fixed, calls, requests, tables), strict=True
            ):
                found[job.table] = gradient
        del rows
        return *found, *self._weights_backward(grads, wanted)

    def _structs(
        self, part: Part, positions: Sequence[int], places: dict[int, tuple[int, int]]
    ) -> tuple[array[int], array[int], list[Request]]:
        calls, requests = array("q"), []
        for at in positions:
            request = self.requests[part.lookups[at]]
            assert request is not None
            requests.append(request)
            calls.extend(request.fields(*places[part.lookups[at]]))
        fixed = part.fixed if len(positions) == len(part.lookups) else part.fixed_of(positions)
        return fixed, calls, requests

    def _gradient_places(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], dict[int, tuple[int, int]]]:
        """The gradients as rows, and the address and row stride of each look-up's."""
        dims, rows, places = self._dims(), [], {}
        if self._is_one_buffer():
            if grads[0] is None:
                return [], {}
            rows.append(_as_rows(grads[0], sum(dims.values())))
            address, stride, size = rows[0].data_ptr(), rows[0].stride(0), rows[0].element_size()
            for index, dim in dims.items():
                places[index] = (address, stride)
                address += dim * size
            return rows, places
        for (index, dim), grad in zip(dims.items(), grads, strict=True):
            if grad is not None:
                row = _as_rows(grad, dim)
                rows.append(row)
                places[index] = (row.data_ptr(), row.stride(0))
        return rows, places

    def _weights_backward(self, grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        present = [index for index, weight in enumerate(self.weights) if weight is not None]
        found: list[Tensor | None] = [None] * len(present)
        if not any(wanted[len(self.tables) :]):
            return found
        rows, places = self._gradient_places(grads)
        for part in self.layout.parts:
            positions = [at for at, index in enumerate(part.lookups) if index in places]
            targets = array("q", bytes(8 * len(positions)))
            for k, at in enumerate(positions):
                index = part.lookups[at]
                weight = self.weights[index]
                if weight is not None and wanted[len(self.tables) + present.index(index)]:
                    gradient = torch.zeros_like(weight, memory_format=torch.contiguous_format)
                    found[present.index(index)] = gradient
                    targets[k] = gradient.data_ptr()
            if any(targets):
                fixed, calls, _ = self._structs(part, positions, places)
                part.kernels.weights_backward(fixed, calls, targets)
        del rows
        return found


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided


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
    layout = make_layout(spec, tuple(table_key(table) for table in tables))
    if not layout.parts:
        return None
    requests: list[Request | None] = [None] * len(spec.lookups)
    for part in layout.parts:
        for index in part.lookups:
            request = _make_request(spec.lookups[index], part, ids[index], offsets[index], weights[index])
            if request is None:
                return None
            requests[index] = request
    return GroupCall(spec, layout, tables, ids, offsets, weights, requests)


def _is_index(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.dtype in (torch.int64, torch.int32)


def _make_request(
    lookup: LookupSpec, part: Part, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> Request | None:
    if not _is_index(ids) or ids.numel() > MAX_IDS:
        return None
    if lookup.mode == "none":
        if offsets is not None or weights is not None:
            return None
        return Request(lookup, ids if 0 < ids.dim() < 3 else ids.reshape(-1), None, None, ids.numel(), None)
    if ids.dim() == 2 and offsets is None and ids.shape[1] > 0:
        bags = ids.shape[0]
    elif ids.dim() == 1 and offsets is not None and _is_index(offsets) and offsets.dim() == 1:
        bags = offsets.shape[0] - lookup.include_last_offset
        if bags < 0:
            return None
        if not lookup.include_last_offset:
            offsets = torch.cat((offsets, offsets.new_tensor((ids.shape[0],))))
        offsets = offsets.to(torch.int64).contiguous()
    else:
        return None
    if weights is not None:
        if not _weights_fit(weights, ids, part):
            return None
        weights = weights.detach().reshape(-1).contiguous()
    winners = torch.empty(bags, part.dim, dtype=torch.int64) if lookup.mode == "max" else None
    return Request(lookup, ids, offsets, weights, bags, winners)


def _weights_fit(weights: Tensor, ids: Tensor, part: Part) -> bool:
    plain = type(weights) in (Tensor, Parameter) and weights.is_cpu
    return plain and weights.dtype is part.dtype and weights.shape == ids.shape
