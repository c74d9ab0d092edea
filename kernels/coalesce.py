"""Rows and sums of a sparse gradient that names a row more than once, by the kernels of the look-up backward.

Enters: ``(n,)`` row numbers and ``(n, dim)`` values. Leaves: ascending rows, each once, and their sums, added in the
order they came in: the same bits for any number of threads.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from heterps_compile.kernels import cpu_units
from heterps_compile.kernels.cpu_lookup import TableGradient, call_fields, fixed_fields, place
from heterps_compile.kernels.specs import LookupSpec


def coalesce(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """The coalesced gradient of a table of ``shape``; needs kernels for it (see ``cpu_units.is_supported``)."""
    kernels = cpu_units.lookup_kernels(shape[1], values.dtype)
    assert kernels is not None
    values = values.contiguous()
    calls = array("q", call_fields(rows, None, None, None, rows.shape[0]))
    place(calls, [values.data_ptr() or 1], [shape[1]])
    fixed = array("q", fixed_fields(LookupSpec(table=0), 0, shape[0]))
    wanted = TableGradient(shape=shape, dtype=values.dtype, num_lookups=1, sparse=True, by_frequency=False)
    return kernels.table_gradients(fixed, calls, [wanted])[0]
