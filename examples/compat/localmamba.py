"""hunto/LocalMamba: LocalVim-T, unchanged, beside the checkout's own `selective_scan_ref`. Needs einops.

python examples/compat/localmamba.py --source LocalMamba
"""

import importlib
import sys

from common import compare, norms_of, package, parse, reference_of

args = parse(__doc__, 224)


def build(source):
    for name in ("lib", "lib.models", "lib.models.mamba"):
        package(name, source / "classification" / name.replace(".", "/"))
    return importlib.import_module("lib.models.local_vim").local_vim_tiny(img_size=args.px)


def reference():
    reference_of(args.source / "mamba-1p1p1", args.source / "causal-conv1d")
    norms_of("mamba_ssm.ops.triton.layernorm")


sys.exit(not compare(args, build, reference))
