"""The typed configuration of a run: its keys, their meaning, defaults, types and ranges, and checks across keys."""

import difflib
import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from os.path import expanduser
from typing import Any, Literal

import timm
from timm.layers import to_2tuple

from .. import models  # noqa: F401  (registers our models with timm)
from ..data.image_file import printable
from ..data.loaders.config import ImageConfig, TransformConfig, check_intervals, within
from ..models.weights_file import one_line

ClassNames = Sequence[str] | None  # by label; None: unknown


@dataclass
class DataConfig(ImageConfig):
    """The data of a run: files, batches and preprocessing. `ImageConfig` has the other keys.

    Args:
        train: a .beton file or an image folder (one folder per class) to train on
        val: the same to evaluate on
        val_split: without data.val, the part of each class of the image folder data.train that is held out for it,
            chosen at random by run.seed and the content of the files
        skip_unreadable: leave out the images of a folder that cannot be read, and list them; false: they are an error
    """

    train: str | None = None
    val: str | None = None
    val_split: float | None = within("(0, 1)", None)
    skip_unreadable: bool = False

    @property
    def held_out(self) -> str | None:
        """Where held-out images are: `val`, or `train` of which a part is held out."""
        return self.val or self.train


@dataclass
class ModelConfig:
    """The model.

    Args:
        name: name of any timm model, ours included
        num_classes: number of classes; null: as many as the data has
        drop_path: stochastic depth rate of the last block; null: the default of the model, 0 for ours
        pretrained: start from the published weights
        weights: start from these weights: directory of a run (its best), a file, or hf:NAME, the published weights of a
            model of timm or of a repository of the Hub; positions, patch embedding and head are fitted to the model as
            timm does; auto: the weights of this package or those downloaded before, else random ones
        kwargs: more arguments of the model, such as {img_size: 32, patch_size: 4}
    """

    name: str = "vilonghorn_tiny"
    num_classes: int | None = within("[1, inf)", None)
    drop_path: float | None = within("[0, 1)", None)
    pretrained: bool = False
    weights: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """The optimizer.

    Args:
        name: name of any timm optimizer
        lr: peak learning rate, for updates of lr_batch images
        lr_batch: images per update for which lr, warmup_lr and min_lr are given; they are scaled in proportion to
            batch_size * accumulate * processes; null: not scaled
        weight_decay: weight decay of matrices; vectors and the model's no_weight_decay() parameters have none
        betas: decay rates of the first and second moment
        eps: added to the denominator
        clip_grad: maximum norm of the gradient; null: not clipped
        accumulate: batches whose gradients are averaged into one update
        layer_decay: factor of the learning rate from one layer to the one before it, for fine-tuning; null: none
        layer_decay_min_scale: smallest factor that layer_decay gives a layer
        kwargs: more arguments of the optimizer, such as {momentum: 0.95}
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
    layer_decay_min_scale: float = within("[0, 1]", 0.0)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScheduleConfig:
    """The learning rate schedule: linear warm-up, then half a cosine or a constant, stepped at every update.

    Args:
        kind: cosine, or wsd (warmup-stable-decay): lr up to the last fifth after warm-up, then a decay by 1 - sqrt
        epochs: passes over the training data
        warmup_epochs: epochs of warm-up, included in epochs; null: 5, or a fifth of epochs if that is shorter
        warmup_lr: learning rate of the first update
        min_lr: learning rate at the end; if equal to lr, the rate is constant
        patience: stop after this many epochs in a row without a better held-out result (top-1, then the loss); the
            rate does not fall faster for it; null: train all epochs
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    epochs: int = within("[1, 1000000]", 300)
    warmup_epochs: float | None = within("[0, inf)", None)
    warmup_lr: float = within("[0, inf)", 1e-6)
    min_lr: float = within("[0, inf)", 1e-5)
    patience: int | None = within("[1, inf)", None)

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, where `warmup_epochs` may be None."""
        return min(5.0, self.epochs / 5) if self.warmup_epochs is None else self.warmup_epochs


@dataclass
class TaskConfig:
    """What a run learns. Keys of the other kind have no effect.

    Args:
        kind: classification: the classes of the images; masked: to reconstruct masked squares of images without labels
        loss: cross_entropy (of all classes together) or binary_cross_entropy (of each class, mean over the classes)
        label_smoothing: probability spread over all classes
        mixup: alpha of mixup; 0: off
        cutmix: alpha of cutmix; 0: off
        mix_prob: probability of mixup or cutmix per batch
        switch_prob: probability of cutmix if both are on
        teacher: what the model learns from beside the labels (distillation): directory of a run (its best), file of its
            weights, or name of a pretrained timm model; of a list, the mean of their probabilities; [] or null: none
        teacher_output: what is learned of it: logits (Kullback-Leibler divergence of the classes) or features (mean
            squared error of the pooled features, which a linear layer computes from those of the model)
        teacher_weight: weight of the teacher's loss; that of the labels is 1 - teacher_weight
        teacher_temperature: divides the logits of teacher and model; the loss is multiplied by its square
        teacher_image_size: side, or [height, width], of the images that it sees, in pixels; null: as in its training
        teacher_cache: compute the logits of each training image once, without augmentation, before the first epoch;
            mixup and cutmix mix them as the labels
        mask_ratio: part of an image that is masked
        mask_unit: height and width of a masked square, in pixels; null: about an eighth of image_size
        mask_normalize: reconstruct the pixels of each masked square normalised to mean 0 and variance 1
    """

    kind: Literal["classification", "masked"] = "classification"
    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"
    label_smoothing: float = within("[0, 1)", 0.1)
    mixup: float = within("[0, inf)", 0.8)
    cutmix: float = within("[0, inf)", 1.0)
    mix_prob: float = within("[0, 1]", 1.0)
    switch_prob: float = within("[0, 1]", 0.5)
    teacher: list[str] | str | None = field(default_factory=list)
    teacher_output: Literal["logits", "features"] = "logits"
    teacher_weight: float = within("[0, 1]", 0.5)
    teacher_temperature: float = within("(0, inf)", 1.0)
    teacher_image_size: int | tuple[int, int] | None = within("[1, 20000]", None)
    teacher_cache: bool = False
    mask_ratio: float = within("(0, 1)", 0.6)
    mask_unit: int | None = within("[1, inf)", None)
    mask_normalize: bool = False

    @property
    def labelled(self) -> bool:
        """Whether the run learns classes."""
        return self.kind == "classification"

    def check(self, batch_size: int) -> None:
        """Raises ValueError if keys contradict each other or the size of a batch."""
        if not self.labelled and self.teacher:
            raise ValueError(f"task.teacher is {self.teacher}, but a run without labels learns from none: make it []")
        if self.labelled and (self.mixup or self.cutmix) and batch_size % 2:
            raise ValueError(f"data.batch_size is {batch_size}; mixup and cutmix pair images, so it must be even")
        if self.teacher_output == "features" and len(self.teacher) > 1:
            given = f"task.teacher is {self.teacher}"
            raise ValueError(f"task.teacher_output is features, which takes one teacher: {given}")
        if self.teacher_cache and not (self.teacher and self.teacher_output == "logits"):
            given = f"task.teacher is {self.teacher} and task.teacher_output {self.teacher_output}"
            raise ValueError(f"task.teacher_cache is true, but {given}: only the logits of a teacher are cached")


@dataclass
class AugmentationConfig(TransformConfig):
    """Augmentation of the training images by the loader, with the defaults of the recipe."""

    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = within("[0, 1]", 0.3)
    erase: float = within("[0, 1]", 0.25)
    repeats: int = within("[1, 65536]", 3)


@dataclass
class EmaConfig:
    """The exponential moving average of the weights. If it is on, it gives the results of the run.

    Args:
        decay: fraction of the old average that an update keeps; 0: no average
        warmup: let the decay grow from 0, for runs of few updates
    """

    decay: float = within("[0, 1)", 0.99996)
    warmup: bool = True


@dataclass
class RunConfig:
    """Output, hardware and precision.

    Args:
        dir: directory for configuration, log, checkpoints and pictures
        seed: seed of the weights, the order of the data and the augmentation
        device: auto, cpu, cuda, cuda:1, ...
        amp: autocast to bf16 or, with a scaled loss, fp16; auto: bf16 on CUDA devices that support it
        compile: compile the model with torch.compile, or its mode, such as reduce-overhead; null: on CUDA devices
        capture: run each update but the average as a CUDA graph, for small models; one process, no accumulation
        memory_budget: of a compiled model, the part of what forward saves that is kept; the rest is computed again
        log_updates: updates between lines of the log
        checkpoint_updates: updates between checkpoints inside an epoch; null: by time alone
        checkpoint_seconds: seconds between checkpoints inside an epoch; null: by updates alone
        max_skipped: updates in a row that may be skipped because the loss or gradient is not finite
        tensorboard: write TensorBoard events too
        imports: Python modules that register further models with timm, such as mambavision; imported after
            vilonghorn.compat.install(patches=True), also by commands that read the run
    """

    dir: str = "runs/default"
    seed: int = within("[0, 9223372036854775808)", 0)  # 63 bits
    device: str = "auto"
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    capture: bool = False
    memory_budget: float = within("[0, 1]", 1.0)
    log_updates: int = within("[1, inf)", 50)
    checkpoint_updates: int | None = within("[1, inf)", None)
    checkpoint_seconds: float | None = within("(0, inf)", 600.0)
    max_skipped: int = within("[0, inf)", 10)
    tensorboard: bool = True
    imports: list[str] = field(default_factory=list)


@dataclass
class Config:
    """The configuration of a run. The defaults are Vim-Ti's recipe on ImageNet-1k, with four differences.

    The gradient is clipped, GPUs train in bfloat16 (autocast), the average has a warm-up, and random crops of a .beton
    are resized by area averaging.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for section, key in ((self.data, "train"), (self.data, "val"), (self.model, "weights"), (self.run, "dir")):
            if path := getattr(section, key):  # no shell replaces the ~ of --run.dir=~/x
                setattr(section, key, expanduser(path))
        given = [] if self.task.teacher is None else self.task.teacher
        self.task.teacher = [expanduser(source) for source in ([given] if isinstance(given, str) else given)]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, equal to what YAML or JSON reads back."""
        return json.loads(json.dumps(asdict(self)))

    def image_sizes(self) -> list[tuple[int, int]]:
        """Height and width of the images of the run, the largest last."""
        recipe, last = self.augmentation, self.data.image_size
        growing = range(min(self.schedule.epochs, recipe.ramp[1]))
        return sorted({*map(to_2tuple, [last, *recipe.sizes]), *(recipe.grown_size(epoch, last) for epoch in growing)})


SECTIONS = {section.name: section.default_factory for section in fields(Config)}
FIELDS = {f"{name}.{key.name}": key for name, section in SECTIONS.items() for key in fields(section)}


def check(config: Config) -> None:
    """Raises ValueError if a value is out of range, contradicts another, or is a name that timm does not know."""
    for name in SECTIONS:
        check_intervals(getattr(config, name), f"{name}.")
    values, defaults = flatten(asdict(config)), flatten(Config().to_dict())
    texts = [(key, text) for key, value in values.items() for text in (value if isinstance(value, list) else [value])]
    for key, value in texts:
        if isinstance(value, str) and (not value.strip() or "\0" in value):  # "" would be the current folder
            raise ValueError(f"{key} is {value!r}, expected a name or a path; its default is {defaults[key]!r}")
        if isinstance(value, str) and value != value.encode(errors="ignore").decode():  # no YAML file could hold it
            raise ValueError(f"{key} is {printable(value)}, which is not UTF-8: rename it, or set PYTHONUTF8=1")
    data, model = config.data, config.model
    config.augmentation.check_transforms(data.image_size, data.mean, "augmentation.")
    config.task.check(data.batch_size)
    epochs, warmup = config.schedule.epochs, config.schedule.warmup
    if warmup >= epochs:
        raise ValueError(f"schedule.warmup_epochs is {warmup}, expected less than schedule.epochs, {epochs}, or null")
    accumulate, mode = config.optimizer.accumulate, config.run.compile
    if accumulate > 1 and mode in ("reduce-overhead", "max-autotune"):
        problem = f"run.compile is {mode!r} and optimizer.accumulate is {accumulate}: in the CUDA graphs of this mode"
        remedy = "set run.compile to 'default', or optimizer.accumulate to 1"
        raise ValueError(f"{problem} torch may add the gradients of several batches wrongly; {remedy}")
    if model.weights not in (None, "auto") and model.pretrained:
        raise ValueError(f"model.weights is {model.weights} and model.pretrained is true: give one of them")
    import_models(config.run.imports)
    known_names = {"model.name": timm.list_models(), "optimizer.name": timm.optim.list_optimizers()}
    for key, known in known_names.items():
        if (name := values[key]).partition(".")[0] not in known:
            raise ValueError(f"{key} is {name!r}, which timm does not know; {nearest(name, known)}")


def import_models(modules: Sequence[str]) -> None:
    """Imports `run.imports`. Raises ValueError if one cannot be imported."""
    if modules:
        from .. import compat  # other runs start without it

        compat.install(patches=True)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # of the module: any
            remedy = "install it, or add its folder to PYTHONPATH"
            raise ValueError(f"run.imports: {name!r} cannot be imported ({one_line(error)}); {remedy}") from error


def flatten(sections: dict[str, Any]) -> dict[str, Any]:
    """Nested sections to {"section.key": value}."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the most similar known names."""
    known = list(known)
    close = [k for k in known if k.rpartition(".")[2] == name.lstrip("-").rpartition(".")[2]]
    if close := close or difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(close[:4])}?"
    return f"expected one of {', '.join(known)}" if len(known) <= 40 else f"none of {len(known)} known names is similar"
