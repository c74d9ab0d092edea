"""Models of deepctr-torch and torch-rechub run unmodified under the backend: forward and gradients equal eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterps_compile

from client_models import CASES, Built

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:deepctr_torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_rechub"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]


def run(model: nn.Module, forward: Callable[..., Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    output = forward(*inputs)
    output.square().sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "build"), CASES, ids=[f"{b.__name__}-{n}" for n, b in CASES])
def test_runs_unmodified_and_equals_eager(name: str, build: Callable[[str], Built]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, inputs = build(name)
        except ImportError as error:
            pytest.skip(f"needs {error.name}, which is not installed")
        reference = copy.deepcopy(model)
        output, gradients = run(model, torch.compile(model, backend="heterps"), inputs)
        expected, wanted = run(reference, reference, inputs)
    torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-4)
    assert gradients.keys() == wanted.keys()
    torch.testing.assert_close(gradients, wanted, rtol=2e-4, atol=2e-4)
    assert heterps_compile.is_planned(model)
