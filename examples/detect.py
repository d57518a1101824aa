"""Trains a torchvision detector on digits: `python examples/detect.py --model fcos --picture fcos.png`.

FCOS and RetinaNet use the maps from stride 8 on, Faster and Mask R-CNN those from 4 on, as in their papers, and at
least two maps. The score counts the top boxes of held-out scenes, as many as there are digits in each. A box is right
if it overlaps a digit of its class by an IoU above 0.5; each digit counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

import timm
import torch
from common import BACKGROUND_AND_DIGITS, COLORS, MEAN, STD, fit, held_out, options, parse, save_picture
from detection_backbone import DetectionBackbone
from scenes import Scene
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import box_iou
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

import vilonghorn  # noqa: F401  (registers the models)

DETECTORS = {
    "fcos": dict(steps=800),
    "retinanet": dict(steps=800),
    "faster_rcnn": dict(steps=600),
    "mask_rcnn": dict(steps=500),
}


def build(detector: str, name: str, side: int) -> nn.Module:
    """A detector for images of about side x side pixels, on a backbone registered as `name`."""
    all_strides = timm.create_model(name, features_only=True, stem_stride=2).feature_info.reduction()
    finest = min(8 if detector in ("fcos", "retinanet") else 4, all_strides[-2])
    levels = [i for i, stride in enumerate(all_strides) if stride >= finest]
    strides = [all_strides[i] for i in levels]
    model = timm.create_model(name, features_only=True, out_indices=levels, stem_stride=2)
    backbone = DetectionBackbone(model, out_channels=128)
    n = len(strides) + 1  # and a coarser map
    images = dict(min_size=side, max_size=side, image_mean=[MEAN] * 3, image_std=[STD] * 3)
    if detector == "fcos":
        anchors = AnchorGenerator(tuple((stride,) for stride in [*strides, 2 * strides[-1]]), ((1.0,),) * n)
        return backbone.attach(FCOS(backbone, BACKGROUND_AND_DIGITS, anchor_generator=anchors, **images))
    if detector == "retinanet":
        sizes = ((16, 24, 32), (24, 36, 48), (64,) * 3, (96,) * 3)[:n]
        anchors = AnchorGenerator(sizes, ((1.0, 1.5, 2.5),) * n)
        return backbone.attach(RetinaNet(backbone, BACKGROUND_AND_DIGITS, anchor_generator=anchors, **images))
    width = backbone.out_channels
    regions = dict(
        rpn_anchor_generator=AnchorGenerator(((16,), (24,), (32,), (44,), (64,))[:n], ((1.0, 1.5, 2.5),) * n),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=50,
        box_batch_size_per_image=64,
        box_head=TwoMLPHead(width * 7**2, 256),
        box_predictor=FastRCNNPredictor(256, BACKGROUND_AND_DIGITS),
    )
    if detector == "faster_rcnn":
        return backbone.attach(FasterRCNN(backbone, **regions, **images))
    mask = dict(
        mask_head=MaskRCNNHeads(width, (width, width), 1),
        mask_predictor=MaskRCNNPredictor(width, width, BACKGROUND_AND_DIGITS),
    )
    return backbone.attach(MaskRCNN(backbone, **regions, **mask, **images))


def loss(model: nn.Module, batch: list[Scene]) -> Tensor:
    """Sum of the detector's losses; label 0 is the background."""
    targets = [dict(boxes=s.boxes, labels=1 + s.labels, masks=s.masks.byte()) for s in batch]
    return sum(model([s.image for s in batch], targets).values())


def top_boxes(found: dict[str, Tensor], scene: Scene) -> tuple[dict[str, Tensor], list[bool]]:
    """Returns the top boxes, as many as there are digits, and which of them are right."""
    top = {key: value[: len(scene.labels)] for key, value in found.items()}  # detectors sort by score
    free, right = set(range(len(scene.labels))), []
    for label, overlaps in zip(top["labels"].tolist(), box_iou(top["boxes"], scene.boxes)):
        hits = [i for i in free if overlaps[i] > 0.5 and label == 1 + scene.labels[i]]
        free -= set(hits[:1])
        right.append(bool(hits))
    return top, right


def report(scenes: Iterable[Scene], found: list[tuple[dict[str, Tensor], list[bool]]]) -> float:
    """Prints and returns the share of the scenes' digits that `top_boxes` found."""
    hits, digits = sum(sum(right) for _, right in found), sum(len(scene.labels) for scene in scenes)
    print(
        f"held out: {hits} of {digits} top boxes ({hits / digits:.1%}) have IoU above 0.5 with a digit of their class"
    )
    return hits / digits


def draw(scene: Scene, top: dict[str, Tensor], right: list[bool]) -> Tensor:
    """A scene with its top boxes, white if right and red if not, and masks where there are any: (3, H, W) uint8."""
    picture = (255 * scene.image).byte()
    if "masks" in top and len(right):
        colors = [COLORS[i - 1] for i in top["labels"].tolist()]
        picture = draw_segmentation_masks(picture, top["masks"][:, 0] > 0.5, 0.6, colors)
    names = [str(i - 1) for i in top["labels"].tolist()]
    return draw_bounding_boxes(picture, top["boxes"], names, ["white" if hit else "red" for hit in right])


def main(argv: list[str] | None = None) -> float:
    """Trains and measures; returns the share of the top boxes that are right."""
    parser = options(__doc__, DETECTORS, argv)
    parser.add_argument("--backbone", default="vilonghornv2_nano", help="a vilonghornv2_* model, at half its strides")
    args = parse(parser, argv)
    try:
        model = build(args.model, args.backbone, args.side)
    except (RuntimeError, TypeError, ValueError) as error:
        parser.error(f"no {args.model} on {args.backbone}: {error}")
    fit(model, lambda batch: loss(model, batch), args)
    scenes = held_out(args)
    with torch.no_grad():
        found = [top_boxes(model([scene.image])[0], scene) for scene in scenes]
    score = report(scenes, found)
    save_picture(args.picture, (draw(scene, *one) for scene, one in zip(list(scenes)[:16], found)))
    return score


if __name__ == "__main__":
    main()
