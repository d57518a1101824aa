"""The scripts on data run on a few small images, and print what docs/data.md quotes."""

import re

import pytest

pytest.importorskip("ffcv")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = ["--images", "16", "--size", "60", "50", "--image-size", "32", "--batch", "8", "--rounds", "1"]


def test_every_loader_is_timed_and_every_file_weighed(script, capsys):
    status = script("benchmarks/loader_speed").main([*SMALL, "--workers", "1", "--crops-only"])
    out = capsys.readouterr().out
    reached, verdict = re.search(r"target: .*: ([\d.]+), (met|NOT MET)", out).groups()
    assert status == (0 if verdict == "met" else 1)
    assert out.count("| timm, PIL |") == out.count("| ours, jpg |") == out.count("| ours, folder |") == 1
    assert re.search(rf"\| ours, jpg \| \d+ \| (\d+) to \1 \| {reached} \|", out)  # the first round is not counted
    assert len(re.findall(r"\| (?:jpg|raw) \| [+-][\d.]+% \| [+-].*% to [+-].*% \|", out)) == 2


def test_pixels_of_bicubic_crops_are_those_of_timm_and_of_operations_near(script, tmp_path, capsys):
    pixels = script("benchmarks/pixels")
    pixels.make_photos(tmp_path / "photos", 16, 220, 160)
    pixels.report_pixels(tmp_path / "photos", tmp_path, 112)
    out = capsys.readouterr().out
    assert float(re.search(r"\| raw, bicubic \| ([\d.]+) \|", out)[1]) < 0.3
    means = dict(re.findall(r"\| (\w+) \| ([\d.]+) \| [\d.]+ \|", out))
    assert len(means) == 15 and float(means["Invert"]) == 0 and max(map(float, means.values())) < 1.5
