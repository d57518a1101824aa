"""`--dry-run`: the updates, memory and time of a run, counted and measured before it starts."""

import itertools
from dataclasses import replace

import torch
from torch import nn

from .build import build_loader, pick_device, scale_rates
from .config import Config
from .distributed import Distributed
from .train_state import StepCounter, TrainState

SECONDS = 5.0  # shortest duration of the speed measurement, after the warm-up


def dry_run(
    config: Config,
    processes: int | None = None,
    train_images: int | None = None,
    images_per_second: float | None = None,
) -> str:
    """Builds the model of a run and makes some updates on noise. Returns its cost as text, with each number's source.

    Args:
        config: the run.
        processes: number of processes; None: those of torchrun, or one for each GPU, or one on a CPU.
        train_images: number of training images, with `model.num_classes` in place of the data; None: the data is read.
        images_per_second: speed of one process; None: the measured speed.

    Raises:
        FileNotFoundError: there is neither the data nor `train_images`.
        ValueError: there are too few images, or the number of classes is unknown.
    """
    dist, device = Distributed(), pick_device(config.run.device)
    if processes is None:
        processes = max(dist.world_size, torch.cuda.device_count() if device.type == "cuda" else 1)
    dist.world_size = 1  # measured here, without the others
    images, classes, size = train_images, config.model.num_classes, config.data.batch_size
    if images is None:
        try:
            data = build_loader(replace(config, data=replace(config.data, workers=0)), "cpu", training=True)
        except FileNotFoundError as error:
            hint = "a dry run without the data needs --train-images and --model.num_classes"
            raise FileNotFoundError(f"{error}; {hint}") from error
        images, classes = data.num_samples, data.num_classes
    elif classes is None:
        raise ValueError("--train-images does not give the number of classes: give --model.num_classes, too")
    steps = StepCounter(images // (size * processes), config.optimizer.accumulate, processes)
    if not steps.rounds:
        raise ValueError(f"{images} images do not fill a batch of {size} in each of {processes} processes")

    state = TrainState(config, classes, device)
    state.setup(dist, steps.updates_per_epoch)
    each = activation_bytes(state)
    speed, peak, source = measure_speed(state)
    if images_per_second:
        speed, source = images_per_second, "as given by --images-per-second"
    weights = sum(p.nbytes for p in state.model.parameters())
    moments = (value for values in state.optimizer.state.values() for value in values.values())
    optimizer = sum(value.nbytes for value in moments if isinstance(value, torch.Tensor))
    memory = dict(weights=weights, gradients=weights, optimizer=optimizer, average=weights if state.ema else 0)
    parts = ", ".join(f"{name} {_bytes(count)}" for name, count in memory.items())
    parameters = sum(p.numel() for p in state.model.parameters())
    highest = f"\n           {_bytes(peak)} at most in an update, in total (measured)" if peak else ""
    scaled, schedule = scale_rates(config, size * steps.batches_per_update), config.schedule
    updates, epochs, used = steps.updates_per_epoch, schedule.epochs, steps.batches * size
    seconds = used * epochs / (speed * processes)
    duration = f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"
    return f"""\
images     {images:,} an epoch, {images - used:,} of them unused: they do not fill a batch
updates    {size} images x {steps.accumulate} accumulated x {processes} processes = \
{size * steps.batches_per_update:,} images; {updates:,} an epoch, {updates * epochs:,} in {epochs} epochs
rate       {scaled.schedule.warmup_lr:.3g} to {scaled.optimizer.lr:.3g} in the first {schedule.warmup * updates:,.0f} \
updates, then half a cosine to {scaled.schedule.min_lr:.3g}
memory     {_bytes(sum(memory.values()))} in each process for {parameters / 1e6:.2f} M parameters: {parts} (counted)
           {_bytes(each * size)} for the activations of {size} images, {_bytes(each)} each (what autograd saves here, \
counted; kernels and communication need more){highest}
time       {duration} at {speed:,.1f} images/s a process ({source}), if \
decoding, communication and evaluation cost nothing"""


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def saved_bytes(model: nn.Module, images: torch.Tensor, *, with_images: bool = True) -> int:
    """Bytes that autograd saves for backward in a forward pass: without parameters, with or without the images."""
    excluded = [*model.parameters(), *([] if with_images else [images])]
    known = {tensor.untyped_storage()._cdata for tensor in excluded}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # holding it keeps its address unique
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(images)  # noqa: F841  (keeps the graph alive)
    return sum(storage.nbytes() for storage in saved.values())


def activation_bytes(state: TrainState) -> float:
    """Bytes that autograd saves per image in training: half the difference between four images and two."""
    size, device = state.config.data.image_size, state.device
    with state.amp:
        two, four = (saved_bytes(state.model.train(), torch.randn(n, 3, size, size, device=device)) for n in (2, 4))
    return (four - two) / 2


def measure_speed(state: TrainState) -> tuple[float, int | None, str]:
    """Images per second, peak memory of the GPU in bytes (None on a CPU), and what was measured."""
    from torch.utils.benchmark import Timer  # its import warns where there is nvcc and no GPU

    data, device, threads = state.config.data, state.device, torch.get_num_threads()
    on_gpu = device.type == "cuda"
    count = data.batch_size if on_gpu else min(8, data.batch_size)
    images = torch.randn(count, 3, data.image_size, data.image_size, device=device)
    batch = images, torch.randint(state.num_classes, (count,), device=device)
    updates = itertools.count(1)

    def update() -> None:
        state.backward(iter([batch]), [(0, 0, 0)])
        state.step(next(updates), skip=False)

    state.model.train()
    timer = Timer("update()", globals={"update": update}, num_threads=threads)
    speed = count / timer.blocked_autorange(min_run_time=SECONDS).median
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    name = torch.cuda.get_device_name(device) if on_gpu else f"this CPU with {threads} thread(s)"
    return speed, peak, f"measured here: updates of {count} images of noise on {name}"
