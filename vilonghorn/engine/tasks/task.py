"""What a run learns: from a batch to the loss of its update, the held-out scores and the report."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import RunDirectory
from ..config import Config


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
        """Called before the first epoch of a process, started or resumed, with the loader of the training data.

        Calls `on_batch` after each batch, equally often in every process; it may raise to stop.
        """

    def backbone(self, model: nn.Module) -> nn.Module:
        """The part of the model whose weights a run saves for use; here all of it."""
        return model

    @abstractmethod
    def augment(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What `loss` takes of a batch of the training data."""

    @abstractmethod
    def loss(self, forward: Callable[..., Tensor], images: Tensor, targets: Tensor, amp: torch.autocast) -> Tensor:
        """The mean loss of an augmented batch, a scalar of float32. `forward` is the module of `wrap`."""

    @abstractmethod
    def measure(self, model: nn.Module, images: Tensor, targets: Tensor, amp: torch.autocast) -> Tensor:
        """The sums of the scores over a held-out batch, (scores,)."""

    @abstractmethod
    def report(self, model: nn.Module, loader: Any, run: RunDirectory, config: Config, result: dict[str, Any]) -> None:
        """Writes the report of a finished run on held-out data, with the result of `Trainer.fit`, in every process."""
