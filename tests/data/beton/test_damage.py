"""Reading a damaged `.beton` ends with a clear error or with all its samples, and never hangs or crashes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from damage import BATCH, DAMAGE, Watched, abort, damaged_copy, hang, overwrite, read_all

from vilonghorn.data import create_loader
from vilonghorn.data.beton import format as fmt

pytestmark = pytest.mark.needs_ffcv


@pytest.fixture(scope="module")
def watched():
    reader = Watched()
    yield reader
    reader.end()


# What the check refuses never reaches the decoders; `test_format` tests it.
CASES = [name for name in DAMAGE if "Beton" not in DAMAGE[name][2]]


@pytest.mark.parametrize("interpolation", ["area", "bicubic"])
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_ends_in_a_clear_error(name, interpolation, raw_beton, jpg_beton, tmp_path, watched):
    kind, damage, expected = DAMAGE[name]
    path = damaged_copy({"raw": raw_beton, "jpg": jpg_beton}[kind], tmp_path, damage)
    said = watched.outcome(path, interpolation=interpolation, workers=2)
    assert re.match(expected, said), said
    assert said == "27 samples" or ("copy.beton" in said and "\n" not in said)


def test_random_damage_ends_in_an_error_or_in_all_samples(jpg_beton, tmp_path, watched):
    """Some bytes anywhere: in tables, where the check finds them or they do no harm, or in images."""
    random = np.random.default_rng(0)
    said = []
    for _ in range(8):

        def scribble(path):
            size, tables = path.stat().st_size, fmt.TABLES_AT + 27 * fmt.SAMPLE.itemsize
            data_at = int(np.fromfile(path, fmt.SAMPLE, 27, offset=fmt.TABLES_AT)["image"]["data_ptr"].min())
            for low, high in ((0, tables), (data_at, size)) if random.random() < 0.5 else ((data_at, size),):
                overwrite(path, int(random.integers(low, high)), random.bytes(int(random.integers(1, 40))))

        said.append(watched.outcome(damaged_copy(jpg_beton, tmp_path, scribble), workers=2))
    allowed = r"27 samples$|BetonError: .*copy.beton|ValueError: .*copy.beton: sample \d+"
    assert [s for s in said if not re.match(allowed, s)] == []
    assert any(s != "27 samples" for s in said)


def test_the_watchdog_sees_hangs_and_deaths_and_goes_on(jpg_beton):
    watched = Watched()
    try:
        assert watched.outcome(jpg_beton, hang, limit=1) == "hung for 1 seconds"
        assert watched.outcome(jpg_beton, abort) == "died with exit code -6"
    finally:
        watched.end()


def test_a_batch_of_one_has_one_label(jpg_beton, tmp_path):
    loader = create_loader(jpg_beton, batch_size=1, image_size=16, training=False)
    images, targets = next(loader.epoch(0))
    assert images.shape == (1, 3, 16, 16) and targets.shape == (1,)


def test_two_loaders_in_one_process_make_no_noise(jpg_beton, raw_beton, capfd):
    assert read_all(jpg_beton, {"workers": 1}) == read_all(raw_beton, {"workers": 2}) == "27 samples"
    assert capfd.readouterr() == ("", "") and 27 % BATCH
