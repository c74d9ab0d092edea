"""Avazu's click logs: ``id,click,hour`` and 21 categorical columns; the only dense column is the hour of the day."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_compile.data.click_log import ClickLog
from heterps_compile.data.tabular import Columns, Numbers, Path, first_line, header_layout, read_clicks

CATEGORICAL = (
    "C1 banner_pos site_id site_domain site_category app_id app_domain app_category device_id device_ip device_model "
    "device_type device_conn_type C14 C15 C16 C17 C18 C19 C20 C21"
)


def hour_of_day(stamps: Numbers) -> Numbers:
    """YYMMDDHH -> [0, 1)."""
    return stamps % 100 / 24


COLUMNS = Columns(label="click", dense=("hour",), categorical=tuple(CATEGORICAL.split()), dense_transform=hour_of_day)


def read_avazu(path: Path, *, rows: int | Sequence[int] = 200_000, max_samples: int | None = None) -> ClickLog:
    """Read an Avazu CSV file: 1 dense column and 21 tables of ``rows`` (one number, or 21).

    Raises:
        FileFormatError: a column is missing or holds what it should not.
        MissingPackageError: pyarrow is not installed.
    """
    return read_clicks(path, COLUMNS, header_layout(first_line(path)), rows=rows, max_samples=max_samples)
