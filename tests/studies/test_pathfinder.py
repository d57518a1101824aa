"""Pathfinder: the label is what a reader of the drawing finds, and both classes have the same paths."""

from __future__ import annotations

import numpy as np
import pytest
from study.pathfinder import APART, BORDER, GAP, LENGTH, RADIUS, Pathfinder
from study.tasks import make_task

ndimage = pytest.importorskip("scipy.ndimage", reason="scipy comes with scikit-learn")
stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")

COUNT = 300
TASK = Pathfinder("train", dashes=6, count=COUNT)


@pytest.fixture(scope="module")
def drawings():
    return [TASK.drawing(i) for i in range(COUNT)]


@pytest.fixture(scope="module")
def samples():
    pictures, labels = zip(*(TASK[i] for i in range(COUNT)))
    return np.stack([np.asarray(picture)[..., 0] for picture in pictures]), np.array(labels)


def reach(dashes: np.ndarray, disc: complex) -> int:
    """Which dash is the last of the chain that begins at a disc: from ends of dashes in any order alone."""
    left = list(range(len(dashes)))
    here, current = disc, None
    while left:
        distances = np.abs(dashes[left] - here)
        nearest = int(distances.min(1).argmin())
        if distances[nearest].min() > (GAP + 0.01 if current is not None else 0.01):
            break
        current = left.pop(nearest)
        far = int(distances[nearest].argmax())
        here = dashes[current, far]
    return current


def test_the_label_is_what_following_the_dashes_finds(drawings):
    rng = np.random.default_rng(0)
    for drawing in drawings:
        dashes = rng.permuted(np.concatenate(drawing.paths), axis=1)[rng.permutation(sum(map(len, drawing.paths)))]
        start, end = drawing.discs
        assert (np.abs(dashes[reach(dashes, start)] - end).min() < 0.01) == bool(drawing.label)


def test_the_label_is_mostly_what_a_flood_fill_of_the_pixels_finds(samples):
    pictures, labels = samples
    found = []
    for i, picture in enumerate(pictures):
        parts, _ = ndimage.label(ndimage.binary_dilation(picture > 64, np.ones((2, 2))))
        start, end = (parts[int(disc.imag), int(disc.real)] for disc in TASK.drawing(i).discs)
        found.append(start == end)
    assert (np.array(found) == labels).mean() > 0.8


def test_the_drawing_follows_the_rules(drawings):
    for drawing in drawings:
        long, short = drawing.paths[:2], drawing.paths[2:]
        assert [len(path) for path in long] == [6, 6] and {len(path) for path in short} <= {2} and len(short) <= 10
        assert abs(abs(long[0][0, 0] - long[1][0, 0]) - 7) < 1e-9
        dashes = np.concatenate(drawing.paths)
        assert np.allclose(np.abs(dashes[:, 1] - dashes[:, 0]), LENGTH)
        coordinates = dashes.view(float)
        assert coordinates.min() >= BORDER - 1e-9 and coordinates.max() <= 32 - BORDER + 1e-9
        for path in drawing.paths:
            gaps = np.abs(path[1:, 0] - path[:-1, 1])
            turns = np.angle((path[1:, 1] - path[1:, 0]) / (path[:-1, 1] - path[:-1, 0]))
            assert gaps.max(initial=0) <= GAP + 1e-9 and np.abs(turns).max(initial=0) <= np.pi / 2
        points = [np.concatenate([path[:, 0], path.mean(1), path[:, 1]]) for path in drawing.paths]
        for i, ours in enumerate(points):
            for theirs in points[:i]:
                assert np.abs(ours[:, None] - theirs).min() >= APART - 1e-9


def test_both_classes_have_the_same_paths(samples, drawings):
    pictures, labels = samples
    assert stats.binomtest(int(labels.sum()), COUNT).pvalue > 1e-3
    for value in (pictures.sum((1, 2), dtype=float), [sum(map(len, drawing.paths)) for drawing in drawings]):
        value = np.asarray(value)
        assert stats.ks_2samp(value[labels == 0], value[labels == 1]).pvalue > 1e-3


def test_the_picture_has_two_discs_at_the_ends_of_long_paths(samples, drawings):
    pictures, labels = samples
    for picture, label, drawing in zip(pictures, labels, drawings):
        rows, columns = np.mgrid[:32, :32] + 0.5
        for disc in drawing.discs:
            assert picture[np.abs(columns + 1j * rows - disc) <= RADIUS - 0.5].min() == 255
        (first,) = [i for i in (0, 1) if drawing.paths[i][0, 0] == drawing.discs[0]]
        (last,) = [i for i in (0, 1) if drawing.paths[i][-1, 1] == drawing.discs[1]]
        assert label == drawing.label == (first == last)


def test_equal_leaves_the_distance_of_the_discs_out_of_the_label():
    task = Pathfinder("train", dashes=3, distractors=6, equal=True, count=COUNT)
    apart = {0: [], 1: []}
    for drawing in (task.drawing(i) for i in range(COUNT)):
        one, other = (abs(drawing.discs[0] - path[-1, 1]) for path in drawing.paths[:2])
        assert abs(one - other) <= 1
        apart[drawing.label].append(abs(drawing.discs[0] - drawing.discs[1]))
    assert abs(np.mean(apart[0]) - np.mean(apart[1])) < 0.5
    public = [Pathfinder("train", dashes=3, distractors=0, count=COUNT).drawing(i) for i in range(COUNT)]
    assert max(abs(abs(d.discs[0] - d.paths[0][-1, 1]) - abs(d.discs[0] - d.paths[1][-1, 1])) for d in public) > 5


def test_a_sample_depends_on_its_split_seed_and_number_alone():
    task = make_task("pathfinder", "val", 5, dashes=6, seed=3)
    again = make_task("pathfinder", "val", 9, dashes=6, seed=3)
    assert all(task[i][0].tobytes() == again[i][0].tobytes() and task[i][1] == again[i][1] for i in (4, 0))
    for other in (
        Pathfinder("test", 6, seed=3),
        Pathfinder("val", 6, seed=4),
        Pathfinder("val", 6, distractors=0, seed=3),
    ):
        assert other[0][0].tobytes() != task[0][0].tobytes()
    assert task[0][0].size == (32, 32) and len(task) == 5
    with pytest.raises(IndexError, match="sample 5 of 5"):
        task[5]
    with pytest.raises(ValueError, match="expected at least 3 dashes"):
        Pathfinder("val", dashes=2)
    with pytest.raises(ValueError, match="split 'dev': expected one of train, val, test"):
        Pathfinder("dev")
