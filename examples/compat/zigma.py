"""CompVis/zigma: a small ZigMa and its fork of mamba_ssm, unchanged, beside the fork's `mamba_inner_ref`.

Needs einops, matplotlib and triton. Its norms are torch's, since the fork has RMSNorm for CUDA only.

    python examples/compat/zigma.py --source zigma
"""

import functools
import importlib
import sys

import torch
import torch.nn.functional as F
from common import compare, package, parse

args = parse(__doc__, 16)


def build(source):
    sys.path.insert(0, str(source))
    package("dis_mamba.mamba_ssm", source / "dis_mamba" / "mamba_ssm")  # without its language models
    sizes = dict(in_channels=4, embed_dim=96, depth=4, img_dim=args.px, use_pe=2)
    options = dict(scan_type="zigzagN4", use_jit=False, rms_norm=False, fused_add_norm=False, device="cpu")
    model = importlib.import_module("model_zigma").ZigMa(**sizes, **options)
    for parameter in model.parameters():  # those of the last layer are zero
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.forward = functools.partial(model.forward, t=torch.full((1,), 0.3))
    return model


def adjust(model):
    scan = sys.modules["dis_mamba.mamba_ssm.ops.selective_scan_interface"]

    def convolution(x, weight, bias, activation):
        return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight)))

    scan.causal_conv1d_fn, scan.selective_scan_fn = convolution, scan.selective_scan_ref
    sys.modules["dis_mamba.mamba_ssm.modules.mamba_simple"].mamba_inner_fn = scan.mamba_inner_ref


sys.exit(not compare(args, build, lambda: None, adjust, shape=(1, 4, args.px, args.px)))
