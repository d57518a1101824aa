"""JiarunLiu/Swin-UMamba: SwinUMamba, unchanged, beside `selective_scan_ref` of state-spaces/mamba.

Needs einops and monai.

    python examples/compat/swin_umamba.py --source Swin-UMamba --mamba mamba
"""

import importlib
import sys

import monai.networks.blocks.unetr_block  # noqa: F401  (before the checkout's modules, which are forgotten)
from common import compare, module, package, parse, reference_of

args = parse(__doc__, 64)


def build(source):
    for name in ("nnunetv2", "nnunetv2.nets", "nnunetv2.utilities", "nnunetv2.utilities.plans_handling"):
        package(name, source / "swin_umamba" / name.replace(".", "/"))
    module("nnunetv2.utilities.plans_handling.plans_handler", ConfigurationManager=None, PlansManager=None)
    return importlib.import_module("nnunetv2.nets.SwinUMamba").SwinUMamba(in_chans=3, out_chans=4)


sys.exit(not compare(args, build, lambda: reference_of(args.mamba)))
