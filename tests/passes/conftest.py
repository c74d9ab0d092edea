"""Dynamo graphs for the passes: ``record(model, *inputs)`` gives each graph of a model with its example inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

Recorded = tuple[fx.GraphModule, list[Any]]


class Composed(nn.Module):
    """A module whose forward is a function of itself and the inputs: ``Composed(lambda m, x: m.a(x), a=layer)``."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self, *inputs)


@pytest.fixture
def composed() -> type[Composed]:
    return Composed


@pytest.fixture
def record() -> Callable[..., list[Recorded]]:
    """Compile with a backend that notes the graph and runs it as it is; ``dynamic=True`` gives symbolic sizes."""

    def run(model: nn.Module, *inputs: Any, dynamic: bool = False) -> list[Recorded]:
        found: list[Recorded] = []

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append((gm, list(example_inputs)))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
        return found

    return run
