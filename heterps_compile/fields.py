"""Reading cluster, cost and plan files: every error is one line with path, line, field, value and what is allowed.

Enters: parsed JSON or YAML. Leaves: typed values, one field at a time. Refused: missing, unknown and ill-typed fields,
numbers outside their range, NaN and infinity. Line numbers are looked up only when there is an error to report.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from heterps_compile.errors import FileFormatError

FieldPath = tuple[str | int, ...]

LARGEST_WHOLE = 2**53
"""Every whole number up to here is a float as well."""


@dataclass(frozen=True)
class Record:
    """One mapping of a file, with where it stands, so that an error can name its place."""

    values: Mapping[str, Any]
    origin: str = ""
    path: FieldPath = ()

    @classmethod
    def of(cls, value: object, origin: str = "", path: FieldPath = ()) -> Record:
        """Wrap ``value``. Raises :class:`FileFormatError` unless it is a mapping with text keys."""
        if not isinstance(value, Mapping):
            fail(origin, path, value, "a mapping of fields")
        for key in value:
            if not isinstance(key, str):
                fail(origin, path, key, "text as field names")
        return cls(values=value, origin=origin, path=path)

    def reject(self, name: str | None, allowed: str) -> NoReturn:
        """Raise for field ``name`` of this record (or for the record itself), saying what is allowed."""
        if name is None:
            fail(self.origin, self.path, self.values, allowed)
        fail(self.origin, (*self.path, name), self.values.get(name), allowed)

    def only(self, *allowed: str) -> None:
        """Refuse fields that are not in ``allowed``, naming the close ones."""
        for name in self.values:
            if name not in allowed:
                inside = [known for known in allowed if name and known.startswith(name)]
                close = inside or difflib.get_close_matches(name, allowed, n=2)
                near = f"; did you mean {' or '.join(close)}?" if close else ""
                place = describe(self.origin, (*self.path, name))
                raise FileFormatError(f"{place}: unknown field (allowed: {', '.join(allowed)}{near})")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in [low, high]; booleans and text are refused, except text that YAML left of ``4e9``."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        bounds = f"a number >= {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            self.reject(name, bounds)
        number = _float(value)  # YAML 1.1 reads 4e9 (without a dot) as text
        if not math.isfinite(number) or not low <= number <= high:
            self.reject(name, bounds)
        return number

    def integer(self, name: str, default: int | None = None, *, low: int = 0) -> int:
        """A whole number >= low; ``4.0`` and ``1e3`` are accepted."""
        if self.values.get(name) is None and default is not None:
            return default
        value = self.values.get(name)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = _float(value)
            if low <= number <= LARGEST_WHOLE and number == int(number):
                return int(number)
            if number > LARGEST_WHOLE:
                self.reject(name, f"a whole number in [{low}, {LARGEST_WHOLE}]")
        return self.reject(name, f"a whole number >= {low}")

    def text(self, name: str, default: str | None = None, *, choices: Sequence[str] = ()) -> str:
        """Text, one of ``choices`` if there are any; empty text is allowed only as the default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        allowed = f"one of {', '.join(choices)}" if choices else "text that is not empty"
        if not isinstance(value, str) or (value == "" and default != "") or (choices and value not in choices):
            self.reject(name, allowed)
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """``true`` or ``false``."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self.reject(name, "true or false")
        return value

    def record(self, name: str) -> Record:
        """The mapping under ``name``; an empty one when it is absent."""
        value = self.values.get(name)
        return Record.of({} if value is None else value, self.origin, (*self.path, name))

    def records(self, name: str, *, required: bool = False) -> tuple[Record, ...]:
        """The list of mappings under ``name``; empty when it is absent and not required."""
        items = self.sequence(name, required=required)
        return tuple(Record.of(item, self.origin, (*self.path, name, index)) for index, item in enumerate(items))

    def sequence(self, name: str, *, required: bool = False) -> Sequence[Any]:
        """The list under ``name``."""
        value = self.values.get(name)
        if value is None and not required:
            return ()
        if not isinstance(value, (list, tuple)) or (required and not value):
            self.reject(name, "a list with at least one entry" if required else "a list")
        return value

    def texts(self, name: str, *, required: bool = False) -> tuple[str, ...]:
        """The list of texts under ``name``."""
        value = self.sequence(name, required=required)
        if not all(isinstance(item, str) for item in value):
            self.reject(name, "a list of texts")
        return tuple(value)

    def version(self) -> None:
        """Check the ``version`` field, which may be left out."""
        if self.integer("version", 1) != 1:
            self.reject("version", "1")


def fail(origin: str, path: FieldPath, value: object, allowed: str) -> NoReturn:
    """Raise :class:`FileFormatError` in one line: where, the value found, what is allowed."""
    shown = "is missing" if value is None else f"is {_short(value)}"
    raise FileFormatError(f"{describe(origin, path)} {shown} (allowed: {allowed})")


def describe(origin: str, path: FieldPath) -> str:
    """``fleet.yaml:4: resources[0].limit`` as far as it is known."""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    line = _line(origin, path)
    place = f"{origin}:{line}: " if line else f"{origin}: " if origin else ""
    return f"{place}{name or 'the file'}"


def read_file(path: str | Path) -> Record:
    """Parse a JSON or YAML file by its content. Raises :class:`FileFormatError` with the line of a syntax error."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: cannot be read: not UTF-8 text from byte {error.start} on") from None
    if not text.strip():
        raise FileFormatError(f"{path}: the file is empty (allowed: a mapping of fields)")
    return Record.of(parse(text, str(path)), str(path))


def parse(text: str, origin: str = "") -> Any:
    """Parse JSON text, or YAML text when it does not open with a brace."""
    place = origin or "text"
    try:
        if not text.lstrip().startswith("{"):
            return _parse_yaml(text, place)
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _each_once(pairs, place))
        except json.JSONDecodeError as error:
            if not origin.endswith(".json"):
                return _parse_yaml(text, place)
            problem = f"{error.msg} at column {error.colno}"
            raise FileFormatError(f"{place}:{error.lineno}: not valid JSON: {problem}") from None
    except RecursionError:
        raise FileFormatError(f"{place}: nested too deeply (allowed: the handful of levels of its fields)") from None
    except FileFormatError:
        raise
    except ValueError as error:  # a number of thousands of digits, a date such as 2026-13-01
        raise FileFormatError(f"{place}: {error}") from None


def _parse_yaml(text: str, place: str) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _refuse_repeats(node, place)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise FileFormatError(f"{place}{line}: not valid YAML: {problem}") from None


def _refuse_repeats(root: Any, place: str) -> None:
    """Refuse a field that stands twice in a mapping of a composed YAML document; each node is looked at once."""
    waiting, looked_at = [root], set()
    while waiting:
        node = waiting.pop()
        children = getattr(node, "value", None)
        if id(node) in looked_at or not isinstance(children, list):
            continue
        looked_at.add(id(node))
        pairs = [child for child in children if isinstance(child, tuple)]
        names = [key.value for key, _ in pairs]
        for index, (key, _) in enumerate(pairs):
            if key.value in names[:index]:
                line = key.start_mark.line + 1
                raise FileFormatError(f"{place}:{line}: {key.value} is there twice (allowed: each field once)")
        waiting += [value for _, value in pairs] or children


def _each_once(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileFormatError(f"{place}: {twice} is there twice (allowed: each field once)")
    return values


def _float(value: float | str) -> float:
    """As a float; NaN for text that is no number, infinity beyond the largest float."""
    try:
        return float(value)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def _short(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(origin: str, path: FieldPath) -> int | None:
    """The line of a field in the file it came from, or of the deepest part of its path that is there."""
    if not origin or not Path(origin).is_file():
        return None
    import yaml

    try:
        node: Any = yaml.compose(Path(origin).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError):
        return None
    if node is None:
        return None
    line = int(node.start_mark.line) + 1
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == step]
            if not found:
                return line
            line, node = int(found[0][0].start_mark.line) + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = int(node.start_mark.line) + 1
        else:
            return line
    return line
