"""Masked image modelling: what is hidden, the loss, and the way from images without labels to a classifier."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rank_run import ended, start_ranks
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from toy_run import Recited, toy_config, toy_trainer

from vilonghorn.cli import main
from vilonghorn.engine.probe import probe_run
from vilonghorn.engine.tasks.masked_images import MaskedImageModel, MaskedImages, draw_mask, masked_loss

TINY = "{patch_size: 4, depth: 2, embed_dim: 32}"
DATA = ("--data.image_size=16", "--data.batch_size=4", "--data.workers=0", "--schedule.epochs=1")
RUN = (
    "--model.name=vilonghorn_nano",
    "--run.device=cpu",
    "--run.tensorboard=false",
    f"--model.kwargs={TINY}",
    "--schedule.warmup_epochs=0",
)


def test_every_image_has_its_own_mask_of_the_same_number_of_units():
    masks = draw_mask(50, (4, 5), 0.6)
    assert masks.shape == (50, 4, 5) and (masks.sum((1, 2)) == 12).all()
    assert len({mask.numpy().tobytes() for mask in masks}) > 40
    assert (draw_mask(9, (2, 2), 0.01).sum((1, 2)) == 1).all() and (draw_mask(9, (2, 2), 0.99).sum((1, 2)) == 3).all()


def test_the_loss_is_that_of_numpy_over_masked_pixels_alone_and_zero_for_a_copy():
    rng = np.random.default_rng(0)
    images, found = rng.normal(size=(2, 3, 3, 8, 8)).astype(np.float32)
    task, mask = MaskedImages(0.5, 4), rng.random((3, 2, 2)) < 0.5
    mask[:, 0, 0] = True
    expected = []
    for image, guess, units in zip(images, found, mask):
        pixels = [(r, c) for r in range(8) for c in range(8) if units[r // 4, c // 4]]
        expected.append(np.mean([np.abs(image[:, r, c] - guess[:, r, c]).mean() for r, c in pixels]))
    images, found, mask = map(torch.from_numpy, (images, found, mask))
    loss = task.loss(lambda *_: found, images, mask, nullcontext())
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-6)
    assert task.loss(lambda images, mask: images, images, mask, nullcontext()) == 0
    pixels = mask.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    assert (masked_loss(images, torch.where(pixels, images, found), pixels) == 0).all()


def test_normalised_pixels_have_the_mean_and_variance_of_numpy_in_each_unit_and_pictures_show_the_image(tmp_path):
    rng = np.random.default_rng(0)
    images, found = rng.normal(1, 2, size=(2, 3, 3, 8, 8)).astype(np.float32)
    task, mask, target = MaskedImages(0.5, 4, normalize=True), torch.ones(3, 2, 2, dtype=torch.bool), images.copy()
    for row, column in np.ndindex(2, 2):
        unit = np.s_[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        mean, deviation = (f(images[unit], axis=(1, 2, 3), keepdims=True) for f in (np.mean, np.std))
        target[unit] = (images[unit] - mean) / deviation
    images, found, target = map(torch.from_numpy, (images, found, target))
    loss = task.loss(lambda *_: found, images, mask, nullcontext())
    assert loss.item() == pytest.approx((target - found).abs().mean().item(), rel=1e-5)
    shown = task.examples(Answer(target), Recited(images, torch.zeros(3), 2), nullcontext(), count=8)
    torch.testing.assert_close(shown[2], images, rtol=1e-4, atol=1e-4)


class Answer(nn.Module):
    """A model that returns the same for any images."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.answer


@pytest.mark.parametrize(
    ("name", "kwargs", "unit"),
    [
        ("vilonghorn_nano", {"patch_size": 8, "depth": 2}, 16),
        ("vilonghornv2_nano", {"stem_stride": 2}, 16),
    ],
)
def test_a_model_does_not_see_masked_pixels_and_learns_from_them_in_all_its_parameters(name, kwargs, unit):
    torch.manual_seed(0)
    backbone = timm.create_model(name, img_size=32, num_classes=0, mask_token=True, **kwargs)
    model, images = MaskedImageModel(backbone, unit), torch.randn(2, 3, 32, 32)
    mask = draw_mask(2, (32 // unit, 32 // unit), 0.5)
    hidden = model.pixels(mask)
    with torch.no_grad():
        first, other = model(images, mask), model(torch.where(hidden, 9, images), mask)
        seen = model(torch.where(hidden, images, 9), mask)
    assert first.shape == images.shape and torch.equal(first, other) and not torch.equal(first, seen)
    masked_loss(images, model(images, mask), hidden).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task.mask_ratio=0"], r"mask_ratio is 0.0; it must lie in \(0, 1\)"),
        (
            ["--task.mask_unit=6"],
            r"mask_unit is 6: expected one of \[4, 8\], multiples of the stride of vilonghorn_nano",
        ),
        (["--model.name=vit_tiny_patch16_224"], "vit_tiny_patch16_224, which has no mask token"),
        (["--model.kwargs={patch_size: 4, stride: 2}"], "does not reconstruct .* patches must not overlap"),
        (["--model.num_classes=4"], "model.num_classes is 4 but the data has 0 classes"),
    ],
)
def test_what_cannot_be_masked_is_refused_in_one_sentence(tmp_path, options, message):
    start = ["--model.name=vilonghorn_nano", f"--model.kwargs={TINY}", "--task.kind=masked"]
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path / "run", *start, *options)
    assert not (tmp_path / "run").exists()


def test_layers_of_a_backbone_without_labels_learn_at_the_rates_that_layer_decay_gives_them_alone(tmp_path):
    options = ["--model.name=vilonghorn_nano", f"--model.kwargs={TINY}", "--optimizer.layer_decay=0.5"]
    unlabelled = toy_trainer(tmp_path / "unlabelled", *options, "--task.kind=masked")
    alone = toy_trainer(tmp_path / "alone", *options)
    scales = []
    for state in (unlabelled.train_state, alone.train_state):
        names = {id(parameter): name.removeprefix("backbone.") for name, parameter in state.trained.named_parameters()}
        groups = state.optimizer.param_groups
        scales.append({names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]})
    ours, theirs = scales
    shared = {*ours} & {*theirs}
    assert len(shared) > 20 and {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert ours["decoder.weight"] == 1 > ours["patch_embed.proj.weight"]


def probe_to_file(run: str, options: list[str], file: str) -> None:
    """In one of several processes: what a probe finds, and from how many images."""
    torch.set_num_threads(1)
    features = []
    original = KNeighborsClassifier.fit
    KNeighborsClassifier.fit = lambda self, x, y: features.append(len(x)) or original(self, x, y)
    result = probe_run(run, toy_config(run, *options))
    Path(f"{file}{os.environ['RANK']}").write_text(f"{features} {result['linear']} {result['images']}")


def write_shades(folder: Path, classes: str = "ab", count: int = 9) -> None:
    """Images of 16 px, of which the brightness tells the class."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (16, 16, 3)) + 155 * label // len(classes)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


def test_a_probe_in_two_processes_learns_from_the_images_of_both(tmp_path):
    write_shades(tmp_path / "data")
    data = [f"--data.train={tmp_path}/data", f"--data.val={tmp_path}/data", "--data.workers=0"]
    toy_trainer(tmp_path / "run", "--schedule.epochs=1", "--schedule.warmup_epochs=0").fit()
    given = f"{tmp_path}/run", data, f"{tmp_path}/found"
    assert ended(start_ranks(2, probe_to_file, *given)) == [0, 0]
    found = [(tmp_path / f"found{rank}").read_text() for rank in (0, 1)]
    assert found[0] == found[1] and found[0].startswith("[18] ") and found[0].endswith("(18, 18)")


def test_a_probe_that_cannot_be_made_is_refused_in_a_sentence(tmp_path):
    write_shades(tmp_path / "data")
    toy_trainer(tmp_path / "run", "--schedule.epochs=1", "--schedule.warmup_epochs=0").fit()
    data = [f"--data.train={tmp_path}/data", f"--data.val={tmp_path}/data", "--data.workers=0"]
    with pytest.raises(ValueError, match=r"run does not turn images \(2, 3, 20, 20\) into features .*data.image_size"):
        probe_run(tmp_path / "run", toy_config(tmp_path, *data, "--data.image_size=20"))
    shutil.copytree(tmp_path / "data/a", tmp_path / "one/a")
    data = [f"--data.train={tmp_path}/one", f"--data.val={tmp_path}/one", "--data.workers=0"]
    with pytest.raises(ValueError, match="one has images of one class only"):
        with pytest.warns(UserWarning, match="one is data.train, too: the results are not of held-out images"):
            probe_run(tmp_path / "run", toy_config(tmp_path, *data))


def test_images_without_classes_give_weights_that_a_classifier_starts_from(tmp_path, capsys, pictures):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(16):
            label = "ab"[i % 2]
            pixels = (rng.random((16, 16, 3)) * 100 + 155 * (i % 2)).clip(0, 255).astype(np.uint8)
            for path in (tmp_path / split / label / f"{i}.png", tmp_path / "flat" / f"{i}.png"):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    data = [f"--data.train={tmp_path}/train", f"--data.val={tmp_path}/val", *DATA]
    run = f"{tmp_path}/pre"
    with pytest.warns(UserWarning, match=r"val: its classes \(2\) are not used"):
        assert main(["pretrain", *data, f"--data.train={tmp_path}/flat", f"--run.dir={run}", *RUN]) == 0
    assert "held-out loss" in capsys.readouterr().out
    page = (tmp_path / "pre/report.html").read_text()
    assert "Reconstructions" in page and "Confusions" not in page
    assert main(["evaluate", run, "--probe", *data[:2]]) == 0
    assert "linear probe 100.00%, 20 nearest neighbours 100.00% on 16 images" in capsys.readouterr().out
    fine = [f"--run.dir={tmp_path}/fine", f"--model.weights={run}", *data, *RUN]
    assert main(["train", "--config=photos", *fine]) == 0
    assert "tensors are from" in capsys.readouterr().out
    published = ["publish", run, f"{tmp_path}/published"]
    for command, message in (
        (["evaluate", run], "no classes: give --probe"),
        (["predict", run, "x"], "no classifier"),
        (published, "has learned without labels, no classifier: train from its weights"),
    ):
        assert main(command) == 2 and message in capsys.readouterr().err
    assert main(["train", *data, *RUN, f"--data.train={tmp_path}/flat", f"--run.dir={tmp_path}/no"]) == 2
    assert "images without classes are for vilonghorn pretrain" in capsys.readouterr().err
