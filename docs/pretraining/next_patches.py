"""Whether predicting the next patches (ARM, arXiv 2406.07537) gives more than masked images on few labelled images.

    python docs/pretraining/next_patches.py digits=data/digits mnist=data/mnist stamps=/usr/share/tuxpaint/stamps

in the root of a checkout writes docs/pretraining/next_patches.json. Data, updates, rates and fine-tuning are those of
docs/models/small_data.py, which has the results of masked images. Results that the file has are kept.

In pretraining all directions scan forward, so no token sees a later one. Fine-tuning uses the ordinary model, whose
second direction scans backward. Each token predicts the next patch in raster order; or the next cluster of 2 x 2
patches, where the scan goes from cluster to cluster.
"""

import json
import sys
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from vilonghorn.data.files import write_json
from vilonghorn.ops.scan_order import insert_class_token, prefix_first

sys.path.insert(0, "docs/models")
import small_data as base

RESULTS, UNIT = Path("docs/pretraining/next_patches.json"), 8  # pixels, side of a patch
# Side of a cluster in patches; whether the pixels of each patch are normalised (as in MAE, arXiv 2111.06377); the loss.
METHODS = {
    "next patch": (1, False, nn.functional.l1_loss),
    "next patch, normalised": (1, True, nn.functional.mse_loss),
    "next cluster": (2, False, nn.functional.l1_loss),
    "next cluster, normalised": (2, True, nn.functional.mse_loss),
}


class NextPatches(nn.Module):
    """A backbone whose directions all scan forward, and a linear decoder from each token to the pixels that follow."""

    def __init__(self, backbone: nn.Module, side: int) -> None:
        super().__init__()
        self.backbone, self.size = backbone, side**2
        self.decoder = nn.Linear(backbone.num_features, 3 * side**2 * UNIT**2)
        index = torch.arange(backbone.patch_embed.num_patches).view(backbone.patch_embed.grid_size)
        self.order = index.unfold(0, side, side).unfold(1, side, side).flatten()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to what follows each patch, (B, clusters, patches of one, pixels of one)."""
        tokens = prefix_first(self.backbone._embed(images))
        tokens = insert_class_token(tokens[:, 1:][:, self.order], tokens[:, :1])
        features = self.backbone.norm(prefix_first(self.backbone.blocks(tokens)))[:, 1:]
        return self.decoder(features).unflatten(1, (-1, self.size))

    def targets(self, images: Tensor, normalise: bool) -> Tensor:
        """The pixels of the clusters, (B, clusters, 1, pixels of one)."""
        patches = images.unfold(2, UNIT, UNIT).unfold(3, UNIT, UNIT).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        if normalise:
            patches = (patches - patches.mean(-1, True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        return patches[:, self.order].unflatten(1, (-1, 1, self.size)).flatten(3)


def pretrain(pixels: Tensor, method: str) -> dict[str, Tensor]:
    """The weights of a model that has learned to predict the next patches; it prints the last loss."""
    torch.manual_seed(0)
    rng, (side, normalise, distance) = torch.Generator().manual_seed(0), METHODS[method]
    model = NextPatches(timm.create_model(base.MODEL, num_classes=0, img_size=base.SIDE, reverse=(False, False)), side)

    def loss() -> Tensor:
        batch = pixels[torch.randint(len(pixels), (base.MASKED_BATCH,), generator=rng)]
        images = base.crop(base.normalize(batch), rng)
        found, expected = model(images)[:, :-1], model.targets(images, normalise)[:, 1:]
        return distance(found, expected.expand_as(found))

    print(f"loss {base.fit(model, base.MASKED_RATE, base.MASKED_UPDATES, loss):.4f}", flush=True)
    return model.backbone.state_dict()


def main(arguments: list[str]) -> None:
    """Measures the datasets, given as NAME=FOLDER, and writes the results."""
    base.COUNTS, base.STARTS, base.MACHINES = base.COUNTS[-1:], {}, {}
    base.WITHOUT_LABELS, base.pretrain = METHODS, pretrain
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    for name, folder in (argument.split("=", 1) for argument in arguments):
        for row in base.measure(name, Path(folder), rows):
            rows = sorted([*rows, row], key=lambda row: (row["data"], row["method"]))
            write_json(RESULTS, {"command": ["python", "docs/pretraining/next_patches.py", *arguments], "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
