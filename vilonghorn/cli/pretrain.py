"""Learns from images without labels, for `vilonghorn train --model.weights` to start from: `vilonghorn pretrain`."""

from collections.abc import Sequence

from ..engine import command_line
from .train import train

USAGE = """vilonghorn pretrain [--config NAME] --data.train DIR --data.val DIR [--SECTION.KEY VALUE ...]

Parts of the images are masked, and the model learns to reconstruct them (SimMIM). The options are those of train.
  --data.train DIR               images without labels: a folder, also of folders, or a .beton file
  --data.val DIR                 images to measure the reconstruction on
  --augmentation.mask_ratio 0.6  the part of an image that is masked
  --augmentation.mask_unit 32    height and width of a masked square, in pixels

examples:
  vilonghorn pretrain --data.train photos/all --data.val photos/val
  vilonghorn train --config photos --model.weights runs/pretrained --data.train photos/train --data.val photos/val
  vilonghorn evaluate runs/pretrained --probe --data.train photos/train --data.val photos/val"""
parser = command_line.build_parser(prog="vilonghorn pretrain", description="Learn without labels.", usage=USAGE)
parser.set_defaults({"augmentation.mask_ratio": 0.6})


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status, as `vilonghorn train`."""
    return command_line.run(lambda argv: train(argv, parser, "pretrain"), argv)
