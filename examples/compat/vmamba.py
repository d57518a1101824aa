"""MzeroMiko/VMamba: VMamba-T, unchanged, beside its own fallback in torch. Needs einops and fvcore.

python examples/compat/vmamba.py --source VMamba
"""

import importlib
import sys

from common import compare, parse

args = parse(__doc__, 224)


def build(source):
    sys.path.insert(0, str(source / "classification" / "models"))
    models = importlib.import_module("vmamba")
    sizes = dict(depths=[2, 2, 8, 2], dims=96, ssm_d_state=1, ssm_ratio=1.0, ssm_dt_rank="auto", ssm_conv=3)
    form = dict(forward_type="v05_noz", downsample_version="v3", patchembed_version="v2", norm_layer="ln2d")
    return models.VSSM(**sizes, **form, ssm_conv_bias=False, ssm_init="v0", mlp_ratio=4.0)


def reference():
    for name in ("selective_scan_cuda", "selective_scan_cuda_core", "selective_scan_cuda_oflex"):
        sys.modules[name] = None  # raises ImportError, so that the checkout falls back to torch


sys.exit(not compare(args, build, reference))
