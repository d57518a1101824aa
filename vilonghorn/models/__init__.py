"""The models, registered with timm when this package is imported: `timm.create_model("vilonghorn_tiny")`."""

from . import vilonghorn, vilonghornv2, vim
from .detection import DetectionBackbone
from .hierarchy import HierarchicalSSM
from .trunk import VisionSSM

__all__ = ["DetectionBackbone", "HierarchicalSSM", "VisionSSM", "vilonghorn", "vilonghornv2", "vim"]
