"""The loader's part of the recipe: ranks, repeated augmentation, growing images, interpolation, erasing."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from vilonghorn.data import ImageFolder, check_beton, create_loader, write_beton
from vilonghorn.data.rng import sample_of, training_order

TRAIN = {"batch_size": 4, "image_size": 16, "training": True, "seed": 3, "workers": 0}
EVAL = {"batch_size": 4, "image_size": 16, "training": False, "workers": 0}
PLAIN = {"mean": (0, 0, 0), "std": (1 / 255,) * 3}
WHOLE = {"scale": (1.0, 1.0), "ratio": (0.2, 5.0), "hflip": 0.0}


def epoch(source, number=0, **options):
    return list(create_loader(source, **options).epoch(number))


def images_of(batches):
    return torch.cat([images for images, _ in batches])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_batches_of_all_ranks_together_are_those_of_one_rank_with_their_sizes_added(source, world_size):
    options = {**TRAIN, "auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.5, "repeats": 2}
    one = epoch(source, 1, **{**options, "batch_size": 2 * world_size})
    ranks = [epoch(source, 1, **{**options, "batch_size": 2}, rank=r, world_size=world_size) for r in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(one)} == {27 // (2 * world_size)}
    for number, (images, targets) in enumerate(one):
        for rank, batches in enumerate(ranks):
            assert torch.equal(images[rank::world_size], batches[number][0])
            assert torch.equal(targets[rank::world_size], batches[number][1])


@pytest.mark.parametrize("world_size", [2, 5])
def test_every_held_out_sample_is_measured_by_exactly_one_rank(source, world_size):
    whole = images_of(epoch(source, **EVAL))
    for rank in range(world_size):
        loader = create_loader(source, **EVAL, rank=rank, world_size=world_size)
        batches = list(loader.epoch(0))
        assert len(batches) == len(loader)
        expected = whole[rank::world_size]
        assert torch.equal(images_of(batches) if batches else expected, expected)


def test_repeated_augmentation_shows_other_crops_of_the_same_images(source, folder):
    batches = epoch(source, 2, **TRAIN, repeats=4)
    labels = ImageFolder(folder).labels[sample_of(training_order(27, 3, 2, 4))][:24]
    assert torch.cat([targets for _, targets in batches]).tolist() == labels.tolist()
    for images, targets in batches:
        assert len(targets.unique()) == 1
        assert all((images[i] - images[j]).abs().mean() > 0.01 for i in range(4) for j in range(i))


def test_images_grow_from_start_size_to_image_size(source):
    for size, start, ramp, expected in (
        (128, 32, (2, 5), [32, 32, 32, 64, 96, 128, 128]),
        (72, 8, (1, 5), [8, 8, 32, 32, 64, 72, 72]),
        (70, 40, (0, 4), [40, 40, 64, 64, 70, 70, 70]),  # no step is below the start
    ):
        loader = create_loader(source, **{**TRAIN, "image_size": size}, start_size=start, ramp=ramp)
        assert [tuple(next(loader.epoch(e))[0].shape[2:]) for e in range(7)] == [(side, side) for side in expected]
    fixed = create_loader(source, **{**EVAL, "image_size": 32}, start_size=16, ramp=(2, 5))
    assert next(fixed.epoch(0))[0].shape[2:] == (32, 32)


def test_a_batch_has_one_of_several_sizes_the_same_on_all_ranks_and_after_a_resume(source):
    sizes = {"image_size": 48, "sizes": [24, 32, 48], "erase": 1.0}
    whole, plain = epoch(source, 1, **TRAIN | sizes), epoch(source, 1, **TRAIN | sizes | {"sizes": []})
    assert len({images.shape for images, _ in whole}) > 1
    for (images, targets), (large, labels) in zip(whole, plain, strict=True):
        assert torch.equal(targets, labels) and images.shape[-1] in sizes["sizes"]
        reduced = torch.nn.functional.interpolate(large, images.shape[2:], mode="bilinear", antialias=True)
        assert torch.equal(images, large if images.shape == large.shape else reduced)
    loader = create_loader(source, **TRAIN | sizes)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(loader.epoch(1, start=2), whole[2:], strict=True))
    ranks = [epoch(source, 1, **TRAIN | sizes | {"batch_size": 2}, rank=rank, world_size=2) for rank in (0, 1)]
    assert all(a.shape == b.shape for (a, _), (b, _) in zip(*ranks, strict=True))


@pytest.mark.needs_ffcv
@pytest.mark.parametrize("training", [True, False])
def test_bicubic_crops_of_a_beton_are_those_of_pil(tmp_path, photo, training):
    images = [photo(i, 60 + 9 * i, 80) for i in range(6)]
    for mode, error in (("raw", 0.0), ("jpg", 2.0)):
        write_beton([(image, 0) for image in images], tmp_path / f"{mode}.beton", mode=mode, progress=False)
        options = {**(TRAIN if training else EVAL), **PLAIN, "batch_size": 6, "interpolation": "bicubic"}
        order = training_order(6, 3, 0) if training else np.arange(6)
        found = images_of(epoch(tmp_path / f"{mode}.beton", **options, **(WHOLE if training else {"crop_pct": 1.0})))
        for image, index in zip(found, order):
            width, height = images[index].size
            side = min(width, height)
            left, top = (0, 0) if training else ((width - side) // 2, (height - side) // 2)
            box = (left, top, width, height) if training else (left, top, left + side, top + side)
            pil = np.asarray(images[index].resize((16, 16), Image.Resampling.BICUBIC, box=box), float)
            assert np.abs(image.permute(1, 2, 0).numpy() - pil).mean() <= error + 1e-4


def test_evaluation_takes_no_notice_of_the_augmentation(source):
    recipe = {"auto_augment": "3a", "color_jitter": 0.3, "erase": 1.0, "repeats": 3, "start_size": 8, "ramp": (9, 9)}
    assert torch.equal(images_of(epoch(source, **EVAL)), images_of(epoch(source, **EVAL, **recipe)))


def test_the_fingerprint_tells_datasets_apart(folder, raw_beton, jpg_beton, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "cat" / "00.png").rename(other / "cat" / "99.png")
    data = [ImageFolder(folder), ImageFolder(other), check_beton(raw_beton), check_beton(jpg_beton)]
    assert len({item.digest for item in data}) == 4 and ImageFolder(folder).digest == data[0].digest
