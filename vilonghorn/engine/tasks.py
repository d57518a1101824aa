"""What a run learns: from a batch to the loss of its update."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy
from torch import nn

from .config import Config
from .evaluate import CLASS_SCORES, class_scores


class Task:
    """What a run learns.

    Attributes:
        scores: names of the held-out scores that `measure` sums over a batch.
        extra: what is trained beside the model, and saved with it; None: nothing.
        digest: of what else the loss depends on, which a resumed run must find unchanged; None: nothing.
    """

    scores: tuple[str, ...]
    extra: nn.Module | None = None
    digest: str | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that is trained: the model, or one around it whose one output `loss` reads."""
        return model

    def prepare(self, loader: Any, directory: Path, on_batch: Callable[[], None]) -> None:
        """Called before the first epoch of a process, started or resumed.

        Args:
            loader: of the training data.
            directory: of the run.
            on_batch: called after each batch, equally often in every process; may raise to stop.
        """

    def augment(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loss` takes of a batch of the training data."""
        raise NotImplementedError

    def loss(
        self,
        forward: Callable[..., torch.Tensor],
        images: torch.Tensor,
        targets: torch.Tensor,
        amp: torch.autocast,
    ) -> torch.Tensor:
        """The mean loss of a batch, a scalar of float32."""
        raise NotImplementedError

    def measure(
        self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, amp: torch.autocast
    ) -> torch.Tensor:
        """The sums of the scores over a held-out batch, (scores,)."""
        raise NotImplementedError


class Classification(Task):
    """Learns the classes of images: mixup and cutmix, then cross-entropy, for all classes or for each."""

    scores, measure = CLASS_SCORES, staticmethod(class_scores)

    def __init__(self, config: Config, num_classes: int) -> None:
        recipe = config.augmentation
        options = {"prob": recipe.mix_prob, "switch_prob": recipe.switch_prob, "num_classes": num_classes}
        mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, **options)
        self.mixup = mixup if recipe.mixup or recipe.cutmix else None
        self.set_criterion(recipe.loss, 0.0 if self.mixup else recipe.label_smoothing)  # Mixup smooths its targets

    def set_criterion(self, name: str, smoothing: float) -> None:
        """Sets the loss of logits (B, classes) and targets (B,) or (B, classes)."""
        cross_entropy = partial(F.cross_entropy, label_smoothing=smoothing)
        self.criterion = BinaryCrossEntropy(smoothing) if name == "binary_cross_entropy" else cross_entropy

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
        return self.criterion(logits.float(), targets)
