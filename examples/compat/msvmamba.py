"""YuHengsss/MSVMamba: MSVMamba-N, unchanged, beside `selective_scan_ref` of state-spaces/mamba.

Needs einops and fvcore. The reference takes the place of the checkout's autograd function.

    python examples/compat/msvmamba.py --source MSVMamba --mamba mamba
"""

import importlib
import sys
from types import SimpleNamespace

from common import compare, package, parse, reference_of

args = parse(__doc__, 64)


def build(source):
    package("models", source / "classification" / "models")
    models = importlib.import_module("models.vmamba")
    sizes = dict(dims=48, depths=[1, 2, 5, 2], ssm_d_state=1, mlp_ratio=0.0, add_conv=True, add_se=True, convFFN=True)
    scales = dict(sscore_type="multiscale_4scan_12", ms_stage=[0, 1, 2, 3], ms_split=[1, 3], up_sample="interpolate")
    return models.VSSM(**sizes, **scales, b1_ratio=0.5, ffn_dropout=0.0, downsample_version="v1")


def adjust(model):
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_ref

    def apply(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows):
        return scan(u, delta, A, B, C, D, None, delta_bias, delta_softplus)

    for name in ("models.utils", "models.vmamba"):
        sys.modules[name].SelectiveScan = SimpleNamespace(apply=apply)


sys.exit(not compare(args, build, lambda: reference_of(args.mamba), adjust))
