"""The kernel cache: built once, safe among processes, rebuilt when wrong; and machines without a compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from heterps_compile.errors import HeterpsWarning, LoweringError
from heterps_compile.kernels import compiler, cpu_units
from heterps_compile.kernels.cpu_source import Unit
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERPS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def new_process() -> None:
    """Kernels loaded by other tests are out of the way, and those of this test leave nothing."""
    cpu_units.forget()
    yield
    cpu_units.forget()


@pytest.fixture
def no_compiler(cache: Path, new_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def answer(library: ctypes.CDLL) -> int:
    return library.answer()


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made: list[Path] = []
    compile_it = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda source, library, *rest: (made.append(library), compile_it(source, library, *rest))
    )
    return made


def test_a_source_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_compiles(monkeypatch)
    assert answer(compiler.load(SOURCE)) == 42
    assert answer(compiler.load(SOURCE)) == 42
    assert len(made) == 1
    assert made[0].with_suffix(".cpp").read_text() == SOURCE
    assert compiler.build(SOURCE + "// other\n") != made[0]


def test_the_key_holds_everything_a_build_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler.find_compiler()
    keys = {compiler.content_key(SOURCE, path), compiler.content_key(SOURCE, path, (*compiler.FLAGS, "-g"))}
    monkeypatch.setattr(compiler, "_cpu_features", lambda: "another processor")
    keys.add(compiler.content_key(SOURCE, path))
    monkeypatch.setattr(compiler, "_compiler_version", lambda *args: "another compiler")
    keys.add(compiler.content_key(SOURCE, path))
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["cut", "altered", "no seal", "empty"])
def test_what_is_not_whole_is_built_again(damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE + f"// {damage}\n"
    library = compiler.build(source)
    content = library.read_bytes()
    library.unlink()  # a file that is mapped must not be written to
    if damage == "no seal":
        library.write_bytes(content)
        library.with_suffix(".sha256").unlink()
    else:
        library.write_bytes({"cut": content[:1000], "altered": content[:-1] + b"?", "empty": b""}[damage])
    made = count_compiles(monkeypatch)
    assert answer(compiler.load(source)) == 42
    assert len(made) == 1


def test_a_library_of_another_system_is_built_again(cache: Path) -> None:
    library = compiler.build(SOURCE)
    library.unlink()
    library.write_bytes(b"whole, and yet not for this machine")
    library.with_suffix(".sha256").write_text(compiler._digest(library))
    assert answer(compiler.load(SOURCE)) == 42


def test_a_killed_compile_is_in_nobodys_way(cache: Path, tmp_path: Path) -> None:
    stuck = tmp_path / "slow-compiler"
    stuck.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo 1; else echo $$ > "$HETERPS_CACHE_DIR/pid"; sleep 60; fi\n'
    )
    stuck.chmod(0o755)
    code = f"from heterps_compile.kernels import compiler; compiler.build({SOURCE!r})"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "CXX": str(stuck)}, start_new_session=True
    )
    while not (cache / "pid").exists() and child.poll() is None:
        pass
    os.killpg(child.pid, 9)
    child.wait()
    assert list(cache.glob("build-*"))
    assert answer(compiler.load(SOURCE)) == 42


def test_two_processes_build_once(cache: Path) -> None:
    code = (
        "from heterps_compile.kernels import compiler; made = []; real = compiler._compile\n"
        "compiler._compile = lambda *a: (made.append(1), real(*a))\n"
        f"assert compiler.load({SOURCE!r}).answer() == 42; print(len(made))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(child.communicate()[0].strip() for child in children) == ["0", "1"]


def test_a_source_the_compiler_refuses(cache: Path) -> None:
    with pytest.raises(LoweringError, match=r"returned 1 for a CPU kernel:\n.*error") as caught:
        compiler.build("this is not C++\n")
    assert "hint: " in str(caught.value)
    assert not list(cache.glob("*.so"))


def test_no_compiler_is_said_once_and_eager_runs(no_compiler: None) -> None:
    table = torch.randn(5, 4, requires_grad=True)
    spec = GroupSpec(lookups=(LookupSpec(table=0, sparse=True),))
    with pytest.warns(HeterpsWarning, match="several times slower: no C\\+\\+ compiler found"):
        assert not prepare([(4, torch.float32), (8, torch.float32)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not prepare([(4, torch.float32)])
        (output,) = lookup_group(spec, [table], [torch.tensor([1, 1])], [None], [None])
    output.sum().backward()
    assert output.grad_fn.name() == "EmbeddingBackward0"


def test_strict_refuses_to_go_without_kernels(no_compiler: None) -> None:
    with pytest.raises(LoweringError, match="no C\\+\\+ compiler found"):
        prepare([(4, torch.float32)], strict=True)


def test_shapes_without_kernels_are_not_compiled(no_compiler: None) -> None:
    assert prepare([(4, torch.complex64), (0, torch.float32), (10**6, torch.float32)], strict=True)


def test_units_read_well_and_keep_nan() -> None:
    source = Unit(kind="lookup", dim=3, dtype=torch.bfloat16).source()
    assert source.startswith("// heterps-compile: lookup kernels for rows of 3 x bfloat16.")
    assert "constexpr int64_t DIM = 3;" in source
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only"} & set(compiler.FLAGS)
    assert max(map(len, source.splitlines())) <= 120


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_as_torch_does(dtype: torch.dtype) -> None:
    """Every value of the type, and the halves between them, through the generated conversions and back."""
    source = Unit(kind="lookup", dim=1, dtype=dtype).prelude() + (
        'extern "C" void widen(const scalar* a, float* b, int64_t n) { while (n--) b[n] = load(a[n]); }\n'
        'extern "C" void narrow(const float* a, scalar* b, int64_t n) { while (n--) store(b + n, a[n]); }\n'
    )
    for variant in (source, source.replace("__F16C__", "__NO_SUCH_THING__")):
        library = compiler.load(variant)
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        wide = torch.empty(2**16)
        library.widen(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(wide.data_ptr()), ctypes.c_int64(2**16))
        assert torch.equal(wide.nan_to_num(nan=0.5), values.float().nan_to_num(nan=0.5))
        finite = wide[wide.isfinite()].sort().values
        between = torch.cat(
            [finite, (finite[1:] + finite[:-1]) / 2, finite * 1.0001, torch.tensor([float("inf"), 1e38, -1e38])]
        )
        narrow = torch.empty_like(between, dtype=dtype)
        library.narrow(
            ctypes.c_void_p(between.data_ptr()), ctypes.c_void_p(narrow.data_ptr()), ctypes.c_int64(between.numel())
        )
        assert torch.equal(narrow, between.to(dtype))
