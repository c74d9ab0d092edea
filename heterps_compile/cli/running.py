"""``heterps demo``, ``train`` and ``doctor``: the subcommands that run something on this machine.

``demo`` and ``train`` have command lines of their own, which need torch to be read: their words are handed on.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_demo(commands: Any) -> None:
    """``heterps demo``."""
    command = commands.add_parser("demo", help="layers, plan and training of a small model here", add_help=False)
    command.set_defaults(run=demo, hands_on=True)


def add_train(commands: Any) -> None:
    """``heterps train``."""
    command = commands.add_parser("train", help="train a click-through-rate model here", add_help=False)
    command.set_defaults(run=train, hands_on=True)


def add_doctor(commands: Any) -> None:
    """``heterps doctor``."""
    command = commands.add_parser("doctor", help="what works on this machine, and how to mend what does not")
    command.set_defaults(run=doctor)


def demo(arguments: argparse.Namespace) -> int:
    """0 when the model learned what was planted."""
    from heterps_compile.cli.demo import main

    return main(arguments.rest)


def train(arguments: argparse.Namespace) -> int:
    """Train, test, print."""
    from heterps_compile.cli.train import main

    return main(arguments.rest)


def doctor(arguments: argparse.Namespace) -> int:
    """1 when something essential fails."""
    from heterps_compile.cli.doctor import main

    return main()
