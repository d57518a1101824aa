"""What a run would take, before it is started: its updates, the memory and the time of each of its processes.

Nothing is looked up in tables of devices: bytes and operations are counted, and the speed is measured here or given.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from . import build
from .config import Config
from .distributed import Ranks
from .progress import Pace
from .train_state import Learner

SECONDS = 5.0  # of updates to measure a speed by, after two that are not counted


@dataclass
class Estimate:
    """What a run would take; see `describe` for how each figure comes about.

    Args:
        images: of an epoch, before it is divided.
        processes: that train together.
        pace: how they divide an epoch.
        rates: the configuration with learning rates scaled to the global batch.
        parameters: of the model.
        bytes_of: of "weights", "gradients", "optimizer" and "average", in each process.
        activation_bytes: kept for the backward pass, of an image.
        peak_bytes: most that a GPU held in an update of a whole batch; None on a CPU.
        flops: of one image's forward pass; a multiplication and an addition are two.
        uncounted: operators outside of torch whose operations are not among those.
        speed: images a second of one process.
        speed_rests_on: in words.
    """

    images: int
    processes: int
    pace: Pace
    rates: Config
    parameters: int
    bytes_of: dict[str, int]
    activation_bytes: float
    peak_bytes: int | None
    flops: float
    uncounted: list[str]
    speed: float
    speed_rests_on: str


def estimate(
    config: Config, *, images: int, num_classes: int, processes: int = 8, images_per_second: float | None = None
) -> Estimate:
    """Counts and measures what a run would take; the model is built here, and makes some updates from noise.

    Args:
        config: the run.
        images: of the training data.
        num_classes: of the training data.
        processes: that would train together.
        images_per_second: of one process; None: measured here.

    Raises:
        ValueError: the model does not suit the data, or the images do not fill a batch of each process.
    """
    size, optimizer = config.data.batch_size, config.optimizer
    pace = Pace(images // (size * processes), optimizer.accumulate, processes)
    if not pace.rounds:
        raise ValueError(f"{images} images do not fill a batch of {size} in each of {processes} processes")
    learner = Learner(config, num_classes, build.pick_device(config.run.device))
    learner.start(Ranks(), pace.updates_per_epoch)
    # On a CPU and on a GPU alike, what is kept for each image is what four keep more than two.
    two, four = (kept_for_backward(learner, count) for count in (2, 4))
    with Uncounted() as uncounted, FlopCounterMode(display=False) as counter, torch.no_grad():
        learner.model.eval()(noise(learner, 2)[0])
    measured, peak, batch = measure(learner)
    rests_on = f"measured here: updates of {batch} images of noise on {device_name(learner.device)}"
    weights = sum(p.numel() * p.element_size() for p in learner.model.parameters())
    states = (value for state in learner.optimizer.state.values() for value in state.values())
    moments = sum(value.numel() * value.element_size() for value in states if isinstance(value, torch.Tensor))
    average = weights if learner.ema else 0
    return Estimate(
        images=images,
        processes=processes,
        pace=pace,
        rates=build.scale_rates(config, size * pace.batches_per_update),
        parameters=sum(p.numel() for p in learner.model.parameters()),
        bytes_of={"weights": weights, "gradients": weights, "optimizer": moments, "average": average},
        activation_bytes=(four - two) / 2,
        peak_bytes=peak,
        flops=counter.get_total_flops() / 2,
        uncounted=sorted(uncounted.names),
        speed=images_per_second or measured,
        speed_rests_on="as given by --images-per-second" if images_per_second else rests_on,
    )


class Uncounted(TorchDispatchMode):
    """While entered, notes the operators that do not come with torch and have no formula for `FlopCounterMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prims", "prim") and func._overloadpacket not in flop_registry:
            self.names.add(func._overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


def noise(learner: Learner, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, H, W) and targets (count,) of no meaning."""
    size = learner.config.data.image_size
    images = torch.randn(count, 3, size, size, device=learner.device)
    return images, torch.randint(learner.num_classes, (count,), device=learner.device)


def kept_for_backward(learner: Learner, count: int) -> int:
    """Bytes that autograd keeps of a forward pass over `count` images, parameters aside, every storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor, so that nothing else gets its address
        return tensor

    learner.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), learner.amp:
        scores = learner.model(noise(learner, count)[0])
    del scores
    return sum(size for size, _ in seen.values())


def measure(learner: Learner) -> tuple[float, int | None, int]:
    """Makes updates of the configured batch, of 8 images at most on a CPU, for some seconds.

    Returns:
        Images a second; the most bytes that a GPU held, or None; the images of an update.
    """
    on_gpu = learner.device.type == "cuda"
    count = learner.config.data.batch_size if on_gpu else min(8, learner.config.data.batch_size)
    batch = noise(learner, count)
    learner.model.train()
    for update in itertools.count(1):
        learner.gradient(iter([batch]), [(0, 0, update)])  # ends with a transfer that waits for the device
        learner.step(update, skip=False)
        if update == 2:
            start = time.monotonic()
        if update > 2 and time.monotonic() - start > SECONDS:
            speed = (update - 2) * count / (time.monotonic() - start)
            return speed, torch.cuda.max_memory_allocated(learner.device) if on_gpu else None, count


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this machine's CPU with {torch.get_num_threads()} thread(s)"


def describe(run: Estimate) -> str:
    """The estimate as text: every figure with what it rests on."""
    rates, pace = run.rates, run.pace
    size, accumulate, epochs = rates.data.batch_size, rates.optimizer.accumulate, rates.schedule.epochs
    updates, warmup = pace.updates_per_epoch, rates.schedule.warmup_epochs
    used = pace.batches * size
    activations = run.activation_bytes * size
    fixed = sum(run.bytes_of.values())
    parts = ", ".join(f"{name} {binary(count)}" for name, count in run.bytes_of.items())
    total = 3 * run.flops * used * epochs
    hours = used * epochs / (run.speed * run.processes) / 3600
    lines = [
        f"images     {run.images:,} an epoch, {run.images - used:,} of them left over by whole batches",
        f"updates    {size} images x {accumulate} accumulated x {run.processes} processes = "
        f"{size * pace.batches_per_update:,} images; {updates:,} an epoch, {updates * epochs:,} in {epochs} epochs",
        f"rate       {rates.schedule.warmup_lr:.3g} to {rates.optimizer.lr:.3g} in the first {warmup * updates:,.0f} "
        f"updates, then half a cosine to {rates.schedule.min_lr:.3g}",
        f"memory     {binary(fixed)} in each process for {run.parameters / 1e6:.2f} M parameters: {parts} (counted)",
        f"           {binary(activations)} for the activations of {size} images, {binary(run.activation_bytes)} each "
        "(what autograd keeps here, counted; buffers of kernels and communication come on top)",
    ]
    if run.peak_bytes is not None:
        lines.append(f"           {binary(run.peak_bytes)} at most in an update, all together (measured on this GPU)")
    without = f" without {', '.join(run.uncounted)}" if run.uncounted else ""
    lines += [
        f"work       {run.flops / 1e9:.2f} GFLOPs an image forward (counted{without}), 3 times that in training: "
        f"{total / 1e18:.3g} exaFLOPs in all",
        f"time       {hours:,.1f} hours at {run.speed:,.1f} images/s a process ({run.speed_rests_on}), if decoding, "
        "communication and evaluation cost nothing",
    ]
    return "\n".join(lines)


def binary(count: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def dry_run(config: Config, options: Any) -> str:
    """What `--dry-run` prints.

    Args:
        config: the run.
        options: `processes`, `train_images` and `images_per_second` of the command line; each may be None.

    Raises:
        FileNotFoundError: the data are not here, and nothing says how many images they have.
    """
    if options.train_images is None:
        alone = replace(config, data=replace(config.data, workers=0))
        try:
            data = build.train_loader(alone, torch.device("cpu"))
        except FileNotFoundError as error:
            hint = "a dry run without the data needs --train-images and --model.num_classes"
            raise FileNotFoundError(f"{error}; {hint}") from error
        images, classes = data.num_samples, data.num_classes
    else:
        images, classes = options.train_images, config.model.num_classes
        if classes is None:
            raise ValueError("--train-images leaves the number of classes open: give --model.num_classes, too")
    found = estimate(
        config,
        images=images,
        num_classes=classes,
        processes=options.processes or 8,
        images_per_second=options.images_per_second,
    )
    return describe(found)
