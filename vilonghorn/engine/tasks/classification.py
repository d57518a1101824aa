"""Learning the classes of images: mixup and cutmix, then cross-entropy, for all classes or for each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

from ..checkpoint import RunDirectory
from ..config import Config
from ..device import autocast
from ..distributed import Distributed
from ..evaluate import CLASS_SCORES, class_scores, predict_all
from ..report import write_report
from .task import Task


class Classification(Task):
    """Learns the classes of images."""

    scores = CLASS_SCORES
    measure = staticmethod(class_scores)

    def __init__(self, config: Config, num_classes: int) -> None:
        recipe = config.task
        options = {"prob": recipe.mix_prob, "switch_prob": recipe.switch_prob, "num_classes": num_classes}
        mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, **options)
        self.mixup = mixup if recipe.mixup or recipe.cutmix else None
        self.set_criterion(recipe.loss, 0.0 if self.mixup else recipe.label_smoothing)  # Mixup smooths its targets

    def set_criterion(self, name: str, smoothing: float) -> None:
        """Sets the loss of logits (B, classes) and targets (B,) or (B, classes)."""
        cross_entropy = partial(F.cross_entropy, label_smoothing=smoothing)
        self.criterion = BinaryCrossEntropy(smoothing) if name == "binary_cross_entropy" else cross_entropy

    def augment(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mixes the images of a batch. Targets (B,) become (B, classes)."""
        return self.mixup(images, targets) if self.mixup else (images, targets)

    def loss(self, forward: Callable[..., Tensor], images: Tensor, targets: Tensor, amp: torch.autocast) -> Tensor:
        """The mean loss of an augmented batch, a scalar of float32."""
        with amp:
            output = forward(images)
        return self.output_loss(output.float(), images, targets)

    def output_loss(self, output: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (B, classes), a scalar."""
        return self.criterion(output, targets)

    def report(self, model: nn.Module, loader: Any, run: RunDirectory, config: Config, result: dict[str, Any]) -> None:
        """Writes the report with predictions, mistakes and confusions."""
        dist = Distributed()
        amp = autocast(config.run.amp, next(model.parameters()).device)
        found = predict_all(model, loader, amp, dist)
        if dist.is_main:
            write_report(run, config, found, result)
