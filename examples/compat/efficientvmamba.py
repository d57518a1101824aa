"""TerryPei/EfficientVMamba: EfficientVMamba-T, unchanged, beside the checkout's `selective_scan_ref`.

Needs einops and fvcore. The checkout has no fallback: its reference takes the place of its autograd function.

    python examples/compat/efficientvmamba.py --source EfficientVMamba
"""

import importlib
import sys
from types import SimpleNamespace

from common import compare, package, parse

from vilonghorn import compat

args = parse(__doc__, 224, seed=2)  # with seed 1 the input of a ReLU is zero but for rounding


def build(source):
    for name in ("lib", "lib.models", "lib.models.mamba"):
        package(name, source / "classification" / name.replace(".", "/"))
    models = importlib.import_module("lib.models.mamba.efficient_mamba")
    sizes = dict(depths=[2, 2, 4, 2], dims=[48, 96, 192, 384], d_state=16, ssm_ratio=2.0, window_size=2)
    return models.EfficientVSSM(**sizes, mlp_ratio=0.0, downsample_version="v1")


def reference():
    compat.install()
    package("selective_scan", args.source / "selective_scan" / "selective_scan")


def adjust(model):
    scan = importlib.import_module("selective_scan.selective_scan_interface").selective_scan_ref
    sys.modules[type(model).__module__].SelectiveScan = SimpleNamespace(apply=lambda *given: scan(*given[:8]))


sys.exit(not compare(args, build, reference, adjust))
