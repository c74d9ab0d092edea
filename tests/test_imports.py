"""Who may import whom: the layout of the packages, read from the source with ``ast``.

Imports inside functions and under ``TYPE_CHECKING`` count as well: the direction is about what a reader must know, not
about the order of loading.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "heterps_compile"
FOLDERS = {PACKAGE: PACKAGE, f"{PACKAGE}.passes": "passes", f"{PACKAGE}.kernels": "kernels"}

DATA = ("fields", "catalog", "graph", "stage_graph", "cluster", "costs", "plan_facts", "plans", "options", "row_split")
FACTS = ("fx", "cache", "calibrate")
EQUATIONS = ("cost_model", "cost_terms", "spans", "provision", "static_ratio")
ENGINE = ("runtime", "devices", "optim", "data", "models", "metrics", "report", "export")
BELOW_PASSES = ("errors", *DATA, *FACTS, *EQUATIONS)
"""Parts of the package: the first folder or module below ``heterps_compile``. What is not named here is a face of the
package (backend, training, planning, cli, demo, ...) and may import everything."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    **dict.fromkeys(DATA, ("errors", *DATA)),
    **dict.fromkeys(FACTS, ("errors", *DATA, *FACTS)),
    **dict.fromkeys(EQUATIONS, ("errors", *DATA, *EQUATIONS)),
    "kernels": ("errors",),
    "passes": (*BELOW_PASSES, "devices", "optim"),
    **dict.fromkeys(ENGINE, (*BELOW_PASSES, *ENGINE)),
    "optim": (*BELOW_PASSES, *ENGINE, "kernels"),
}
KERNELS_MAY_IMPORT = ("torch", "triton", "numpy")
MAY_IMPORT_KERNELS = ("lower",)
SHORTCUTS = {("plans", "report"), ("plans", "export"), ("compiled", "report")}
"""Methods such as ``Plan.explain()`` that a user looks for on the value and that only hand on to the code above it."""


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target``, both as dotted names, at ``place`` (file:line)."""

    module: str
    target: str
    place: str

    @property
    def part(self) -> str:
        return part_of(self.module)


def part_of(module: str) -> str:
    """``heterps_compile.passes.place.rl`` -> ``passes``; the package itself -> ``heterps_compile``."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE and len(names) > 1 else names[0]


def pass_of(module: str) -> str:
    """``heterps_compile.passes.place.rl`` -> ``place``; empty outside the passes."""
    names = module.split(".")
    return names[2] if names[:2] == [PACKAGE, "passes"] and len(names) > 2 else ""


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name -> file, with ``passes/`` and ``kernels/`` where setup.py puts them."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            names = [package, *path.relative_to(root / folder).with_suffix("").parts]
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports_of(root: Path) -> list[Import]:
    """Every import statement of the tree; ``from package import module`` counts as an import of that module."""
    modules = modules_of(root)
    found = []
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            found += [Import(module, target, place) for target in _targets(node, module, path, modules)]
    return found


def _targets(node: ast.AST, module: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = module.split(".")[: None if path.name == "__init__.py" else -1]
            above = above[: len(above) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in modules else base
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
        yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def broken_rules(root: Path) -> list[str]:
    """One line per import that goes the wrong way, and one per circle."""
    imports = imports_of(root)
    problems = [f"{item.place}: imports {item.target}: {reason}" for item in imports if (reason := _reason(item))]
    return sorted(problems) + [f"circle: {' -> '.join(circle)}" for circle in _circles(imports, set(modules_of(root)))]


def _reason(item: Import) -> str:
    target, top = part_of(item.target), item.target.split(".")[0]
    if (item.part, target) in SHORTCUTS:
        return ""
    if top in ("passes", "kernels"):
        return f"the folder name loads a second copy; write {PACKAGE}.{item.target}"
    if top != PACKAGE:
        allowed = item.part != "kernels" or top in KERNELS_MAY_IMPORT or top in sys.stdlib_module_names
        return "" if allowed else f"kernels import only {', '.join(KERNELS_MAY_IMPORT)} and errors"
    if pass_of(item.module) in MAY_IMPORT_KERNELS and target == "kernels":
        return ""
    if item.part == "passes" and target == "passes":
        same = pass_of(item.module) == pass_of(item.target) or not pass_of(item.module)
        return "" if same else "passes do not import each other"
    may = MAY_IMPORT.get(item.part)
    if may is None or target in may or target == item.part:
        return ""
    return f"{item.part} may import only {', '.join(may) or 'nothing of the package'}"


def _circles(imports: list[Import], modules: set[str]) -> list[list[str]]:
    """Circles among modules; a package and its own submodules are one place (``__init__`` re-exports them)."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for item in imports:
        target = item.target if item.target in modules else item.target.rpartition(".")[0]
        nested = item.target.startswith(f"{item.module}.") or item.module == PACKAGE
        if target in modules and target != item.module and not nested and (item.part, part_of(target)) not in SHORTCUTS:
            graph.add_edge(item.module, target)
    return sorted(
        [*group, group[0]] for group in map(sorted, nx.strongly_connected_components(graph)) if len(group) > 1
    )


def test_every_import_of_the_repository_follows_the_layout() -> None:
    assert len(modules_of(ROOT)) > 10
    problems = broken_rules(ROOT)
    assert not problems, "\n".join(problems)


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"heterps_compile/graph.py": "import heterps_compile.cost_model", "heterps_compile/cost_model.py": ""},
            "heterps_compile/graph.py:1: imports heterps_compile.cost_model: graph may import only",
            id="data-imports-equations",
        ),
        pytest.param(
            {"heterps_compile/errors.py": "def f():\n    from heterps_compile.graph import Layer"},
            "heterps_compile/errors.py:2: imports heterps_compile.graph: errors may import only nothing of the package",
            id="lazy-import-counts",
        ),
        pytest.param(
            {"passes/fuse.py": "from heterps_compile.passes import trace", "passes/trace.py": ""},
            "passes/fuse.py:1: imports heterps_compile.passes.trace: passes do not import each",
            id="pass-imports-pass",
        ),
        pytest.param(
            {"passes/place/rl.py": "from ..trace import Trace", "passes/trace.py": ""},
            "passes/place/rl.py:1: imports heterps_compile.passes.trace: passes do not",
            id="relative-import-counts",
        ),
        pytest.param(
            {"passes/split.py": "from heterps_compile.kernels.look_up import run"},
            "passes/split.py:1: imports heterps_compile.kernels.look_up: passes may import only",
            id="pass-imports-kernels",
        ),
        pytest.param(
            {"passes/lower.py": "from heterps_compile.backend import heterps"},
            "passes/lower.py:1: imports heterps_compile.backend: passes may import only",
            id="pass-imports-a-face",
        ),
        pytest.param(
            {"kernels/cpu.py": "import pandas"},
            "kernels/cpu.py:1: imports pandas: kernels import only torch, triton, numpy and",
            id="kernels-import-a-third-package",
        ),
        pytest.param(
            {"kernels/cpu.py": "from heterps_compile.graph import Layer"},
            "kernels/cpu.py:1: imports heterps_compile.graph: kernels may import only errors",
            id="kernels-import-data",
        ),
        pytest.param(
            {"heterps_compile/runtime/local.py": "import importlib as i\ni.import_module('heterps_compile.kernels')"},
            "heterps_compile/runtime/local.py:2: imports heterps_compile.kernels: runtime",
            id="runtime-imports-kernels-by-name",
        ),
        pytest.param(
            {"heterps_compile/backend.py": "import passes.trace"},
            "heterps_compile/backend.py:1: imports passes.trace: the folder name loads a second copy",
            id="folder-name",
        ),
        pytest.param(
            {
                "heterps_compile/a.py": "import heterps_compile.b",
                "heterps_compile/b.py": "def f():\n    from heterps_compile.a import x",
            },
            "circle: heterps_compile.a -> heterps_compile.b -> heterps_compile.a",
            id="circle",
        ),
    ],
)
def test_a_planted_violation_is_reported_once_with_its_place(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    problems = broken_rules(plant(tmp_path, files))
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_allowed_imports_pass(tmp_path: Path) -> None:
    files = {
        "heterps_compile/__init__.py": "def plan():\n    from heterps_compile.backend import plan",
        "heterps_compile/backend.py": "from heterps_compile.passes.lower import Lower\nimport networkx",
        "heterps_compile/runtime/__init__.py": "from heterps_compile.runtime.local import run",
        "heterps_compile/runtime/local.py": "import heterps_compile.plans, heterps_compile.runtime.queue",
        "heterps_compile/runtime/queue.py": "from heterps_compile.errors import DeviceError",
        "passes/lower.py": "from heterps_compile.kernels import cpu\nfrom heterps_compile.errors import LoweringError",
        "kernels/cpu.py": "import ctypes, torch, triton\nfrom heterps_compile.errors import LoweringError",
    }
    assert broken_rules(plant(tmp_path, files)) == []


HEAVY = ("networkx", "yaml", "triton", "scipy", "pandas", "pyarrow", "matplotlib")


def test_importing_the_package_loads_nothing_heavy_beyond_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import heterps_compile;"
        f"print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
