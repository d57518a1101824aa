"""Whatever is wrong with a `.beton`, the check says so in one sentence."""

import json
import os
import shutil

import pytest
from damage import REFUSED, damaged_copy, overwrite, table_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vilonghorn.data import BetonError, check_beton
from vilonghorn.data.beton import format as fmt


@pytest.fixture
def copy(raw_beton, tmp_path):
    """A copy of a good file, without its manifest."""
    return shutil.copy(raw_beton, tmp_path / "copy.beton")


def test_a_file_cut_off_anywhere_is_refused(copy):
    size, table = os.path.getsize(copy), table_at(copy)
    lengths = {*range(table - 5, size, 7), *range(0, 2200, 97), *range(20, 30), *range(2200, table, 999983)}
    for length in sorted(lengths, reverse=True):
        os.truncate(copy, length)
        with pytest.raises(BetonError, match="copy.beton: (damaged|not a) .beton"):
            check_beton(copy)


def test_a_missing_file_is_named_with_the_command_that_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="x.beton: no such file; write it with: vilonghorn beton"):
        check_beton(tmp_path / "x.beton")


@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_contradict_each_other_or_the_file_are_refused(name, raw_beton, jpg_beton, tmp_path):
    kind, damage, expected = REFUSED[name]
    path = damaged_copy({"raw": raw_beton, "jpg": jpg_beton}[kind], tmp_path, damage)
    with pytest.raises(BetonError, match=expected) as raised:
        check_beton(path)
    message = str(raised.value)
    if "damaged .beton" in message:
        assert message.endswith(f"; write it again: vilonghorn beton SRC {path} --overwrite")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_the_tables_is_seen_with_the_manifest(raw_beton, tmp_path, data):
    path = tmp_path / "bent.beton"
    if not path.exists():
        shutil.copy(raw_beton, path)
        shutil.copy(fmt.manifest_path(raw_beton), fmt.manifest_path(path))
    size, table = path.stat().st_size, table_at(path)
    tables_end = fmt.TABLES_AT + 27 * fmt.SAMPLE.itemsize
    offset = data.draw(st.one_of(st.integers(0, tables_end - 1), st.integers(table, size - 1)))
    good = path.read_bytes()[offset : offset + 1]
    overwrite(path, offset, bytes([good[0] ^ data.draw(st.integers(1, 255))]))
    with pytest.raises(BetonError):
        check_beton(path)
    overwrite(path, offset, good)
    check_beton(path)


def test_a_changed_pixel_is_seen_by_the_check_of_the_images(copy, raw_beton, jpg_beton):
    with pytest.raises(BetonError, match="cannot be checked without copy.beton.json"):
        check_beton(copy, images=True)
    shutil.copy(fmt.manifest_path(jpg_beton), fmt.manifest_path(copy))
    with pytest.raises(BetonError, match="copy.beton.json: does not describe copy.beton"):
        check_beton(copy)
    shutil.copy(fmt.manifest_path(raw_beton), fmt.manifest_path(copy))
    check_beton(copy, images=True)
    overwrite(copy, table_at(copy) - 5, b"\x00\xff")
    check_beton(copy)
    with pytest.raises(BetonError, match="image data are not those that were written"):
        check_beton(copy, images=True)


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": 3}', "[" * 200_000 + "]" * 200_000])
def test_a_broken_manifest_is_named(copy, content):
    fmt.manifest_path(copy).write_text(content)
    with pytest.raises(BetonError, match="copy.beton.json: not the manifest of a .beton"):
        check_beton(copy)


@pytest.fixture
def manifest(copy, raw_beton):
    """Writes the manifest of the copy with some entries changed; None leaves an entry out."""

    def write(**changes):
        good = json.loads(fmt.manifest_path(raw_beton).read_text())
        if "rename" in changes:
            good["classes"][1] = changes["rename"]
        elif "classes" in changes:
            del good["sha256"]["classes"]
        changed = {key: value for key, value in {**good, **changes}.items() if value is not None or key == "classes"}
        fmt.manifest_path(copy).write_text(json.dumps(changed))

    return write


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"classes": classes}, "distinct names") for classes in (5, "cde", ["c", "d", 3], ["c", "d", "d"])),
        ({"classes": ["cat", "dog"]}, "fewer class names than labels, up to 2"),
        ({"crc32": "AAAAAA=="}, "expected 27 checksums"),
        ({"crc32": "?"}, "not the manifest"),
        ({"rename": "dig"}, "its class names are not those that were written"),
    ],
)
def test_a_manifest_that_contradicts_the_file_is_refused(copy, manifest, changes, message):
    manifest(**changes)
    with pytest.raises(BetonError, match=f"copy.beton.json: .*{message}.*; delete it or write both again"):
        check_beton(copy)


def test_a_class_without_images_and_manifests_without_names_or_checksums_pass(copy, manifest):
    manifest(classes=["cat", "dog", "eel", "fox"])
    assert check_beton(copy).num_classes == 4
    manifest(classes=None)
    assert check_beton(copy).classes is None and check_beton(copy).num_classes == 3
    manifest(crc32=None)
    assert check_beton(copy, images=True).checksums is None
