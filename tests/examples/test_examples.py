"""The examples run: each trains for one step, is evaluated and writes its picture."""

import numpy as np
import pytest
import torch
from PIL import Image

BRIEF = ["--steps", "1", "--batch", "2", "--held-out", "2", "--side", "64"]
DETECTORS = ["fcos", "retinanet", "faster_rcnn"]
DECODERS = ["dpt", "unet", "linknet", "upernet", "segformer"]  # test_smp.py has others
STRIDES = [  # those of `build`, by model and size
    ("fcos", "nano", [8]),
    ("retinanet", "tiny", [8, 16]),
    ("faster_rcnn", "tiny", [4, 8, 16]),
    ("unet", "tiny", [2, 4, 8]),
    ("unetplusplus", "nano", [2, 4, 8]),
    ("upernet", "tiny", [2, 4, 8, 16]),
    ("fpn", "tiny", [2, 4, 8, 16]),
    ("pspnet", "tiny", [2, 4, 8]),
    ("manet", "tiny", [2, 4, 8, 16]),
]


@pytest.mark.parametrize("model", DECODERS)
def test_a_decoder_trains_and_is_measured(script, model, tmp_path, capsys):
    pytest.importorskip("segmentation_models_pytorch", reason="pip install vilonghorn[downstream]")
    score = script("examples/segment").main(["--model", model, *BRIEF, "--picture", str(tmp_path / "picture.png")])
    said = capsys.readouterr().out
    assert 0 <= score <= 1 and "step 1/1: loss" in said and f"mean IoU {score:.3f} on 2 scenes" in said
    assert np.ptp(np.asarray(Image.open(tmp_path / "picture.png").convert("RGB"))) > 100


@pytest.mark.parametrize("model, size, strides", STRIDES)
def test_a_hierarchy_has_half_of_its_strides_in_the_examples(script, model, size, strides):
    if model in DETECTORS:
        pytest.importorskip("torchmetrics", reason="pip install vilonghorn[downstream]")
        built = script("examples/detect_coco").build(model, f"vilonghornv2_{size}", 5, 64, stem_stride=2)
        assert built.backbone.model.feature_info.reduction() == strides
        return
    pytest.importorskip("segmentation_models_pytorch", reason="pip install vilonghorn[downstream]")
    built = script("examples/segment").build(model, f"vilonghornv2_{size}").eval()
    assert built.encoder.model.feature_info.reduction() == strides
    with torch.no_grad():
        assert built(torch.zeros(1, 3, 96, 64)).shape == (1, 11, 96, 64)


@pytest.mark.parametrize("task", ["upernet", "detr", "classifier"])
def test_transformers_trains_and_loads_our_models_exactly(script, task, capsys):
    pytest.importorskip("transformers", reason="pip install vilonghorn[downstream]")
    pytest.importorskip("accelerate", reason="pip install vilonghorn[downstream]")
    score = script("examples/huggingface").main(["--model", task, *BRIEF])
    assert 0 <= score <= 1 and "the same outputs to the last bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("segment", ["--side", "40"], "--side is 40, expected at least 48"),
        ("segment", ["--steps", "0"], "--steps is 0, expected at least 1"),
        (
            "segment",
            ["--picture", "no/where.png"],
            "--picture is no/where.png, expected the name of a .png in a folder",
        ),
        ("segment", ["--model", "dpt", "--side", "60"], "no dpt for scenes of 60 pixels: Wrong input shape height=60"),
        ("segment", ["--model", "unet", "--backbone", "vilonghorn_nano"], "of vilonghornv2_*; vilonghorn_nano"),
        ("segment", ["--model", "fpn"], "no fpn for scenes of 96 pixels: with vilonghornv2_nano the logits have"),
        (
            "segment",
            ["--model", "dpt", "--backbone", "vilonghornv2_nano"],
            "of a plain model; vilonghornv2_nano",
        ),
    ],
)
def test_what_cannot_work_gets_a_sentence_before_work_begins(script, name, arguments, sentence, capsys):
    pytest.importorskip("segmentation_models_pytorch", reason="pip install vilonghorn[downstream]")
    with pytest.raises(SystemExit) as end:
        script(f"examples/{name}").main(arguments)
    out = capsys.readouterr()
    assert end.value.code == 2 and sentence in out.err and "step" not in out.out


def test_mean_iou_is_that_of_its_definition(script):
    pytest.importorskip("segmentation_models_pytorch", reason="pip install vilonghorn[downstream]")
    draw = torch.Generator().manual_seed(0)
    target, predicted = torch.randint(0, 5, (2, 3, 8, 8), generator=draw)
    by_class = [((predicted == c) & (target == c)).sum() / ((predicted == c) | (target == c)).sum() for c in range(5)]
    assert script("examples/segment").mean_iou(predicted, target) == pytest.approx(torch.stack(by_class).mean().item())
