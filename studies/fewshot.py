"""Few-shot classification inside one image: mosaics whose keys are icons of classes never seen in training.

    python studies/fewshot.py [exact mamba ...]    # needs data/icons; see data/icons.py

A pair is an icon and a white digit, in neighbouring tiles. Each of `WAYS` classes has one digit in all its pairs, of
which there are `shots`. Dark digits on white ground fill the other tiles. The last tile is another icon of one of the
classes; the label is the digit of its class. Every sixth class, 80 of 480, is in the test only. Training has icons of
the authors of the training split, validation those of the other authors, both of the other 400 classes. Training has
16 tiles and one shot; tests have up to 256 tiles, and up to five shots.

A tile becomes a token by a small convolutional network, which is trained first, on its own, to tell the 400 classes
and the digits apart, then kept as it is; it is the same for all mixers. The mixers are those of the study `million`,
with as many parameters, and a head on the last tile. Each has the best of three rates on one seed, then two more seeds.
The rate 0.002 and the third seed were added on 2026-11-30, when eight runs were known. With these 3,072 updates most
runs of the other mixers were still learning at the end. So on the same day a second budget was added, of four times as
many updates, at the best rate of each, three seeds. A finished run is a line of results/fewshot.json and is not run
again. One thread.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from numpy.random import Generator, default_rng
from study.command import revision
from study.digits import load_split
from study.plan import match_size, read_study
from study.tasks import list_icons
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from vilonghorn import read_image
from vilonghorn.data.atomic_files import write_json

ROOT = Path(__file__).parents[1]
ICONS, RUNS = ROOT / "data" / "icons", ROOT / "runs" / "studies" / "fewshot"
RESULTS = ROOT / "studies" / "results" / "fewshot.json"
WAYS, SIDE, FEATURES, BATCH = 5, 32, 64, 64
RATES, SEEDS, BUDGETS = (0.004, 0.008, 0.002), (1, 2, 3), (3072, 12288)  # updates
TESTS = {"16": (4, 1), "64": (8, 1), "256": (16, 1), "64, 5 shots": (8, 5), "256, 5 shots": (16, 5)}  # grid, shots
COUNT = 2048  # mosaics of a test
SPLITS = ("train", "val", "test")


def every_sixth(classes: int) -> np.ndarray:
    """Whether a class is in the test."""
    return np.arange(classes) % 6 == 5


def read_icons(folder: Path = ICONS) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images, (n, SIDE, SIDE) uint8, and classes of each split, ordered by class."""
    found: dict[str, list] = {split: [] for split in SPLITS}
    classes, icons = list_icons(folder, "train")
    held_out = [(file, label) for part in ("val", "test") for file, label in list_icons(folder, part)[1]]
    tested = every_sixth(len(classes))
    for split, files in (("train", icons), ("val", held_out)):
        for file, label in files:
            image = read_image(file).convert("L").resize((SIDE, SIDE), 4)  # box
            found["test" if tested[label] else split].append((label, np.asarray(image)))
    arrays = {}
    for split, rows in found.items():
        rows.sort(key=lambda row: row[0])
        arrays[split] = np.stack([image for _, image in rows]), np.array([label for label, _ in rows])
    return arrays


def digit_tiles(split: str) -> tuple[np.ndarray, np.ndarray]:
    """White digits on black, then dark digits on white, (n, SIDE, SIDE) uint8, and their labels, 0 to 9, each time."""
    digits = load_split(split)
    images = digits.images.repeat(SIDE // 8, 1).repeat(SIDE // 8, 2)
    return np.concatenate([images, 255 - images]), np.concatenate([digits.labels, digits.labels])


class Encoder(nn.Sequential):
    """(n, 1, 32, 32) tiles to (n, FEATURES)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.GELU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(128 * 16, FEATURES), nn.BatchNorm1d(FEATURES))


def as_input(images: np.ndarray) -> Tensor:
    """Bytes to (n, 1, SIDE, SIDE)."""
    return (torch.from_numpy(images)[:, None].float() - 128) / 128


def train_encoder(icons: tuple[np.ndarray, np.ndarray], epochs: int = 6) -> Encoder:
    """An encoder that tells the classes of icons, white digits and dark digits apart; tiles are moved by up to 2 px."""
    torch.manual_seed(0)
    digits, values = digit_tiles("train")
    classes = int(icons[1].max()) + 1
    values = classes + values + 10 * (np.arange(len(values)) >= len(values) // 2)
    images, labels = np.concatenate([icons[0], digits]), torch.from_numpy(np.concatenate([icons[1], values]))
    encoder, head, rng = Encoder(), nn.Linear(FEATURES, classes + 20), default_rng(0)
    model = nn.Sequential(encoder, nn.GELU(), head)
    steps = len(images) // 128
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * steps)
    for epoch in range(epochs):
        total = 0.0
        for index in rng.permutation(len(images))[: steps * 128].reshape(steps, 128):
            moved = np.roll(images[index], rng.integers(-2, 3, 2), (1, 2))
            loss = F.cross_entropy(model(as_input(moved)), labels[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() / steps
        print(f"encoder, epoch {epoch + 1}: loss {total:.3f}", flush=True)
    return encoder.eval()


class Tokens:
    """The tokens of the tiles of a split, and mosaics of them.

    Args:
        encode: (n, SIDE, SIDE) tiles to tokens, (n, FEATURES).
        icons: images and classes, ordered by class; each class has at least two.
        split: of the digits.
    """

    def __init__(self, encode, icons: tuple[np.ndarray, np.ndarray], split: str) -> None:
        digits, values = digit_tiles(split)
        half = len(values) // 2
        self.table = torch.cat([encode(icons[0]), encode(digits)])
        _, starts, counts = np.unique(icons[1], return_index=True, return_counts=True)
        self.icons = [np.arange(start, start + count) for start, count in zip(starts, counts)]
        self.digits = [len(icons[1]) + np.flatnonzero(values[:half] == digit) for digit in range(10)]
        self.dark = len(icons[1]) + half + np.arange(half)

    def layout(self, rng: Generator, grid: int, shots: int) -> tuple[np.ndarray, int]:
        """The rows of `table` of a mosaic's tiles, (grid ** 2,), and its label."""
        tiles = rng.choice(self.dark, grid**2)
        ways, values = rng.permutation(len(self.icons))[:WAYS], rng.permutation(10)[:WAYS]
        slots = iter(rng.permutation((grid**2 - 1) // 2)[: WAYS * shots])
        asked = rng.integers(WAYS)
        for way, (label, value) in enumerate(zip(ways, values)):
            icons = rng.choice(self.icons[label], shots + 1, replace=len(self.icons[label]) <= shots)
            for icon in icons[:shots]:
                slot = next(slots)
                tiles[2 * slot : 2 * slot + 2] = icon, rng.choice(self.digits[value])
            if way == asked:
                tiles[-1] = icons[shots]
        return tiles, int(values[asked])

    def batch(self, rng: Generator, count: int, grid: int = 4, shots: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens, (count, tiles, FEATURES), and labels of mosaics."""
        tiles, labels = zip(*(self.layout(rng, grid, shots) for _ in range(count)))
        return self.table[torch.from_numpy(np.stack(tiles))], torch.tensor(labels)


def prepare() -> dict[str, Tokens]:
    """The tokens of each split; the encoder is trained once and kept in `RUNS`."""
    icons, file = read_icons(), RUNS / "encoder.pt"
    RUNS.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        torch.save(train_encoder(icons["train"]).state_dict(), file)
    encoder = Encoder().eval()
    encoder.load_state_dict(torch.load(file, weights_only=True))

    @torch.inference_mode()
    def encode(images: np.ndarray) -> Tensor:
        return torch.cat([encoder(as_input(part)) for part in np.array_split(images, len(images) // 256 + 1)])

    return {split: Tokens(encode, icons[split], split) for split in SPLITS}


def nearest(tokens: Tokens, count: int = COUNT) -> float:
    """Accuracy in percent, one shot, of the class whose icon's token has the highest cosine: without any mixer."""
    rng, right = default_rng(1), 0
    for _ in range(count):
        tiles, _ = tokens.layout(rng, 4, 1)
        icons = tiles[:-1][tiles[:-1] < tokens.digits[0][0]]
        found = F.cosine_similarity(tokens.table[icons], tokens.table[tiles[-1:]]).argmax()
        labels = [
            next(i for i, members in enumerate(tokens.icons) if row in members) for row in (icons[found], tiles[-1])
        ]
        right += labels[0] == labels[1]
    return 100 * right / count


class Reader(nn.Module):
    """The blocks of a model between a projection of tokens, (B, L, FEATURES), and a head on the last, which asks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, model.embed_dim), nn.Linear(model.embed_dim, 10)
        self.blocks, self.norm = model.blocks, model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))[:, -1]))


@torch.inference_mode()
def accuracy(model: nn.Module, tokens: Tokens, grid: int, shots: int, count: int = COUNT) -> float:
    """Right answers in percent, on the same mosaics for all models."""
    rng, right = default_rng([grid, shots]), 0
    for _ in range(count // BATCH):
        inputs, labels = tokens.batch(rng, BATCH, grid, shots)
        right += int((model(inputs).argmax(1) == labels).sum())
    return round(100 * right / (count // BATCH * BATCH), 3)


def train(name: str, rate: float, updates: int, seed: int, tokens: dict[str, Tokens]) -> dict:
    """Trains a reader of tokens with AdamW, a warm-up and a cosine to a tenth; returns the fields of its run."""
    study, rng, start = (
        read_study(ROOT / "studies" / "plans" / "million.yaml"),
        default_rng([seed, 0]),
        time.monotonic(),
    )
    torch.manual_seed(seed)
    kwargs, _ = match_size(study, "million", name)
    model = Reader(timm.create_model(study.candidates[name].model, **kwargs))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=updates // 12)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates - updates // 12, rate / 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [updates // 12])
    curve, total = [], 0.0
    for update in range(1, updates + 1):
        inputs, labels = tokens["train"].batch(rng, BATCH)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if update % (updates // 12) == 0:
            curve.append(accuracy(model, tokens["val"], 4, 1, 1024))
            print(
                f"{name}, {update} updates: loss {total / (updates // 12):.3f}, validation {curve[-1]:.1f}", flush=True
            )
            total = 0.0
    tests = {test: accuracy(model, tokens["test"], *where) for test, where in TESTS.items()}
    row = {"candidate": name, "rate": rate, "seed": seed, "updates": updates, "validation": curve, "tests": tests}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    return row | {"seconds": round(time.monotonic() - start), "commit": revision()}


def read_runs() -> list[dict]:
    """The finished runs."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []


def key(run: dict) -> tuple[str, float, int, int]:
    """Candidate, rate, updates and seed."""
    return run["candidate"], run["rate"], run["updates"], run["seed"]


def best_rate(name: str, runs: list[dict]) -> float:
    """The rate with the highest final validation accuracy of the first seed and budget."""
    first = [run for run in runs if (run["candidate"], run["seed"], run["updates"]) == (name, SEEDS[0], BUDGETS[0])]
    return max(first, key=lambda run: run["validation"][-1])["rate"]


def main(names: list[str]) -> None:
    """Trains what is missing: at each rate all mixers, then the other seeds, then the longer budget."""
    torch.set_num_threads(1)
    tokens = prepare()
    kept = {"command": ["python", "studies/fewshot.py"], "nearest": nearest(tokens["test"])}
    wanted: list[tuple] = [(name, rate, BUDGETS[0], SEEDS[0]) for rate in RATES for name in names]
    wanted += [(name, None, updates, seed) for updates in BUDGETS for seed in SEEDS for name in names]
    for name, rate, updates, seed in wanted:
        run = name, rate or best_rate(name, read_runs()), updates, seed
        if run not in map(key, read_runs()):
            row = train(*run, tokens)
            print(row, flush=True)
            write_json(RESULTS, {**kept, "runs": [*read_runs(), row]})


if __name__ == "__main__":
    main(sys.argv[1:] or ["exact", "gated_delta", "mamba", "log_scaled"])
