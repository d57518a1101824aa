"""Every name that timm keeps private and we need, so that a change in timm is met in one place."""

from timm.models._features import feature_take_indices
from timm.models._input import get_model_input_config, update_model_input_size

__all__ = ["feature_take_indices", "get_model_input_config", "update_model_input_size"]
