"""The dry run: its figures against counts made by hand, and its refusals."""

import re
from pathlib import Path

import pytest
import timm
import torch
from rank_run import some_digits
from toy_run import toy_config

from vilonghorn.cli.train import train
from vilonghorn.engine import dry_run as dry
from vilonghorn.engine import model_from_config


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(dry, "SECONDS", 0.05)


def test_parameters_and_updates_are_those_of_the_run(tmp_path):
    options = ["--optimizer.accumulate=2", "--optimizer.lr=1e-3", "--optimizer.lr_batch=32", "--schedule.epochs=5"]
    config = toy_config(tmp_path / "run", *options, "--model.num_classes=4")
    text = dry.dry_run(config, processes=4, train_images=1000)
    count = sum(p.numel() for p in model_from_config(config, 4).parameters())
    assert f"{count / 1e6:.2f} M parameters, 0.00 GFLOPs an image" in text
    assert "1,000 an epoch, 8 of them unused" in text
    assert "8 images x 2 accumulated x 4 processes = 64 images; 16 an epoch, 80 in 5 epochs" in text
    assert "to 0.002 in the first 16 updates" in text  # 8 x 2 x 4 images instead of 32
    assert "updates of 8 images of noise on this CPU" in text
    assert not (tmp_path / "run").exists()


def test_flops_are_those_of_the_table_of_models(tmp_path, monkeypatch):
    monkeypatch.setattr(dry, "measure_speed", lambda state: (1.0, "not measured"))
    table = (Path(__file__).parents[2] / "docs/models.md").read_text().partition("<!-- models")[2]
    for name in ("vilonghorn_nano", "vilonghornv2_nano"):
        parameters, gflops = [cell.strip() for cell in re.search(rf"\| `{name}` .*", table)[0].split("|")][3:5]
        config = toy_config(tmp_path, f"--model.name={name}", "--model.kwargs={}", "--data.image_size=224")
        config.model.num_classes = timm.get_pretrained_cfg(name).num_classes
        assert f"model      {parameters} M parameters, {gflops} GFLOPs an image" in dry.dry_run(config, 1, 100)


@pytest.mark.parametrize(("world_size", "device", "expected"), [(1, "cpu", 1), (3, "cpu", 3), (1, "cuda", 4)])
def test_the_processes_are_those_that_there_are(tmp_path, monkeypatch, world_size, device, expected):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(dry, "pick_device", lambda name: torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=f"3 images do not fill a batch of 8 in each of {expected} processes"):
        dry.dry_run(toy_config(tmp_path, "--model.num_classes=4"), train_images=3)


def test_the_command_prints_the_cost_alone_and_writes_nothing(tmp_path, capsys):
    from toy_run import OPTIONS

    options = [*OPTIONS, f"--run.dir={tmp_path}/run", "--dry-run"]
    train([*options, "--train-images=1281167", "--model.num_classes=1000"])
    out = capsys.readouterr().out
    assert out.splitlines()[-5].startswith("images     1,281,167 an epoch") and "name:" not in out
    with pytest.raises(FileNotFoundError, match="without the data needs --train-images and --model.num_classes"):
        train([*options, "--data.train=nowhere", "--train-images=1281167"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speed", "said"), [(4e4, "75 seconds"), (1e4, "5 minutes"), (400, "2.1 hours"), (2, "416.7 hours")]
)
def test_the_time_has_a_unit_that_fits(tmp_path, monkeypatch, speed, said):
    monkeypatch.setattr(dry, "measure_speed", lambda state: (speed, "not measured"))
    text = dry.dry_run(toy_config(tmp_path, "--model.num_classes=4", "--schedule.epochs=30"), 1, 100_000)
    assert f"time       {said} at" in text


def test_data_that_training_refuses_or_warns_of_is_named(tmp_path):
    digits = {option.split("=")[0]: option for option in some_digits(tmp_path, 3, 2)[-2:]}
    train_set = digits["--data.train"].partition("=")[2]
    with pytest.warns(UserWarning, match="is data.train, too: the results are not of held-out images"):
        dry.dry_run(toy_config(tmp_path / "run", digits["--data.train"], f"--data.val={train_set}"))
    val = Path(digits["--data.val"].partition("=")[2])
    (val / "eleven").mkdir()
    (next(val.glob("*/*.png"))).rename(val / "eleven/0.png")
    with pytest.raises(ValueError, match="eleven"):
        dry.dry_run(toy_config(tmp_path / "run", *digits.values()))
