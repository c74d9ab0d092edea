"""C++ text of the CPU kernels: one translation unit per (unit, dim, dtype), plain C ABI, readable when printed.

Enters: a :class:`Unit`. Leaves: the source a compiler gets. Storage may be float32, float64, float16 or bfloat16;
sums are kept in float32 (float64 for float64). Nothing here assumes finite numbers: NaN and Inf pass through as in
eager. The body of each unit lives beside its host code, in ``cpu_*_source.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from heterps_compile.kernels.cpu_gradient_source import GRADIENT
from heterps_compile.kernels.cpu_lookup_source import LOOKUP
from heterps_compile.kernels.cpu_update_source import UPDATE

SCALARS = {
    torch.float32: ("float", "float"),
    torch.float64: ("double", "double"),
    torch.float16: ("Half", "float"),
    torch.bfloat16: ("BFloat16", "float"),
}
"""Storage and accumulation type of each dtype a unit can be made for."""

PRELUDE = """\
// heterps-compile: {kind} kernels for rows of {dim} x {dtype}. Generated; the Python host code documents every
// argument.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
{includes}
struct BFloat16 {{ uint16_t bits; }};
struct Half {{ uint16_t bits; }};

static inline float as_float(uint32_t bits) {{ float value; std::memcpy(&value, &bits, 4); return value; }}
static inline uint32_t as_bits(float value) {{ uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }}

static inline float load(float value) {{ return value; }}
static inline double load(double value) {{ return value; }}
static inline float load(BFloat16 value) {{ return as_float(uint32_t(value.bits) << 16); }}
static inline void store(float* to, float value) {{ *to = value; }}
static inline void store(double* to, double value) {{ *to = value; }}
static inline void store(BFloat16* to, float value) {{  // to nearest, ties to even, NaN stays NaN
  const uint32_t bits = as_bits(value);
  to->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}}
{half}using scalar = {scalar};  // what memory holds
using real = {real};      // what sums are kept in
constexpr int64_t DIM = {dim};

static inline void prefetch_row(const scalar* row) {{
  for (int64_t byte = 0; byte < DIM * int64_t(sizeof(scalar)) && byte < 512; byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
}}
"""


HALF = """\
#if defined(__F16C__)
static inline float load(Half value) { return _cvtsh_ss(value.bits); }
#else
static inline float load(Half value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000u | ((rest & 0x3ff) << 13));
  if (rest >= 0x0400) return as_float(sign | ((rest << 13) + 0x38000000u));
  const float tiny = float(rest) * 5.9604644775390625e-8f;  // subnormal: a multiple of 2**-24
  return sign ? -tiny : tiny;
}
#endif
#if defined(__F16C__)
static inline void store(Half* to, float value) { to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline void store(Half* to, float value) {
  const uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000u) { to->bits = 0x7e00; return; }
  if (size >= 0x477ff000u) { to->bits = uint16_t(sign | 0x7c00); return; }
  if (size < 0x38800000u) {  // subnormal: the float adder rounds to a multiple of 2**-24
    to->bits = uint16_t(sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000u)); return;
  }
  to->bits = uint16_t(sign | ((size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13));
}
#endif
"""
"""Loads and stores of float16; the header they need takes half a second to read, so others go without."""

HALF_INCLUDES = """\
#if defined(__F16C__)
#include <immintrin.h>
#endif
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What one shared object is made for: the kernels of a ``kind`` for rows of ``dim`` numbers of ``dtype``."""

    kind: Literal["lookup", "update"]
    dim: int
    dtype: torch.dtype

    def source(self) -> str:
        """The C++ text of this unit."""
        return self.prelude() + {"lookup": LOOKUP + GRADIENT, "update": UPDATE}[self.kind]

    def prelude(self) -> str:
        """Types, constants and conversions that all kernels of this unit share."""
        scalar, real = SCALARS[self.dtype]
        is_half = self.dtype is torch.float16
        return PRELUDE.format(
            kind=self.kind,
            dim=self.dim,
            dtype=str(self.dtype).removeprefix("torch."),
            scalar=scalar,
            real=real,
            includes=HALF_INCLUDES if is_half else "",
            half=HALF if is_half else "",
        )
