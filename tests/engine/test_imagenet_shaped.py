"""The way of ImageNet, from folders to a fine-tuned model, with the commands that a person types."""

import json
from pathlib import Path

import pytest
from imagenet_shaped import SYNSETS, TRAIN, VAL, make_imagenet
from safetensors import safe_open

from vilonghorn.cli import beton
from vilonghorn.cli.train import train as main
from vilonghorn.data import check_beton

ROOT = Path(__file__).parents[2]


@pytest.mark.needs_ffcv
def test_write_check_train_validate_and_fine_tune_at_stride_8(tmp_path, capsys):
    odd = make_imagenet(tmp_path)
    train, val = str(tmp_path / "train.beton"), str(tmp_path / "val.beton")
    options = ["--mode", "proportion", "--max-resolution", "96", "--quiet"]
    assert not beton.main([str(tmp_path / "train"), train, "--skip-unreadable", *options])
    assert not beton.main([str(tmp_path / "val"), val, "--labels", str(tmp_path / "devkit"), *options])
    assert "left out: " in capsys.readouterr().err
    for path in (train, val):
        assert not beton.main(["--check", path])
        assert check_beton(path).classes == sorted(SYNSETS)
    manifest = json.loads((tmp_path / "train.beton.json").read_text())
    converted = {kind: found["count"] for kind, found in manifest["converted"].items()}
    assert converted == {"L": odd["gray"], "CMYK": odd["CMYK"], "turned by EXIF": odd["turned"]}
    assert len(manifest["left_out"]) == odd["corrupt"] == 1
    assert manifest["class_counts"] == [TRAIN, TRAIN, TRAIN - 1, TRAIN]

    run, fine = tmp_path / "run", tmp_path / "fine"
    small = ["--data.image_size=64", "--data.batch_size=16", f"--data.train={train}", f"--data.val={val}"]
    small += ["--model.name=vilonghorn_nano", "--run.device=cpu"]
    recipe = ["--config", str(ROOT / "configs/imagenet/vilonghorn_tiny.yaml")]
    two = ["--model.kwargs={depth: 2}", "--schedule.epochs=2", "--schedule.warmup_epochs=1", "--optimizer.lr_batch=16"]
    main([*recipe, *small, *two, "--ema.decay=0.9", f"--run.dir={run}"])
    trained = capsys.readouterr().out.splitlines()[-1]
    assert f"on {VAL * len(SYNSETS)} images: last weights (ema, epoch 2)" in trained
    main(["--evaluate", str(run), "--checkpoint", "last"])
    measured = capsys.readouterr().out.splitlines()[-1]
    assert trained.partition(" on ")[0] == measured.partition(" on ")[0]

    stage = ["--config", str(ROOT / "configs/finetune.yaml"), f"--model.weights={run}"]
    one = ["--model.kwargs={depth: 2, stride: 8}", "--schedule.epochs=1", "--ema.decay=0"]
    main([*recipe, *stage, *small, *one, f"--run.dir={fine}"])
    assert f"on {VAL * len(SYNSETS)} images: last weights (model, epoch 1)" in capsys.readouterr().out.splitlines()[-1]
    rows = []
    for directory in (run, fine):
        with safe_open(directory / "last.safetensors", "pt") as weights:
            rows.append(weights.get_slice("pos_embed").get_shape()[1])
    assert rows == [1 + 4 * 4, 1 + 7 * 7]
