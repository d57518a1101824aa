"""The models, registered with timm when this package is imported: `timm.create_model("vilonghorn_tiny")`."""

from . import vilonghorn, vilonghornv2, vim
from .hierarchy import HierarchicalSSM
from .pyramid import DetectionBackbone, PyramidSSM
from .trunk import VisionSSM

__all__ = ["DetectionBackbone", "HierarchicalSSM", "PyramidSSM", "VisionSSM", "vilonghorn", "vilonghornv2", "vim"]
