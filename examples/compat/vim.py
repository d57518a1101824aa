"""hustvl/Vim: Vim-Ti, unchanged, beside the checkout's own `selective_scan_ref`. Needs einops.

python examples/compat/vim.py --source Vim
"""

import importlib
import sys

from common import compare, norms_of, parse, reference_of

args = parse(__doc__, 224)


def build(source):
    sys.path.insert(0, str(source / "vim"))
    models = importlib.import_module("models_mamba")
    name = "vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2"
    return getattr(models, name)(img_size=args.px)


def reference():
    reference_of(args.source / "mamba-1p1p1", args.source / "causal-conv1d")
    norms_of("mamba_ssm.ops.triton.layer_norm")


sys.exit(not compare(args, build, reference))
