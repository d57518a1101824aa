"""The dry run: its figures against counts made by hand, and its refusals."""

from __future__ import annotations

import pytest
import torch
from toy_run import toy_config

from vilonghorn.cli.train import train
from vilonghorn.engine import build
from vilonghorn.engine import dry_run as dry
from vilonghorn.engine.train_state import TrainState


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(dry, "SECONDS", 0.05)


def test_bytes_and_updates_are_those_of_the_run(tmp_path):
    options = ["--optimizer.accumulate=2", "--optimizer.lr=1e-3", "--optimizer.lr_batch=32", "--schedule.epochs=5"]
    config = toy_config(tmp_path / "run", *options, "--model.num_classes=4")
    found = dry.dry_run(config, processes=4, train_images=1000)
    count = sum(p.numel() for p in build.build_model(config, 4).parameters())
    assert found.parameters == count
    assert {name: found.memory[name] for name in ("weights", "gradients", "average")} == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "average": 4 * count,
    }
    tensors = len(list(build.build_model(config, 4).parameters()))
    assert found.memory["optimizer"] == 8 * count + 4 * tensors  # two moments, and the count of each tensor's steps
    assert (found.steps.rounds, found.steps.batches, found.steps.updates_per_epoch) == (31, 124, 16)
    assert found.config.optimizer.lr == pytest.approx(2e-3)  # 8 x 2 x 4 images instead of 32
    assert found.speed > 0 and "measured here" in found.speed_source
    assert not (tmp_path / "run").exists()


def test_activations_are_what_autograd_keeps_of_each_image(tmp_path):
    config = toy_config(tmp_path)
    state = TrainState(config, 4, torch.device("cpu"))
    state.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 10), torch.nn.GELU())
    assert dry.activation_bytes(state) == 4 * (3 * 16 * 16 + 10)  # inputs of the linear layer and of GELU, in float32


def test_operations_are_counted(tmp_path):
    kwargs = "--model.kwargs={patch_size: 4, depth: 0, embed_dim: 32, num_heads: 2}"
    found = dry.dry_run(toy_config(tmp_path, kwargs, "--model.num_classes=4"), processes=1, train_images=100)
    assert found.flops == 2 * (16 * 3 * 4 * 4 * 32 + 32 * 4)  # the patches, then the head


def test_the_time_follows_from_a_given_speed(tmp_path):
    config = toy_config(tmp_path, "--schedule.epochs=9", "--model.num_classes=4")
    found = dry.dry_run(config, processes=2, train_images=1600, images_per_second=2.0)
    text = str(found)
    assert "1.0 hours at 2.0 images/s a process (as given by --images-per-second)" in text
    assert "8 images x 1 accumulated x 2 processes = 16 images; 100 an epoch, 900 in 9 epochs" in text


@pytest.mark.parametrize("speed, text", [(20.0, "6.0 minutes"), (7200.0, "1.0 seconds"), (1.0, "2.0 hours")])
def test_a_short_time_is_in_minutes_or_seconds(tmp_path, speed, text):
    config = toy_config(tmp_path, "--schedule.epochs=9", "--model.num_classes=4")
    found = dry.dry_run(config, processes=2, train_images=1600, images_per_second=speed)
    assert f"time       {text} at" in str(found)


def test_too_few_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="60 images do not fill a batch of 8 in each of 8 processes"):
        dry.dry_run(toy_config(tmp_path, "--model.num_classes=4"), processes=8, train_images=60)


@pytest.mark.parametrize(("world_size", "device", "expected"), [(1, "cpu", 1), (3, "cpu", 3), (1, "cuda", 4)])
def test_the_processes_are_those_that_there_are(tmp_path, monkeypatch, world_size, device, expected):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(dry, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=f"3 images do not fill a batch of 8 in each of {expected} processes"):
        dry.dry_run(toy_config(tmp_path, "--model.num_classes=4"), train_images=3)


def test_the_command_prints_the_resolved_recipe_and_writes_nothing(tmp_path, capsys):
    from toy_run import OPTIONS

    options = [*OPTIONS, f"--run.dir={tmp_path}/run", "--dry-run"]
    train([*options, "--train-images=1281167", "--model.num_classes=1000"])
    out = capsys.readouterr().out
    assert "name: vit_tiny_patch16_224" in out and "images     1,281,167 an epoch" in out
    with pytest.raises(ValueError, match="give --model.num_classes"):
        train([*options, "--train-images=1281167"])
    with pytest.raises(FileNotFoundError, match="a dry run without the data needs --train-images"):
        train([*options, "--data.train=nowhere"])
    assert list(tmp_path.iterdir()) == []
