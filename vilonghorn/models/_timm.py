"""The private names of timm that this library imports, in one place."""

from timm.models._features import FeatureGetterNet, feature_take_indices
from timm.models._hub import generate_readme
from timm.models._input import update_model_input_size

__all__ = [
    "FeatureGetterNet",
    "feature_take_indices",
    "generate_readme",
    "update_model_input_size",
]
