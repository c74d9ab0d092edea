"""The four click models against their formulas written out, and their options."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from heterps_compile.models import DCN, DLRM, MODELS, DeepFM, DotInteraction, WideDeep

ROWS = (7, 5, 11)


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.rand(batch, 4), torch.stack([torch.randint(rows, (batch,)) for rows in ROWS], dim=1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [0, 1, 6])
def test_one_logit_per_sample(name: str, batch: int) -> None:
    assert MODELS[name](ROWS, 8, num_dense=4)(*inputs(batch)).shape == (batch,)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_bag", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_table_options(name: str, use_bag: bool, sparse: bool) -> None:
    model = MODELS[name](ROWS, 8, num_dense=4, sparse=sparse, use_bag=use_bag)
    model(*inputs(6)).sum().backward()
    kind = nn.EmbeddingBag if use_bag else nn.Embedding
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    assert all(type(table) is kind and table.weight.grad.is_sparse == sparse for table in tables)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_bags_of_one_id_are_look_ups(name: str) -> None:
    plain, bags = MODELS[name](ROWS, 8, num_dense=4), MODELS[name](ROWS, 8, num_dense=4, use_bag=True)
    bags.load_state_dict(plain.state_dict())
    batch = inputs(6)
    torch.testing.assert_close(bags(*batch), plain(*batch))


def test_default_dlrm_is_the_documented_one() -> None:
    with torch.device("meta"):
        model = DLRM()
    widths = [tuple(m.weight.shape[::-1]) for m in model.modules() if isinstance(m, nn.Linear)]
    assert widths == [(13, 512), (512, 256), (256, 16), (16 + 351, 512), (512, 256), (256, 1)]
    assert [tuple(table.weight.shape) for table in model.embeddings.tables] == [(200_000, 16)] * 26


def test_dot_interaction_is_every_pair_once() -> None:
    vectors = torch.randn(2, 4, 3)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(dim=1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(DotInteraction(4)(vectors), torch.stack(pairs, dim=1))


def test_deepfm_second_order_is_the_sum_over_pairs() -> None:
    model = DeepFM(ROWS, 8, num_dense=4)
    dense, ids = inputs(6)
    vectors = model.embeddings(ids)
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(dim=1) for i in range(3) for j in range(i))
    first = sum(table(ids[:, t])[:, 0] for t, table in enumerate(model.first_order.tables))
    deep = model.output(model.deep(torch.cat([dense, vectors.flatten(1)], dim=1)))[:, 0]
    torch.testing.assert_close(model(dense, ids), first + model.first_order_dense(dense)[:, 0] + pairs + deep)


def test_dcn_cross_layer_is_the_outer_product_form() -> None:
    model = DCN(ROWS, 8, num_dense=4, num_crosses=1)
    x0 = torch.randn(6, 4 + 24)
    cross = model.crosses[0]
    nn.init.normal_(cross.bias)
    expected = torch.einsum("bi,bj,j->bi", x0, x0, cross.weight.weight[0]) + cross.bias + x0
    torch.testing.assert_close(cross(x0, x0), expected)


def test_wide_part_is_linear_in_each_id() -> None:
    model = WideDeep(ROWS, 8, num_dense=4)
    dense, ids = inputs(6)
    before = model(dense, ids)
    with torch.no_grad():
        model.wide.tables[1].weight += 2.0
    torch.testing.assert_close(model(dense, ids), before + 2.0)
