"""Masked image modelling (SimMIM, arXiv 2111.09886): a backbone learns from images without labels.

Square units of an image are masked. The backbone sees the mask token in their place, and a linear decoder of its last
map predicts their pixels.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle

from ...models.weights_file import is_ours
from ..checkpoint import RunDirectory
from ..config import Config
from ..device import autocast
from ..distributed import Distributed
from ..model_setup import explain_model_errors, model_from_config
from ..report import write_masked_report
from .task import Task

ROWS = ("original", "masked", "reconstructed")  # of the picture of a report


class MaskedImageModel(nn.Module):
    """A backbone with a mask token, and a decoder from its last map to pixels.

    Args:
        backbone: a model of this library with `mask_token=True` and without a head.
        unit: height and width of a masked unit, in pixels, a multiple of the stride of the last map.
    """

    def __init__(self, backbone: nn.Module, unit: int) -> None:
        super().__init__()
        self.backbone, self.unit = backbone, unit
        last = backbone.feature_info[-1]
        self.stride = last["reduction"]
        self.decoder = nn.Conv2d(last["num_chs"], 3 * self.stride**2, 1)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Reconstructs images, (B, 3, H, W), of which `mask`, (B, h, w), hides units where it is True; None: none."""
        if mask is None:
            mask = images.new_zeros(len(images), *(side // self.unit for side in images.shape[-2:]), dtype=torch.bool)
        # Patches that overlap would see masked pixels.
        visible = images.masked_fill(enlarge(mask, self.unit)[:, None], 0)
        options = {"indices": 1, "norm": True, "intermediates_only": True}
        tokens = enlarge(mask, self.unit // self.stride)
        (features,) = self.backbone.forward_intermediates(visible, masked=tokens, **options)
        return pixel_shuffle(self.decoder(features), self.stride)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}  # type: ignore[operator]

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter, for layer decay: as in the backbone, the decoder in the place of its head."""
        matcher = self.backbone.group_matcher(coarse)  # type: ignore[operator]
        layers = group_parameters(self.backbone, matcher, reverse=True)
        return lambda name: layers.get(name.removeprefix("backbone."), max(layers.values()) + 1)


def enlarge(mask: Tensor, factor: int) -> Tensor:
    """Repeats each value of a mask (B, h, w) in a square of `factor` x `factor`."""
    return mask.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def unit_statistics(images: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the unit that a pixel lies in, over its channels too, each (B, 1, H, W)."""
    mean, square = (F.avg_pool2d(values.float().mean(1), unit) for values in (images, images.square()))
    deviation = ((square - mean.square()).clamp(min=0) + 1e-6).sqrt()
    return enlarge(mean, unit)[:, None], enlarge(deviation, unit)[:, None]


def masked_model_from_config(config: Config, device: torch.device) -> MaskedImageModel:
    """The model of a run with masked images, on a device. Raises ValueError if images or masked unit do not fit."""
    name, unit, sizes = config.model.name, config.task.mask_unit, config.image_sizes()
    if not is_ours(name):
        known = "vilonghorn_*, vilonghornv2_* or vim_*"
        raise ValueError(f"model.name is {name}, which has no mask token for masked images: expected {known}")
    backbone = model_from_config(config, 0)
    stride = backbone.feature_info[-1]["reduction"]  # type: ignore[index, union-attr]
    sides = sorted({side for size in sizes for side in size})
    fitting = [u for u in range(stride, sides[0], stride) if not any(s % u for s in sides)]
    why = f"multiples of the stride of {name}, {stride}, that divide the sides of images, {sides}"
    if not fitting:
        raise ValueError(f"data.image_size has no task.mask_unit: expected smaller {why}; change the size of images")
    if unit not in (None, *fitting):
        raise ValueError(f"task.mask_unit is {unit}: expected one of {fitting}, {why}")
    default = next((u for u in fitting if 8 * u >= sides[-1]), fitting[-1])
    model = MaskedImageModel(backbone, unit or default).to(device)
    remedy = "change data.image_size, model.kwargs, augmentation.start_size or sizes; patches must not overlap"
    for size in sizes:
        problem = explain_model_errors(f"{name} does not reconstruct {(2, 3, *size)}", remedy)
        with problem, torch.no_grad(), autocast(config.run.amp, device):
            model.eval()(torch.zeros(2, 3, *size, device=device))
    return model.train()


class MaskedImages(Task):
    """Learns to reconstruct masked images, as `task.mask_*` say, and is evaluated by the same loss."""

    scores = ("loss",)

    def __init__(self, ratio: float, unit: int, normalize: bool = False) -> None:
        self.ratio, self.unit, self.normalize = ratio, unit, normalize

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The masks of a batch, (B, h, w), on its device: as many units in each image, at least one, and not all."""
        height, width = (side // self.unit for side in images.shape[-2:])
        masked = min(max(round(self.ratio * height * width), 1), height * width - 1)
        order = torch.rand(len(images), height * width, generator=generator).argsort(1)
        return (order < masked).view(-1, height, width).to(images.device)

    def augment(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images as they are, and the masks in place of the targets."""
        return images, self.draw(images)

    def losses(self, reconstructed: Tensor, images: Tensor, mask: Tensor) -> Tensor:
        """The mean absolute difference over the masked pixels of each image, (B,), in float32."""
        if self.normalize:  # MAE, arXiv 2111.06377
            mean, deviation = unit_statistics(images, self.unit)
            images = (images - mean) / deviation
        hidden = enlarge(mask, self.unit)[:, None]
        difference = (images.float() - reconstructed.float()).abs() * hidden
        return difference.flatten(1).sum(1) / (hidden.flatten(1).sum(1) * images.shape[1])

    def loss(self, forward: Callable[..., Tensor], images: Tensor, mask: Tensor, amp: torch.autocast) -> Tensor:
        """The mean loss of images and their masks, a scalar of float32."""
        with amp:
            reconstructed = forward(images, mask)
        return self.losses(reconstructed, images, mask).mean()

    def measure(self, model: nn.Module, images: Tensor, targets: Tensor, amp: torch.autocast) -> Tensor:
        """The sum of the losses of a held-out batch, (1,). All batches have the same masks."""
        mask = self.draw(images, torch.Generator().manual_seed(0))
        with amp:
            reconstructed = model(images, mask)
        return self.losses(reconstructed, images, mask).sum()[None]

    def backbone(self, model: nn.Module) -> nn.Module:
        """The model without the decoder."""
        return model.backbone  # type: ignore[return-value]

    @torch.no_grad()
    def examples(self, model: nn.Module, loader: Any, amp: torch.autocast, count: int) -> Tensor:
        """Up to `count` held-out images of this process, evenly spaced, in each of `ROWS`, (rows, N, 3, H, W)."""
        last = (len(loader) - 1) * loader.batch_size
        chosen, found = {*torch.linspace(0, last, count).long().tolist()}, []
        with closing(loader.epoch(0)) as batches:
            for i, image in enumerate(image for batch, _ in batches for image in batch):
                found += [image] if i in chosen else []
        images = torch.stack(found)
        mask = self.draw(images, torch.Generator().manual_seed(0))
        hidden = enlarge(mask, self.unit)[:, None]
        with amp:
            reconstructed = model.eval()(images, mask).float()
        if self.normalize:
            mean, deviation = unit_statistics(images, self.unit)
            reconstructed = reconstructed * deviation + mean
        return torch.stack([images, images.masked_fill(hidden, 0), torch.where(hidden, reconstructed, images)]).cpu()

    def report(self, model: nn.Module, loader: Any, run: RunDirectory, config: Config, result: dict[str, Any]) -> None:
        """Writes the report with reconstructions of the held-out images of process 0."""
        if Distributed().is_main:
            amp = autocast(config.run.amp, next(model.parameters()).device)
            write_masked_report(run, config, self.examples(model, loader, amp, 10), ROWS, result)
