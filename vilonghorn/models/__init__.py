"""The models, registered with timm when this package is imported: `timm.create_model("vilonghorn_tiny")`.

`vim.py` has `vim_*` and `vilonghorn_*`, which differ only by their rule; `vilonghornv2.py` has `vilonghornv2_*`.
"""

from . import vilonghornv2, vim
from .timm_contract import Backbone
from .vilonghornv2 import VisionLonghorn
from .vim import VisionSSM
