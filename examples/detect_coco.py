"""Trains a torchvision detector on your own COCO file and measures its mAP.

`python examples/detect_coco.py --train IMAGES train.json --val IMAGES val.json --out FOLDER`; `scenes.py` writes an
example, and `coco_boxes.py` says what the files must have. Every image is decoded before training, and all problems of
images and annotations are listed. Crowd annotations (`iscrowd` 1) are not trained on; in evaluation, boxes on them do
not count as wrong. `detect_coco.load(FOLDER/weights.safetensors)` gives the detector and its class names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import timm
import torch
from coco_boxes import CocoBoxes, class_names, collate, read_coco
from detection_backbone import DetectionBackbone
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.transforms import v2

DETECTORS = {"fcos": FCOS, "retinanet": RetinaNet, "faster_rcnn": FasterRCNN}


def build(model: str, backbone: str, classes: int, size: int, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A detector of `classes` classes, from 1 on. Images are scaled to a shorter side of `size`, a longer of 5/3 of it.

    FCOS and RetinaNet use the maps from stride 8 on, Faster R-CNN those from 4 on, and each one coarser map, with the
    anchors of their papers at these strides. `kwargs` are those of the backbone.
    """
    strides = timm.create_model(backbone, features_only=True, **kwargs).feature_info.reduction()
    levels = [i for i, stride in enumerate(strides) if stride >= (4 if model == "faster_rcnn" else 8)]
    features = timm.create_model(backbone, pretrained, features_only=True, out_indices=levels, **kwargs)
    wrapped, config = DetectionBackbone(features, out_channels=128), features.model.pretrained_cfg
    strides = [*(strides[i] for i in levels), 2 * strides[-1]]
    if model == "fcos":
        sizes = [(stride,) for stride in strides]
    elif model == "retinanet":
        sizes = [tuple(int(4 * stride * 2 ** (third / 3)) for third in range(3)) for stride in strides]
    else:
        sizes = [(8 * stride,) for stride in strides]
    anchors = AnchorGenerator(tuple(sizes), (((1.0,) if model == "fcos" else (0.5, 1.0, 2.0)),) * len(sizes))
    options = {"rpn_anchor_generator" if model == "faster_rcnn" else "anchor_generator": anchors}
    options |= dict(min_size=size, max_size=size * 5 // 3, image_mean=config["mean"], image_std=config["std"])
    return wrapped.attach(DETECTORS[model](wrapped, classes + 1, **options))


@torch.no_grad()
def evaluate(model: nn.Module, data: CocoBoxes, device: torch.device, workers: int) -> dict[str, Any]:
    """mAP of COCO: `map`, `map_50`, ..., and `map_per_class` with the labels `classes`."""
    metric = MeanAveragePrecision(class_metrics=True)
    for images, targets in DataLoader(data, 1, num_workers=workers, collate_fn=collate):
        found = model([image.to(device) for image in images])
        metric.update([{key: value.cpu() for key, value in one.items()} for one in found], targets)
    return metric.compute()


def load(path: str | Path) -> tuple[nn.Module, dict[int, str]]:
    """The detector of a file of weights, in evaluation mode, and its class names by label."""
    model, record = common.load(Path(path), build)
    return model, dict(enumerate(record["classes"], 1))


def main(argv: list[str] | None = None) -> float:
    """Trains and measures; returns the mAP on the held-out images."""
    parser = common.own_options(__doc__, "annotations.json", epochs=12, batch=8, lr=2e-3)
    parser.add_argument("--model", choices=DETECTORS, default="fcos")
    parser.add_argument("--size", type=int, default=480, help="shorter side of the images, scaled, in pixels")
    args = common.parse_own(parser, argv)
    (train_file, problems), (val_file, more) = read_coco(*args.train), read_coco(*args.val)
    common.refuse(problems + more)
    classes = class_names(train_file)
    if class_names(val_file) != classes:
        common.refuse([f"the categories of {args.val[1]} are {class_names(val_file)}, those of training {classes}"])
    augment = [v2.RandomHorizontalFlip(0.5 * args.flip), v2.ColorJitter(0.2, 0.2, 0.2)]
    train, val = CocoBoxes(args.train[0], train_file, augment), CocoBoxes(args.val[0], val_file, [])
    record = dict(model=args.model, backbone=args.backbone, classes=len(classes), size=args.size)
    model, device = build(**record, pretrained=args.pretrained).to(args.device), torch.device(args.device)

    def loss(batch: tuple[list, list]) -> torch.Tensor:
        images, targets = batch
        kept = [
            {key: target[key][target["iscrowd"] == 0].to(device) for key in ("boxes", "labels")} for target in targets
        ]
        return sum(model([image.to(device) for image in images], kept).values())

    loader = DataLoader(train, args.batch, shuffle=True, num_workers=args.workers, collate_fn=collate)
    common.optimize(model, loss, common.endless(loader), args.epochs * len(loader), args.lr)
    scores = evaluate(model, val, device, args.workers)
    names = list(classes.values())
    common.save(args.out / common.WEIGHTS, model, dict(build=record, classes=names))
    for label, score in zip(scores["classes"].reshape(-1).tolist(), scores["map_per_class"].reshape(-1).tolist()):
        print(f"{names[label - 1]}: mAP {score:.3f}")
    print(f"held out: mAP {scores['map']:.3f}, mAP at IoU 0.5 {scores['map_50']:.3f} on {len(val)} images")
    print(f"load them with detect_coco.load('{args.out / common.WEIGHTS}')")
    return scores["map"].item()


if __name__ == "__main__":
    main()
