"""Autoregressive pretraining (ARM, arXiv 2406.07537): a backbone learns from images without labels.

All directions of its blocks scan forward, from cluster to cluster of patches, so that no token sees a later one. A
linear decoder of each token predicts the pixels of the next cluster.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from ..models.vim import VisionSSM
from ..ops.scan_order import insert_class_token
from .build import build_model, image_sizes
from .config import Config
from .masking import BackboneWithDecoder, MaskedImages


class NextPatchesModel(BackboneWithDecoder):
    """A backbone, whose directions are made to scan forward, and a decoder from each token to the next cluster.

    Args:
        backbone: a model without a head, whose patches do not overlap.
        side: height and width of a cluster, in patches.
    """

    def __init__(self, backbone: VisionSSM, side: int) -> None:
        super().__init__()
        self.backbone, self.side, self.stride = backbone, side, backbone.feature_info[-1]["reduction"]
        for block in backbone.blocks:
            block.mixer.reverse = (False,) * len(block.mixer.reverse)  # type: ignore[union-attr, arg-type]
            block.mixer.flags = [0] * len(block.mixer.reverse)  # type: ignore[union-attr, arg-type]
        self.decoder = nn.Linear(backbone.num_features, 3 * (side * self.stride) ** 2)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to predictions, (B, clusters, side**2 tokens, side**2 patches, pixels of a patch)."""
        model, size = self.backbone, self.side**2
        token, patches = model.split_tokens(model._embed(images), images.shape[-2:])
        tokens = insert_class_token(clusters(patches, self.side).flatten(1, 2), token)
        features = model._norm_tokens(model.blocks(tokens, None, model.grad_checkpointing))[:, 1:]
        return self.decoder(features).unflatten(1, (-1, size)).unflatten(3, (size, -1))


def clusters(x: Tensor, side: int) -> Tensor:
    """A map (B, C, h, w) to (B, clusters, side**2, C), both in raster order."""
    return x.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(1, 2)


def build_next_patches(config: Config, device: torch.device) -> NextPatchesModel:
    """The model of a run that predicts clusters of patches, on a device.

    Raises:
        ValueError: tokens of the model see later ones, or its patches do not fit clusters; and the errors of
            `build_model`.
    """
    name, side, backbone = config.model.name, config.augmentation.next_cluster or 1, build_model(config, 0)
    if not isinstance(backbone, VisionSSM) or backbone.has_conv2d:
        known = "vilonghorn_* or vim_*, with d_conv a number of tokens"
        raise ValueError(f"model.name is {name}, whose patches see later ones (augmentation.next_cluster): use {known}")
    patch, stride, sizes = backbone.patch_embed.patch_size, backbone.patch_embed.stride, image_sizes(config)
    unit = side * patch[0]
    if not patch == stride == patch[::-1] or any(size % unit or size == unit for size in sizes):
        raise ValueError(
            f"augmentation.next_cluster is {side} with patches {patch} at steps {stride} in images of "
            f"{' to '.join(map(str, sizes))} pixels: expected several whole clusters a side, of square patches that do "
            "not overlap; change it, data.image_size or model.kwargs"
        )
    return NextPatchesModel(backbone, side).to(device)


class NextPatches(MaskedImages):
    """The task of a run: learns to predict clusters of patches, each patch of mean 0 and variance 1, as in MAE."""

    rows = ("original", "predicted")

    def __init__(self, side: int, stride: int) -> None:
        self.side, self.stride = side, stride

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The normalised patches of all clusters, (B, clusters, side**2, pixels of a patch). Nothing is random."""
        patches, mean, deviation = self.patches(images)
        return (patches - mean) / deviation

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The patches of all clusters, their means and standard deviations."""
        patches = clusters(pixel_unshuffle(images.float(), self.stride), self.side)
        return patches, patches.mean(-1, True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()

    def inputs(self, images: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """The images."""
        return (images,)

    def losses(self, predicted: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of each image, (B,)."""
        return (predicted[:, :-1].float() - targets[:, 1:, None]).square().flatten(1).mean(1)

    def show(self, model: nn.Module, images: Tensor, amp: torch.autocast) -> tuple[Tensor, ...]:
        """Images, and what the last token of each cluster predicts, with the mean and the deviation of each patch."""
        patches, mean, deviation = self.patches(images)
        with amp:
            found = model(images)[:, :-1, -1].float()
        patches = torch.cat([0 * patches[:, :1], found * deviation[:, 1:] + mean[:, 1:]], 1).flatten(1, 2)
        grid = [side // self.stride for side in images.shape[2:]]
        order = clusters(torch.arange(patches.shape[1], device=images.device).view(1, 1, *grid), self.side).flatten()
        return images, pixel_shuffle(patches[:, order.argsort()].transpose(1, 2).unflatten(2, grid), self.stride)
