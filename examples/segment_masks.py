"""Trains UPerNet on your own images and PNG masks, and measures the IoU of each class.

`python examples/segment_masks.py --train IMAGES MASKS --val IMAGES MASKS --classes background leaf --out FOLDER`;
`scenes.py` writes an example, and `mask_files.py` says what the files must have. Pixels of 255 are ignored in loss and
IoU. Every file is decoded before training, and all problems are listed.
`segment_masks.load(FOLDER/weights.safetensors)` gives the model and its class names.
"""

from __future__ import annotations

from pathlib import Path

import common
import segmentation_models_pytorch as smp
import timm
import torch
import torch.nn.functional as F
from mask_files import IGNORED, ImagesWithMasks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms import v2

STRIDE = 32  # sides of the images that UPerNet takes are multiples of it


class Segmenter(nn.Module):
    """UPerNet on a vilonghornv2 backbone: images (B, 3, H, W) from 0 to 1 to logits (B, classes, H, W), of any size."""

    def __init__(self, backbone: str, classes: int, pretrained: bool = False) -> None:
        super().__init__()
        maps = timm.create_model(backbone, features_only=True)
        weights = True if pretrained else None
        options = dict(encoder_weights=weights, encoder_depth=1 + len(maps.feature_info), decoder_channels=64)
        self.model = smp.create_model("upernet", f"tu-{backbone}", classes=classes, **options)
        config = maps.model.pretrained_cfg
        self.normalize = v2.Normalize(config["mean"], config["std"])

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        padded = F.pad(self.normalize(images), (0, -width % STRIDE, 0, -height % STRIDE))
        return self.model(padded)[..., :height, :width]


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, size: int, classes: int, device: torch.device) -> Tensor:
    """IoU (classes,) over all pixels of the masks; NaN for a class that is neither in the masks nor predicted.

    Images are scaled to a longer side of `size`, and the logits to the size of the mask.
    """
    metric = MulticlassJaccardIndex(classes, average="none", ignore_index=IGNORED, zero_division=float("nan"))
    scale = v2.Resize(None, max_size=size)
    for image, mask in data:
        logits = F.interpolate(model(scale(image)[None].to(device)), mask.shape, mode="bilinear")
        metric.update(logits.argmax(1).cpu(), mask[None])
    return metric.compute()


def cross_entropy(logits: Tensor, masks: Tensor) -> Tensor:
    """The mean over pixels that are not ignored; 0 if all are."""
    total = F.cross_entropy(logits, masks.long(), ignore_index=IGNORED, reduction="sum")
    return total / (masks != IGNORED).sum().clamp(min=1)


def load(path: str | Path) -> tuple[nn.Module, list[str]]:
    """The model of a file of weights, in evaluation mode, and the names of its classes."""
    model, record = common.load(Path(path), Segmenter)
    return model, record["classes"]


def main(argv: list[str] | None = None) -> float:
    """Trains and measures; returns the mean IoU on the held-out images."""
    parser = common.own_options(__doc__, "MASKS", epochs=20, batch=8, lr=2e-3)
    parser.add_argument("--classes", nargs="+", required=True, metavar="NAME", help="names of the classes 0, 1, ...")
    parser.add_argument("--size", type=int, default=256, help="side of the training crops, and longer side of others")
    args = common.parse_own(parser, argv)
    if not 2 <= len(args.classes) <= IGNORED:
        parser.error(f"--classes has {len(args.classes)} names, expected 2 to {IGNORED}")
    augment = [v2.RandomResizedCrop(args.size, (0.25, 1.0)), v2.RandomHorizontalFlip(0.5 * args.flip)]
    train = ImagesWithMasks(*args.train, len(args.classes), [*augment, v2.ColorJitter(0.2, 0.2, 0.2)])
    val = ImagesWithMasks(*args.val, len(args.classes), [])
    problems = train.problems + val.problems
    if not problems and not 2 <= args.batch <= len(train):
        problems = [f"--batch is {args.batch}, expected 2 (BatchNorm) to {len(train)}, the number of images"]
    common.refuse(problems)
    record, device = dict(backbone=args.backbone, classes=len(args.classes)), torch.device(args.device)
    model = Segmenter(**record, pretrained=args.pretrained).to(device)
    loader = DataLoader(train, args.batch, shuffle=True, drop_last=True, num_workers=args.workers)

    def loss(batch: list[Tensor]) -> Tensor:
        return cross_entropy(model(batch[0].to(device)), batch[1].to(device))

    common.optimize(model, loss, common.endless(loader), args.epochs * len(loader), args.lr)
    scores = evaluate(model, val, args.size, len(args.classes), device)
    common.save(args.out / common.WEIGHTS, model, dict(build=record, classes=args.classes))
    for name, score in zip(args.classes, scores.tolist()):
        print(f"{name}: IoU {score:.3f}")
    print(f"held out: mean IoU {scores.nanmean():.3f} on {len(val)} images")
    print(f"load them with segment_masks.load('{args.out / common.WEIGHTS}')")
    return scores.nanmean().item()


if __name__ == "__main__":
    main()
