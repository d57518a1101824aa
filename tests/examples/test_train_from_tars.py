"""Training from tar files by several processes: a killed run resumes to the same weights; what is damaged is named."""

import io
import os
import signal
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from rank_run import OPTIONS, ended, some_digits, start_ranks

from vilonghorn.data.loaders.config import LoaderConfig
from vilonghorn.engine import Trainer
from vilonghorn.engine.checkpoint import RunDirectory, load_weights
from vilonghorn.engine.command_line import run

pytest.importorskip("webdataset", reason="pip install vilonghorn[sources]")
import train_from_tars  # noqa: E402


def write_tars(folder, files, count=4):
    """Tar files of images and labels, of {name: (content, label)}; returns their paths."""
    paths = [str(folder / f"part-{i}.tar") for i in range(count)]
    for i, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for name, (content, label) in list(files.items())[i::count]:
                for extension, data in (("png", content), ("cls", b"%d" % label)):
                    info = tarfile.TarInfo(f"{name}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return paths


@pytest.fixture
def shades(tmp_path):
    """Tar files of 40 images, image i of the shade 6 i."""
    files = {}
    for i in range(40):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (6 * i,) * 3).save(buffer, "PNG")
        files[f"{i:02d}"] = (buffer.getvalue(), i % 10)
    return write_tars(tmp_path, files)


@pytest.fixture
def names(tmp_path):
    (tmp_path / "names.txt").write_text("\n".join("0123456789"))
    return tmp_path / "names.txt"


def loader(tars, index, **options):
    train_from_tars.update_index(tars, index)
    counts = {tar: train_from_tars.json.loads(index.read_text())[tar] for tar in tars}
    options = dict(training=True, batch_size=4, image_size=8, workers=0, interpolation="bicubic") | options
    config = LoaderConfig(classes=list("0123456789"), mean=(0, 0, 0), std=(1, 1, 1), **options)
    return train_from_tars.TarLoader("tars", counts, config)


def shown(batches) -> list[list[int]]:
    found = [(images[:, 0, 0, 0].mul(255).round() / 6, targets) for images, targets in batches]
    assert all(torch.equal(images.long() % 10, targets) for images, targets in found)
    return [images.int().tolist() for images, _ in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_processes_read_every_image_once_and_an_epoch_continues(shades, tmp_path, workers):
    options = dict(batch_size=5, world_size=2, workers=workers)
    ranks = [loader(shades, tmp_path / "index.json", rank=rank, **options) for rank in range(2)]
    read = [shown(rank.epoch(0)) for rank in ranks]
    assert [len(rank) for rank in ranks] == [4, 4] and sorted(sum(sum(read, []), [])) == list(range(40))
    assert shown(ranks[1].epoch(0, start=3)) == read[1][3:] and shown(ranks[1].epoch(1)) != read[1]
    assert ranks[0].num_samples == 40 and ranks[0].fingerprint == ranks[1].fingerprint


def killed_in_the_second_epoch(argv):
    train_epoch = Trainer.train_epoch

    def train(trainer, stop):
        if trainer.progress.epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        train_epoch(trainer, stop)

    Trainer.train_epoch = train
    train_from_tars.main(argv)


def test_a_run_of_two_processes_that_was_killed_resumes_to_the_same_weights(tmp_path, names):
    brief = some_digits(tmp_path, 4, 1)
    digits = sorted((tmp_path / "digits" / "train").glob("*/*.png"))
    files = {path.stem: (path.read_bytes(), int(path.parent.name)) for path in digits}
    tars = write_tars(tmp_path, files)
    options = [*brief, f"--data.train={'::'.join(tars)}", f"--classes={names}", "--data.batch_size=4"]
    options += ["--augmentation.hflip=0.5", "--model.kwargs={patch_size: 16, depth: 1, embed_dim: 16}"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ended(start_ranks(2, train_from_tars.main, [*options, f"--run.dir={whole}"])) == [0, 0]
    processes = start_ranks(2, killed_in_the_second_epoch, [*options, f"--run.dir={killed}"])
    assert ended(processes) == [-signal.SIGKILL] * 2
    assert load_weights(RunDirectory(killed).weights("last"))[1]["epoch"] == 1
    assert ended(start_ranks(2, train_from_tars.main, [f"--resume={killed}", f"--classes={names}"])) == [0, 0]
    (first, record), (second, again) = (load_weights(RunDirectory(run).weights("last")) for run in (whole, killed))
    assert record == again and record["epoch"] == 2 and record["class_names"] == list("0123456789")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_all_damaged_tar_files_are_named_before_training(shades, tmp_path, names, capsys):
    whole = open(shades[1], "rb").read()
    open(shades[1], "wb").write(whole[: len(whole) // 2])
    open(shades[2], "wb").write(b"")
    options = [*OPTIONS, f"--data.train={tmp_path}/part-{{0..5}}.tar", f"--run.dir={tmp_path}/run"]
    status = run(train_from_tars.main, [*options, f"--data.val={tmp_path}", f"--classes={names}"])
    said = capsys.readouterr().err
    assert status == 2 and not (tmp_path / "run").exists() and "4 of 6 tar files cannot be trained on:" in said
    assert [f"part-{i}.tar" in said for i in range(6)] == [False, True, True, False, True, True]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "sample, message",
    [
        ((b"no image", 1), "part-0.tar: bad: not a readable image"),
        ((None, 10), "part-0.tar: bad: its label is 10, but there are 10 classes"),
    ],
)
def test_a_damaged_sample_is_an_error_that_names_it(tmp_path, sample, message, workers):
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(buffer, "PNG")
    good, (content, label) = buffer.getvalue(), sample
    tars = write_tars(tmp_path, {"good": (good, 0), "bad": (content or good, label)}, 1)
    with pytest.raises(ValueError, match=message):
        list(loader(tars, tmp_path / "index.json", batch_size=1, workers=workers).epoch(0))


def test_a_tar_file_is_counted_again_only_if_it_has_changed(shades, tmp_path, monkeypatch):
    first, counted = loader(shades, tmp_path / "index.json"), []
    count = train_from_tars.count_labels
    monkeypatch.setattr(train_from_tars, "count_labels", lambda tar: counted.append(tar) or count(tar))
    assert loader(shades, tmp_path / "index.json").fingerprint == first.fingerprint and counted == []
    open(shades[3], "ab").write(bytes(512))
    assert loader(shades, tmp_path / "index.json").fingerprint != first.fingerprint and counted == shades[3:]


def test_what_a_stream_cannot_do_is_refused(shades, tmp_path):
    with pytest.raises(ValueError, match="augmentation.repeats is 3; tar files are read once: make it 1"):
        loader(shades, tmp_path / "index.json", repeats=3)
    with pytest.raises(ValueError, match=r"4 tar file\(s\) for 5 processes: give more files"):
        loader(shades, tmp_path / "index.json", rank=0, world_size=5)
