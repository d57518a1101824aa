"""What a run learns, as the section `task` of its configuration says."""

import torch
from torch import nn

from ..config import ClassNames, Config
from ..model_setup import check_model, model_from_config
from .classification import Classification
from .distillation import Distillation
from .masked_images import MaskedImageModel, MaskedImages, masked_model_from_config
from .task import Task

__all__ = ["Classification", "Distillation", "MaskedImageModel", "MaskedImages", "Task", "build_task"]


def build_task(
    config: Config, num_classes: int, device: torch.device, class_names: ClassNames = None
) -> tuple[nn.Module, Task]:
    """The model of a run with its initial weights, on a device, and the task that trains it.

    `num_classes` and `class_names` are those of the data. Raises ValueError if the model, the teacher or one of their
    options does not fit the data, and the errors of `model_from_config`.
    """
    if config.task.kind == "masked":
        masked = masked_model_from_config(config, device)
        return masked, MaskedImages(config.task.mask_ratio, masked.unit, config.task.mask_normalize)
    model = model_from_config(config, num_classes).to(device)
    check_model(config, model, num_classes, device)
    if config.task.teacher:
        return model, Distillation(config, num_classes, device, class_names)
    return model, Classification(config, num_classes)
