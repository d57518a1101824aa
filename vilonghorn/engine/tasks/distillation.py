"""Learning from teachers beside the labels: their class probabilities, or the features of one of them."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_input_data_config
from timm.layers import to_2tuple
from timm.task.distillation import FeatureDistillationTrainableModule
from torch import nn

from ...data.atomic_files import atomic_write
from ...models.weights_file import digest, one_line
from ..checkpoint import full_disk_explained
from ..config import ClassNames, Config, nearest
from ..device import autocast
from ..distributed import Distributed
from ..evaluate import load_run, preprocessing, pretrained_class_names, recorded_transform
from ..loaders import build_loader
from ..model_setup import MODEL_ERRORS, explain_model_errors
from .classification import Classification


class Teacher:
    """One of `task.teacher` in evaluation mode, which takes the images of the student and returns its classes."""

    def __init__(
        self, source: str, config: Config, num_classes: int, device: torch.device, class_names: ClassNames
    ) -> None:
        synsets = bool(class_names) and all(re.fullmatch(r"n\d{8}", name) for name in class_names or ())
        self.model, names, cfg = _load(source, synsets)
        name = f"the teacher {source}"
        same = "they must be the same"
        self.order, self.amp = slice(None), autocast(config.run.amp, device)
        self.is_classifier = config.task.teacher_output == "logits"
        if self.is_classifier and (found := getattr(self.model, "num_classes", None)) != num_classes:
            raise ValueError(f"{name} has {found} classes but the data has {num_classes}: {same}")
        if self.is_classifier and names is not None and class_names is not None:
            names, class_names = ([normalize("NFC", text) for text in texts] for texts in (names, class_names))
            if unknown := sorted({*class_names} - {*names}):
                raise ValueError(f"{name} has no class {unknown[0]!r}, which the data has: {same}, in any order")
            self.order = [names.index(name) for name in class_names]
        self.size = to_2tuple(config.task.teacher_image_size or cfg["input_size"][-2:])
        self.digest = [digest(self.model.state_dict()), self.size, *(list(cfg[key]) for key in ("mean", "std"))]
        values = cfg["mean"], cfg["std"], config.data.mean, config.data.std
        own_mean, own_std, mean, std = (torch.tensor(value, device=device)[:, None, None] for value in values)
        self.factor, self.shift = std / own_std, (mean - own_mean) / own_std
        self.model.to(device).eval()
        shown = torch.zeros(2, 3, *to_2tuple(config.data.image_size), device=device)
        problem = f"{name} does not take images (3, {self.size[0]}, {self.size[1]})"
        with explain_model_errors(problem, "change task.teacher_image_size"):
            self.num_outputs = self(shown).shape[1]

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) in the order of the data, or pooled features (B, D), float32, of the student's images."""
        images = images * self.factor + self.shift
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        with self.amp:
            if self.is_classifier:
                return self.model(images).float()[:, self.order]
            return self.model.forward_head(self.model.forward_features(images), pre_logits=True).float()


def _load(source: str, synsets: bool) -> tuple[nn.Module, ClassNames, dict[str, Any]]:
    """A teacher, the names of its classes, and `input_size`, `mean` and `std` of its images."""
    path = Path(source)
    if path.exists():
        run = path if path.is_dir() else path.parent
        cfg = preprocessing(run) if (run / "config.yaml").is_file() else {}  # first: it may import the model
        model, record = load_run(path)
        cfg = cfg or recorded_transform(record, path)
        cfg = cfg or resolve_input_data_config(model, {"model_kwargs": record["kwargs"]})
        return model, record.get("class_names"), cfg
    if not timm.is_model(source):
        hint = nearest(source, timm.list_models())
        raise ValueError(f"task.teacher is {source}, which is no run, file of weights or model of timm; {hint}")
    try:
        model = timm.create_model(source, pretrained=True)
    except (*MODEL_ERRORS, OSError) as error:
        remedy = "give the directory of a run or the file of its weights"
        raise OSError(f"the weights of the teacher {source} cannot be loaded ({one_line(error)}): {remedy}") from error
    return model, pretrained_class_names(model, synsets), resolve_input_data_config(model)


class StudentWithFeatures(FeatureDistillationTrainableModule):
    """Returns logits and projected features of a student in one tensor (B, classes + features of the teacher)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, 3, H, W)."""
        return torch.cat(super().forward(images), 1)


@dataclass(frozen=True)
class CachedTargets:
    """Label and logits of the teacher of samples, (B, 1 + classes) float32."""

    labels: np.ndarray  # (N,)
    logits: np.ndarray  # (N, classes) float16

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        return np.concatenate([self.labels[samples, None], self.logits[samples]], 1, dtype=np.float32)


def read_cache(file: Path) -> np.ndarray:
    """The logits (N, classes) float16 of a cache, which ends with its SHA-256. Raises ValueError if it is damaged."""
    try:
        content, size = np.memmap(file, np.uint8, "r"), hashlib.sha256().digest_size
        if content[-size:].tobytes() == hashlib.sha256(content[:-size]).digest():
            return np.load(file, mmap_mode="r")
        reason = "its checksum is wrong"
    except (OSError, ValueError) as error:
        reason = one_line(error)
    raise ValueError(f"{file} is damaged ({reason}): remove it, and it is computed again")


class Distillation(Classification):
    """Learns the outputs of teachers beside the classes: Hinton et al., 2015, arXiv 1503.02531.

    The logits of several teachers are the logarithm of the mean of their probabilities. Raises the errors of `Teacher`.
    """

    def __init__(self, config: Config, num_classes: int, device: torch.device, class_names: ClassNames) -> None:
        super().__init__(config, num_classes)
        self.config, self.num_classes, self.device, self.recipe = config, num_classes, device, config.task
        self.teachers = [Teacher(source, config, num_classes, device, class_names) for source in self.recipe.teacher]
        facts = json.dumps([teacher.digest for teacher in self.teachers])
        self.digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
        if self.recipe.teacher_cache:  # twice as many targets, all smooth: those of the labels, and of the teacher
            self.set_criterion(self.recipe.loss, 0.0)
            if self.mixup:
                self.mixup.num_classes, self.mixup.multi_label, self.mixup.label_smoothing = 2 * num_classes, True, 0.0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, or with features a module around it with the linear layer from them to those of the teacher."""
        if self.recipe.teacher_output == "logits":
            return model
        if (dim := getattr(model, "head_hidden_size", None)) is None:
            name = self.config.model.name
            raise ValueError(f"task.teacher_output is features, but {name} does not tell their number")
        self.extra = nn.Linear(dim, self.teachers[0].num_outputs, device=self.device)
        return StudentWithFeatures(model, self.extra)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) of the mean of the teachers' probabilities, float32."""
        each = torch.stack([teacher(images).log_softmax(1) for teacher in self.teachers])
        return each.logsumexp(0) - math.log(len(self.teachers))

    def prepare(self, loader: Any, directory: Path, on_batch: Callable[[], None]) -> None:
        """With a cache, lets the loader give its logits, which are computed if the run does not have them yet."""
        if not self.recipe.teacher_cache:
            return
        data = self.config.data
        seen = [data.image_size, data.mean, data.std, data.crop_pct, data.crop_mode, data.interpolation]
        images = [loader.fingerprint, getattr(loader, "content", None)]  # a loader of one's own may not have the latter
        key = hashlib.sha256(json.dumps([*images, self.digest, self.config.run.amp, *seen]).encode())
        file, dist = directory / f"teacher-{key.hexdigest()[:16]}.npy", Distributed()
        if not dist.sum([dist.is_main and file.is_file()])[0]:
            self._write_cache(file, loader, on_batch)
        loader.set_targets(CachedTargets(loader.data.labels, dist.run_on_all(lambda: read_cache(file))))

    def _write_cache(self, file: Path, loader: Any, on_batch: Callable[[], None]) -> None:
        """Writes the logits of all images, (N, classes) float16, of which each process computes a part."""
        dist, given = Distributed(), {"classes": loader.class_names, "source": loader.data}
        source = build_loader(self.config, self.device, training=False, **given)
        dist.print(f"teacher: computing the logits of {source.num_samples} training images")
        with ExitStack() as stack:
            batches = stack.enter_context(closing(source.epoch(0)))
            if dist.is_main:
                stack.enter_context(full_disk_explained(file))
                out = stack.enter_context(atomic_write(file))
                shape = {"descr": "<f2", "fortran_order": False, "shape": (source.num_samples, self.num_classes)}
                np.lib.format.write_array_header_1_0(out, shape)
                out.seek(0)
                found = hashlib.sha256(out.read())
            for _ in range(int(dist.sum([dist.is_main * len(source)])[0])):  # process 0 has the most batches
                images = next(batches, (None,))[0]
                own = torch.empty(0, self.num_classes) if images is None else self.logits(images)
                parts = dist.gather(own.half().cpu().numpy())
                rows = np.empty((sum(map(len, parts)), self.num_classes), "<f2")
                for rank, part in enumerate(parts):  # processes take turns
                    rows[rank :: dist.world_size] = part
                if dist.is_main:
                    out.write(rows.tobytes())
                    found.update(rows.tobytes())
                on_batch()
            if dist.is_main:
                out.write(found.digest())
        dist.gather(None)  # process 0 has renamed the file

    def augment(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Classification.augment`; cached targets (B, 1 + classes) become (B, 2 classes)."""
        if self.recipe.teacher_cache:
            smoothing = self.recipe.label_smoothing
            labels = F.one_hot(targets[:, 0].long(), self.num_classes) * (1 - smoothing) + smoothing / self.num_classes
            targets = torch.cat([labels, (targets[:, 1:] / self.recipe.teacher_temperature).softmax(1)], 1)
        return super().augment(images, targets)

    def output_loss(self, output: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The weighted mean of the losses of labels and teacher, a scalar."""
        recipe, classes = self.recipe, self.num_classes
        output, features = output.tensor_split([classes], 1)
        if recipe.teacher_output == "features":
            learned = F.mse_loss(features, self.teachers[0](images))
        else:
            if recipe.teacher_cache:
                targets, probabilities = targets.tensor_split([classes], 1)
            else:
                probabilities = (self.logits(images) / recipe.teacher_temperature).softmax(1)
            own = (output / recipe.teacher_temperature).log_softmax(1)
            learned = F.kl_div(own, probabilities, reduction="batchmean") * recipe.teacher_temperature**2
        return (1 - recipe.teacher_weight) * self.criterion(output, targets) + recipe.teacher_weight * learned
