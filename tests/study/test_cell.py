"""A cell is trained by the engine, resumed where it was stopped, and leaves its results."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from toy_study import write_plan

pytest.importorskip("sklearn", reason="the tasks are made of the digits that come with scikit-learn")

from vilonghorn.data import create_loader  # noqa: E402
from vilonghorn.engine import Interrupted  # noqa: E402
from vilonghorn.study.cell import MixedSizes, ShortEpochs, data_file, plan_hash, run_cell, write_data  # noqa: E402
from vilonghorn.study.match import match_size  # noqa: E402
from vilonghorn.study.plan import Cell, read_study  # noqa: E402


@pytest.fixture
def write(tmp_path):
    return partial(write_plan, tmp_path / "toy.yaml")


@pytest.fixture
def study(write):
    return read_study(write())


@pytest.mark.needs_ffcv
def test_a_cell_that_diverges_leaves_that_as_its_result(write, tmp_path):
    study = read_study(write(recipe__run={"device": "cpu", "max_skipped": 0}))
    write_data(study, tmp_path, "recall")
    cell = Cell("recall", "longhorn", 1e30, 0)
    result = run_cell(study, tmp_path, cell, None)
    assert "not finite" in result["diverged"] and result["tests"] is None and "seconds" in result


@pytest.mark.needs_ffcv
def test_short_epochs_make_up_a_pass(tmp_path, study):
    write_data(study, tmp_path, "recall")
    file = data_file(tmp_path, study.tasks["recall"].dataset("train"))
    loader = create_loader(file, batch_size=8, image_size=32, training=True, workers=1)
    parts = ShortEpochs(loader, 2)
    assert len(parts) == 2 and parts.num_samples == 16 and len(loader) == 4
    for whole in (0, 1):
        expected = [targets for _, targets in loader.epoch(whole)]
        found = [targets for part in (0, 1) for _, targets in parts.epoch(2 * whole + part)]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    (one,) = parts.epoch(1, start=1)
    assert torch.equal(one[1], [targets for _, targets in loader.epoch(0)][3])
    with pytest.raises(ValueError, match="cannot be divided into 9 parts"):
        ShortEpochs(loader, 9)


@pytest.mark.needs_ffcv
def test_batches_of_mixed_sizes_are_the_loaders_scaled(tmp_path, study):
    write_data(study, tmp_path, "recall")
    file = data_file(tmp_path, study.tasks["recall"].dataset("train"))
    loader = create_loader(file, batch_size=2, image_size=32, training=True, workers=1)
    mixed = MixedSizes(loader, [8, 16, 32], seed=1)
    found, again, other = list(mixed.epoch(1)), list(mixed.epoch(1, start=3)), list(mixed.epoch(2))
    assert len(found) == len(mixed) == len(loader)
    assert {images.shape[-1] for images, _ in found} == {8, 16, 32}
    assert [i.shape for i, _ in found] != [i.shape for i, _ in other]
    assert all(torch.equal(a, b) for a, b in zip([i for i, _ in found[3:]], [i for i, _ in again], strict=True))
    for (images, targets), (whole, expected) in zip(found, loader.epoch(1), strict=True):
        assert torch.equal(targets, expected)
        torch.testing.assert_close(images.mean((2, 3)), whole.mean((2, 3)), rtol=0.1, atol=0.05)
        assert images.shape != whole.shape or torch.equal(images, whole)


@pytest.mark.needs_ffcv
def test_a_cell_trains_at_mixed_sizes(write, tmp_path):
    cell, sides = Cell("recall", "longhorn", 0.01, 1), dict(tasks__recall__sides=[16, 32])
    study = read_study(write(**sides, tasks__recall__kwargs={"dynamic_img_size": True}))
    write_data(study, tmp_path, "recall")
    found = run_cell(study, tmp_path, cell, None)
    assert set(found["tests"]) == {"test", "large"}
    assert [point["images"] for point in found["curve"]] == [16, 32, 48, 64]
    fixed = tmp_path / "fixed"
    fixed.mkdir()
    (fixed / "data").symlink_to(tmp_path / "data")
    with pytest.raises(ValueError, match="image is 16x16, expected 32x32; give img_size= or dynamic_img_size"):
        run_cell(read_study(write(**sides)), fixed, cell, None)


@pytest.mark.needs_ffcv
def test_the_results_of_a_cell_are_those_of_the_engine(study, tmp_path):
    write_data(study, tmp_path, "recall")
    cell = Cell("recall", "longhorn", 0.01, 1)
    found = run_cell(study, tmp_path, cell, "abc")
    assert [point["images"] for point in found["curve"]] == [16, 32, 48, 64]
    assert found["val"]["top1"] == found["curve"][-1]["top1"] and found["commit"] == "abc"
    assert found["val"]["top5"] >= found["val"]["top1"]
    assert found["parameters"] == match_size(study, "recall", "longhorn")[1]
    tests = found["tests"]
    assert tests["test"]["images"] == 8 and tests["large"]["images"] == 3
    assert tests["test"]["chance"] == 50
    assert all(math.isfinite(test["loss"]) and test["top5"] >= test["top1"] for test in tests.values())
    again = run_cell(study, tmp_path, cell, "abc")  # as after a stop between the training and the results
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(found))


def test_the_hash_of_a_cell_is_of_its_plan_alone(write, study, tmp_path):
    cell = Cell("recall", "longhorn", 0.01, 1)
    found = plan_hash(study, tmp_path, cell)
    assert plan_hash(study, tmp_path / "elsewhere", cell) == found
    assert (
        plan_hash(read_study(write(title="Another", tasks__recall__sweep=[0.01, 0.1], seeds=[1, 9])), tmp_path, cell)
        == found
    )
    changes = [
        dict(recipe__optimizer={"weight_decay": 0.3}),
        dict(trunk={"embed_dim": 24, "depth": 1, "patch_size": 8}),
        dict(tasks__recall__count={"train": 35, "val": 8, "test": 8}),
        dict(tasks__recall__parts=4),
        dict(tasks__recall__sides=[16, 32]),
        dict(tasks__recall__test_count={"large": 4}),
        dict(tasks__recall__tests={"test": {}, "large": {"grid": 6}}),
    ]
    hashes = [plan_hash(read_study(write(**change)), tmp_path, cell) for change in changes]
    assert len({found, *hashes}) == len(changes) + 1


@pytest.mark.needs_ffcv
def test_a_stopped_cell_is_resumed_and_ends_as_if_it_had_not_been_stopped(study, tmp_path, monkeypatch):
    write_data(study, tmp_path, "recall")
    cell, undisturbed = Cell("recall", "longhorn", 0.01, 1), tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "data").symlink_to(tmp_path / "data")
    expected = run_cell(study, undisturbed, cell, None)
    whole_epoch = ShortEpochs.epoch

    def stopped_epoch(self, epoch, start=0):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_epoch(self, epoch, start)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stopped:
        patch.setattr(ShortEpochs, "epoch", stopped_epoch)
        run_cell(study, tmp_path, cell, None)
    assert pickle.loads(pickle.dumps(stopped.value)).signum == signal.SIGTERM  # passes from a worker to the command
    found = run_cell(study, tmp_path, cell, None)
    assert found["curve"] == expected["curve"] and found["tests"] == expected["tests"]
