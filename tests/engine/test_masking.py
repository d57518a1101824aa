"""Masked image modelling: what is hidden, the loss, and the way from images without labels to a classifier."""

from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from toy_run import toy_trainer

from vilonghorn.cli import main
from vilonghorn.engine.masking import MaskedImageModel, MaskedImages, draw_mask, masked_loss

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


@pytest.mark.parametrize(
    ("name", "kwargs", "unit"),
    [
        ("vilonghorn_nano", {"patch_size": 8, "depth": 2}, 16),
        ("vilonghorn_nano", {"patch_size": 8, "depth": 2, "stem": "conv"}, 8),
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
        (["--augmentation.mask_ratio=0"], r"mask_ratio is 0.0; it must lie in \(0, 1\)"),
        (["--augmentation.mask_unit=6"], "mask_unit is 6: expected one of 4, 8, as the last map of vilonghorn_nano"),
        (["--model.name=vit_tiny_patch16_224"], "vit_tiny_patch16_224, which has no mask token"),
        (["--model.kwargs={patch_size: 4, stride: 2}"], "does not reconstruct .* patches must not overlap"),
        (["--model.num_classes=4"], "model.num_classes is 4 but the data has 0 classes"),
    ],
)
def test_what_cannot_be_masked_is_refused_in_one_sentence(tmp_path, options, message):
    start = ["--model.name=vilonghorn_nano", f"--model.kwargs={TINY}", "--augmentation.mask_ratio=0.5"]
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path / "run", *start, *options)
    assert not (tmp_path / "run").exists()


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
