"""Measuring: on numbers counted by hand, and on what a run left."""

import shutil
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from rank_run import some_digits
from timm.data import create_dataset, create_loader
from timm.data.readers.class_map import load_class_map
from torch import nn
from toy_run import Recited, ToyLoader, toy_config, toy_trainer

from vilonghorn import load
from vilonghorn.engine import Trainer, build_parser, evaluate, evaluate_run, load_run, parse
from vilonghorn.engine.checkpoint import load_weights, save_weights
from vilonghorn.engine.device import autocast

OFF = autocast("off", torch.device("cpu"))


def test_scores_are_those_of_all_images_whatever_the_batches():
    logits, targets = torch.randn(50, 12), torch.randint(0, 12, (50,))
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    for split in (1, 37):
        result = evaluate({"m": nn.Identity(), "n": nn.Identity()}, Recited(logits, targets, split), amp=OFF)
        assert result["m"] == result["n"]
        assert result["m"]["top1"] == pytest.approx(100 * (ranks < 1).double().mean().item())
        assert result["m"]["top5"] == pytest.approx(100 * (ranks < 5).double().mean().item())
        assert result["m"]["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)


@pytest.mark.parametrize("classes", [4, 12])
def test_an_image_whose_scores_are_no_numbers_is_not_recognised(classes):
    logits, targets = torch.eye(classes), torch.arange(classes)
    logits[1:] = float("nan")
    result = evaluate({"m": nn.Identity()}, Recited(logits, targets, 2), amp=OFF)["m"]
    assert result["top1"] == result["top5"] == pytest.approx(100 / classes)


def test_a_model_is_measured_in_evaluation_mode_and_without_a_graph_until_a_batch_raises():
    class Watching(nn.Module):
        def forward(self, x):
            assert not self.training and not torch.is_grad_enabled()
            return x

    def stop():
        raise InterruptedError

    loader = Recited(torch.randn(4, 3), torch.zeros(4).long(), 2)
    assert evaluate({"m": Watching().train()}, loader, amp=OFF)["m"]["top5"] == 100
    with pytest.raises(InterruptedError):
        evaluate({"m": nn.Identity()}, loader, amp=OFF, on_batch=stop)


@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_reloaded_weights_score_what_training_said_of_them(tmp_path, checkpoint):
    result = toy_trainer(tmp_path, "--schedule.epochs=4", "--optimizer.lr=5e-3").fit()
    model, record = load_run(tmp_path, checkpoint)
    measured = evaluate({"m": model}, ToyLoader(32, training=False), amp=OFF)["m"]
    assert measured == {key: record[key] for key in measured}
    assert record["weights"] == "ema" and record["class_names"] == ["a", "b", "c", "d"]
    if checkpoint == "last":
        assert record["epoch"] == 4 and measured == {key: result[key] for key in measured}
    else:
        assert {name: record[name] for name in ("epoch", "top1", "loss")} == result["best"]
    file = tmp_path / f"{checkpoint}.safetensors"
    by_timm = timm.create_model(record["model"], checkpoint_path=str(file), **record["kwargs"]).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(by_timm(images), model(images))


def test_data_of_other_classes_or_of_another_size_is_not_measured(tmp_path, monkeypatch):
    toy_trainer(tmp_path, "--schedule.epochs=2").fit()
    loader = ToyLoader(32, training=False)
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["vilonghorn.engine.evaluate"], "build_loader", lambda *arguments, **options: loader)
    config = toy_config(tmp_path)
    loader.num_classes = 3
    with pytest.raises(ValueError, match="the run in .* has 4 classes but the held-out data has 3: training"):
        evaluate_run(tmp_path, config)
    loader = ToyLoader(32, training=False, size=20)
    with pytest.raises(ValueError, match=r"images \(2, 3, 20, 20\) into scores.*change data.image_size") as raised:
        evaluate_run(tmp_path, toy_config(tmp_path, "--data.image_size=20"))
    assert "\n" not in str(raised.value)


def test_timm_measures_what_we_do_by_the_classes_of_a_run(tmp_path):
    """As timm's validate.py --class-map: timm sorts folders by number, and we by the string of the name."""
    digits = some_digits(tmp_path, 40, 8)
    for split in ("train", "val"):
        for folder in (tmp_path / "digits" / split).iterdir():
            names = {"2": "1", "3": "2", "5": "10", "7": "20", "8": "3"}
            folder.rename(f"{folder}x") if folder.name in names else shutil.rmtree(folder)
        for old, new in names.items():
            (tmp_path / f"digits/{split}/{old}x").rename(tmp_path / f"digits/{split}/{new}")
    options = [*digits, "--data.batch_size=8", "--data.crop_pct=1", "--ema.decay=0", "--schedule.epochs=3"]
    config = parse(build_parser(), [*options, f"--run.dir={tmp_path}/run"])[0]
    result = Trainer(config).fit()
    class_map = f"{tmp_path}/run/classes.txt"
    dataset = create_dataset("", root=f"{tmp_path}/digits/val", class_map=class_map)
    options = {"num_workers": 0, "device": torch.device("cpu"), "use_prefetcher": False}
    options |= {"mean": config.data.mean, "std": config.data.std}
    loader = create_loader(dataset, 32, 8, interpolation="bicubic", crop_pct=1.0, **options)
    record = load_run(tmp_path / "run", "last")[1]
    assert list(load_class_map(class_map)) == record["class_names"] == sorted(names.values())
    weights = {"num_classes": 5, "checkpoint_path": f"{tmp_path}/run/last.safetensors"}
    model = timm.create_model(record["model"], **record["kwargs"] | weights).eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == targets).sum().item() for images, targets in loader)
    assert 100 * right / len(dataset) == pytest.approx(result["top1"]) and result["top1"] > 50


def test_names_of_classes_that_are_no_lines_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyLoader, "class_names", ["a", "b\nb", "\udcff", "d"])
    toy_trainer(tmp_path)
    assert (tmp_path / "classes.txt").read_text().splitlines() == ["a", r"b\nb", r"\udcff", "d"]


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a"] * 5, "abcd", [1, 2, 3, 4], {"a": 0}])
def test_names_that_do_not_fit_the_head_are_refused_in_a_run_and_in_a_file(tmp_path, names):
    toy_trainer(tmp_path, "--schedule.epochs=2").fit()
    weights, record = load_weights(tmp_path / "best.safetensors")
    save_weights(tmp_path / "best.safetensors", weights, {**record, "class_names": names})
    kwargs = {"num_classes": 4, "img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2}
    for arguments in ((tmp_path,), (record["model"], str(tmp_path / "best.safetensors"), kwargs)):
        with pytest.raises(ValueError, match="has 4 classes but .*class names.*: expected a list of one text"):
            load(*arguments, device="cpu")


@pytest.mark.parametrize(
    "spoil", [{"record": {}}, {"weights": {"a": torch.zeros(1)}}, {"kwargs": {"num_classes": "x"}}]
)
def test_weights_that_no_run_left_are_refused_in_one_sentence(tmp_path, spoil):
    kwargs = dict(num_classes=4, img_size=16, patch_size=4, depth=1, embed_dim=32, num_heads=2)
    weights = timm.create_model("vit_tiny_patch16_224", **kwargs).state_dict()
    record = {"model": "vit_tiny_patch16_224", "kwargs": spoil.get("kwargs", kwargs), "weights": "ema", "epoch": 1}
    save_weights(tmp_path / "best.safetensors", spoil.get("weights", weights), spoil.get("record", record))
    with pytest.raises(ValueError, match="best.safetensors does not contain weights and record") as raised:
        load_run(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"), [("top1", None), ("top5", [1]), ("loss", "low"), ("epoch", "\x1b[2J"), ("weights", 3)]
)
def test_scores_of_a_record_that_are_no_numbers_are_refused(tmp_path, key, value):
    save_weights(tmp_path / "best.safetensors", {"a": torch.zeros(1)}, {key: value})
    with pytest.raises(ValueError, match=f"best.safetensors has a record of a run with {key} .*, expected a") as raised:
        load_weights(tmp_path / "best.safetensors", tensors=False)
    assert str(raised.value).isprintable()
