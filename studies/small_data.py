"""What the weights of icons, and images without labels, give on few labelled images, against a random start.

    python studies/small_data.py digits=data/digits mnist=data/mnist stamps=/usr/share/tuxpaint/stamps

in the root of a checkout writes studies/results/small_data.json; `python studies/pages.py` then makes the tables of
docs/models/icons480.md and docs/pretraining.md. Results that the file has are kept. A folder has train/CLASS and
val/CLASS, or CLASS, of which every fifth image is held out, or the files of Fashion-MNIST, of which every twelfth
training image is taken, or labels.csv of PyPI's elpv-dataset: photographs of solar cells, defective if their
probability of a defect is above 0.5.
`vilonghorn data digits` and studies/data/mnist.py make the first two; the others are in Debian's packages
tuxpaint-stamps-default and dataset-fashion-mnist.

Of the held-out images, half choose the learning rate (with the first seed) and half are the test.
"""

import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from timm.optim import create_optimizer_v2
from torch import Tensor

import vilonghorn
from vilonghorn.data.atomic_files import write_json
from vilonghorn.engine.tasks.masked_images import MaskedImageModel, MaskedImages

RESULTS = Path("studies/results/small_data.json")
MODEL = "vilonghorn_nano_patch8"
SIDE = 64
COUNTS = (100, 500)  # training images
SEEDS = (0, 1, 2)  # of the choice of training images, and of training
RATES = (5e-4, 2e-3, 8e-3)
UPDATES, BATCH, WARMUP = 200, 32, 20
MAX_HELD_OUT = 1000  # images
STARTS = {"icons": "from the weights of icons", "random": "from random weights"}
# All training images without their labels, in one pretraining for all seeds.
WITHOUT_LABELS = {
    "unlabelled": "masked images without labels",
    "icons_unlabelled": "icons, then masked images",
}
MASKED_UPDATES, MASKED_BATCH, MASKED_RATE, RATIO, UNIT = 1000, 64, 4e-3, 0.6, 8
MACHINES = {"colours": "SVM of a colour histogram", "pixels": "SVM of the pixels"}


class Images(NamedTuple):
    """Images (N, 3, SIDE, SIDE) uint8 with their labels (N,)."""

    pixels: Tensor
    labels: Tensor

    def take(self, index: Tensor) -> "Images":
        """Those at `index`."""
        return Images(self.pixels[index], self.labels[index])


def read_folder(folder: Path) -> tuple[Images, Images, list[str]]:
    """The training images, the held-out images and the names of the classes of a folder."""
    if (folder / "train-images-idx3-ubyte.gz").exists():
        return read_fashion(folder, "train", 12), read_fashion(folder, "t10k", 10), list("0123456789")
    if (folder / "labels.csv").exists():
        rows = [line.split() for line in (folder / "labels.csv").read_text(encoding="utf-8").splitlines()]
        cells = [(folder / file, int(float(probability) > 0.5)) for file, probability, _ in rows]
        parts = [cell for i, cell in enumerate(cells) if i % 5], cells[::5]
        return read_images(parts[0]), read_images(parts[1]), ["functional", "defective"]
    split = (folder / "train").is_dir()
    root = folder / "train" if split else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    parts = [], []
    for label, name in enumerate(classes):
        roots = (folder / "train" / name, folder / "val" / name) if split else (folder / name,)
        for part, root in enumerate(roots):
            files = sorted(path for path in root.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg", ".webp"))
            for i, file in enumerate(files):
                parts[part if split else i % 5 == 0].append((file, label))
    held_out = parts[1][:: -(-len(parts[1]) // MAX_HELD_OUT)]
    return read_images(parts[0]), read_images(held_out), classes


def read_images(files: list[tuple[Path, int]]) -> Images:
    """Images on white ground, padded to squares."""
    pixels = torch.empty(len(files), 3, SIDE, SIDE, dtype=torch.uint8)
    for i, (file, _) in enumerate(files):
        image = ImageOps.pad(vilonghorn.read_image(file), (SIDE, SIDE), Image.Resampling.BICUBIC, "white")
        pixels[i] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return Images(pixels, torch.tensor([label for _, label in files]))


def read_fashion(folder: Path, part: str, step: int) -> Images:
    """Every `step`-th image of a part of Fashion-MNIST."""
    arrays = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        content = gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes())
        arrays.append(torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).copy()))
    gray, labels = arrays[0].view(-1, 1, 28, 28)[::step], arrays[1][::step].long()
    pixels = F.interpolate(gray.float(), size=SIDE, mode="bicubic").round().clamp(0, 255)
    return Images(pixels.to(torch.uint8).expand(-1, 3, -1, -1).contiguous(), labels)


def normalize(pixels: Tensor) -> Tensor:
    """Pixels as the weights of icons take them."""
    return pixels.float() / 127.5 - 1


def crop(pixels: Tensor, rng: torch.Generator) -> Tensor:
    """One random part of 64% to 100% of the area of all images of a batch, resized to the whole."""
    size = int(torch.randint(int(0.8 * SIDE), SIDE + 1, (), generator=rng))
    top, left = (int(torch.randint(0, SIDE - size + 1, (), generator=rng)) for _ in range(2))
    part = pixels[:, :, top : top + size, left : left + size]
    return F.interpolate(part, size=SIDE, mode="bilinear", antialias=True)


def fit(model: torch.nn.Module, rate: float, updates: int, loss_of: Callable[[], Tensor]) -> float:
    """Minimises a loss with AdamW, a linear warm-up and a cosine to 0; returns the mean of its last tenth."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=WARMUP)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates - WARMUP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [WARMUP])
    losses = []
    for _ in range(updates):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return statistics.fmean(losses[-updates // 10 :])


def pretrain(pixels: Tensor, start: str) -> dict[str, Tensor]:
    """The weights of a model that has learned from masked images; it prints the last loss."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    backbone = timm.create_model(MODEL, mask_token=True, pretrained=start.startswith("icons"), num_classes=0)
    task, model = MaskedImages(RATIO, UNIT), MaskedImageModel(backbone, UNIT)

    def loss() -> Tensor:
        batch = pixels[torch.randint(len(pixels), (MASKED_BATCH,), generator=rng)]
        images = crop(normalize(batch), rng)
        targets = task.draw(images, rng)
        return task.losses(model(images, targets), images, targets).mean()

    print(
        f"loss {fit(model.train(), MASKED_RATE, MASKED_UPDATES, loss):.4f} after {MASKED_UPDATES} updates", flush=True
    )
    return {name: value for name, value in backbone.state_dict().items() if name != "mask_token"}


def train(
    images: Images, classes: int, start: str, weights: dict[str, Tensor] | None, rate: float, seed: int
) -> torch.nn.Module:
    """Trains a classifier from one of the `STARTS`, or from `weights` without a head."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = timm.create_model(MODEL, pretrained=start == "icons", num_classes=classes).train()
    if weights:
        model.load_state_dict(weights, strict=False)

    def loss() -> Tensor:
        batch = images.take(torch.randint(len(images.labels), (BATCH,), generator=rng))
        return F.cross_entropy(model(crop(normalize(batch.pixels), rng)), batch.labels, label_smoothing=0.1)

    fit(model, rate, UPDATES, loss)
    return model.eval()


@torch.no_grad()
def top1(model: torch.nn.Module, images: Images) -> float:
    """Accuracy in percent."""
    hits = [
        model(normalize(pixels)).argmax(1) == labels
        for pixels, labels in zip(images.pixels.split(BATCH), images.labels.split(BATCH))
    ]
    return 100 * torch.cat(hits).float().mean().item()


def colours(images: Images) -> np.ndarray:
    """A histogram of 8 x 8 x 8 colours for each image."""
    bins = (images.pixels.long() // 32).flatten(2)
    index = bins[:, 0] * 64 + bins[:, 1] * 8 + bins[:, 2]
    return np.sqrt(np.stack([np.bincount(row, minlength=512) for row in index.numpy()]) / index.shape[1])


def pixels(images: Images) -> np.ndarray:
    """The images at a quarter of their size, as vectors."""
    return F.avg_pool2d(images.pixels.float(), 4).flatten(1).numpy()


def support_vectors(features: str, images: Images, test: Images) -> float:
    """Accuracy in percent of a support vector machine of colours or pixels, with scikit-learn's default parameters."""
    make = {"colours": colours, "pixels": pixels}[features]
    machine = make_pipeline(StandardScaler(), SVC()) if features == "pixels" else SVC()
    machine.fit(make(images), images.labels.numpy())
    return 100 * float((machine.predict(make(test)) == test.labels.numpy()).mean())


def measure(name: str, folder: Path, known: list[dict]) -> Iterator[dict]:
    """The results on one dataset that are not known: a row for each number of images and each method."""
    pool, held_out, classes = read_folder(folder)
    order = torch.randperm(len(held_out.labels), generator=torch.Generator().manual_seed(0))
    val, test = (held_out.take(part) for part in order.chunk(2))
    found = {(row["train"], row["method"]) for row in known if row["data"] == name}
    weights: dict[str, dict[str, Tensor]] = {}
    for count in COUNTS:
        chosen = {
            seed: pool.take(torch.randperm(len(pool.labels), generator=torch.Generator().manual_seed(seed))[:count])
            for seed in SEEDS
        }
        row = {"data": name, "classes": len(classes), "train": count, "test": len(test.labels)}
        for start in STARTS | (WITHOUT_LABELS if count == max(COUNTS) else {}):
            if (count, start) in found:
                continue
            began = time.monotonic()
            if start in WITHOUT_LABELS:
                weights[start] = pretrain(pool.pixels, start)
            options = len(classes), start, weights.get(start)
            first = {rate: train(chosen[SEEDS[0]], *options, rate, SEEDS[0]) for rate in RATES}
            scores = {rate: top1(model, val) for rate, model in first.items()}
            rate = max(scores, key=scores.__getitem__)
            others = [train(chosen[seed], *options, rate, seed) for seed in SEEDS[1:]]
            top = [top1(model, test) for model in (first[rate], *others)]
            yield {**row, "method": start, "rate": rate, "val": scores, "top1": top}
            print(f"{name} {count} {start} {top}, {time.monotonic() - began:.0f} s", flush=True)
        for features in MACHINES:
            if (count, features) not in found:
                top = [support_vectors(features, chosen[seed], test) for seed in SEEDS]
                yield {**row, "method": features, "top1": top}


def main(arguments: list[str]) -> None:
    """Measures all datasets, given as NAME=FOLDER, and writes the results."""
    folders = dict(argument.split("=", 1) for argument in arguments)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    for name, folder in folders.items():
        for row in measure(name, Path(folder), rows):
            rows = sorted([*rows, row], key=lambda row: (row["data"], row["train"]))
            write_json(RESULTS, {"command": ["python", "studies/small_data.py", *arguments], "rows": rows})


if __name__ == "__main__":
    if len(sys.argv) == 1 or any("=" not in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    main(sys.argv[1:])
