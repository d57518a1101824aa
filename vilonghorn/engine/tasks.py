"""What a run learns: from a batch to the loss of its update."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.data import Mixup

from .config import Config


class Classification:
    """Learns the classes of images: mixup and cutmix, then cross-entropy."""

    def __init__(self, config: Config, num_classes: int) -> None:
        recipe = config.augmentation
        options = {"prob": recipe.mix_prob, "switch_prob": recipe.switch_prob, "num_classes": num_classes}
        mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, **options)
        self.mixup = mixup if recipe.mixup or recipe.cutmix else None
        self.smoothing = 0.0 if self.mixup else recipe.label_smoothing  # Mixup smooths its targets

    def augment(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes the images of a batch. Targets (B,) become (B, classes)."""
        return self.mixup(images, targets) if self.mixup else (images, targets)

    def loss(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        images: torch.Tensor,
        targets: torch.Tensor,
        amp: torch.autocast,
    ) -> torch.Tensor:
        """The mean loss of a batch, a scalar of float32."""
        with amp:
            logits = forward(images)
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.smoothing)
