"""What the weights of icons give on few images, against a random start and a support vector machine.

    python docs/models/small_data.py digits=data/digits mnist=data/mnist stamps=/usr/share/tuxpaint/stamps

in the root of a checkout writes docs/models/small_data.json and the table of docs/models/icons480.md. A folder has
train/CLASS and val/CLASS, or CLASS, of which every fifth image is held out. `vilonghorn data digits` and
docs/comparison/mnist.py make the first two; the stamps are in Debian's package tuxpaint-stamps-default.

Of the held-out images, half choose the learning rate (with the first seed) and half are the test.
"""

import itertools
import json
import statistics
import sys
import time
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
from vilonghorn.bench.tables import fill_page, markdown
from vilonghorn.data.files import atomic_write, write_json

RESULTS = Path("docs/models/small_data.json")
PAGE = Path("docs/models/icons480.md")
MODEL = "vilonghorn_nano_patch8"
SIDE = 64
COUNTS = (100, 500)  # training images
SEEDS = (0, 1, 2)  # of the choice of training images, and of training
RATES = (5e-4, 2e-3, 8e-3)
UPDATES, BATCH, WARMUP = 200, 32, 20
MAX_HELD_OUT = 1000  # images
STARTS = {"icons": "from the weights of icons", "random": "from random weights"}
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
    split = (folder / "train").is_dir()
    root = folder / "train" if split else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    parts: tuple[list, list] = [], []
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


def normalize(pixels: Tensor) -> Tensor:
    """Pixels as the weights of icons take them."""
    return pixels.float() / 127.5 - 1


def crop(pixels: Tensor, rng: torch.Generator) -> Tensor:
    """One random part of 64% to 100% of the area of all images of a batch, resized to the whole."""
    size = int(torch.randint(int(0.8 * SIDE), SIDE + 1, (), generator=rng))
    top, left = (int(torch.randint(0, SIDE - size + 1, (), generator=rng)) for _ in range(2))
    part = pixels[:, :, top : top + size, left : left + size]
    return F.interpolate(part, size=SIDE, mode="bilinear", antialias=True)


def train(images: Images, classes: int, start: str, rate: float, seed: int) -> torch.nn.Module:
    """Trains a model with AdamW, a linear warm-up and a cosine to 0."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = timm.create_model(MODEL, pretrained=start == "icons", num_classes=classes).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=WARMUP)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES - WARMUP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [WARMUP])
    for _ in range(UPDATES):
        batch = images.take(torch.randint(len(images.labels), (BATCH,), generator=rng))
        scores = model(crop(normalize(batch.pixels), rng))
        loss = F.cross_entropy(scores, batch.labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
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


def measure(name: str, folder: Path) -> list[dict]:
    """The results on one dataset: a row for each number of images and each method."""
    pool, held_out, classes = read_folder(folder)
    order = torch.randperm(len(held_out.labels), generator=torch.Generator().manual_seed(0))
    val, test = (held_out.take(part) for part in order.chunk(2))
    rows = []
    for count in COUNTS:
        chosen = {
            seed: pool.take(torch.randperm(len(pool.labels), generator=torch.Generator().manual_seed(seed))[:count])
            for seed in SEEDS
        }
        row = {"data": name, "classes": len(classes), "train": count, "test": len(test.labels)}
        for start in STARTS:
            began = time.monotonic()
            first = {rate: train(chosen[SEEDS[0]], len(classes), start, rate, SEEDS[0]) for rate in RATES}
            scores = {rate: top1(model, val) for rate, model in first.items()}
            rate = max(scores, key=scores.__getitem__)
            others = [train(chosen[seed], len(classes), start, rate, seed) for seed in SEEDS[1:]]
            found = [top1(model, test) for model in (first[rate], *others)]
            rows.append({**row, "method": start, "rate": rate, "val": scores, "top1": found})
            print(rows[-1], f"{time.monotonic() - began:.0f} s", flush=True)
        for features in MACHINES:
            found = [support_vectors(features, chosen[seed], test) for seed in SEEDS]
            rows.append({**row, "method": features, "top1": found})
            print(rows[-1], flush=True)
    return rows


def write_page() -> None:
    """Puts the table of the results into the page."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    lines = []
    for (name, count), group in itertools.groupby(rows, key=lambda row: (row["data"], row["train"])):
        group = list(group)
        line = {"data": name, "classes": str(group[0]["classes"]), "training images": str(count)}
        for row in group:
            mean, deviation = statistics.fmean(row["top1"]), statistics.stdev(row["top1"])
            line[(STARTS | MACHINES)[row["method"]]] = f"{mean:.1f} ± {deviation:.1f}"
        lines.append(line)
    text = fill_page(PAGE.read_text(encoding="utf-8"), "small data", markdown(lines))
    with atomic_write(PAGE, "w") as target:
        target.write(text)


def main(arguments: list[str]) -> None:
    """Measures all datasets, given as NAME=FOLDER, and writes results and page."""
    folders = dict(argument.split("=", 1) for argument in arguments)
    rows = [row for name, folder in folders.items() for row in measure(name, Path(folder))]
    write_json(RESULTS, {"command": ["python", "docs/models/small_data.py", *arguments], "rows": rows})
    write_page()


if __name__ == "__main__":
    if len(sys.argv) == 1 or any("=" not in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    main(sys.argv[1:])
