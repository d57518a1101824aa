"""`--dry-run`: the updates, memory and time of a run, counted and measured before it starts."""

import itertools
from dataclasses import replace

import torch
from timm.layers import to_2tuple

from ..models.flops import count_flops
from .config import Config
from .device import pick_device
from .distributed import Distributed
from .loaders import build_loader, check_classes, open_data
from .train_state import StepCounter, TrainState, scale_rates

SECONDS = 5.0  # shortest duration of the speed measurement, after the warm-up


def dry_run(config: Config, processes: int | None = None, train_images: int | None = None) -> str:
    """Builds the model of a run and makes some updates on noise. Returns its cost as text; call it in every process.

    `processes` None: those of torchrun, or one for each GPU, or one on a CPU. `train_images`, with `model.num_classes`,
    is in place of the data; None: the data is read.
    """
    dist, device = Distributed(), pick_device(config.run.device)
    if processes is None:
        processes = max(dist.world_size, torch.cuda.device_count() if device.type == "cuda" else 1)
    dist.world_size = 1  # each process makes updates of its own
    images, size = train_images, config.data.batch_size
    classes = config.model.num_classes if config.task.labelled else 0
    if images is None or classes is None:
        try:
            sources = open_data(config)
            data = build_loader(config, "cpu", training=True, source=sources["train"])
            val = build_loader(config, "cpu", training=False, source=sources["val"], classes=data.class_names)
        except FileNotFoundError as error:
            hint = "a dry run without the data needs --train-images and --model.num_classes"
            raise FileNotFoundError(f"{error}; {hint}") from error
        check_classes(config.data.train, data.num_classes, data.class_names, config.data.val, val)
        images, classes = data.num_samples, data.num_classes
    steps = StepCounter(images // (size * processes), config.optimizer.accumulate, processes)
    if not steps.rounds:
        raise ValueError(f"{images} images do not fill a batch of {size} in each of {processes} processes")

    model = replace(config.model, weights=None, pretrained=False)  # without a download
    state = TrainState(replace(config, model=model), classes, device)
    state.setup(dist, steps.updates_per_epoch)
    speed, source = measure_speed(state)
    parameters = sum(p.numel() for p in state.model.parameters())
    gflops = count_flops(state.model, config.data.image_size) / 2e9  # multiply-adds, as in docs/models.md
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB at most" if device.type == "cuda" else ""
    scaled, schedule = scale_rates(config, size * steps.batches_per_update), config.schedule
    updates, epochs, used = steps.updates_per_epoch, schedule.epochs, steps.batches * size
    minutes = used * epochs / (speed * processes) / 60
    time = f"{60 * minutes:.0f} seconds" if minutes < 2 else f"{minutes:.0f} minutes"
    time = f"{minutes / 60:,.1f} hours" if minutes > 120 else time
    return f"""\
images     {images:,} an epoch, {images - used:,} of them unused: they do not fill a batch
updates    {size} images x {steps.accumulate} accumulated x {processes} processes = \
{size * steps.batches_per_update:,} images; {updates:,} an epoch, {updates * epochs:,} in {epochs} epochs
rate       {scaled.schedule.warmup_lr:.3g} to {scaled.optimizer.lr:.3g} in the first {schedule.warmup * updates:,.0f} \
updates, then {"half a cosine" if schedule.kind == "cosine" else schedule.kind} to {scaled.schedule.min_lr:.3g}
model      {parameters / 1e6:.2f} M parameters, {gflops:.2f} GFLOPs an image (multiply-adds){memory}
time       {time} at {speed:,.1f} images/s a process ({source}), \
without decoding, communication and evaluation"""


def measure_speed(state: TrainState) -> tuple[float, str]:
    """Images per second in updates on noise, and what was measured."""
    from torch.utils.benchmark import Timer  # its import warns where there is nvcc and no GPU

    data, device, threads = state.config.data, state.device, torch.get_num_threads()
    count = data.batch_size if device.type == "cuda" else min(8, data.batch_size)
    images = torch.randn(count, 3, *to_2tuple(data.image_size), device=device)
    targets = torch.randint(max(1, state.num_classes), (count,), device=device)
    if state.config.task.teacher_cache:  # each has the teacher's logits, too
        targets = torch.cat([targets[:, None], torch.randn(count, state.num_classes, device=device)], 1)
    batch = images, targets
    updates = itertools.count(1)

    def update() -> None:
        state.update(iter([batch]), [(0, 0, 0)], next(updates))

    state.model.train()
    timer = Timer("update()", globals={"update": update}, num_threads=threads)
    speed = count / timer.blocked_autorange(min_run_time=SECONDS).median
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this CPU with {threads} thread(s)"
    return speed, f"updates of {count} images of noise on {name}"
