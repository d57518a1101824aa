"""Weights of `vilonghornv2_nano` that have learned the features of EfficientNet-Lite0 from images without labels.

    python studies/students.py data/students lite0.safetensors stamps/usr/share/tuxpaint/stamps
    python studies/students.py test stamps=stamps/usr/share/tuxpaint/stamps digits=data/digits

in the root of a checkout. docs/models/lite0.md has the commands that fill the folder, and examples/lite0.py makes
lite0.safetensors. The first command writes views.npy and targets.npy into the folder, which are kept, then
vilonghorn/weights/vilonghornv2_nano.lite0.safetensors. The second compares these weights with those of icons, on the
photographs of studies/photos.py and on 500 images of sets of studies/small_data.py. It writes results/students.json,
and keeps what is there; `python studies/pages.py` then makes the tables of docs/models/lite0.md. One thread.

The images are those of data/views.py, less those that resemble a stamp. The teacher sees each once, at 128 px. The
student sees it once in an epoch, at 64, 96 or 112 px, mirrored or not. It learns the square roots of the teacher's
pooled features, each with mean 0 and variance 1, by the mean squared error.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from PIL import Image, ImageOps
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent / "data"))

import photos
import small_data
from views import SIDE, write_views

import vilonghorn
from vilonghorn.data.atomic_files import atomic_write, write_json
from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.models.timm_contract import WEIGHTS

MODEL, TEACHER, TAG = "vilonghornv2_nano", "tf_efficientnet_lite0", "lite0"
RESULTS = Path("studies/results/students.json")
SIZES = (64, 96, 112)  # pixels of the student's images
EPOCHS, BATCH, RATE, DECAY = 8, 64, 4e-3, 0.05
MAX_COSINE = 0.75  # of the features of a view and of a test image


def batch_of(views: np.ndarray) -> Tensor:
    """Views as the two models take them, (B, 3, SIDE, SIDE)."""
    return torch.from_numpy(np.array(views)).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.inference_mode()
def teach(views: np.ndarray, weights: Path) -> np.ndarray:
    """The square roots of the teacher's pooled features, (N, 1280) float16."""
    overlay = dict(file=str(weights))
    model = timm.create_model(TEACHER, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0).eval()
    parts = np.array_split(views, -(-len(views) // BATCH))
    return np.concatenate([model(batch_of(part)).sqrt().half().numpy() for part in parts])


def unlike(targets: np.ndarray, tests: np.ndarray) -> np.ndarray:
    """Indices of views whose features have a cosine to those of each test image of less than `MAX_COSINE`."""
    mean = targets.mean(0, dtype=np.float32)
    tests, views = (F.normalize(torch.from_numpy(features - mean)) for features in (tests, targets))
    return np.flatnonzero((views @ tests.T).amax(1) < MAX_COSINE)


def train(views: np.ndarray, targets: np.ndarray, index: np.ndarray) -> nn.Module:
    """A student of the views at `index`, from the weights of icons, without a head."""
    torch.manual_seed(0)
    rng = default_rng(0)
    model = timm.create_model(f"{MODEL}.icons480", pretrained=True, num_classes=targets.shape[1]).train()
    mean, std = (torch.from_numpy(f(targets, 0, dtype=np.float32)) for f in (np.mean, np.std))
    steps = EPOCHS * (per_epoch := len(index) // BATCH)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.06, cycle_momentum=False)
    began, losses = time.monotonic(), []
    while len(losses) < steps:
        for batch in np.array_split(rng.permutation(index), per_epoch):
            images = F.interpolate(batch_of(views[batch]), size=int(rng.choice(SIZES)), mode="area")
            mirrored = torch.from_numpy(rng.random(len(batch)) < 0.5)[:, None, None, None]
            wanted = (torch.from_numpy(targets[batch]).float() - mean) / (std + 1e-3)
            loss = F.mse_loss(model(torch.where(mirrored, images.flip(3), images)), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) % 100 == 0:
                seconds = time.monotonic() - began
                print(f"{len(losses)} of {steps}: loss {np.mean(losses[-100:]):.3f}, {seconds:.0f} s", flush=True)
    model.reset_classifier(0)
    return model.eval()


def make(folder: Path, weights: Path, stamps: Path) -> None:
    """Makes what is not there yet, then the student."""
    if not (file := folder / "views.npy").exists():
        write_views(folder, file)
    views = np.load(file, mmap_mode="r")
    if not (file := folder / "targets.npy").exists():
        with atomic_write(file) as target:
            np.save(target, teach(views, weights))
    targets = np.load(file)
    tests = [
        np.asarray(ImageOps.pad(vilonghorn.read_image(path), (SIDE, SIDE), Image.Resampling.BICUBIC, "white"))
        for path in sorted(stamps.rglob("*.png"))
    ]
    index = unlike(targets, teach(np.stack(tests), weights))
    print(f"{len(views) - len(index)} views are left out: they resemble one of {len(tests)} stamps", flush=True)
    student = train(views, targets, index)
    half = {name: value.half() for name, value in student.state_dict().items()}
    save_weights(WEIGHTS / f"{MODEL}.{TAG}.safetensors", half, {"model": MODEL, "teacher": TEACHER, "epochs": EPOCHS})


@torch.inference_mode()
def frozen(images: list[Image.Image], start: str) -> np.ndarray:
    """Pooled features (N, 160) of photographs at the largest of the student's sizes."""
    model = timm.create_model(f"{MODEL}.{start}", pretrained=True, num_classes=0).eval()
    pixels = np.stack([image.resize((SIZES[-1], SIZES[-1]), Image.Resampling.BICUBIC) for image in images])
    return torch.cat([model(batch) for batch in batch_of(pixels).split(BATCH)]).numpy()


def measure(name: str, folder: Path, start: str) -> Iterator[dict]:
    """Top-1 in percent of a start: on splits of the photographs among the stamps, and on 500 images of a set."""
    if name == "stamps":
        images, labels = photos.read_photographs(folder)
        splits = [*StratifiedKFold(5, shuffle=True, random_state=0).split(labels, labels)]
        row = {"start": start, "train": len(splits[0][0])}
        features = frozen(images, start)
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
        top1 = [100 * probe.fit(features[i], labels[i]).score(features[j], labels[j]) for i, j in splits]
        yield row | {"data": "photographs, frozen features", "top1": top1}
        for epochs in (100, 20):
            top1, options = [], [f"--model.name={MODEL}.{start}", f"--schedule.epochs={epochs}"]
            for i, j in splits:
                with tempfile.TemporaryDirectory() as run:
                    top1.append(photos.train(images, labels, Path(run), dict(train=i, val=j), options))
            yield row | {"data": f"photographs, {epochs} epochs", "top1": top1}
    small_data.MODEL, small_data.COUNTS, small_data.STARTS = f"{MODEL}.{start}", (500,), {"icons": ""}
    small_data.WITHOUT_LABELS = small_data.MACHINES = {}
    for row in small_data.measure(name, folder, []):
        yield row | {"start": start}


def test(arguments: list[str]) -> None:
    """Measures both weights on sets, given as NAME=FOLDER, and writes the results."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    for name, folder in (argument.split("=", 1) for argument in arguments):
        for start in (TAG, "icons480"):
            if (name, start) not in {(row["data"], row["start"]) for row in rows}:
                rows += measure(name, Path(folder), start)
                write_json(RESULTS, {"command": ["python", "studies/students.py", "test", *arguments], "rows": rows})


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 4 and sys.argv[1] != "test":
        make(*map(Path, sys.argv[1:]))
    elif len(sys.argv) > 2 and all("=" in argument for argument in sys.argv[2:]):
        test(sys.argv[2:])
    else:
        sys.exit(__doc__)
