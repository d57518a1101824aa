"""The benchmark of the loaders measures what it says, on a few small images."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from vilonghorn.data import ImageFolder

SMALL = ["--images", "16", "--size", "60", "50", "--image-size", "32", "--batch", "8", "--rounds", "1"]


@pytest.fixture
def loader_speed(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "data"))
    threads = torch.get_num_threads()
    yield importlib.import_module("loader_speed")
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_loader_is_timed_and_every_file_weighed(loader_speed, capsys, monkeypatch):
    pytest.importorskip("ffcv")
    calls, measure = [], loader_speed.images_per_second
    monkeypatch.setattr(loader_speed, "images_per_second", lambda *a: calls.append((type(a[0]), a[1])) or measure(*a))
    status = loader_speed.main([*SMALL, "--workers", "1", "--crops-only"])
    out = capsys.readouterr().out
    reached, verdict = re.search(r"target: .*: ([\d.]+), (met|NOT MET)", out).groups()
    assert status == (0 if verdict == "met" else 1)
    assert out.count("| timm, PIL |") == out.count("| ours, jpg |") == out.count("| ours, folder |") == 1
    assert re.search(rf"\| ours, jpg \| \d+ \| (\d+) to \1 \| {reached} \|", out)  # the first round is not counted
    assert [i for _, i in calls] == [0] * 5 + [1] * 5 + [0] * 4  # the last are those of the checksums
    assert len(re.findall(r"\| (?:jpg|raw) \| [+-][\d.]+% \| [+-].*% to [+-].*% \|", out)) == 2
    assert re.search(r"\| raw \| \d+ \| \d+ \| \d+ \|", out)


def test_made_photos_are_about_as_large_as_photographs(loader_speed, tmp_path):
    loader_speed.make_photos(tmp_path, 4, 500, 400)
    sizes = [len(open(path, "rb").read()) for path in ImageFolder(tmp_path).paths]
    assert all(40_000 < size < 110_000 for size in sizes)
