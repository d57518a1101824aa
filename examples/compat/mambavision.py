"""NVlabs/MambaVision: MambaVision-T, unchanged, beside `selective_scan_ref` of state-spaces/mamba. Needs einops.

python examples/compat/mambavision.py --source MambaVision --mamba mamba
"""

import importlib
import sys

from common import compare, package, parse, reference_of

args = parse(__doc__, 224)


def build(source):
    package("mambavision", source / "mambavision")
    package("mambavision.models", source / "mambavision" / "models")
    return importlib.import_module("mambavision.models.mamba_vision").mamba_vision_T(pretrained=False)


sys.exit(not compare(args, build, lambda: reference_of(args.mamba)))
