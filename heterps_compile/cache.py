"""A folder of small JSON files that outlive the process: profiles and calibrations.

Enters: a kind, a content key and plain values. Leaves: the same values later, or None. A file that is torn, foreign or
unreadable counts as absent and is written anew; a folder that cannot be written to costs the saving, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """``$HETERPS_CACHE_DIR``, else ``heterps-compile`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("HETERPS_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterps-compile"


def load(kind: str, key: str) -> dict[str, Any] | None:
    """What was saved under the key, or None."""
    try:
        values = json.loads(_path(kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def save(kind: str, key: str, values: dict[str, Any]) -> None:
    """Write a file whole or not at all: to a temporary name, then renamed."""
    path = _path(kind, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(values, file)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _path(kind: str, key: str) -> Path:
    return cache_dir() / kind / f"{key}.json"
