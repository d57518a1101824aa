"""The typed configuration of a run: its keys, their meaning, defaults, types and ranges, and checks across keys."""

import difflib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

import timm
import yaml

from .. import models  # noqa: F401  (registers our models with timm)
from ..data.files import named_errors
from ..data.images import printable
from ..data.loaders.config import ImageConfig, TransformConfig, check_intervals, within


@dataclass
class DataConfig(ImageConfig):
    """The data of a run: files, batches and preprocessing. `ImageConfig` has the other keys.

    Args:
        train: a .beton file or an image folder (one folder per class) to train on; hfds/NAME:SPLIT: of Hugging Face's
            library datasets; wds/FOLDER or wds/PATTERN: tar files of WebDataset
        val: the same to evaluate on
    """

    train: str = "data/imagenet/train.beton"
    val: str = "data/imagenet/val.beton"


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
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    epochs: int = within("[1, 1000000]", 300)
    warmup_epochs: float | None = within("[0, inf)", None)
    warmup_lr: float = within("[0, inf)", 1e-6)
    min_lr: float = within("[0, inf)", 1e-5)

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, where `warmup_epochs` may be None."""
        return min(5.0, self.epochs / 5) if self.warmup_epochs is None else self.warmup_epochs


@dataclass
class AugmentationConfig(TransformConfig):
    """Augmentation of the training data. `TransformConfig` has the other keys.

    Args:
        mixup: alpha of mixup; 0: off
        cutmix: alpha of cutmix; 0: off
        mix_prob: probability of mixup or cutmix per batch
        switch_prob: probability of cutmix if both are on
        label_smoothing: probability spread over all classes
        loss: cross_entropy (of all classes together) or binary_cross_entropy (of each class, mean over the classes)
        mask_ratio: part of an image that is masked, to learn from images without labels; null: learn their classes
        mask_unit: height and width of a masked square, in pixels; null: about an eighth of image_size
        next_cluster: height and width, in patches, of the clusters that a model learns to predict in the order of the
            scan, in place of masked images, from images without labels; null: none
    """

    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = within("[0, 1]", 0.3)
    erase: float = within("[0, 1]", 0.25)
    repeats: int = within("[1, 65536]", 3)
    mixup: float = within("[0, inf)", 0.8)
    cutmix: float = within("[0, inf)", 1.0)
    mix_prob: float = within("[0, 1]", 1.0)
    switch_prob: float = within("[0, 1]", 0.5)
    label_smoothing: float = within("[0, 1)", 0.1)
    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"
    mask_ratio: float | None = within("(0, 1)", None)
    mask_unit: int | None = within("[1, inf)", None)
    next_cluster: int | None = within("[1, inf)", None)

    @property
    def labelled(self) -> bool:
        """Whether the run learns classes."""
        return self.mask_ratio is None and self.next_cluster is None


@dataclass
class TeacherConfig:
    """Teachers, whose outputs the model learns beside the labels (knowledge distillation): docs/pretraining.md.

    Args:
        weights: directory of a run (its best), a file of a run's weights, or the name of a pretrained timm model; of a
            list, the mean of their probabilities; []: no teacher
        kind: what is learned: logits (Kullback-Leibler divergence of the classes) or features (mean squared error of
            the pooled features, which a linear layer computes from those of the model)
        weight: weight of the teacher's loss; that of the labels is 1 - weight
        temperature: divides the logits of teacher and model; the loss is multiplied by its square
        image_size: height and width of the images that a teacher sees, in pixels; null: those of its training
        cache: compute the logits of each training image once, without augmentation, before the first epoch; mixup and
            cutmix mix them as the labels
    """

    weights: list[str] | str = field(default_factory=list)
    kind: Literal["logits", "features"] = "logits"
    weight: float = within("[0, 1]", 0.5)
    temperature: float = within("(0, inf)", 1.0)
    image_size: int | None = within("[1, inf)", None)
    cache: bool = False


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
        memory_budget: of a compiled model, the part of what forward saves for backward that is kept; the rest is
            computed again
        log_updates: updates between lines of the log
        checkpoint_updates: updates between checkpoints inside an epoch; null: by time alone
        checkpoint_seconds: seconds between checkpoints inside an epoch; null: by updates alone
        max_skipped: updates in a row that may be skipped because the loss or gradient is not finite
        tensorboard: write TensorBoard events too
        wandb: send the TensorBoard events to Weights & Biases, too, if it is installed, as its project vilonghorn;
            the environment variables of wandb apply, such as WANDB_MODE=offline
    """

    dir: str = "runs/default"
    seed: int = within("[0, 9223372036854775808)", 0)  # 63 bits
    device: str = "auto"
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    memory_budget: float = within("[0, 1]", 1.0)
    log_updates: int = within("[1, inf)", 50)
    checkpoint_updates: int | None = within("[1, inf)", None)
    checkpoint_seconds: float | None = within("(0, inf)", 600.0)
    max_skipped: int = within("[0, inf)", 10)
    tensorboard: bool = True
    wandb: bool = False


@dataclass
class Config:
    """The configuration of a run. The defaults are Vim-Ti's recipe on ImageNet-1k, with four differences.

    The gradient is clipped, GPUs train in bfloat16 (autocast), the average has a warm-up, and random crops of a .beton
    are resized by area averaging.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for section, key in ((self.data, "train"), (self.data, "val"), (self.model, "weights"), (self.run, "dir")):
            if path := getattr(section, key):  # no shell replaces the ~ of --run.dir=~/x
                setattr(section, key, expanduser(path))
        given = self.teacher.weights
        self.teacher.weights = [expanduser(source) for source in ([given] if isinstance(given, str) else given)]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, equal to what YAML or JSON reads back."""
        return json.loads(json.dumps(asdict(self)))


SECTIONS = {section.name: section.default_factory for section in fields(Config)}
FIELDS = {f"{name}.{key.name}": key for name, section in SECTIONS.items() for key in fields(section)}

MAX_BYTES = 100_000  # of a configuration file
# Keys that a resumed run may change. The trainer compares the batches per update: accumulate * processes.
FREE_ON_RESUME = frozenset(
    "data.train data.val data.workers data.max_pixels data.checksums run.dir run.device run.log_updates "
    "run.checkpoint_updates run.checkpoint_seconds run.max_skipped run.tensorboard run.wandb "
    "optimizer.accumulate teacher.weights".split()
)


def check(config: Config) -> None:
    """Raises ValueError if a value is out of range, contradicts another, or is a name that timm does not know."""
    for name in SECTIONS:
        check_intervals(getattr(config, name), f"{name}.")
    values = flatten(asdict(config))
    texts = [(key, text) for key, value in values.items() for text in (value if isinstance(value, list) else [value])]
    for key, value in texts:
        if isinstance(value, str) and not value.strip():  # an empty path would be the current folder
            raise ValueError(f"{key} is {value!r}, expected a name or a path; its default is {FIELDS[key].default!r}")
        if isinstance(value, str) and value != value.encode(errors="ignore").decode():  # no YAML file could hold it
            raise ValueError(f"{key} is {printable(value)}, which is not UTF-8: rename it, or set PYTHONUTF8=1")
    data, model, augmentation = config.data, config.model, config.augmentation
    augmentation.check_transforms(data.image_size, data.mean, "augmentation.")
    epochs, warmup = config.schedule.epochs, config.schedule.warmup
    if warmup >= epochs:
        raise ValueError(f"schedule.warmup_epochs is {warmup}, expected less than schedule.epochs, {epochs}, or null")
    if model.weights not in (None, "auto") and model.pretrained:
        raise ValueError(f"model.weights is {model.weights} and model.pretrained is true: give one of them")
    if (augmentation.mixup or augmentation.cutmix) and data.batch_size % 2:
        raise ValueError(f"data.batch_size is {data.batch_size}; mixup and cutmix pair images, so it must be even")
    if config.run.wandb and not (config.run.tensorboard and find_spec("wandb")):
        raise ValueError("run.wandb is true: it needs run.tensorboard true and the library wandb (pip install wandb)")
    teacher = config.teacher
    if teacher.cache and not (teacher.weights and teacher.kind == "logits"):
        given = f"teacher.weights is {teacher.weights} and teacher.kind {teacher.kind}"
        raise ValueError(f"teacher.cache is true, but {given}: only the logits of a teacher are cached")
    if augmentation.mask_ratio and augmentation.next_cluster:
        given = f"augmentation.mask_ratio is {augmentation.mask_ratio} and next_cluster {augmentation.next_cluster}"
        raise ValueError(f"{given}: a run learns one of them, make the other null")
    if teacher.weights and not augmentation.labelled:
        problem = "but a run without labels learns from no teacher"
        raise ValueError(f"teacher.weights is {teacher.weights}, {problem}: make it []")
    if teacher.kind == "features" and len(teacher.weights) > 1:
        raise ValueError(f"teacher.kind is features, which takes one teacher: teacher.weights is {teacher.weights}")
    known_names = {"model.name": timm.list_models(), "optimizer.name": timm.optim.list_optimizers()}
    for key, name in (("model.name", model.name), ("optimizer.name", config.optimizer.name)):
        if name.partition(".")[0] not in known_names[key]:
            raise ValueError(f"{key} is {name!r}, which timm does not know; {nearest(name, known_names[key])}")


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which can expand a small file to millions of nodes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node. Raises ComposerError if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read: repeat the value", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Constructs a mapping. Raises ConstructorError if a key is there twice, of which YAML would drop the first."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if names and (most := names.most_common(1)[0])[1] > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {most[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_sections(file: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Reads a configuration file: its sections, and the name of the file that it is based on.

    Raises FileNotFoundError if there is no such file, and ValueError if it is no configuration. The message does not
    quote the file, which may be another one by mistake.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no configuration file {file}")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        with named_errors(file):
            sections = yaml.load(file.read_bytes(), PlainLoader) or {}
        if not isinstance(sections, dict):
            raise ValueError("it has no keys")
        if not isinstance(base := sections.pop("base", None), str | None):
            raise ValueError("its base is not the name of another YAML file")
        if wrong := [printable(str(name))[:80] for name, keys in sections.items() if not isinstance(keys, dict)]:
            raise ValueError(f"there are no keys in {wrong[0]}")
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        reason = f"in line {mark.line + 1}: {str(error.problem)[:80]}" if mark else reason
        expected = f"expected YAML in UTF-8 with keys in the sections {', '.join(SECTIONS)}"
        raise ValueError(f"{file} is no configuration: {' '.join(reason.split())}; {expected}") from None
    return sections, base


def flatten(sections: dict[str, Any]) -> dict[str, Any]:
    """Nested sections to {"section.key": value}."""
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys that differ between two configurations and that a resumed run must not change."""
    old, new = flatten(Config().to_dict()) | flatten(old), flatten(new)  # an earlier version had fewer keys
    return [key for key in FIELDS if key not in FREE_ON_RESUME and old[key] != new[key]]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the most similar known names."""
    known = list(known)
    close = [k for k in known if k.rpartition(".")[2] == name.lstrip("-").rpartition(".")[2]]
    if close := close or difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(close[:4])}?"
    return f"expected one of {', '.join(known)}" if len(known) <= 40 else f"none of {len(known)} known names is similar"
