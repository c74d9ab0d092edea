"""``heterps demo``, ``train`` and ``doctor``: the subcommands that run something on this machine."""

from __future__ import annotations

import argparse
from typing import Any


def add_demo(commands: Any) -> None:
    """``heterps demo``."""
    command = commands.add_parser("demo", help="layers, plan and training of a small model on this machine")
    command.set_defaults(run=demo)


def add_train(commands: Any) -> None:
    """``heterps train``."""
    command = commands.add_parser("train", help="train a click-through-rate model")
    command.set_defaults(run=train)


def add_doctor(commands: Any) -> None:
    """``heterps doctor``."""
    command = commands.add_parser("doctor", help="what works on this machine, and how to mend what does not")
    command.set_defaults(run=doctor)


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from heterps_compile.demo import main

    return main([])


def train(arguments: argparse.Namespace) -> int:
    """Train a model."""
    raise NotImplementedError


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine; 1 when something essential fails."""
    from heterps_compile.doctor import main

    return main()
