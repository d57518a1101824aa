"""Icons as a task: authors are in one split only, missing data are named, and a study runs without them."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from PIL import Image
from toy_study import write_plan

pytest.importorskip("sklearn", reason="the other tasks are made of the digits that come with scikit-learn")

from vilonghorn.study import __main__ as command  # noqa: E402
from vilonghorn.study.cell import data_file, plan_hash, run_cell, run_config, write_data  # noqa: E402
from vilonghorn.study.icons import Icons, list_icons  # noqa: E402
from vilonghorn.study.plan import Cell, read_study  # noqa: E402

CLASSES = ("arrow", "bell")
HELD_OUT = {"Ann": 5, "Bob": 3, "Cy": 2, "Di": 1}  # author: icons of a class; Ann has two sets


@pytest.fixture
def icons(tmp_path):
    """A folder as `vilonghorn data icons` writes it: 12 images for training, 22 held out, of 8 x 8 pixels."""
    folder, sets = tmp_path / "icons", {}
    by_set = {"eve": ("Eve", "train", 6)}
    by_set |= {author.lower(): (author, "val", count) for author, count in HELD_OUT.items()}
    by_set["ann"], by_set["ann-fill"] = ("Ann", "val", 3), ("Ann", "val", 2)
    rng = np.random.default_rng(0)
    for prefix, (author, split, count) in by_set.items():
        sets[prefix] = {"author": author}
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                picture = Image.fromarray(rng.integers(256, size=(8, 8, 3), dtype=np.uint8))
                picture.save(folder / split / name / f"{prefix}_{name}-{i}.png")
    made_from = {"version": "2.2.535", "pixels": 8, "min_sets": 30, "held_out": 0.2, "split_by": "author"}
    (folder / "manifest.json").write_text(json.dumps({"made_from": made_from, "sets": sets}))
    list_icons.cache_clear()
    return folder


@pytest.fixture
def write(tmp_path, icons):
    task = {
        "kind": "icons",
        "options": {"folder": str(icons), "side": 16, "pixels": 8, "num_classes": 2},
        "sweep": [0.01],
        "candidates": ["longhorn"],
        "tests": {"16": {}, "32": {"side": 32}},
        "test_count": {"32": 5},
    }
    recall = dict(tasks__recall__candidates=["longhorn"], tasks__recall__sweep=[0.01])
    return partial(write_plan, tmp_path / "toy.yaml", tasks__icons=task, seeds=[0, 1], **recall)


def test_authors_are_in_one_split_and_halve_the_held_out_images(icons):
    options = dict(folder=str(icons), pixels=8, num_classes=2)
    splits = {split: Icons(split, **options) for split in ("train", "val", "test")}
    authors = {
        split: {file.name.partition("_")[0].removesuffix("-fill") for file, _ in dataset.files}
        for split, dataset in splits.items()
    }
    assert authors == {"train": {"eve"}, "val": {"ann", "di"}, "test": {"bob", "cy"}}
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 12, "val": 12, "test": 10}
    image, label = splits["test"][9]
    file = icons / "val" / "bell" / "cy_bell-1.png"
    assert label == 1 and image.tobytes() == Image.open(file).tobytes()
    assert splits["val"].classes == list(CLASSES) and splits["val"].chance == 0.5
    some = Icons("train", count=4, **options)
    assert [label for _, label in some.files] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="count 13: split train of .* has 12 icons"):
        len(Icons("train", count=13, **options))


@pytest.mark.needs_ffcv
def test_a_cell_is_trained_and_tested_in_two_sizes_from_one_file(write, tmp_path):
    study = read_study(write())
    cell, tests = Cell("icons", "longhorn", 0.01, 0), study.tasks["icons"].test_datasets()
    write_data(study, tmp_path, "icons")
    assert len(list((tmp_path / "data").glob("*.beton"))) == 4  # train, val, all of test, 5 of test
    assert data_file(tmp_path, Icons("test", side=99, pixels=8, num_classes=2)) == data_file(tmp_path, tests["16"])
    assert run_config(study, tmp_path, cell)["data"]["image_size"] == 16
    found = run_cell(study, tmp_path, cell, None)
    assert {name: test["images"] for name, test in found["tests"].items()} == {"16": 10, "32": 5}
    assert found["val"]["top5"] == 100 and found["tests"]["16"]["chance"] == 50
    sizes = {"16": {}, "32": {"side": 48}}
    study.tasks["icons"].tests = sizes
    assert plan_hash(study, tmp_path, cell) != found["plan"]  # although the file is the same


def test_a_study_without_the_icons_says_how_to_make_them_and_runs_its_other_tasks(write, icons, tmp_path, capsys):
    arguments = [str(write()), "--dir", str(tmp_path / "runs"), "--list"]
    assert command.main(arguments) == 0
    assert "icons/longhorn/rate0.01-seed0" in capsys.readouterr().out.splitlines()
    icons.rename(tmp_path / "away")
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == "recall/longhorn/rate0.01-seed0\n"
    assert f"task icons is left out: there are no icons in {icons}; make them: npm pack @iconify/json@2.2.535 && " in (
        printed.err
    )
    assert "--split-by author --size 8 --min-sets 30" in printed.err


def test_other_icons_than_the_plans_are_refused(write, icons, tmp_path, capsys):
    manifest = json.loads((icons / "manifest.json").read_text())
    manifest["made_from"]["split_by"] = "set"
    (icons / "manifest.json").write_text(json.dumps(manifest))
    assert command.main([str(write()), "--dir", str(tmp_path / "runs"), "--list"]) == 2
    assert "'split_by': 'set'}; the study has 2, made with {" in capsys.readouterr().err
    with pytest.raises(ValueError, match="split 'dev': expected one of train, val, test"):
        Icons("dev")
    with pytest.raises(ValueError, match="side 1: expected at least 2"):
        Icons("val", side=1)
