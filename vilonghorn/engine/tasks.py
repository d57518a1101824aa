"""What a run learns: from a batch to the loss of its update."""

from abc import ABC, abstractmethod
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


class Task(ABC):
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

    def prepare(self, loader: Any, directory: Path, on_batch: Callable[[], None]) -> None:  # noqa: B027 (not required)
        """Called before the first epoch of a process, started or resumed.

        Args:
            loader: of the training data.
            directory: of the run.
            on_batch: called after each batch, equally often in every process; may raise to stop.
        """

    def backbone(self, model: nn.Module) -> nn.Module:
        """The part of the model whose weights a run saves for use; here all of it."""
        return model

    @abstractmethod
    def augment(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `loss` takes of a batch of the training data."""

    def inputs(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model takes of an augmented batch."""
        return (images,)

    @abstractmethod
    def compare(self, output: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of what the model returned, in float32, a scalar."""

    def loss(
        self,
        forward: Callable[..., torch.Tensor],
        images: torch.Tensor,
        targets: torch.Tensor,
        amp: torch.autocast,
    ) -> torch.Tensor:
        """The mean loss of an augmented batch, a scalar of float32."""
        with amp:
            output = forward(*self.inputs(images, targets))
        return self.compare(output.float(), images, targets)

    @abstractmethod
    def measure(
        self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, amp: torch.autocast
    ) -> torch.Tensor:
        """The sums of the scores over a held-out batch, (scores,)."""


class Classification(Task):
    """Learns the classes of images: mixup and cutmix, then cross-entropy, for all classes or for each."""

    scores = CLASS_SCORES
    measure = staticmethod(class_scores)

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

    def compare(self, output: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of logits (B, classes), a scalar."""
        return self.criterion(output, targets)
