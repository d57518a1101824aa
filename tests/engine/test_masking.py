"""Masked image modelling: what is hidden, the loss, and the way from images without labels to a classifier."""

from contextlib import nullcontext

import numpy as np
import publish
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from toy_run import Recited, toy_trainer

from vilonghorn.cli import main
from vilonghorn.engine.tasks.masked_images import MaskedImageModel, MaskedImages, enlarge

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
    masks = MaskedImages(0.6, 2).draw(torch.zeros(50, 3, 8, 10))
    assert masks.shape == (50, 4, 5) and (masks.sum((1, 2)) == 12).all()
    assert len({mask.numpy().tobytes() for mask in masks}) > 40
    for ratio, count in ((0.01, 1), (0.99, 3)):
        assert (MaskedImages(ratio, 4).draw(torch.zeros(9, 3, 8, 8)).sum((1, 2)) == count).all()


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
    assert (task.losses(torch.where(pixels, images, found), images, mask) == 0).all()


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
    [("vilonghorn_nano", {"patch_size": 8, "depth": 2}, 16), ("vilonghornv2_nano", {"stem_stride": 2}, 16)],
)
def test_a_model_does_not_see_masked_pixels_and_learns_from_them_in_all_its_parameters(name, kwargs, unit):
    backbone = timm.create_model(name, img_size=32, num_classes=0, mask_token=True, **kwargs)
    model, images = MaskedImageModel(backbone, unit), torch.randn(2, 3, 32, 32)
    task = MaskedImages(0.5, unit)
    mask = task.draw(images)
    hidden = enlarge(mask, unit)[:, None]
    with torch.no_grad():
        first, other = model(images, mask), model(torch.where(hidden, 9, images), mask)
        seen = model(torch.where(hidden, images, 9), mask)
    assert first.shape == images.shape and torch.equal(first, other) and not torch.equal(first, seen)
    task.losses(model(images, mask), images, mask).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task.mask_ratio=0"], r"mask_ratio is 0.0; it must lie in \(0, 1\)"),
        (
            ["--task.mask_unit=6"],
            r"mask_unit is 6: expected one of \[4, 8\], multiples of the stride of vilonghorn_nano",
        ),
        (
            ["--model.kwargs={patch_size: 16}"],
            r"no task.mask_unit: .* the stride of vilonghorn_nano, 16, .*\[16\]; change",
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


def test_images_without_classes_give_weights_that_a_classifier_starts_from(tmp_path, capsys, pictures, script):
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
    assert script("examples/probe").main([run, f"{tmp_path}/train", f"{tmp_path}/val"]) == {"linear": 100, "knn": 100}
    assert "linear probe 100.00%, 20 nearest neighbours 100.00% on 16 images" in capsys.readouterr().out
    fine = [f"--run.dir={tmp_path}/fine", f"--model.weights={run}", *data, *RUN]
    assert main(["train", "--config=photos", *fine]) == 0
    assert "tensors are from" in capsys.readouterr().out
    for command, message in (
        (["evaluate", run], "no classes: train from its weights first"),
        (["predict", run, "x"], "no classifier"),
    ):
        assert main(command) == 2 and message in capsys.readouterr().err
    with pytest.raises(ValueError, match="has learned without labels, no classifier: train from its weights"):
        publish.main([run, f"{tmp_path}/published"])
    assert main(["train", *data, *RUN, f"--data.train={tmp_path}/flat", f"--run.dir={tmp_path}/no"]) == 2
    assert "images without classes are for vilonghorn pretrain" in capsys.readouterr().err
