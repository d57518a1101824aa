"""Both loaders keep one contract: order, resume, independence of workers, shapes, normalisation, errors, clean ends."""

import multiprocessing
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from vilonghorn.data import ImageFolder, create_loader

TRAIN = {"batch_size": 4, "image_size": 16, "training": True, "seed": 3, "workers": 0}
EVAL = {"batch_size": 4, "image_size": 16, "training": False, "workers": 0}


def stream(loader, epoch, start=0):
    return list(loader.epoch(epoch, start))


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b))


def test_batches_have_the_shapes_and_numbers_that_the_loader_says(source):
    loader = create_loader(source, **TRAIN)
    assert (loader.num_samples, loader.num_classes, loader.batch_size, len(loader)) == (27, 3, 4, 6)
    assert loader.class_names == ["cat", "dog", "eel"]
    batches = stream(loader, 0)
    assert len(batches) == 6
    for images, targets in batches:
        assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert targets.shape == (4,) and targets.dtype == torch.int64


def test_evaluation_takes_every_sample_once_in_the_order_of_the_source(source, folder):
    loader = create_loader(source, **EVAL)
    batches = stream(loader, 0)
    assert [len(targets) for _, targets in batches] == [4] * 6 + [3]
    assert torch.cat([targets for _, targets in batches]).tolist() == ImageFolder(folder).labels.tolist()
    assert same(batches, stream(loader, 7))


def test_the_stream_repeats_and_does_not_depend_on_the_number_of_workers(source):
    one = stream(create_loader(source, **TRAIN), 5)
    assert same(one, stream(create_loader(source, **TRAIN), 5))
    assert same(one, stream(create_loader(source, **TRAIN | {"workers": 2}), 5))


@pytest.mark.parametrize("options", [EVAL, TRAIN | dict(auto_augment="3a", color_jitter=0.3, erase=0.5, repeats=3)])
def test_an_epoch_resumed_at_any_batch_is_the_tail_of_the_whole(source, options):
    loader = create_loader(source, **options)
    whole = stream(loader, 2)
    for start in range(len(loader) + 1):
        assert same(whole[start:], stream(loader, 2, start))


def test_a_negative_start_is_refused(folder):
    with pytest.raises(ValueError, match="^epoch is 1 and start is -1; expected 0 or more$"):
        next(create_loader(folder, **TRAIN).epoch(1, -1))


def test_yielded_tensors_stay_as_they_are(source):
    loader = create_loader(source, **TRAIN | {"batch_size": 2})
    kept = []
    for images, targets in loader.epoch(0):
        kept.append((images, targets, images.clone(), targets.clone()))
    assert len(kept) == 13  # more than are decoded ahead
    assert all(torch.equal(x, a) and torch.equal(y, b) for x, y, a, b in kept)


@pytest.mark.parametrize("taken", [0, 2])
def test_an_epoch_left_early_frees_its_threads_and_processes(source, taken):
    loader = create_loader(source, **TRAIN | {"workers": 2})

    def running():
        return threading.active_count() + len(multiprocessing.active_children())

    before = running()
    batches = loader.epoch(0)
    for _ in range(taken):
        next(batches)
    time.sleep(0.2)  # lets the thread run into a full queue
    batches.close()
    deadline = time.monotonic() + 20
    while running() > before and time.monotonic() < deadline:
        time.sleep(0.05)  # the threads that feed torch's queues end a little after they are told to
    assert running() <= before


def test_random_generators_and_torchs_threads_are_left_alone(source):
    loader = create_loader(source, **TRAIN, erase=1.0, auto_augment="3a", color_jitter=0.3)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    torch.set_num_threads(3)
    stream(loader, 0)
    assert torch.get_num_threads() == 3
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_mean_and_std_normalise(source):
    plain = stream(create_loader(source, **EVAL, mean=(0, 0, 0), std=(1, 1, 1)), 0)[0][0]
    assert 0 <= plain.min() and plain.max() <= 1 and plain.max() > 0.5
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (plain - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(stream(create_loader(source, **EVAL), 0)[0][0], expected, atol=1e-5, rtol=0)


def test_hflip_mirrors_and_whole_crops_keep_the_picture(source):
    options = {**TRAIN, "scale": (1.0, 1.0), "ratio": (0.2, 5.0)}
    never, always = (stream(create_loader(source, **options, hflip=p), 0) for p in (0.0, 1.0))
    assert all(torch.equal(x, u.flip(3)) for (x, _), (u, _) in zip(never, always))
    mixed = stream(create_loader(source, **options, hflip=0.5), 0)
    flipped = [torch.equal(a, b) for (x, _), (u, _) in zip(mixed, always) for a, b in zip(x, u)]
    assert 5 <= sum(flipped) <= 19


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_in_a_folder_is_named_with_its_index(tmp_path, photo, workers):
    (tmp_path / "a").mkdir()
    for i in range(6):
        photo(i).save(tmp_path / "a" / f"{i}.jpg")
    whole = (tmp_path / "a" / "4.jpg").read_bytes()
    (tmp_path / "a" / "4.jpg").write_bytes(whole[: len(whole) // 2])
    batches = create_loader(tmp_path, **EVAL | {"batch_size": 2, "workers": workers}).epoch(0)
    next(batches), next(batches)
    with pytest.raises(ValueError, match=r"^sample 4: .*4.jpg: not a readable image \([^\n]*$"):
        next(batches)


def test_an_image_too_long_to_be_resized_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (2, 3000)).save(tmp_path / "a" / "x.png")
    batches = create_loader(tmp_path, **EVAL | {"batch_size": 1, "crop_mode": "border"}).epoch(0)
    with pytest.raises(ValueError, match=r"^sample 0: .*x.png: its 2x3000 pixels cannot be resized: height and"):
        next(batches)


def test_without_ffcv_a_beton_is_refused_with_the_remedy(jpg_beton, monkeypatch):
    monkeypatch.setitem(sys.modules, "vilonghorn.data.loaders.ffcv", None)
    with pytest.raises(ImportError, match=r"jpg.beton: reading a .beton needs FFCV.*run ./setup.sh.*image folder"):
        create_loader(jpg_beton, **EVAL)
