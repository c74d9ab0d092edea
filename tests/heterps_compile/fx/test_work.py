"""FLOPs of heavy operations equal those of ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from heterps_compile.fx.work import node_work

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((5, 7, 6), (4, 6), (4,))),
    "matmul": (torch.matmul, ((3, 5, 6), (6, 4))),
    "bmm": (torch.bmm, ((3, 5, 6), (3, 6, 4))),
    "addmm": (torch.addmm, ((4,), (5, 6), (6, 4))),
    "baddbmm": (torch.baddbmm, ((3, 5, 4), (3, 5, 6), (3, 6, 4))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([2], [0])), ((3, 5, 6), (6, 4))),
    "einsum": (lambda a, b: torch.einsum("bif,bjf->bij", a, b), ((3, 5, 6), (3, 4, 6))),
    "conv1d": (F.conv1d, ((2, 4, 9), (6, 4, 3))),
    "conv2d grouped": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2), ((2, 4, 9, 9), (6, 2, 3, 3))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 4, 5, 5), (4, 6, 3, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_equal_the_flop_counters(name: str) -> None:
    call, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    counter = FlopCounterMode(display=False)
    with counter:
        result = call(*inputs)
        forward = counter.get_total_flops()
        result.sum().backward()
    work = node_work(only_node(call, *inputs))
    assert work.forward_flops == pytest.approx(forward)
    if "grouped" not in name:  # the counter's weight gradient does not know of groups
        assert work.backward_flops == pytest.approx(counter.get_total_flops() - forward)


def test_attention_flops_equal_the_flop_counters_formula() -> None:
    shapes = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)
    work = node_work(only_node(F.scaled_dot_product_attention, *(torch.randn(shape) for shape in shapes)))
    assert work.forward_flops == sdpa_flop_count(*shapes)
    assert work.backward_flops == 0


def only_node(call: Callable[..., Tensor], *inputs: Tensor) -> fx.Node:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(call, backend=backend, dynamic=False)(*inputs)
    (node,) = (node for node in graphs[0].graph.nodes if node.op.startswith("call"))
    return node
