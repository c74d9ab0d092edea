"""One small Triton kernel, to find out what Triton can do here; ``doctor`` runs this file in a process of its own.

``interpret`` runs it in Triton's interpreter (TRITON_INTERPRET=1), ``compile`` makes a cubin for a GPU that need not be
here, ``run`` launches it on the GPU.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

TARGET = ("cuda", 90, 32)
BLOCK = 16


@triton.jit  # type: ignore[untyped-decorator]
def add_one(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x[i] += 1`` for i < n; x is float32."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1.0, mask=mask)


def compile_ahead() -> str:
    """Size of the cubin."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=add_one, signature=signature, constexprs={"BLOCK": BLOCK})
    compiled = triton.compile(source, target=GPUTarget(*TARGET))
    return f"a kernel compiled for {TARGET[0]} {TARGET[1] / 10}: {len(compiled.asm['cubin'])} bytes"


def launch(device: str) -> str:
    """Run the kernel on ``device`` and check its result."""
    x = torch.zeros(BLOCK, device=device)
    add_one[(1,)](x, BLOCK - 1, BLOCK=BLOCK)
    assert x.tolist() == [1.0] * (BLOCK - 1) + [0.0], f"wrong result: {x.tolist()}"
    return f"a kernel ran on {device if device == 'cpu' else torch.cuda.get_device_name()}"


if __name__ == "__main__":
    print(compile_ahead() if sys.argv[1] == "compile" else launch("cpu" if sys.argv[1] == "interpret" else "cuda"))
