"""Tasks: labels are right, splits are disjoint, there is no shortcut to the label, and missing icons are named."""

from __future__ import annotations

import gzip
import json
from functools import cache

import numpy as np
import pytest
from PIL import Image
from study import command
from study.digits import SPLITS, load_split
from study.plan import TaskPlan, read_study
from study.tasks import COLOURS, Icons, Recall, list_icons, make_task
from study.training import write_data
from toy_study import write_plan

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
    """Key (colour, digit) to value, the key of the query, and the originals: from pixels and scikit-learn alone."""
    target = originals_of_sklearn().target
    grid = len(picture) // 8
    tiles = picture.reshape(grid, 8, grid, 8, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 8, 8, 3)
    seen = []
    for tile in tiles:
        inverted = tile[0, 0].min() > 128 and (tile[..., 0] == tile[..., 1]).all() and (tile == 255).mean() > 0.2
        ink = tile.max(axis=2)
        colour = tuple((tile.max(axis=(0, 1)) > 0).astype(int))
        seen.append(None if inverted or not ink.any() else (colour, originals()[ink.tobytes()]))
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


def test_splits_share_no_original():
    parts = [load_split(split) for split in SPLITS]
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(1797))
    for split, part in zip(SPLITS, parts):
        task = Recall(split, pairs=4, grid=6, distractors=True, count=20)
        used = set().union(*(read(task[i][0])[2] for i in range(20)))
        assert used <= set(part.indices.tolist())


def mosaics(count: int = 6000, **options):
    task = Recall("train", count=count, **options)
    return task, [task.mosaic(i) for i in range(count)]


def uniform(counts) -> bool:
    """Whether counts are as even as chance makes them; seeds are fixed, so it is true or false for ever."""
    return stats.chisquare(np.asarray(counts)).pvalue > 1e-3


def test_neither_the_query_nor_its_place_tells_the_label():
    task, drawn = mosaics(pairs=4, grid=4, colours=1, distractors=True)
    keys, labels = np.array([m.keys[m.query] for m in drawn]), np.array([m.label for m in drawn])
    table = np.zeros((10, 10))
    np.add.at(table, (keys, labels), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3  # the two are independent
    assert uniform(table.sum(axis=0)) and uniform(table.sum(axis=1))
    assert uniform(np.bincount([m.slots[m.query] for m in drawn], minlength=task.room))


SETS = {"eve": 6, "ann": 3, "ann-fill": 2, "bob": 3, "cy": 2, "di": 1}  # icons of a class; Ann has two sets


@pytest.fixture
def icons(tmp_path):
    """A folder as icons.py writes it: Eve's 12 images for training, 22 held out, of 8 x 8 pixels."""
    folder = tmp_path / "icons"
    for number, (prefix, count) in enumerate(SETS.items()):
        for name in ("arrow", "bell"):
            target = folder / ("train" if prefix == "eve" else "val") / name
            target.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (number, i, 0)).save(target / f"{prefix}_{name}-{i}.png")
    made_from = {"version": "2.2.535", "pixels": 8, "min_sets": 30, "held_out": 0.2, "split_by": "author"}
    sets = {prefix: {"author": prefix.removesuffix("-fill")} for prefix in SETS}
    (folder / "manifest.json").write_text(json.dumps({"made_from": made_from, "sets": sets}))
    list_icons.cache_clear()
    return folder


def test_authors_are_in_one_split_and_halve_the_held_out_icons(icons):
    options = dict(folder=str(icons), pixels=8, num_classes=2)
    splits = {split: Icons(split, **options) for split in SPLITS}
    authors = {
        split: {file.name.partition("_")[0].removesuffix("-fill") for file, _ in dataset.files}
        for split, dataset in splits.items()
    }
    assert authors == {"train": {"eve"}, "val": {"ann", "di"}, "test": {"bob", "cy"}}
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 12, "val": 12, "test": 10}
    image, label = splits["test"][9]
    assert label == 1 and image.tobytes() == Image.open(icons / "val" / "bell" / "cy_bell-1.png").tobytes()
    assert splits["val"].classes == ["arrow", "bell"] and splits["val"].chance == 0.5
    with pytest.raises(ValueError, match="count 13: split train of .* has 12 icons"):
        len(Icons("train", count=13, **options))


def test_a_study_without_the_icons_says_how_to_make_them_and_runs_its_other_tasks(icons, tmp_path, capsys):
    options = {"folder": str(icons), "side": 16, "pixels": 8, "num_classes": 2}
    task = {"kind": "icons", "options": options, "sweep": [0.01], "candidates": ["longhorn"]}
    task |= {"tests": {"16": {}, "32": {"side": 32}}, "test_count": {"32": 5}}
    recall = dict(tasks__recall__candidates=["longhorn"], tasks__recall__sweep=[0.01])
    path = write_plan(tmp_path / "toy.yaml", tasks__icons=task, **recall)
    study = read_study(path)
    write_data(study, tmp_path, "icons")
    assert len(list((tmp_path / "data").glob("*.beton"))) == 4  # train, val, all of test, 5 of test
    arguments = [str(path), "--dir", str(tmp_path / "runs"), "--list"]
    assert command.main(arguments) == 0
    assert "icons/longhorn/rate0.01-seed0" in capsys.readouterr().out.splitlines()
    manifest = (icons / "manifest.json").read_text()
    (icons / "manifest.json").write_text(manifest.replace("author", "set", 1))
    assert command.main(arguments) == 2 and "was made with {'split_by': 'set'}" in capsys.readouterr().err
    icons.rename(tmp_path / "away")
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "recall/longhorn/rate0.01-seed0\n"
    assert (
        f"no icons in {icons}; make them: npm pack @iconify/json@2.2.535 && python studies/data/icons.py" in printed.err
    )


def test_fashion_is_split_by_place_and_its_test_set_is_the_published_one(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (36, 28, 28), np.uint8)
    for name, count in (("train", 36), ("t10k", 5)):
        for kind, data in (("images-idx3", bytes(16) + pixels[:count].tobytes()), ("labels-idx1", bytes([0] * 8))):
            data += bytes(i % 10 for i in range(count)) if kind.startswith("labels") else b""
            (tmp_path / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))
    splits = {split: make_task("fashion", split, folder=str(tmp_path)) for split in SPLITS}
    assert {split: len(task) for split, task in splits.items()} == {"train": 33, "val": 3, "test": 5}
    for split, index, number in (("train", 11, 12), ("val", 1, 23), ("test", 4, 4)):
        image, label = splits[split][index]
        assert label == number % 10
        assert np.array_equal(np.asarray(image), np.pad(pixels[number], 2)[..., None].repeat(3, 2))
    with pytest.raises(FileNotFoundError, match="there is no nowhere; run: apt-get install dataset-fashion-mnist"):
        make_task("fashion", "val", folder="nowhere").check()


def test_solar_cells_are_tested_once_in_each_five_folds_and_a_seed_chooses_its_fold(tmp_path):
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(80):
        file = f"images/cell{number:04}.png"
        Image.new("L", (6, 6), number).save(tmp_path / file)
        lines.append(f"{file} {(0, 1 / 3, 2 / 3, 1)[number % 4]} {'mono' if number % 3 else 'poly'}\n")
    (tmp_path / "labels.csv").write_text("".join(lines))
    options = {"folder": str(tmp_path), "side": 6}
    plan = TaskPlan("solar_cells", options, folds=True)
    tested = []
    for seed in range(1, 16):
        splits = {"train": plan.dataset("train", seed), "val": plan.dataset("val", seed), **plan.test_datasets(seed)}
        assert {split: len(cells) for split, cells in splits.items()} == {"train": 56, "val": 8, "test": 16}
        assert len({file for cells in splits.values() for file, _ in cells.files}) == 80
        assert splits["test"].chance == 0.5 and splits["test"] == make_task("solar_cells", "test", fold=seed, **options)
        tested += splits["test"].files
        image, label = splits["train"][0]
        number = image.getpixel((0, 0))[0]
        assert label == (number % 4 > 1)
    assert all(len(set(tested[start : start + 80])) == 80 for start in (0, 80, 160))
    folds = [frozenset(tested[start : start + 16]) for start in range(0, 240, 16)]
    assert len(set(folds)) == 15
    with pytest.raises(ValueError, match="fold 26: expected 1 to 25"):
        plan.dataset("train", 26)
    with pytest.raises(FileNotFoundError, match="no solar cells in nowhere; run: pip install"):
        make_task("solar_cells", "val", folder="nowhere").check()
