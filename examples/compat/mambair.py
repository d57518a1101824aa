"""csguoh/MambaIR: MambaIR for 2 times the size, unchanged, beside `selective_scan_ref` of state-spaces/mamba.

Needs einops.

    python examples/compat/mambair.py --source MambaIR --mamba mamba
"""

import importlib
import sys

from common import compare, package, parse, reference_of

args = parse(__doc__, 32)


def build(source):
    for name in ("basicsr", "basicsr.utils", "basicsr.archs"):
        package(name, source / name.replace(".", "/"))
    sizes = dict(img_size=args.px, embed_dim=60, depths=(6, 6, 6, 6), mlp_ratio=1.2)
    models = importlib.import_module("basicsr.archs.mambair_arch")
    return models.MambaIR(**sizes, upscale=2, upsampler="pixelshuffledirect")


sys.exit(not compare(args, build, lambda: reference_of(args.mamba)))
