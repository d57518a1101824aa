"""The typed configuration of a run: its keys, their meaning, defaults and ranges.

What else makes one valid is in checks.py; reading it from files and options in options.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def within(interval: str, default: Any) -> Any:
    """A field whose number, or each of whose numbers, must lie in `interval`, such as "(0, 1]"; null is free."""
    return field(default=default, metadata={"interval": interval})


@dataclass
class DataConfig:
    """What is trained on.

    Args:
        train: a .beton file or an image folder (one folder a class) to train on
        val: the same, held out
        batch_size: images a batch of one process
        image_size: height and width that the model sees, in pixels
        mean: mean of each channel, subtracted from images in [0, 1]
        std: standard deviation of each channel, divided by
        crop_pct: share of the held-out image's side that its center crop keeps
        interpolation: of that crop to image_size: bicubic, as in the papers, or area, which is faster
        workers: threads or processes that decode images; null: chosen by the loader
    """

    train: str = "data/imagenet/train.beton"
    val: str = "data/imagenet/val.beton"
    batch_size: int = within("[1, inf)", 128)
    image_size: int = within("[1, inf)", 224)
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = within("(0, inf)", IMAGENET_DEFAULT_STD)
    crop_pct: float = within("(0, 1]", 0.875)
    interpolation: Literal["bicubic", "area"] = "bicubic"
    workers: int | None = within("[0, inf)", None)


@dataclass
class ModelConfig:
    """What is trained.

    Args:
        name: any model that timm knows, ours included
        num_classes: classes of the head; null: as many as the data has
        drop_path: stochastic depth rate of the last block
        pretrained: start from the published weights
        weights: start from these: directory of a run (its best), or a file of weights; positions, patches and a head
            for other classes are fitted as timm does
        kwargs: more keywords of the model, such as {img_size: 32, patch_size: 4}
    """

    name: str = "vilonghorn_tiny"
    num_classes: int | None = within("[1, inf)", None)
    drop_path: float = within("[0, 1)", 0.0)
    pretrained: bool = False
    weights: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """How weights follow gradients.

    Args:
        name: any optimizer that timm knows
        lr: peak learning rate, for updates of lr_batch images
        lr_batch: images an update that lr, warmup_lr and min_lr are meant for: updates of batch_size * accumulate *
            processes images scale them in proportion; null: taken as they are
        weight_decay: decay of matrices; vectors and the model's no_weight_decay() names take none
        betas: momentum of the gradient and of its square
        eps: floor of the denominator
        clip_grad: largest norm of the gradient; null: not clipped
        accumulate: batches whose gradients are averaged into one update
        layer_decay: factor of the learning rate from one layer to the one before it, for fine-tuning; null: none
    """

    name: str = "adamw"
    lr: float = within("(0, inf)", 1e-3)
    lr_batch: int | None = within("[1, inf)", 1024)
    weight_decay: float = within("[0, inf)", 0.1)
    betas: tuple[float, float] = within("[0, 1)", (0.9, 0.999))
    eps: float = within("(0, inf)", 1e-8)
    clip_grad: float | None = within("(0, inf)", 1.0)
    accumulate: int = within("[1, inf)", 1)
    layer_decay: float | None = within("(0, 1]", None)


@dataclass
class ScheduleConfig:
    """How the learning rate moves: linear warm-up, then half a cosine, stepped every update.

    Args:
        epochs: passes over the training data
        warmup_epochs: epochs of warm-up, counted in epochs
        warmup_lr: learning rate of the first update
        min_lr: learning rate at the end; equal to lr, the rate is constant
    """

    epochs: int = within("[1, inf)", 300)
    warmup_epochs: float = within("[0, inf)", 5.0)
    warmup_lr: float = within("[0, inf)", 1e-6)
    min_lr: float = within("[0, inf)", 1e-5)


@dataclass
class AugmentationConfig:
    """How the training data is varied.

    Args:
        scale: smallest and largest area of the random crop, as a share of the image
        ratio: smallest and largest aspect ratio of the random crop
        interpolation: of the random crop to image_size: area or bicubic; null: area of a .beton, bicubic of a folder
        hflip: probability of a horizontal flip
        auto_augment: timm's name of a policy such as rand-m9-mstd0.5-inc1, or 3a, the 3-Augment of DeiT III; null: none
        color_jitter: strength of brightness, contrast and saturation; a policy other than 3a takes its place
        erase: probability that a rectangle is replaced by noise (random erasing, pixel mode)
        repeats: repeated augmentation: times that an epoch shows an image, of which it then has fewer
        mixup: alpha of mixup; 0: none
        cutmix: alpha of cutmix; 0: none
        mix_prob: probability that a batch is mixed at all
        switch_prob: probability of cutmix where both are on
        label_smoothing: probability spread over all classes
        start_size: height and width of the first epochs' images, from where they grow; null: image_size throughout
        ramp: epochs between which they grow, counted from 0, in steps of 32 pixels
    """

    scale: tuple[float, float] = within("(0, 1]", (0.08, 1.0))
    ratio: tuple[float, float] = within("(0, inf)", (3 / 4, 4 / 3))
    interpolation: Literal["area", "bicubic"] | None = None
    hflip: float = within("[0, 1]", 0.5)
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = within("[0, 1]", 0.3)
    erase: float = within("[0, 1]", 0.25)
    repeats: int = within("[1, 65536]", 3)
    mixup: float = within("[0, inf)", 0.8)
    cutmix: float = within("[0, inf)", 1.0)
    mix_prob: float = within("[0, 1]", 1.0)
    switch_prob: float = within("[0, 1]", 0.5)
    label_smoothing: float = within("[0, 1)", 0.1)
    start_size: int | None = within("[1, inf)", None)
    ramp: tuple[int, int] = within("[0, inf)", (0, 0))


@dataclass
class EmaConfig:
    """The moving average of the weights, which is what counts where it is on.

    Args:
        decay: share of the old average that an update keeps; 0: no average
        warmup: grow the decay from 0, for runs of few updates
    """

    decay: float = within("[0, 1)", 0.99996)
    warmup: bool = True


@dataclass
class RunConfig:
    """Where and how the run goes.

    Args:
        dir: directory that receives configuration, log, checkpoints and pictures
        seed: seed of the weights, the order, and every augmentation
        device: auto, cpu, cuda, cuda:1, ...
        amp: autocast to bf16 or, with a scaled loss, fp16; auto: bf16 on CUDA devices that have it
        compile: compile the model with torch.compile; null: on CUDA devices
        log_updates: updates between lines of the log
        checkpoint_updates: updates between checkpoints inside an epoch; null: by time alone
        checkpoint_seconds: seconds between checkpoints inside an epoch; null: by updates alone
        max_skipped: updates in a row that may be skipped for a loss or gradient that is not finite
        tensorboard: write events for TensorBoard, too
    """

    dir: str = "runs/default"
    seed: int = within("[0, inf)", 0)
    device: str = "auto"
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool | None = None
    log_updates: int = within("[1, inf)", 50)
    checkpoint_updates: int | None = within("[1, inf)", None)
    checkpoint_seconds: float | None = within("(0, inf)", 600.0)
    max_skipped: int = within("[0, inf)", 10)
    tensorboard: bool = True


@dataclass
class Config:
    """Everything that decides a run; its defaults follow Vim-Ti's recipe on ImageNet-1k.

    They differ from it in the clipped gradient, the warm-up of the average, and where a .beton is trained on, in crops
    that are averaged and not interpolated.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain, nested, and equal to what YAML or JSON reads back."""
        return json.loads(json.dumps(asdict(self)))


SECTIONS = {section.name: section.default_factory for section in fields(Config)}
FIELDS = {f"{name}.{key.name}": key for name, section in SECTIONS.items() for key in fields(section)}
INTERVALS = {key: field.metadata["interval"] for key, field in FIELDS.items() if field.metadata}
