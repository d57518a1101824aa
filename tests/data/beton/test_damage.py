"""Reading a damaged `.beton` ends with a clear error or with all its samples, and never hangs or crashes."""

import re

import numpy as np
import pytest
from damage import DECODED, damaged_copy, overwrite, read_all

from vilonghorn.data.beton import format as fmt

pytestmark = pytest.mark.needs_ffcv


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
