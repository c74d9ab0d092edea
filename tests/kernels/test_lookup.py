"""Look-up kernels against eager: outputs and every gradient, odd sizes, empty bags, repeated ids, every dtype."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heterps_compile.errors import IdRangeError
from heterps_compile.kernels import compiler, reference
from heterps_compile.kernels.cpu_source import Unit
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group

# relative and absolute tolerance against eager in float64, rounded once
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
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
    compiler.build_all([Unit(kind="lookup", dim=dim, dtype=dtype).source() for dtype, dim in SHAPES])


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
        wide = torch.float64 if exact else dtype
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


def look_up(lookups: list[LookupSpec], tables: list[Tensor], ids: list[Tensor], **spec) -> tuple[Tensor, ...]:
    none = [None] * len(ids)
    return lookup_group(GroupSpec(lookups=tuple(lookups), **spec), tables, ids, none, none)


def tables_of(*rows: int, dim: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n, dim).to(dtype).requires_grad_() for n in rows]


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("size", [1, 511, 1024, 1025, 40_000])
def test_sums_over_chunks_and_threads(size: int, sparse: bool, hot: bool) -> None:
    """Sizes around the borders of the sort and of the chunks; the same bits for one thread and two."""
    rows = 3000
    ids = torch.randint(0, rows, (size,))
    if hot:
        ids[: size * 9 // 10] = 17
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (table,) = tables_of(rows)
        table.data.copy_(torch.linspace(-1, 1, rows * 7).view(rows, 7))
        grad = torch.linspace(-1, 1, size * 7).view(size, 7)
        (output,) = look_up([LookupSpec(table=0, sparse=sparse, padding_idx=5)], [table], [ids])
        output.backward(grad)
        results.append(dense(table.grad))
        if sparse:
            assert torch.equal(table.grad._indices()[0], ids[ids != 5].unique())
    assert torch.equal(*results)
    kept = ids != 5
    wanted = torch.zeros(rows, 7, dtype=torch.float64).index_add_(0, ids[kept], grad[kept].double())
    torch.testing.assert_close(results[0].double(), wanted, rtol=1e-4, atol=1e-4)


def test_scaling_by_frequency_counts_across_chunks() -> None:
    ids = torch.randint(0, 4, (5000,))
    Case(GroupSpec(lookups=(LookupSpec(table=0, scale_grad_by_freq=True),)), [torch.randn(4, 7)], [ids], [None]).check()


def test_sparse_gradients_are_coalesced() -> None:
    (table,) = tables_of(9)
    (output,) = look_up([LookupSpec(table=0, sparse=True)], [table], [torch.tensor([4, 1, 4, 8, 1, 4])])
    (gradient,) = torch.autograd.grad(output.sum(), table)
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[1, 4, 8]]
    assert gradient.values()[:, 0].tolist() == [2, 3, 1]


def test_one_table_gets_one_gradient() -> None:
    (table,) = tables_of(9)
    lookups = [LookupSpec(table=0, sparse=True), LookupSpec(table=0, mode="mean", sparse=True)]
    a, b = look_up(lookups, [table], [torch.tensor([4, 1]), torch.tensor([[4, 8]])])
    (gradient,) = torch.autograd.grad([a, b], table, [torch.ones_like(a), torch.ones_like(b)])
    assert gradient.indices().tolist() == [[1, 4, 8]]
    assert gradient.values()[:, 0].tolist() == [1, 1.5, 0.5]


@pytest.mark.parametrize("value", [-1, 6, 2**40])
def test_ids_out_of_range(value: int) -> None:
    tables = tables_of(5, 6)
    ids = [torch.tensor([1, 2]), torch.tensor([[1, 2], [value, 0]])]
    message = rf"id {value} at position \(1, 0\) is outside table 1 \(user\), which has 6 rows"
    with pytest.raises(IndexError, match=message) as caught:
        look_up([LookupSpec(table=0), LookupSpec(table=1, name="user")], tables, ids)
    assert isinstance(caught.value, IdRangeError)
    with pytest.raises(IdRangeError, match=rf"id {value} at position \(1, 0\)"):
        look_up([LookupSpec(table=0), LookupSpec(table=1, mode="sum")], tables, ids)


def test_the_first_bad_id_is_named() -> None:
    (table,) = tables_of(50)
    ids = torch.randint(0, 50, (9000,))
    ids[[8000, 700, 4000]] = 50
    with pytest.raises(IdRangeError, match="id 50 at position 700 is outside table 0, which has 50 rows"):
        look_up([LookupSpec(table=0)], [table], [ids])


@pytest.mark.parametrize("offsets", [[1, 2], [0, 9], [0, 2, 1]])
def test_bad_offsets_raise_what_eager_raises(offsets: list[int]) -> None:
    (table,) = tables_of(5)
    spec = GroupSpec(lookups=(LookupSpec(table=0, mode="sum", has_offsets=True),))
    arguments = spec, [table], [torch.tensor([0, 1, 2])], [torch.tensor(offsets)], [None]
    with pytest.raises(RuntimeError, match=r"ffsets|index_size") as wanted:
        reference.lookup_group(*arguments)
    with pytest.raises(RuntimeError, match=re.escape(str(wanted.value).splitlines()[0])):
        lookup_group(*arguments)


@pytest.mark.parametrize("layout", ["separate", "packed", "concat"])
def test_layouts(layout: str) -> None:
    """Different dims side by side; gradients come back through each layout."""
    wide, narrow = torch.randn(9, 16, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    ids = [torch.tensor([1, 1, 8]), torch.tensor([4, 0, 4]), torch.tensor([0, 8, 2])]
    lookups = [LookupSpec(table=0), LookupSpec(table=1, sparse=True), LookupSpec(table=0)]
    outputs = look_up(lookups, [wide, narrow], ids, layout=layout)
    parts = [wide[ids[0]], narrow[ids[1]], wide[ids[2]]]
    assert len(outputs) == (1 if layout == "concat" else 3)
    joined = torch.cat(outputs, -1)
    assert torch.equal(joined, torch.cat(parts, -1))
    grad = torch.randn(3, 35)
    gradients = torch.autograd.grad(joined, [wide, narrow], grad)
    wanted = torch.autograd.grad(torch.cat(parts, -1), [wide, narrow], grad)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(dense(got), want)


def test_separate_outputs_are_as_eager_lays_them_out() -> None:
    tables = tables_of(9, 9)
    for output in look_up([LookupSpec(table=0), LookupSpec(table=1)], tables, [torch.zeros(4, 5).long()] * 2):
        assert output.is_contiguous()
        assert output.view(4, 35).shape == (4, 35)


@pytest.mark.parametrize("layout", ["separate", "packed"])
def test_outputs_may_be_changed_in_place_each(layout: str) -> None:
    tables = tables_of(9, 9, 9)
    ids = [torch.arange(4)] * 3
    outputs = look_up([LookupSpec(table=k) for k in range(3)], tables, ids, layout=layout)
    saved = outputs[2].square()
    outputs[0].relu_()
    outputs[1].mul_(2)
    (outputs[0].sum() + outputs[1].sum() + saved.sum()).backward()
    torch.testing.assert_close(tables[1].grad[:4], torch.full((4, 7), 2.0))
    torch.testing.assert_close(tables[2].grad[:4], 2 * tables[2].detach()[:4])


def test_an_unused_output_gives_its_table_no_gradient() -> None:
    tables = tables_of(5, 5)
    outputs = look_up([LookupSpec(table=0), LookupSpec(table=1)], tables, [torch.tensor([1])] * 2)
    outputs[1].sum().backward()
    assert tables[0].grad is None
    assert tables[1].grad is not None


def test_frozen_tables() -> None:
    tables = [tables_of(5)[0], tables_of(5)[0].detach()]
    lookups = [LookupSpec(table=0, sparse=True), LookupSpec(table=1)]
    outputs = look_up(lookups, tables, [torch.tensor([1])] * 2, layout="concat")
    outputs[0].sum().backward()
    assert tables[0].grad.is_sparse
    assert tables[1].grad is None
    assert not look_up(lookups, [table.detach() for table in tables], [torch.tensor([1])] * 2)[0].requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode) -> None:
    tables = tables_of(5, 5)
    with mode():
        outputs = look_up([LookupSpec(table=0), LookupSpec(table=1)], tables, [torch.tensor([1, 2])] * 2)
    assert not any(output.requires_grad for output in outputs)
    assert torch.equal(outputs[0], tables[0].detach()[1:3])
    assert outputs[0].is_inference() == (mode is torch.inference_mode)


def test_under_autocast_rows_keep_their_dtype() -> None:
    (table,) = tables_of(5)
    with torch.autocast("cpu", torch.bfloat16):
        (output,) = look_up([LookupSpec(table=0)], [table], [torch.tensor([1, 2])])
    assert output.dtype is torch.float32


def test_double_backward() -> None:
    (table,) = tables_of(5)
    spec, ids = GroupSpec(lookups=(LookupSpec(table=0),)), torch.tensor([[1, 2, 2], [0, 4, 1]])
    seconds = []
    for function in (lookup_group, reference.lookup_group):
        (output,) = function(spec, [table], [ids], [None], [None])
        (first,) = torch.autograd.grad(output.tanh().square().sum(), table, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), table)[0])
    torch.testing.assert_close(*seconds)


def test_double_backward_through_a_bag_is_refused_as_in_eager() -> None:
    (table,) = tables_of(5)
    (output,) = look_up([LookupSpec(table=0, mode="sum")], [table], [torch.tensor([[1, 2]])])
    (first,) = torch.autograd.grad(output.square().sum(), table, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivative for '_embedding_bag_backward' is not implemented"):
        first.square().sum().backward()


def test_a_graph_may_be_kept_and_run_again() -> None:
    (table,) = tables_of(5)
    (output,) = look_up([LookupSpec(table=0, sparse=True)], [table], [torch.tensor([1, 2, 1])])
    loss = output.square().sum()
    first = torch.autograd.grad(loss, table, retain_graph=True)[0]
    assert torch.equal(first.to_dense(), torch.autograd.grad(loss, table)[0].to_dense())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, table)


def test_ids_changed_in_place_are_found_out() -> None:
    (table,) = tables_of(5)
    ids = torch.tensor([1, 2])
    (output,) = look_up([LookupSpec(table=0)], [table], [ids])
    ids.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_table_may_change_before_backward_as_in_eager() -> None:
    (table,) = tables_of(5)
    (output,) = look_up([LookupSpec(table=0)], [table], [torch.tensor([1, 2])])
    with torch.no_grad():
        table.zero_()
    output.sum().backward()
    assert table.grad.sum() == 14


def test_gradients_of_any_layout() -> None:
    lookups = [LookupSpec(table=0, sparse=True)]
    ids = torch.tensor([[1, 2, 1], [0, 4, 4]])
    for grad in (
        torch.ones(()).expand(2, 3, 7),
        torch.randn(7, 3, 2).permute(2, 1, 0),
        torch.randn(2, 3, 14)[..., ::2],
        torch.randn(2, 6, 7)[:, :3],
        torch.randn(2, 3, 20)[..., 5:12],
    ):
        (table,) = tables_of(5)
        look_up(lookups, [table], [ids])[0].backward(grad)
        wanted = torch.zeros(5, 7).index_add_(0, ids.reshape(-1), grad.reshape(-1, 7))
        torch.testing.assert_close(table.grad.to_dense(), wanted)


def test_what_kernels_do_not_do_runs_in_eager_beside_them() -> None:
    tables = [*tables_of(5), torch.randn(7, 5).t().requires_grad_(), torch.randn(5, 7, dtype=torch.complex64)]
    with torch.no_grad():
        tables[0].mul_(10)
    lookups = [
        LookupSpec(table=0, max_norm=1.0),
        LookupSpec(table=1),
        LookupSpec(table=2),
        LookupSpec(table=1, mode="sum", scale_grad_by_freq=True),
    ]
    ids = [torch.tensor([[1, 2]])] * 4
    outputs = look_up(lookups, tables, ids)
    assert outputs[0].norm(dim=-1).max() < 1.001
    assert torch.equal(outputs[1], tables[1][ids[1]])
    assert torch.equal(outputs[2], tables[2][ids[2]])
    (outputs[1].sum() + outputs[3].sum()).backward()
    assert tables[1].grad.sum() == 28


@pytest.mark.parametrize("mode", ["none", "sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1)])
def test_empty_and_single_batches(mode: str, shape: tuple[int, ...]) -> None:
    tables = tables_of(5, 5)
    outputs = look_up([LookupSpec(table=k, mode=mode) for k in range(2)], tables, [torch.zeros(shape).long()] * 2)
    sum(output.sum() for output in outputs).backward()
    assert all(table.grad.sum() == (7 if shape == (1, 1) else 0) for table in tables)


def test_nan_and_infinity_are_seen() -> None:
    (table,) = tables_of(4)
    with torch.no_grad():
        table[1], table[2] = float("nan"), float("inf")
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]])
    for mode in ("sum", "mean", "max"):
        (output,) = look_up([LookupSpec(table=0, mode=mode)], [table], [ids])
        assert output[0].isnan().all() or mode == "max"  # as eager: the first of a bag is kept unless another is larger
        assert torch.isfinite(output[2]).all()
        assert output[1].isinf().all()
    (gradient,) = torch.autograd.grad(output, table, torch.full_like(output, float("nan")))
    assert gradient.isnan().any()


def test_threads_may_call_at_once() -> None:
    tables = tables_of(300, 300)
    ids = [torch.randint(0, 300, (4000,)) for _ in range(2)]
    lookups = [LookupSpec(table=k, sparse=True) for k in range(2)]
    found: list[Tensor] = []

    def step() -> None:
        outputs = look_up(lookups, tables, ids, layout="concat")
        found.append(torch.autograd.grad(outputs[0].square().sum(), tables)[0].to_dense())

    threads = [threading.Thread(target=step) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(torch.equal(gradient, found[0]) for gradient in found)
