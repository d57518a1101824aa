"""A run of a study is trained by the engine, resumed where it was stopped, and leaves its results."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from study.plan import Cell, match_size, read_study
from study.training import StudyLoader, data_file, plan_hash, run_cell, write_data
from toy_study import write_plan

from vilonghorn.data import create_loader
from vilonghorn.engine import Interrupted

pytest.importorskip("sklearn", reason="the tasks are made of the digits that come with scikit-learn")
CELL = Cell("recall", "longhorn", 0.01, 1)


@pytest.fixture
def write(tmp_path):
    return partial(write_plan, tmp_path / "toy.yaml")


@pytest.mark.needs_ffcv
def test_epochs_divide_a_pass_and_batches_have_several_sizes(write, tmp_path):
    study = read_study(write())
    write_data(study, tmp_path, "recall")
    file = data_file(tmp_path, study.tasks["recall"].dataset("train"))
    loader = create_loader(file, batch_size=2, image_size=32, training=True, workers=1, seed=1, sizes=[8, 16, 32])
    parts = StudyLoader(loader, 2)
    assert len(loader) == 17 and len(parts) == 8 and parts.num_samples == 16
    sizes = {}
    for whole in (0, 1):
        found = [batch for part in (0, 1) for batch in parts.epoch(2 * whole + part)]
        for (images, targets), (expected, labels) in zip(found, loader.epoch(whole)):
            assert torch.equal(targets, labels)
            assert torch.equal(images, expected)
        again = list(parts.epoch(2 * whole + 1, start=3))
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(again, found[11:], strict=True))
        sizes[whole] = [images.shape[-1] for images, _ in found]
    labels = next(loader.epoch(1))[1]
    parts.set_targets(loader.targets + 7)  # as a cached teacher does
    assert torch.equal(next(parts.epoch(2))[1], labels + 7)
    assert set(sizes[0]) == {8, 16, 32} and sizes[0] != sizes[1]
    with pytest.raises(ValueError, match="cannot be divided into 18 parts"):
        StudyLoader(loader, 18)


@pytest.mark.needs_ffcv
def test_a_stopped_run_is_resumed_and_ends_as_if_it_had_not_been_stopped(write, tmp_path, monkeypatch):
    study = read_study(
        write(
            tasks__recall__recipe={"augmentation": {"sizes": [16, 32]}},
            tasks__recall__kwargs={"dynamic_img_size": True},
        )
    )
    write_data(study, tmp_path, "recall")
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "data").symlink_to(tmp_path / "data")
    expected, whole_epoch = run_cell(study, undisturbed, CELL, "abc"), StudyLoader.epoch

    def stopped_epoch(self, epoch, start=0):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_epoch(self, epoch, start)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stopped:
        patch.setattr(StudyLoader, "epoch", stopped_epoch)
        run_cell(study, tmp_path, CELL, None)
    assert pickle.loads(pickle.dumps(stopped.value)).signum == signal.SIGTERM  # passes from a worker to the command
    found = run_cell(study, tmp_path, CELL, "abc")
    assert found["curve"] == expected["curve"] and found["tests"] == expected["tests"] and found["commit"] == "abc"
    assert [point["images"] for point in found["curve"]] == [16, 32, 48, 64]
    assert found["val"]["top5"] >= found["val"]["top1"] == found["curve"][-1]["top1"]
    assert found["parameters"] == match_size(study, "recall", "longhorn")[1]
    tests = found["tests"]
    assert tests["test"]["images"] == 8 and tests["large"]["images"] == 3 and tests["test"]["chance"] == 50
    assert all(math.isfinite(test["loss"]) and test["top5"] >= test["top1"] for test in tests.values())
    again = run_cell(study, tmp_path, CELL, "abc")  # as after a stop between the training and the results
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(found))


@pytest.mark.needs_ffcv
def test_a_run_that_diverges_leaves_that_as_its_result(write, tmp_path):
    study = read_study(write(recipe__run={"device": "cpu", "max_skipped": 0}))
    write_data(study, tmp_path, "recall")
    found = run_cell(study, tmp_path, Cell("recall", "longhorn", 1e30, 0), None)
    assert "not finite" in found["diverged"] and found["tests"] is None and "seconds" in found


def test_the_hash_of_a_run_is_of_its_plan_alone(write, tmp_path):
    found = plan_hash(read_study(write()), tmp_path, CELL)
    other = read_study(write(title="Another", tasks__recall__sweep=[0.01, 0.1], seeds=[1, 9]))
    assert plan_hash(other, tmp_path / "elsewhere", CELL) == found
    changes = [
        dict(recipe__optimizer={"weight_decay": 0.3}),
        dict(shared_kwargs={"embed_dim": 24, "depth": 1, "patch_size": 8}),
        dict(tasks__recall__recipe={"augmentation": {"sizes": [16, 32]}}),
        dict(tasks__recall__test_count={"large": 4}),
    ]
    hashes = [plan_hash(read_study(write(**change)), tmp_path, CELL) for change in changes]
    assert len({found, *hashes}) == len(changes) + 1
