"""``MODULE:FACTORY`` on the command line: a function that returns ``(model, example_inputs)``.

Enters: the words. Leaves: a module and a tuple of inputs. Refused, in one line that says which part is wrong: a module
that is not there, a factory that is missing, that fails, or that returns something else.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from heterps_compile.errors import HeterpsError

if TYPE_CHECKING:
    from torch import nn

FORM = "MODULE:FACTORY, such as my_models:make, where make() returns (model, example_inputs)"


class UsageError(HeterpsError, ValueError):
    """Wrong usage of the command line that argparse cannot see."""


def load(spec: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Import the module (the current directory counts), call the factory, check what it returns."""
    module_name, colon, factory_name = spec.partition(":")
    if not colon or not module_name or not factory_name:
        raise UsageError(f"{spec!r} is not {FORM}")
    factory = _factory(_import(module_name, spec), factory_name, spec)
    try:
        made = factory()
    except Exception as error:  # the user's code: say what it raised and where
        raise UsageError(f"{spec} raised {_described(error)}") from error
    return _checked(made, spec)


def _import(name: str, spec: str) -> ModuleType:
    if name.endswith(".py") or os.sep in name:
        dotted = name.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise UsageError(f"{spec}: {name!r} is a path", hint=f"write the module with dots: {dotted}:...")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{spec}: no module {error.name!r} in {folder} or among the installed packages") from None
        raise UsageError(f"{spec}: importing {name} raised {_described(error)}") from error
    except Exception as error:  # the user's code, as above
        raise UsageError(f"{spec}: importing {name} raised {_described(error)}") from error


def _factory(module: ModuleType, name: str, spec: str) -> Callable[[], Any]:
    factory = getattr(module, name, None)
    if factory is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, functions, n=3)
        raise UsageError(
            f"{spec}: module {module.__name__} ({module.__file__}) has no {name!r}",
            hint=f"did you mean {' or '.join(close)}?" if close else "",
        )
    if not callable(factory):
        raise UsageError(f"{spec}: {name} is a {type(factory).__name__}, not a function")
    return factory  # type: ignore[no-any-return]


def _checked(made: object, spec: str) -> tuple[nn.Module, tuple[Any, ...]]:
    from torch import nn

    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(f"{spec} returned {found} (allowed: (model, example_inputs) with an nn.Module first)")
    model, inputs = made
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _described(error: BaseException) -> str:
    """``TypeError: unsupported operand (my_models.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}{place}"


def models_named(given: Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """The models that ``--models`` names, each once; all that are known without it. Raises :class:`UsageError`."""
    allowed = tuple(known)
    for name in given or ():
        if name not in allowed:
            raise UsageError(f"--models names no model {name!r} (allowed: {', '.join(allowed)})")
    return tuple(dict.fromkeys(given or allowed))
