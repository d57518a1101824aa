"""A run of a second for the tests of the engine: synthetic data, a model of two blocks, and ways to kill it."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.layers import to_2tuple

from vilonghorn.engine import Config, Trainer, build_parser, parse

OPTIONS = [
    "--data.batch_size=8",
    "--data.image_size=16",
    "--model.name=vit_tiny_patch16_224",
    "--model.kwargs={patch_size: 4, depth: 2, embed_dim: 32, num_heads: 2}",
    "--model.drop_path=0.3",
    "--optimizer.lr=2e-3",
    "--optimizer.lr_batch=null",
    "--schedule.epochs=3",
    "--schedule.warmup_epochs=1",
    "--task.cutmix=0.5",
    "--augmentation.repeats=1",
    "--ema.decay=0.9",
    "--run.device=cpu",
    "--run.log_updates=2",
    "--run.tensorboard=false",
]


class ToyLoader:
    """Noisy stripes of four widths, with the contract of `vilonghorn.data.create_loader`.

    Like torch's DataLoader it draws from the global generator, which must not touch what a run computes.
    """

    class_names = ["a", "b", "c", "d"]
    num_classes = 4
    fingerprint = "stripes"

    def __init__(
        self, num_samples: int = 48, batch_size: int = 8, training: bool = True, size: Any = 16, dist: Any = None
    ) -> None:
        self.num_samples, self.batch_size, self.training, self.size = num_samples, batch_size, training, to_2tuple(size)
        self.rank, self.world_size = (dist.rank, dist.world_size) if dist else (0, 1)

    def __len__(self) -> int:
        return -(-len(range(self.rank, self.num_samples, self.world_size)) // self.batch_size)

    def image(self, epoch: int, index: int) -> np.ndarray:
        """(3, H, W) of one sample; another one in every epoch of training."""
        rng = np.random.default_rng([epoch if self.training else 10**6, index])
        stripes = np.sin(np.arange(self.size[1]) * (0.4 + 0.5 * (index % 4)) + rng.uniform(0, 6))
        return stripes[None, None, :] + rng.normal(0, 0.3, (3, *self.size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches `start`.. of an epoch."""
        torch.rand(7), np.random.rand()
        order = np.random.default_rng(epoch).permutation(self.num_samples) if self.training else range(self.num_samples)
        order = order[self.rank :: self.world_size]
        for batch in range(start, len(self)):
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            images = np.stack([self.image(epoch, int(i)) for i in indices]).astype(np.float32)
            yield torch.from_numpy(images), torch.tensor([int(i) % 4 for i in indices])


class Recited:
    """Two batches of unequal size whose images are the logits themselves."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor, split: int) -> None:
        self.parts = [(logits[:split], targets[:split]), (logits[split:], targets[split:])]
        self.batch_size = split

    def __len__(self) -> int:
        return len(self.parts)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from self.parts


def toy_config(directory: Any, *options: str) -> Config:
    """The configuration of a toy run; `options` override it."""
    return parse(build_parser(), [*OPTIONS, f"--run.dir={directory}", *options])[0]


def toy_trainer(directory: Any, *options: str, **arguments: Any) -> Trainer:
    """A trainer of toy data; `arguments` go to `Trainer`."""
    loaders = {"train": ToyLoader(), "val": ToyLoader(32, training=False)}
    return Trainer(toy_config(directory, *options), **{**loaders, **arguments})


class Signalling(ToyLoader):
    """Sends its own process a signal when a batch of an epoch is asked for."""

    def __init__(self, signum: int, epoch: int, batch: int) -> None:
        super().__init__()
        self.moment = signum, epoch, batch

    def epoch(self, epoch, start=0):
        for batch, item in enumerate(super().epoch(epoch, start), start):
            if self.moment[1:] == (epoch, batch):
                os.kill(os.getpid(), self.moment[0])
            yield item


def kill_at(directory: Path, epoch: int, batch: int, options: tuple[str, ...], resume: bool) -> None:
    """In a process of its own: trains until SIGKILL, at a batch."""
    torch.set_num_threads(1)
    toy_trainer(directory, *options, train=Signalling(signal.SIGKILL, epoch, batch), resume=resume).fit()


def kill_between_write_and_replace(directory: Path, file: str, nth: int, options: tuple[str, ...]) -> None:
    """In a process of its own: trains until SIGKILL, when the n-th new version of a file is about to take its place."""
    torch.set_num_threads(1)
    replace, left = os.replace, [nth]

    def die(source, target):
        left[0] -= Path(target).name == file
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = die
    toy_trainer(directory, *options).fit()


def dies(target: Callable, *arguments: Any) -> None:
    """Runs a function of this module in a new process, which has to die of SIGKILL."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vilonghorn.engine"])  # imported once for all of these processes
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
