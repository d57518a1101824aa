"""YuHengsss/VSSD with causal scans, unchanged, beside `selective_scan_ref` of state-spaces/mamba.

Needs einops, fvcore and triton, which the reference imports.

    python examples/compat/vssd.py --source VSSD --mamba mamba
"""

import importlib
import sys

import torch
from common import compare, module, package, parse, reference_of

args = parse(__doc__, 64)


def build(source):
    sys.path.insert(0, str(source / "classification" / "models"))
    models = importlib.import_module("mamba2")
    sizes = dict(embed_dim=48, depths=[2, 2, 8, 4], num_heads=[2, 4, 8, 16], d_state=48)
    model = models.VMAMBA2(img_size=args.px, linear_attn_duality=False, **sizes)
    model.register_forward_hook(lambda _model, _x, y: y.as_subclass(torch.Tensor))  # it has a class of its own
    return model


def reference():
    scan = reference_of(args.mamba).selective_scan_ref

    def by_token(x, dt, A, B, C, chunk_size, D, z, seq_idx, initial_states):
        P, N = x.shape[3], B.shape[3]  # channels of a head, states
        dt, A, D = dt.mT.repeat_interleave(P, 1), A.repeat_interleave(P)[:, None].expand(-1, N), D.repeat_interleave(P)
        y = scan(x.flatten(2).mT, dt, A, B.permute(0, 2, 3, 1), C.permute(0, 2, 3, 1), D)
        return y.mT.unflatten(2, (-1, P))

    package("mamba_ssm.ops.triton", args.mamba / "mamba_ssm" / "ops" / "triton")
    module(
        "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=by_token, mamba_split_conv1d_scan_combined=None
    )


sys.exit(not compare(args, build, reference))
