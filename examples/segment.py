"""Trains a segmentation decoder on digits: `python examples/segment.py --model upernet --picture upernet.png`.

The decoders are those of segmentation_models_pytorch. DPT takes the tokens of a plain model, FPN
the maps of `vilonghornv2_tiny`, the others those of any hierarchy, here from stride 2 on. The score is the mean IoU
over the background and the ten digits, each over all pixels of the held-out scenes.
"""

from __future__ import annotations

import json

import segmentation_models_pytorch as smp
import timm
import torch
import torch.nn.functional as F
from common import BACKGROUND_AND_DIGITS, COLORS, MEAN, STD, fit, held_out, options, parse, save_picture
from scenes import Scene
from timm.models import register_model
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_jaccard_index
from torchvision.utils import draw_segmentation_masks

import vilonghorn  # noqa: F401  (registers the models)

DECODERS = {  # arguments: the default widths are for larger backbones
    "dpt": dict(decoder_intermediate_channels=(32, 48, 64, 64), decoder_fusion_channels=48),
    # Maps at strides 4 and 8 only: a deeper decoder, or twice the learning rate, learns the digits later.
    "unet": dict(encoder_depth=3, decoder_channels=(64, 32, 16), decoder_interpolation="bilinear"),
    "unetplusplus": dict(decoder_channels=(64, 48, 32, 24, 16)),
    "manet": dict(decoder_channels=(96, 64, 48, 32, 16)),
    "linknet": {},
    "fpn": dict(decoder_pyramid_channels=64, decoder_segmentation_channels=64),
    "pspnet": dict(encoder_depth=3, psp_out_channels=128),
    "upernet": dict(decoder_channels=64),
    "segformer": dict(decoder_segmentation_channels=64),
}
TRAINING = {decoder: dict(steps=750, digits=6) for decoder in DECODERS}
TRAINING["dpt"]["digits"] = 3
TRAINING["unet"] |= dict(steps=1000, lr=2e-3)
PATCH = 8  # pixels: the scenes are small


def build(decoder: str, name: str, kwargs: dict | None = None) -> nn.Module:
    """A model from (B, 3, H, W) to logits (B, 11, H, W) with a backbone registered as `name`, made with `kwargs`.

    Raises:
        ValueError: a backbone whose features are not those that the decoder takes.
    """
    options = dict(stem_stride=2) if name.startswith("vilonghornv2") else dict(patch_size=PATCH)
    options |= kwargs or {}
    strides = set(timm.create_model(name, features_only=True, **options).feature_info.reduction())
    if (decoder == "dpt") != (len(strides) == 1):
        takes = "tokens, of a plain model" if decoder == "dpt" else "maps at several strides, of vilonghornv2_*"
        raise ValueError(f"{decoder} takes {takes}; {name} gives features at strides {sorted(strides)}")
    own = DECODERS[decoder] | (dict(num_classes=0, dynamic_img_size=True) if decoder == "dpt" else {})
    if "stem_stride" in options:
        own = shortened(own, len(strides)) | (dict(upsampling=options["stem_stride"]) if decoder == "fpn" else {})
        name, options = registered(name, options), {}
    return smp.create_model(
        decoder,
        encoder_name=f"tu-{name}",
        encoder_weights=None,
        classes=BACKGROUND_AND_DIGITS,
        **options,
        **own,
    )


def registered(name: str, options: dict) -> str:
    """Registers a backbone with its arguments and returns its new name, of which smp reads the strides."""

    def backbone(pretrained: bool = False, **kwargs) -> nn.Module:
        return timm.create_model(name, pretrained, **options, **kwargs)

    backbone.__name__ = f"{name}_scenes"
    return backbone.__name__ if timm.is_model(backbone.__name__) else register_model(backbone).__name__


def shortened(own: dict, stages: int) -> dict:
    """Arguments of a decoder for a backbone of this many stages, the first of stride 2."""
    own = dict(own, encoder_depth=min(own.get("encoder_depth", stages), stages))
    if isinstance(own.get("decoder_channels"), tuple):
        own["decoder_channels"] = own["decoder_channels"][-own["encoder_depth"] :]
    return own


def logits(model: nn.Module, images: Tensor) -> Tensor:
    return model((images - MEAN) / STD)


def cross_entropy(predicted: Tensor, target: Tensor) -> Tensor:
    """Loss of logits (B, 11, H, W) and classes (B, H, W). Ink, a tenth of the pixels, has four times the weight."""
    return F.cross_entropy(predicted, target, torch.tensor([0.25] + [1.0] * len(COLORS)))


def loss(model: nn.Module, batch: list[Scene]) -> Tensor:
    predicted = logits(model, torch.stack([scene.image for scene in batch]))
    return cross_entropy(predicted, torch.stack([scene.semantic() for scene in batch]))


def mean_iou(predicted: Tensor, target: Tensor) -> float:
    """Mean IoU over classes, of class maps (n, H, W); a class that is in neither does not count."""
    by_class = multiclass_jaccard_index(
        predicted, target, BACKGROUND_AND_DIGITS, average="none", zero_division=float("nan")
    )
    return by_class.nanmean().item()


def draw(image: Tensor, classes: Tensor) -> Tensor:
    """A scene beside what was predicted for it: (3, H, 2 W) uint8."""
    picture = (255 * image).byte()
    masks = torch.stack([classes == 1 + digit for digit in range(len(COLORS))])
    return torch.cat([picture, draw_segmentation_masks(picture // 4, masks, 1.0, COLORS)], 2)


def main(argv: list[str] | None = None) -> float:
    """Trains and measures; returns the mean IoU on held-out scenes."""
    parser = options(__doc__, TRAINING, argv)
    default = "vilonghorn_nano for dpt, vilonghornv2_nano otherwise"
    parser.add_argument("--backbone", help=f"a registered model (default: {default})")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="arguments of the backbone, as JSON")
    args = parse(parser, argv)
    name = args.backbone or ("vilonghorn_nano" if args.model == "dpt" else "vilonghornv2_nano")
    try:
        model = build(args.model, name, args.kwargs)
        found = logits(model.eval(), torch.zeros(1, 3, args.side, args.side)).shape
        if found[2:] != (args.side, args.side):
            problem = f"with {name} the logits have {found[2]}x{found[3]} pixels"
            raise ValueError(f"{problem}: take a backbone with more maps, such as vilonghornv2_tiny")
    except (RuntimeError, ValueError) as error:
        parser.error(f"no {args.model} for scenes of {args.side} pixels: {error}")
    fit(model, lambda batch: loss(model, batch), args)
    scenes = list(held_out(args))
    images, target = torch.stack([s.image for s in scenes]), torch.stack([s.semantic() for s in scenes])
    with torch.no_grad():
        predicted = torch.cat([logits(model, part).argmax(1) for part in images.split(args.batch)])
    score = mean_iou(predicted, target)
    print(f"held out: mean IoU {score:.3f} on {len(scenes)} scenes")
    save_picture(args.picture, map(draw, images[:8], predicted), columns=4)
    return score


if __name__ == "__main__":
    main()
