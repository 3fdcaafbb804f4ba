"""Rows that are written as they come."""

import h5py
import numpy as np
import pytest

from hpcdist.data.row_writer import RowFile
from hpcdist.errors import DataError, UsageError
from hpcdist.training.inputs import by_name


def test_rows_after_none_are_in_chunks_of_their_size(tmp_path):
    with RowFile(tmp_path / "rows.h5") as file:
        file.append({"a": np.zeros((0, 4096), np.float32)})
        file.append({"a": np.ones((3, 4096), np.float32)})
        file.publish()
    with h5py.File(tmp_path / "rows.h5") as file:
        assert file["a"].chunks == (64, 4096)  # a MiB
        np.testing.assert_array_equal(file["a"][:], np.ones((3, 4096)))


def test_a_file_that_is_not_published_is_not_there(tmp_path):
    with RowFile(tmp_path / "rows.h5") as file:
        file.append({"a": np.ones(3)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [np.ones((2, 5)), np.array(["text", "more"], object)], ids=["shape", "objects"])
def test_rows_that_do_not_fit(tmp_path, rows):
    with RowFile(tmp_path / "rows.h5") as file:
        file.append({"a": np.ones((2, 4))})
        if rows.ndim > 1:
            name = "a"
        else:
            name = "b"
        with pytest.raises(DataError, match="numbers.*earlier"):
            file.append({name: rows})


def test_names_of_outputs():
    assert by_name(np.ones(1)).keys() == {"predictions"}
    assert by_name([1, {"a": 2, "b": [3, 4]}]).keys() == {
        "predictions_0",
        "predictions_1/a",
        "predictions_1/b_0",
        "predictions_1/b_1",
    }
    with pytest.raises(UsageError, match="outputs.*different.*'a/b'"):
        by_name({"a": {"b": 1}, "a/b": 2})
