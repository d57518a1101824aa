"""OpenGVLab/VideoMamba: VideoMamba-Ti on 8 frames, unchanged, beside the checkout's `selective_scan_ref`. Needs einops.

python examples/compat/videomamba.py --source VideoMamba
"""

import importlib
import sys

from common import compare, norms_of, package, parse, reference_of

args = parse(__doc__, 112)


def build(source):
    package("models", source / "videomamba" / "video_sm" / "models")
    return importlib.import_module("models.videomamba").videomamba_tiny(img_size=args.px, num_frames=8)


def reference():
    reference_of(args.source / "mamba", args.source / "causal-conv1d")
    norms_of("mamba_ssm.ops.triton.layernorm")


sys.exit(not compare(args, build, reference, shape=(1, 3, 8, args.px, args.px)))
