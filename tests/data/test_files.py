"""A file that is being replaced is whole or untouched."""

from __future__ import annotations

import pytest

from vilonghorn.data.files import replacing


def test_a_block_that_ends_puts_the_new_content_in_place(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_old_content_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
