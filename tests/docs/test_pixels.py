"""The script that compares pixels to those of timm's PIL pipeline."""

import importlib
import re
from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pixels_of_bicubic_crops_are_those_of_timm_and_of_operations_near(tmp_path, capsys, monkeypatch):
    pytest.importorskip("ffcv")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "data"))
    pixels = importlib.import_module("pixels")
    pixels.make_photos(tmp_path / "photos", 16, 220, 160)
    pixels.report_pixels(tmp_path / "photos", tmp_path, 112)
    out = capsys.readouterr().out
    assert float(re.search(r"\| raw, bicubic \| ([\d.]+) \|", out)[1]) < 0.3
    means = dict(re.findall(r"\| (\w+) \| ([\d.]+) \| [\d.]+ \|", out))
    assert len(means) == 15 and float(means["Invert"]) == 0 and max(map(float, means.values())) < 1.5
