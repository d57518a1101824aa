"""Every name that timm keeps private and the models need, so that a change in timm is met in one place."""

from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size

__all__ = ["feature_take_indices", "update_model_input_size"]
