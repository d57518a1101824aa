"""The benchmark of the loaders measures what it says, on a few small images."""

from __future__ import annotations

import re

import pytest
import torch

from vilonghorn.bench import data as bench_data
from vilonghorn.data import ImageFolder

SMALL = ["--images", "16", "--size", "60", "50", "--image-size", "32", "--batch", "8", "--rounds", "1"]


@pytest.fixture(autouse=True)
def threads_kept():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_loader_is_timed_and_every_file_weighed(capsys):
    pytest.importorskip("ffcv")
    status = bench_data.main([*SMALL, "--workers", "1", "--crops-only"])
    out = capsys.readouterr().out
    target = re.search(r"target: .*: ([\d.]+), (met|missed)", out)
    assert status == (0 if target[2] == "met" else 1)
    assert out.count("| timm, PIL |") == out.count("| ours, jpg |") == out.count("| ours, folder |") == 1
    assert re.search(r"\| raw \| \d+ \| \d+ \| \d+ \|", out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pixels_of_bicubic_crops_are_timms_and_of_operations_near(capsys):
    pytest.importorskip("ffcv")
    assert bench_data.main([*SMALL, "--size", "220", "160", "--image-size", "112", "--pixels"]) == 0
    out = capsys.readouterr().out
    assert float(re.search(r"\| raw, bicubic \| ([\d.]+) \|", out)[1]) < 0.3
    means = dict(re.findall(r"\| (\w+) \| ([\d.]+) \| [\d.]+ \|", out))
    assert len(means) == 15 and float(means["Invert"]) == 0 and max(map(float, means.values())) < 1.5


def test_rounds_go_in_turns_and_the_first_is_not_counted():
    seen = []

    def loader(name):
        def epochs(epoch):
            seen.append((name, epoch))
            yield torch.zeros(3), None

        return epochs

    speeds = bench_data.in_turns({"a": loader("a"), "b": loader("b")}, 2, "cpu")
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [len(values) for values in speeds.values()] == [2, 2]


def test_made_photos_take_about_the_room_of_photographs(tmp_path):
    bench_data.make_photos(tmp_path, 4, 500, 400)
    sizes = [len(open(path, "rb").read()) for path in ImageFolder(tmp_path).paths]
    assert all(40_000 < size < 110_000 for size in sizes)
