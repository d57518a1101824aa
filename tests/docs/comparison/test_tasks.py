"""Tasks made of digits: labels are right, splits are disjoint, and there is no shortcut to the label."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from vilonghorn.study.tasks import COLOURS, Recall, make_task, write_task

from vilonghorn.data import create_loader
from vilonghorn.data.digits import SPLITS, load_split

datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
originals_of_sklearn = cache(datasets.load_digits)

FORMS = {
    "two pairs": dict(pairs=2, grid=4, colours=1),
    "eight pairs": dict(pairs=8, grid=6, colours=4),
    "thirty-two pairs": dict(pairs=32, grid=10, colours=4),
    "distractors": dict(pairs=4, grid=8, colours=6, distractors=True),
}


@cache
def originals() -> dict[bytes, int]:
    """Position in scikit-learn's set by the bytes of the picture."""
    return {
        np.rint(ink * 255 / 16).astype(np.uint8).tobytes(): i for i, ink in enumerate(originals_of_sklearn().images)
    }


def read(picture: np.ndarray) -> tuple[dict, tuple, set]:
    """Reads a mosaic from its pixels and the digits of scikit-learn alone.

    Returns:
        Key (colour, digit) to value; the key of the query; and the originals that were used.
    """
    target = originals_of_sklearn().target
    grid = len(picture) // 8
    tiles = picture.reshape(grid, 8, grid, 8, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 8, 8, 3)
    seen = []
    for tile in tiles:
        inverted = tile[0, 0].min() > 128 and (tile[..., 0] == tile[..., 1]).all() and (tile == 255).mean() > 0.2
        ink = tile.max(axis=2)
        colour = tuple((tile.max(axis=(0, 1)) > 0).astype(int))
        if inverted or not ink.any():
            seen.append(None)
        else:
            seen.append((colour, originals()[ink.tobytes()]))
    pairs, white = {}, (1, 1, 1)
    for key, value in zip(seen[:-1:2], seen[1:-1:2]):
        if key is not None:
            assert key[0] in COLOURS and value[0] == white
            pairs[key[0], int(target[key[1]])] = int(target[value[1]])
    colour, original = seen[-1]
    return pairs, (colour, int(target[original])), {tile[1] for tile in seen if tile is not None}


@pytest.mark.parametrize("form", FORMS)
def test_the_label_is_what_a_reader_of_the_picture_finds(form):
    options = FORMS[form]
    task = Recall("train", count=60, **options)
    for picture, label in (task[i] for i in range(60)):
        pairs, query, _ = read(picture)
        assert len(pairs) == task.pairs and str(pairs[query]) == task.classes[label]


def test_the_query_is_another_original_than_its_key():
    task = Recall("test", pairs=4, grid=4, count=200)
    for mosaic in map(task.mosaic, range(200)):
        key = mosaic.tiles[2 * mosaic.slots[mosaic.query]]
        assert mosaic.tiles[-1] != key and load_split("test").labels[mosaic.tiles[-1]] == load_split("test").labels[key]


def test_splits_share_no_original():
    parts = [load_split(split) for split in SPLITS]
    assert [len(part.labels) for part in parts] == [1085, 357, 355]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(1797))
    for part in parts:
        assert (originals_of_sklearn().target[part.indices] == part.labels).all()
    pictures = [{image.tobytes() for image in part.images} for part in parts]
    assert not (pictures[0] & pictures[1] or pictures[0] & pictures[2] or pictures[1] & pictures[2])
    for split, part in zip(SPLITS, parts):
        task = Recall(split, pairs=4, grid=6, distractors=True, count=20)
        used = set().union(*(read(task[i][0])[2] for i in range(20)))
        assert used <= set(part.indices.tolist())


def test_a_sample_depends_on_seed_split_and_number_alone():
    one, more = Recall("val", count=3, seed=5), Recall("val", count=30, seed=5)
    assert all((one[i][0] == more[i][0]).all() for i in (2, 0, 1))
    assert len({Recall(split, seed=seed)[0][0].tobytes() for split in SPLITS for seed in (0, 1)}) == 6
    assert len({more[i][0].tobytes() for i in range(30)}) == 30


def mosaics(count: int = 6000, **options):
    task = Recall("train", count=count, **options)
    return task, [task.mosaic(i) for i in range(count)]


def uniform(counts) -> bool:
    """Whether counts are as even as chance makes them; seeds are fixed, so it is true or false for ever."""
    return stats.chisquare(np.asarray(counts)).pvalue > 1e-3


def within(hits: np.ndarray, chance: float) -> bool:
    """Whether a share of hits is `chance` within four standard errors."""
    return abs(hits.mean() - chance) < 4 * (chance * (1 - chance) / len(hits)) ** 0.5


def test_the_query_alone_says_nothing():
    """The most frequent label of a key in one half of the mosaics is right once in ten in the other half."""
    task, drawn = mosaics(pairs=4, grid=4, colours=1)
    keys = np.array([m.keys[m.query] for m in drawn])
    labels = np.array([m.label for m in drawn])
    table = np.zeros((10, 10))
    np.add.at(table, (keys[:3000], labels[:3000]), 1)
    assert within(table.argmax(axis=1)[keys[3000:]] == labels[3000:], 0.1)
    assert uniform(np.bincount(labels, minlength=10)) and uniform(np.bincount(keys, minlength=10))
    assert stats.chi2_contingency(table).pvalue > 1e-3  # the two are independent


@pytest.mark.parametrize(
    "pairs, grid, chance", [(2, 4, 1 / 2), (4, 4, 1 / 4), (8, 6, 1 / 8), (16, 6, 2 / 16), (32, 10, 4 / 32)]
)
def test_all_tiles_without_their_places_leave_a_guess_among_the_values(pairs, grid, chance):
    """Of the values that are there, the most frequent ones are asked for as often as all are: `chance`, and no more.

    Nor does the key that is asked for help to choose among them: its rank among the values is uniform whatever it is.
    """
    task, drawn = mosaics(2500, pairs=pairs, grid=grid, colours=4)
    assert task.chance == chance
    counts = np.array([np.bincount(m.values, minlength=10) for m in drawn])
    labels = np.array([m.label for m in drawn])
    assert set(counts.max(axis=1)) == {counts.max()}  # as different as they can be: none stands out in some mosaics
    assert within(counts.argmax(axis=1) == labels, chance)
    if pairs < 10:
        ranks = np.array([(np.sort(m.values) == m.label).argmax() for m in drawn])
        colour = np.array([m.keys[m.query] // 10 for m in drawn])
        table = np.zeros((4, pairs))
        np.add.at(table, (colour, ranks), 1)
        assert uniform(table.sum(axis=0)) and stats.chi2_contingency(table).pvalue > 1e-3


def test_no_place_is_asked_for_more_than_another():
    task, drawn = mosaics(pairs=4, grid=4)
    places = np.array([m.slots[m.query] for m in drawn])
    assert uniform(np.bincount(places, minlength=task.room))
    order = np.array([(np.sort(m.slots) == m.slots[m.query]).argmax() for m in drawn])
    assert uniform(np.bincount(order, minlength=4))  # first, second, ... of the pairs in raster order


def test_distractors_say_nothing():
    task, drawn = mosaics(3000, pairs=2, grid=4, distractors=True)
    digits = load_split("train").labels
    beside = np.array([digits[m.tiles[-2]] for m in drawn])  # the tile before the query is never a pair's
    assert within(beside == np.array([m.label for m in drawn]), 0.1)


def test_the_test_digits_are_those_that_the_embedded_digits_hold_out(tmp_path):
    from vilonghorn.data import ImageFolder
    from vilonghorn.data.digits import enlarge, write_digits

    write_digits(tmp_path / "digits")
    held_out = {image.tobytes() for image, _ in ImageFolder(tmp_path / "digits" / "val")}
    assert {enlarge(image, 32).convert("RGB").tobytes() for image in load_split("test").images} == held_out


@pytest.mark.needs_ffcv
def test_a_loader_gives_the_pixels_that_were_painted(tmp_path):
    """With crops of the whole image, in training and in measuring: a mosaic must not be resampled."""
    task = Recall("train", pairs=2, grid=4, count=24)
    write_task(task, tmp_path / "train.beton")
    whole = dict(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, crop_pct=1.0, interpolation="area")
    scaled = dict(mean=(0.0,) * 3, std=(1 / 255,) * 3, workers=1)
    expected = sorted((task[i][0].tobytes(), task[i][1]) for i in range(24))
    for training in (True, False):
        loader = create_loader(
            tmp_path / "train.beton", batch_size=8, image_size=task.side, training=training, **whole, **scaled
        )
        assert loader.class_names == task.classes
        batches = [(x.permute(0, 2, 3, 1).round().to(torch.uint8).numpy(), y.tolist()) for x, y in loader.epoch(0)]
        found = [(image.tobytes(), label) for images, labels in batches for image, label in zip(images, labels)]
        assert sorted(found) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(grid=5), "grid 5: expected an even number"),
        (dict(colours=7), "colours 7: expected 1 to 6"),
        (dict(pairs=12, grid=6, colours=1), "pairs 12: expected 1 to 10"),
        (dict(pairs=0), "pairs 0: expected 1 to 7"),
        (dict(count=0), "count 0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("recall", "train", **options)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="split 'validation': expected one of train, val, test"):
        Recall("validation")
    with pytest.raises(ValueError, match="task 'copy': expected one of icons, recall"):
        make_task("copy", "train")
    with pytest.raises(IndexError):
        Recall("val", count=3)[3]
