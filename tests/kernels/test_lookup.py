"""Look-up kernels against eager: outputs and every gradient, odd sizes, empty bags, repeated ids, every dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heterps_compile.kernels import reference
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare

# relative and absolute tolerance against eager; half types are held to eager in float64, rounded once
TOLERANCE = {
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-12, 1e-13),
    torch.float16: (2e-3, 5e-3),
    torch.bfloat16: (1.6e-2, 4e-2),
}

SHAPES = [(torch.float32, dim) for dim in (1, 3, 7, 16, 33)] + [
    (dtype, 7) for dtype in TOLERANCE if dtype.itemsize != 4
]


@pytest.fixture(scope="module", autouse=True)
def built(kernel_cache) -> None:
    """All units side by side, rather than one after the other when first met."""
    assert prepare([(dim, dtype) for dtype, dim in SHAPES], strict=True)


def dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


class Case:
    """Random tensors for a group; run through the kernels or the reference on fresh leaves of equal value."""

    def __init__(
        self, spec: GroupSpec, tables: list[Tensor], ids: list[Tensor], offsets: list[Tensor | None], seed: int = 0
    ) -> None:
        self.spec, self.tables, self.ids, self.offsets = spec, tables, ids, offsets
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.rand(i.shape, generator=generator).to(tables[lookup.table].dtype) if lookup.has_weights else None
            for lookup, i in zip(spec.lookups, ids, strict=True)
        ]
        self.generator = generator

    def __repr__(self) -> str:
        tables = [(tuple(table.shape), table.dtype) for table in self.tables]
        return f"Case({self.spec}, {tables}, {self.ids}, {self.offsets})"

    def run(self, function, *, exact: bool = False) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        dtype = self.tables[0].dtype
        wide = torch.float64 if exact and dtype.itemsize == 2 else dtype
        tables = [table.clone().to(wide).requires_grad_() for table in self.tables]
        weights = [None if weight is None else weight.clone().to(wide).requires_grad_() for weight in self.weights]
        outputs = function(self.spec, tables, self.ids, self.offsets, weights)
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(o.shape, generator=generator).to(dtype).to(wide) for o in outputs]
        torch.autograd.backward(outputs, grads)
        return outputs, [table.grad for table in tables] + [None if w is None else w.grad for w in weights]

    def check(self) -> None:
        outputs, gradients = self.run(lookup_group)
        wanted, wanted_gradients = self.run(reference.lookup_group, exact=True)
        assert len(outputs) == len(wanted)
        for got, want in zip(outputs, wanted, strict=True):
            assert got.shape == want.shape
            assert got.dtype == self.tables[0].dtype
            rtol, atol = TOLERANCE[got.dtype]
            torch.testing.assert_close(got, want.to(got.dtype), rtol=rtol, atol=atol)
        for k, (got, want) in enumerate(zip(gradients, wanted_gradients, strict=True)):
            assert (got is None) == (want is None), k
            if got is None or want is None:
                continue
            if not self.spec.lazy:
                assert got.layout == want.layout
            rtol, atol = TOLERANCE[got.dtype]
            torch.testing.assert_close(dense(got), dense(want).to(got.dtype), rtol=rtol, atol=atol)


def offsets_of(lengths: list[int], *, last: bool) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends if last else ends[:-1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype, dim = draw(st.sampled_from(SHAPES))
    num_tables = draw(st.integers(1, 3))
    rows = [draw(st.integers(1, 40)) for _ in range(num_tables)]
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    lookups, ids, offsets = [], [], []
    used = 0
    for _ in range(draw(st.integers(1, 4))):
        table = draw(st.integers(0, min(used, num_tables - 1)))
        used = max(used, table + 1)
        mode = draw(st.sampled_from(["none", "sum", "mean", "max"]))
        sparse = mode != "max" and draw(st.booleans())
        lookup = LookupSpec(
            table=table,
            mode=mode,
            sparse=sparse,
            padding_idx=draw(st.none() | st.integers(-rows[table], rows[table] - 1)),
            scale_grad_by_freq=mode != "max" and not sparse and draw(st.booleans()),
            has_weights=mode == "sum" and draw(st.booleans()),
            has_offsets=mode != "none" and draw(st.booleans()),
            include_last_offset=draw(st.booleans()),
        )
        index_type = draw(st.sampled_from([torch.int64, torch.int32]))
        if lookup.has_offsets:
            lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
            offsets.append(offsets_of(lengths, last=lookup.include_last_offset).to(index_type))
            shape = (sum(lengths),)
        else:
            lookup = replace(lookup, include_last_offset=False)
            offsets.append(None)
            sizes = st.integers(0 if mode == "none" else 1, 6)
            shape = tuple(
                draw(sizes) for _ in range(draw(st.integers(int(sparse), 3)) if mode == "none" else 2)
            )  # eager cannot: sparse scalar
        values = torch.randint(0, rows[table], shape, generator=generator).to(index_type)
        if draw(st.booleans()) and values.dim() == 2:
            values = values.t().contiguous().t()
        elif draw(st.booleans()):
            values = torch.stack([values, values * 0], -1)[..., 0]
        ids.append(values)
        lookups.append(lookup)
    spec = GroupSpec(
        lookups=tuple(lookups), lazy=draw(st.booleans()), layout=draw(st.sampled_from(["separate", "packed"]))
    )
    tables = [torch.randn(rows[t], dim, generator=generator).to(dtype) for t in range(used)]
    return Case(spec, tables, ids, offsets, seed)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_kernels_equal_eager(case: Case) -> None:
    case.check()
