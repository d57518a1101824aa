"""Prediction of the next patches: what a token sees, the loss, and what is refused."""

from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from toy_run import toy_trainer

from vilonghorn.cli import main
from vilonghorn.engine.next_patches import NextPatches, NextPatchesModel

TINY = {"patch_size": 4, "depth": 2, "embed_dim": 32}
FLAT = "{patch_size: 4, depth: 2, embed_dim: 32}"


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vilonghorn_nano", {}),
        ("vilonghorn_nano", {"shared_directions": True}),
        ("vilonghorn_nano_exact", {"reverse": ((True,), (False,)), "pos_embed": "none", "mlp_ratio": 1.0}),
        ("vim_nano", {"reverse": (True, True, False), "dynamic_img_size": True}),
    ],
)
def test_a_token_sees_no_later_patch_and_every_earlier_one_and_all_parameters_learn(name, kwargs, side):
    torch.manual_seed(0)
    backbone = timm.create_model(name, img_size=24, num_classes=0, **TINY, **kwargs)
    model, task = NextPatchesModel(backbone, side), NextPatches(side, 4)
    images = torch.randn(2, 3, 24, 24)
    found = model(images)
    assert found.shape == (2, 36 // side**2, side**2, side**2, 48)
    # Clusters in raster order, patches of a cluster in raster order.
    rows = range(6 // side)
    order = [(side * a + i, side * b + j) for a in rows for b in rows for i in range(side) for j in range(side)]
    for at in (1, 17, 35):
        row, column = (4 * index for index in order[at])
        changed = images.clone()
        changed[:, :, row : row + 4, column : column + 4] += 1 + torch.rand(2, 3, 4, 4)
        with torch.no_grad():
            difference = (model(changed) - found).abs().flatten(3).flatten(1, 2).amax((0, 2))
        assert (difference[:at] == 0).all() and (difference[at:] > 0).all()
    task.loss(model, images, task.draw(images), nullcontext()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []
    timm.create_model(name, img_size=24, num_classes=0, **TINY, **kwargs).load_state_dict(backbone.state_dict())


@pytest.mark.parametrize(("side", "size"), [(1, 8), (2, 16)])
def test_the_loss_is_that_of_numpy_and_pictures_show_what_is_predicted(side, size):
    rng = np.random.default_rng(side)
    images, task = rng.normal(size=(2, 3, size, 2 * size)).astype(np.float32), NextPatches(side, 4)
    rows, columns = size // 4 // side, 2 * size // 4 // side
    patches = np.empty((2, rows * columns, side**2, 48), np.float32)
    for k, i in np.ndindex(rows * columns, side**2):
        row, column = (4 * (side * a + b) for a, b in zip(divmod(k, columns), divmod(i, side)))
        patches[:, k, i] = images[:, :, row : row + 4, column : column + 4].reshape(2, -1)
    wanted = (patches - patches.mean(-1, keepdims=True)) / patches.std(-1, ddof=1, keepdims=True)
    found = rng.normal(size=(2, rows * columns, side**2, side**2, 48)).astype(np.float32)
    expected = np.mean((found[:, :-1] - wanted[:, 1:, None]) ** 2)
    images, found, wanted = map(torch.from_numpy, (images, found, wanted))
    targets = task.augment(images, torch.zeros(2))[1]
    assert task.loss(lambda _: found, images, targets, nullcontext()).item() == pytest.approx(expected, rel=1e-5)
    assert task.measure(lambda _: found, images, targets, nullcontext()).item() == pytest.approx(2 * expected, rel=1e-5)
    perfect = wanted.roll(-1, 1)[:, :, None].expand_as(found)
    _, shown = task.show(lambda _: perfect, images, nullcontext())
    first = torch.zeros(size, 2 * size, dtype=torch.bool)
    first[: 4 * side, : 4 * side] = True
    assert (shown[..., first] == 0).all()
    torch.testing.assert_close(shown[..., ~first], images[..., ~first], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--augmentation.mask_ratio=0.5"], "mask_ratio is 0.5 and next_cluster 2: a run learns one of them"),
        (
            ["--augmentation.next_cluster=3"],
            r"next_cluster is 3 with patches \(4, 4\) .* of 16 pixels: expected several",
        ),
        (["--augmentation.next_cluster=4"], "expected several whole clusters a side"),
        (["--model.kwargs={patch_size: 4, stride: 2, depth: 2}"], "several whole clusters a side, of square patches"),
        (["--model.kwargs={patch_size: 4, d_conv: [3, 3], depth: 2}"], "vilonghorn_nano, whose patches see later ones"),
        (
            ["--model.name=vit_tiny_patch16_224", "--model.kwargs={patch_size: 4, depth: 2}"],
            "vit_tiny_patch16_224, whose patches see later ones",
        ),
        (["--model.name=vilonghornv2_nano", "--model.kwargs={}"], "vilonghornv2_nano, whose patches see later ones"),
        (["--teacher.weights=[runs/a]"], "a run without labels learns from no teacher"),
    ],
)
def test_what_cannot_predict_is_refused_in_one_sentence(tmp_path, options, message):
    start = ["--model.name=vilonghorn_nano", f"--model.kwargs={FLAT}", "--augmentation.next_cluster=2"]
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path / "run", *start, *options)
    assert not (tmp_path / "run").exists()


def test_images_without_classes_give_weights_of_the_ordinary_model(tmp_path, capsys, pictures):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / f"{i}.png")
    command = f"pretrain --data.train={tmp_path}/train --data.val={tmp_path}/val --run.dir={tmp_path}/run"
    command += " --data.image_size=16 --data.batch_size=4 --data.workers=0 --schedule.epochs=1 --run.device=cpu"
    command += " --schedule.warmup_epochs=0 --run.tensorboard=false --model.name=vilonghorn_nano"
    command += " --augmentation.mask_ratio=null --augmentation.next_cluster=2"
    assert main([*command.split(), f"--model.kwargs={FLAT}"]) == 0
    assert "held-out loss" in capsys.readouterr().out and (tmp_path / "run/reconstructions.png").exists()
    cfg = dict(file=str(tmp_path / "run/best.safetensors"))
    model = timm.create_model(
        "vilonghorn_nano", pretrained=True, pretrained_cfg_overlay=cfg, img_size=16, num_classes=2, **TINY
    )
    assert all(block.mixer.reverse == (False, True) for block in model.blocks)
