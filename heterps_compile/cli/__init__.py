"""The ``heterps`` command.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 infeasible or failed, 2 wrong usage or a file that
cannot be read or written. An error is one line that names the path and the field; a traceback is a bug of ours.
Each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from heterps_compile.cli import bench, planning, running, simulating
from heterps_compile.cli.factory import UsageError
from heterps_compile.errors import FileFormatError, HeterpsError, HeterpsWarning, OptionError

SUCCESS, FAILURE, USAGE = 0, 1, 2
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line with all its subcommands; each stores the function to run as ``run``."""
    top = argparse.ArgumentParser(prog="heterps", description=__doc__.splitlines()[0], allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    running.add_demo(commands)
    planning.add_plan(commands)
    planning.add_explain(commands)
    planning.add_profile(commands)
    running.add_train(commands)
    bench.add_bench(commands)
    simulating.add_simulate(commands)
    running.add_doctor(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong usage leaves through argparse with code 2."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if rest and not getattr(arguments, "hands_on", False):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    if arguments.version:
        from heterps_compile import __version__

        print(f"heterps-compile {__version__}")
        return SUCCESS
    if not hasattr(arguments, "run"):
        top.print_help(sys.stderr)
        return USAGE
    with warnings.catch_warnings():
        _show_warnings_in_one_line()
        return _guarded(arguments)


def _guarded(arguments: argparse.Namespace) -> int:
    """Turn errors into one line and an exit code."""
    try:
        code: int = _unwrapped(arguments)
        sys.stdout.flush()
    except (UsageError, FileFormatError, OptionError) as error:
        return _say(error, USAGE)
    except HeterpsError as error:
        return _say(error, FAILURE)
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except OSError as error:
        if error.filename is None:
            raise
        return _say(UsageError(f"{error.filename}: {error.strerror}"), USAGE)
    except KeyboardInterrupt:
        print("heterps: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _unwrapped(arguments: argparse.Namespace) -> int:
    """Run; an error of ours that torch.compile has wrapped comes out as it was raised."""
    try:
        code: int = arguments.run(arguments)
    except Exception as error:
        inner = getattr(error, "inner_exception", None)  # torch._dynamo.exc.BackendCompilerFailed, torch 2.11 to 2.13
        if isinstance(inner, HeterpsError):
            raise inner from None
        raise
    return code


def _show_warnings_in_one_line() -> None:
    show = warnings.showwarning

    def show_ours(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, HeterpsWarning):
            print(f"heterps: warning: {message}", file=sys.stderr)
        else:
            show(message, category, *rest, **named)

    warnings.showwarning = show_ours


def _say(error: HeterpsError, code: int) -> int:
    hint = f" (hint: {error.hint})" if error.hint else ""
    print(" ".join(f"heterps: error: {error.message}{hint}".split()), file=sys.stderr)
    return code
