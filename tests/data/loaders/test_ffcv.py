"""What comes through FFCV is what was written: against PIL, against FFCV's own loader, and from damaged files."""

import errno
import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import DECODED, damaged_copy, decode, overwrite, read_all

from vilonghorn.data import LoaderConfig, check_beton, create_loader, write_beton
from vilonghorn.data.beton import format as fmt
from vilonghorn.data.beton.format import manifest_path

ffcv = pytest.importorskip("vilonghorn.data.loaders.ffcv", exc_type=ImportError)
pytestmark = pytest.mark.needs_ffcv
EVAL = {"batch_size": 4, "image_size": 16, "training": False, "mean": (0, 0, 0), "std": (1 / 255,) * 3}


def coverage(start, stop, size, pixels):
    """(size, pixels): how much of each input pixel lies in each output pixel of start..stop, rows summing to 1."""
    edges, pixel = np.linspace(start, stop, size + 1)[:, None], np.arange(pixels)
    return np.clip(np.minimum(edges[1:], pixel + 1) - np.maximum(edges[:-1], pixel), 0, None) * size / (stop - start)


@pytest.mark.parametrize(("mode", "mean_error", "max_error"), [("raw", 0.3, 0.51), ("jpg", 1.3, 6.0)])
def test_centre_crops_agree_with_the_area_averages_of_what_pil_reads(mode, mean_error, max_error, raw_beton, jpg_beton):
    path = {"raw": raw_beton, "jpg": jpg_beton}[mode]
    beton = check_beton(path)
    loader = create_loader(path, **EVAL, interpolation="area")
    found = torch.cat([images for images, _ in loader.epoch(0)])
    for index in range(beton.num_samples):
        image = decode(beton, index).astype(float)
        height, width, _ = image.shape
        top, bottom, left, right = ffcv.center_crops(np.array([height]), np.array([width]), 0.875)[0].tolist()
        rows, columns = coverage(top, bottom, 16, height), coverage(left, right, 16, width)
        expected = np.einsum("ih,jw,hwc->cij", rows, columns, image)
        error = np.abs(found[index].numpy() - expected)
        assert error.mean() <= mean_error and error.max() <= max_error


@pytest.mark.parametrize("training", [False, True])
def test_whole_images_come_back_bit_for_bit(tmp_path, training):
    images = np.random.default_rng(0).integers(0, 256, (9, 17, 17, 3), dtype=np.uint8)
    write_beton(list(zip(images, range(9))), tmp_path / "x.beton", progress=False)
    whole = dict(crop_pct=1.0, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0)
    options = EVAL | whole | {"image_size": 17, "training": training, "batch_size": 3}
    for found, labels in create_loader(tmp_path / "x.beton", **options).epoch(0):
        assert (found.round().to(torch.uint8).permute(0, 2, 3, 1).numpy() == images[labels]).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ffcvs_own_loader_reads_what_is_written_and_its_own_files_pass(tmp_path):
    from ffcv.fields import IntField, RGBImageField
    from ffcv.loader import Loader
    from ffcv.writer import DatasetWriter

    images = np.random.default_rng(1).integers(0, 256, (250, 8, 9, 3), "u1")
    samples = [(image, i % 7) for i, image in enumerate(images)]
    write_beton(samples, tmp_path / "ours.beton", progress=False)
    theirs = list(Loader(str(tmp_path / "ours.beton"), batch_size=250, num_workers=1))
    assert all((read == image).all() for read, (image, _) in zip(theirs[0][0].numpy(), samples, strict=True))
    assert theirs[0][1].flatten().tolist() == [label for _, label in samples]
    fields = {"image": RGBImageField(), "label": IntField()}
    writer = DatasetWriter(str(tmp_path / "theirs.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(samples)
    beton = check_beton(tmp_path / "theirs.beton")
    assert beton.num_classes == 7 and beton.labels.tolist() == [label for _, label in samples]
    assert all((decode(beton, i) == image).all() for i, (image, _) in enumerate(samples))


@pytest.fixture
def copy(request, tmp_path):
    """A copy of a file with its manifest."""

    def make(kind):
        source = request.getfixturevalue(f"{kind}_beton")
        shutil.copy(manifest_path(source), tmp_path / "x.beton.json")
        return Path(shutil.copy(source, tmp_path / "x.beton"))

    return make


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["raw", "jpg"])
def test_every_changed_bit_of_an_image_is_seen_when_it_is_first_read(copy, kind, training):
    path = copy(kind)
    beton, whole, random = check_beton(path), path.read_bytes(), np.random.default_rng(0)
    for index in range(0, 27, 9):
        at = int(beton.images["data_ptr"][index] + random.integers(beton.sizes[index]))
        path.write_bytes(whole)
        overwrite(path, at, bytes([whole[at] ^ 1 << random.integers(8)]))
        loader = create_loader(path, **{**EVAL, "training": training, "batch_size": 27})
        with pytest.raises(ValueError, match=f"x.beton: sample {index}: its data are not those that were written; wr"):
            next(loader.epoch(0))


def test_checksums_are_compared_once_and_not_at_all_if_that_is_chosen(copy):
    path = copy("raw")
    start = int(check_beton(path).images["data_ptr"][5])
    loader = create_loader(path, **EVAL, workers=1000)  # are taken down to the CPUs
    before = torch.cat([images for images, _ in loader.epoch(0)])
    overwrite(path, start, b"\0" * 3000)
    for reader in (loader, create_loader(path, **EVAL, checksums=False)):
        after = torch.cat([images for images, _ in reader.epoch(1)])
        assert (after != before).flatten(1).any(1).nonzero().flatten().tolist() == [5]


def test_images_of_two_pixels_are_cropped_and_enlarged(tmp_path):
    image = np.array([[[0] * 3, [255] * 3], [[255] * 3, [0] * 3]], np.uint8)
    write_beton([(image, 0)] * 8, tmp_path / "x.beton", progress=False)
    for training in (True, False):
        loader = create_loader(tmp_path / "x.beton", **{**EVAL, "training": training})
        for images, _ in loader.epoch(0):
            assert images.isfinite().all() and 0 <= images.min() and images.max() <= 255.5


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(copy):
    path = copy("raw")
    loader = create_loader(path, **EVAL)
    os.truncate(path, check_beton(path).images["data_ptr"][20])
    with pytest.raises(ValueError, match="x.beton: sample 20: the file is cut off before its end; write"):
        list(loader.epoch(0))


def test_an_error_of_the_disk_names_the_file(raw_beton, monkeypatch):
    loader = create_loader(raw_beton, **EVAL)
    monkeypatch.setattr(os, "pread", lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
    with pytest.raises(OSError, match="input/output error: '.*raw.beton'"):
        next(loader.epoch(0))


def test_no_compiler_and_no_cache_are_needed(raw_beton, monkeypatch):
    from vilonghorn.data.loaders import ffcv

    for name in ("numba", "llvmlite"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("HOME", "/nonexistent")
    again = importlib.reload(ffcv)
    assert len(list(again.FFCVLoader(check_beton(raw_beton), LoaderConfig(**EVAL, workers=1)).epoch(0))) == 7


@pytest.mark.parametrize("name", DECODED)
def test_a_damaged_file_ends_in_a_clear_error(name, raw_beton, jpg_beton, tmp_path):
    kind, damage, expected = DECODED[name]
    path = damaged_copy({"raw": raw_beton, "jpg": jpg_beton}[kind], tmp_path, damage)
    result = read_all(path, workers=2)
    assert re.search(expected, result)
    assert result == "27 samples" or ("copy.beton" in result and "\n" not in result)


def test_random_damage_ends_in_an_error_or_in_all_samples(jpg_beton, tmp_path):
    """Some bytes anywhere: in tables, where the check finds them or they do no harm, or in images."""
    rng = np.random.default_rng(0)

    def scribble(path):
        size, tables = path.stat().st_size, fmt.TABLES_AT + 27 * fmt.SAMPLE.itemsize
        data_at = int(np.fromfile(path, fmt.SAMPLE, 27, offset=fmt.TABLES_AT)["image"]["data_ptr"].min())
        for low, high in ((0, tables), (data_at, size)) if rng.random() < 0.5 else ((data_at, size),):
            overwrite(path, int(rng.integers(low, high)), rng.bytes(int(rng.integers(1, 40))))

    results = [read_all(damaged_copy(jpg_beton, tmp_path, scribble), workers=2) for _ in range(8)]
    allowed = r"27 samples$|BetonError: .*copy.beton|ValueError: .*copy.beton: sample \d+"
    assert [result for result in results if not re.match(allowed, result)] == []
    assert any(result != "27 samples" for result in results)
