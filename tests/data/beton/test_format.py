"""Whatever is wrong with a `.beton`, the check says so in one sentence; what FFCV writes passes."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from damage import DAMAGE, damaged_copy, overwrite, set_sample, table_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vilonghorn.data import BetonError, check_beton, create_loader
from vilonghorn.data.beton import format as fmt


@pytest.fixture
def copy(raw_beton, tmp_path):
    """A copy of a good file, without its manifest."""
    return shutil.copy(raw_beton, tmp_path / "copy.beton")


def test_a_file_cut_off_anywhere_is_refused(copy):
    size, table = os.path.getsize(copy), table_at(copy)
    lengths = {*range(table - 50, size), *range(0, 2200, 7), *range(20, 30), *range(2200, table, 99991)}
    for length in sorted(lengths, reverse=True):
        os.truncate(copy, length)
        with pytest.raises(BetonError, match="copy.beton: (damaged|not a) .beton"):
            check_beton(copy)


def test_a_file_with_something_behind_it_is_refused(copy):
    with open(copy, "ab") as file:
        file.write(bytes(fmt.REGION.itemsize))
    with pytest.raises(BetonError, match="its size is .* bytes; its header says"):
        check_beton(copy)


def test_a_cut_off_file_is_refused_before_ffcv_sees_it(copy):
    os.truncate(copy, os.path.getsize(copy) - 24)
    with pytest.raises(BetonError, match="damaged .beton"):
        create_loader(copy, batch_size=4, image_size=16, training=False)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(3000), b"\xff" * 3000, b"hello", bytes(5000)])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "x.beton").write_bytes(content)
    with pytest.raises(BetonError, match="x.beton: not a .beton file of version 2: .*; give a .beton or an image"):
        check_beton(tmp_path / "x.beton")


def test_a_missing_file_is_named_with_the_command_that_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="x.beton: no such file; write it with: vilonghorn beton"):
        check_beton(tmp_path / "x.beton")


@pytest.mark.parametrize("name", [name for name, case in DAMAGE.items() if "Beton" in case[2]])
def test_tables_that_contradict_each_other_or_the_file_are_refused(name, raw_beton, jpg_beton, tmp_path):
    kind, damage, expected = DAMAGE[name]
    path = damaged_copy({"raw": raw_beton, "jpg": jpg_beton}[kind], tmp_path, damage)
    with pytest.raises(BetonError, match=expected.removeprefix("BetonError: ")):
        check_beton(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
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


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_without_a_manifest_any_changed_bytes_give_the_clear_error_or_none(copy, data):
    tables_end = fmt.TABLES_AT + 27 * fmt.SAMPLE.itemsize
    offset = data.draw(st.integers(0, tables_end - 1) | st.integers(0, 24))
    new = data.draw(st.binary(min_size=1, max_size=9))
    with open(copy, "rb") as file:
        file.seek(offset)
        good = file.read(len(new))
    overwrite(copy, offset, new)
    try:
        beton = check_beton(copy)
        assert (beton.images["data_ptr"] + beton.sizes.astype(np.uint64) <= table_at(copy)).all()
    except BetonError as error:
        assert "copy.beton" in str(error)
    overwrite(copy, offset, good)


def test_a_changed_pixel_is_seen_by_the_check_of_the_images(copy, raw_beton):
    shutil.copy(fmt.manifest_path(raw_beton), fmt.manifest_path(copy))
    check_beton(copy, images=True)
    overwrite(copy, table_at(copy) - 5, b"\x00\xff")
    check_beton(copy)
    with pytest.raises(BetonError, match="image data are not those that were written"):
        check_beton(copy, images=True)


def test_the_images_cannot_be_checked_without_a_manifest(copy):
    with pytest.raises(BetonError, match="cannot be checked without copy.beton.json"):
        check_beton(copy, images=True)


def test_the_manifest_of_another_file_is_refused(copy, jpg_beton):
    shutil.copy(fmt.manifest_path(jpg_beton), fmt.manifest_path(copy))
    with pytest.raises(BetonError, match="copy.beton.json: does not describe copy.beton"):
        check_beton(copy)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": 3}', json.dumps({"sha256": {"tables": "x"}})])
def test_a_broken_manifest_is_named(copy, content):
    fmt.manifest_path(copy).write_text(content)
    with pytest.raises(BetonError, match="copy.beton.json: not the manifest of a .beton"):
        check_beton(copy)


@pytest.mark.parametrize("kind", ["folder", "pipe", "nested"])
def test_what_cannot_be_a_manifest_is_named_and_not_waited_for(copy, kind):
    path = fmt.manifest_path(copy)
    make = {
        "folder": os.mkdir,
        "pipe": getattr(os, "mkfifo", os.mkdir),
        "nested": lambda path: path.write_text("[" * 200_000 + "]" * 200_000),
    }
    make[kind](path)
    with pytest.raises(BetonError, match="copy.beton.json: not (a file|the manifest of a .beton).*; delete"):
        check_beton(copy)


@pytest.fixture
def manifest(copy, raw_beton):
    """Writes the manifest of the copy with some entries changed, and without checksums of names and images."""

    def write(**changes):
        good = json.loads(fmt.manifest_path(raw_beton).read_text())
        del good["sha256"]["classes"], good["crc32"]
        fmt.manifest_path(copy).write_text(json.dumps({**good, **changes}))

    return write


@pytest.mark.parametrize("classes", [5, "cde", {"c": 0, "d": 1, "e": 2}, ["c", "d", 3], ["c", "d", "d"], ["c", None]])
def test_classes_that_are_not_distinct_names_are_refused(copy, manifest, classes):
    manifest(classes=classes)
    with pytest.raises(BetonError, match="copy.beton.json: .*distinct names.*; delete it or write both again"):
        check_beton(copy)


def test_fewer_class_names_than_labels_are_refused(copy, manifest):
    manifest(classes=["cat", "dog"], class_counts=[8, 9])
    with pytest.raises(BetonError, match="copy.beton.json: 2 class names for labels up to 2; delete it or write both"):
        check_beton(copy)


def test_a_changed_class_name_is_seen(copy, raw_beton):
    fmt.manifest_path(copy).write_text(fmt.manifest_path(raw_beton).read_text().replace('"dog"', '"dig"'))
    with pytest.raises(BetonError, match="copy.beton.json: its class names are not those that were written; delete it"):
        check_beton(copy)


@pytest.mark.parametrize("crc32", ["AAAA", "AAAAAAAA", "?", 5])
def test_checksums_that_are_not_one_for_each_image_are_refused(copy, manifest, crc32):
    manifest(crc32=crc32)
    with pytest.raises(BetonError, match="copy.beton.json: (not the manifest|2 checksums for 27 images).*; delete it"):
        check_beton(copy)


def test_a_manifest_without_checksums_passes(copy, manifest):
    manifest()
    assert check_beton(copy, images=True).checksums is None


@pytest.mark.parametrize("counts", [[8, 9], [8, 10, 9], [8, 9, 10, 0], 27, None])
def test_class_counts_that_are_not_those_of_the_labels_are_refused(copy, manifest, counts):
    manifest(class_counts=counts)
    with pytest.raises(BetonError, match="copy.beton.json: .*class_counts.*; delete it or write both again"):
        check_beton(copy)


def test_a_class_without_images_and_a_manifest_without_names_pass(copy, manifest):
    manifest(classes=["cat", "dog", "eel", "fox"], class_counts=[8, 9, 10, 0])
    assert check_beton(copy).num_classes == 4
    manifest(classes=None)
    assert check_beton(copy).classes is None and check_beton(copy).num_classes == 3


@pytest.mark.parametrize("label", [2**24, 2**40, 2**63 - 1])
def test_a_label_beyond_any_number_of_classes_is_refused(copy, label):
    set_sample(copy, 5, label=label)
    with pytest.raises(BetonError, match=f"copy.beton: damaged .beton: sample 5 .label {label}, .*; write it again"):
        check_beton(copy)


def test_the_remedy_for_a_damaged_file_is_a_command_that_names_it(copy):
    os.truncate(copy, os.path.getsize(copy) - 1)
    with pytest.raises(BetonError) as error:
        check_beton(copy)
    assert str(error.value).endswith(f"; write it again: vilonghorn beton SRC {copy} --overwrite")


@pytest.mark.needs_ffcv
def test_the_tables_are_those_of_ffcv():
    from ffcv import types
    from ffcv.fields import IntField, RGBImageField

    assert types.CURRENT_VERSION == fmt.VERSION
    for ours, theirs in [
        (fmt.HEADER, types.HeaderType),
        (fmt.FIELD, types.FieldDescType),
        (fmt.REGION, types.ALLOC_TABLE_TYPE),
        (fmt.SAMPLE, types.get_metadata_type([RGBImageField(), IntField()])),
    ]:
        assert ours.itemsize == theirs.itemsize
        assert [v[1] for v in ours.fields.values()] == [v[1] for v in theirs.fields.values()]


@pytest.mark.needs_ffcv
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_of_ffcvs_own_writer_passes(tmp_path):
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    images = np.random.default_rng(0).integers(0, 256, (250, 9, 12, 3), dtype=np.uint8)
    path = tmp_path / "theirs.beton"
    writer = DatasetWriter(str(path), {"image": RGBImageField(), "label": IntField()}, num_workers=2)
    writer.from_indexed_dataset([(image, i % 7) for i, image in enumerate(images)])
    beton = check_beton(path)
    assert beton.num_samples == 250 and beton.num_classes == 7 and beton.fields == ("image", "label")
    assert (beton.labels == np.arange(250) % 7).all()
    at = int(beton.images["data_ptr"][200])
    assert (np.fromfile(path, np.uint8, 9 * 12 * 3, offset=at) == images[200].ravel()).all()


def test_a_sample_is_decoded_without_ffcv(raw_beton, jpg_beton, tmp_path):
    raw, jpg = (check_beton(path) for path in (raw_beton, jpg_beton))
    for index in (0, raw.num_samples - 1):
        exact, lossy = (np.asarray(fmt.read_sample(beton, index), dtype=float) for beton in (raw, jpg))
        row, data = raw.images[index], np.fromfile(raw_beton, np.uint8)
        start, stop = int(row["data_ptr"]), int(row["data_ptr"]) + 3 * int(row["height"]) * int(row["width"])
        assert np.array_equal(exact.ravel(), data[start:stop]) and exact.shape == (row["height"], row["width"], 3)
        assert lossy.shape == exact.shape and abs(lossy - exact).mean() < 12
    damaged = shutil.copy(jpg_beton, tmp_path / "damaged.beton")
    with open(damaged, "r+b") as file:
        file.seek(int(jpg.images[0]["data_ptr"]))
        file.write(bytes(100))
    with pytest.raises(BetonError, match="damaged .beton: image 0 does not decode"):
        fmt.read_sample(check_beton(damaged), 0)
