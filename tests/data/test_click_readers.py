"""Criteo, Avazu and MovieLens files into tensors: values by hand, missing values, and what is refused."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from heterps_compile.data import read_avazu, read_criteo, read_movielens
from heterps_compile.data.tabular import hash_ids
from heterps_compile.errors import FileFormatError, MissingPackageError

HEADER = ["Label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]


def criteo_row(label: str = "1", number: str = "3", category: str = "68fd1e64") -> list[str]:
    return [label, *[number] * 13, *[category] * 26]


def write(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    path.write_text("".join(delimiter.join(row) + "\n" for row in rows))
    return path


def test_dense_values_are_logs_and_missing_ones_zero(tmp_path: Path) -> None:
    rows = [criteo_row(number="3"), criteo_row(number=""), criteo_row(number="-2"), criteo_row(number="260.0")]
    log = read_criteo(write(tmp_path / "a.csv", [HEADER, *rows]), rows=100)
    assert log.dense.shape == (4, 13)
    torch.testing.assert_close(log.dense[:, 0], torch.tensor([3.0, 0.0, 0.0, 260.0]).log1p())


def test_missing_category_is_id_zero_and_no_other_value_is(tmp_path: Path) -> None:
    rows = [criteo_row(category=""), *(criteo_row(category=f"{n:08x}") for n in range(50))]
    log = read_criteo(write(tmp_path / "a.csv", [HEADER, *rows]), rows=7)
    assert log.ids[0].tolist() == [0] * 26
    assert log.ids[1:].min() >= 1
    assert log.ids.max() <= 6
    assert log.rows == (7,) * 26


def test_equal_values_get_equal_ids_in_another_file_and_place(tmp_path: Path) -> None:
    first = read_criteo(write(tmp_path / "a.csv", [HEADER, criteo_row(category="aa"), criteo_row(category="bb")]))
    second = read_criteo(write(tmp_path / "b.csv", [HEADER, criteo_row(category="bb"), criteo_row(category="aa")]))
    assert torch.equal(first.ids, second.ids.flip(0))


@pytest.mark.parametrize("layout", ["id", "no id", "shuffled", "tsv without header", "gzip", "windows"])
def test_layouts_of_one_content_read_alike(tmp_path: Path, layout: str) -> None:
    rows = [criteo_row("0", "1", "aa"), criteo_row("1", "2", "bb")]
    expected = read_criteo(write(tmp_path / "plain.csv", [HEADER, *rows]), rows=50)
    path = tmp_path / ("a.csv.gz" if layout == "gzip" else "a.csv")
    if layout == "id":
        write(path, [["Id", *HEADER], *(["10", *row] for row in rows)])
    elif layout == "no id":
        write(path, [["label", *HEADER[1:]], *rows])
    elif layout == "shuffled":
        write(path, [HEADER[::-1], *(row[::-1] for row in rows)])
    elif layout == "tsv without header":
        write(path, rows, "\t")
    elif layout == "gzip":
        path.write_bytes(gzip.compress((tmp_path / "plain.csv").read_bytes()))
    else:
        path.write_bytes((tmp_path / "plain.csv").read_bytes().replace(b"\n", b"\r\n"))
    log = read_criteo(path, rows=50)
    assert torch.equal(log.dense, expected.dense)
    assert torch.equal(log.ids, expected.ids)
    assert torch.equal(log.labels, torch.tensor([0.0, 1.0]))


def test_missing_column_is_named_with_file_and_what_was_found(tmp_path: Path) -> None:
    path = write(tmp_path / "short.csv", [HEADER[:-1], criteo_row()[:-1]])
    with pytest.raises(FileFormatError, match=r"short\.csv: no column C26; found 39 columns: Label, I1, .*C25"):
        read_criteo(path)


def test_text_in_a_number_column_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "text.csv", [HEADER, criteo_row(number="many")])
    with pytest.raises(FileFormatError, match=r"text\.csv: .*many"):
        read_criteo(path)


@pytest.mark.parametrize(("label", "found"), [("2", "2"), ("", "nan")])
def test_labels_other_than_zero_and_one_are_refused(tmp_path: Path, label: str, found: str) -> None:
    path = write(tmp_path / "label.csv", [HEADER, criteo_row(label=label)])
    with pytest.raises(FileFormatError, match=rf"column Label must hold 0 or 1, found {found}"):
        read_criteo(path)


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    with pytest.raises(FileFormatError, match=r"empty\.csv is empty"):
        read_criteo(tmp_path / "empty.csv")
    with pytest.raises(FileFormatError, match=r"header\.csv has no samples"):
        read_criteo(write(tmp_path / "header.csv", [HEADER]))


def test_headerless_file_of_wrong_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"needs 40 columns .* found 39"):
        read_criteo(write(tmp_path / "a.tsv", [criteo_row()[:-1]], "\t"))


def test_rows_of_a_table_leave_room_for_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [HEADER, criteo_row()])
    with pytest.raises(ValueError, match=r"rows must be at least 2 .*got 1"):
        read_criteo(path, rows=1)
    with pytest.raises(ValueError, match=r"rows has 3 entries; the format has 26"):
        read_criteo(path, rows=(5, 5, 5))


def test_max_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [HEADER, *[criteo_row()] * 9])
    assert len(read_criteo(path, max_samples=4)) == 4


def test_absent_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow.lib", "pyarrow.csv"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=r"needs pyarrow.*\nhint: pip install 'heterps-compile\[data\]'"):
        read_criteo(write(tmp_path / "a.csv", [HEADER, criteo_row()]))


def hash_one(value: bytes, rows: int) -> int:
    """FNV-1a and one round of mixing, byte by byte."""
    state = 0xCBF29CE484222325
    for byte in value:
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    state ^= state >> 33
    state = (state * 0xFF51AFD7ED558CCD) % 2**64
    return (state ^ state >> 33) % (rows - 1) + 1


def test_hash_is_equal_in_every_process() -> None:
    code = (
        "import numpy as np; from heterps_compile.data.tabular import hash_ids; "
        "print(hash_ids(np.array([b'68fd1e64', b'a', b''], dtype=np.bytes_), 1000).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = hash_ids(np.array([b"68fd1e64", b"a", b""], dtype=np.bytes_), 1000).tolist()
    assert printed.strip() == str(here)
    assert here == [hash_one(b"68fd1e64", 1000), hash_one(b"a", 1000), hash_one(b"", 1000)]
    assert here[0] == 75  # pinned: ids are part of a trained model


def test_hash_does_not_depend_on_the_longest_value_and_spreads() -> None:
    short = hash_ids(np.array([b"ab"], dtype="S2"), 10_000)
    padded = hash_ids(np.array([b"ab", b"a much longer value"], dtype=np.bytes_), 10_000)
    assert short[0] == padded[0]
    many = hash_ids(np.array([f"{n:x}".encode() for n in range(100_000)]), 101)
    counts = np.bincount(many, minlength=101)
    assert counts[0] == 0
    assert counts[1:].min() > 800  # 1,000 each on average, standard deviation 32
    assert counts[1:].max() < 1200


def test_real_criteo_files(shared_data: Path) -> None:
    tiny = read_criteo(shared_data / "criteo_train.tiny.csv", rows=1000)
    assert len(tiny) == 1999
    assert int(tiny.labels.sum()) == 418
    assert tiny.dense[0, 3] == 0  # I4 of the first row is 0, I5 is 1382
    assert tiny.dense[0, 4] == pytest.approx(np.log(1383), rel=1e-6)
    assert tiny.ids[0, 21] == 0  # C22 is missing
    assert len(read_criteo(shared_data / "criteo_sample.txt")) == 200


def test_real_avazu_file(shared_data: Path) -> None:
    log = read_avazu(shared_data / "avazu_sample.txt", rows=100)
    assert (len(log), log.num_dense, log.num_tables) == (100, 1, 21)
    assert 0 < log.labels.mean() < 1


def test_avazu_hour_of_day(tmp_path: Path) -> None:
    from heterps_compile.data.avazu import CATEGORICAL

    header = ["id", "click", "hour", *CATEGORICAL.split()]
    log = read_avazu(write(tmp_path / "a.csv", [header, ["1", "0", "14102118", *["x"] * 21]]), rows=10)
    assert log.dense.tolist() == [[0.75]]


def movielens_file(path: Path, **columns: list[int | None]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_movielens_is_ordered_by_time_and_numbered_without_gaps(tmp_path: Path) -> None:
    path = movielens_file(
        tmp_path / "r.parquet", user_id=[7, 3, 7], movie_id=[50, 50, 90], rating=[4, 3, 5], timestamp=[30, 10, 20]
    )
    log = read_movielens(path)
    assert log.rows == (2, 2)
    assert log.ids.tolist() == [[0, 0], [1, 1], [1, 0]]
    assert log.labels.tolist() == [0, 1, 1]
    assert log.dense.shape == (3, 0)


def test_movielens_refuses_what_is_not_ratings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user_id,movie_id\n1,2\n")
    with pytest.raises(FileFormatError, match=r"a\.csv is not a parquet file"):
        read_movielens(tmp_path / "a.csv")
    with pytest.raises(FileFormatError, match=r"no column rating, timestamp; found: user_id, movie_id"):
        read_movielens(movielens_file(tmp_path / "b.parquet", user_id=[1], movie_id=[1]))
    with pytest.raises(FileFormatError, match=r"column rating has 1 missing values"):
        read_movielens(movielens_file(tmp_path / "c.parquet", user_id=[1], movie_id=[1], rating=[None], timestamp=[1]))


def test_real_movielens_file(shared_data: Path) -> None:
    log = read_movielens(shared_data / "movielens100k_ratings.parquet.brotli")
    assert (len(log), log.rows) == (100_000, (943, 1682))
    assert int(log.labels.sum()) == 55_375
