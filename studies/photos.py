"""Compares training by `configs/photos.yaml` with an SVM on colour histograms, on photographs.

    apt-get download tuxpaint-stamps-default && dpkg -x tuxpaint-stamps-default_*.deb stamps
    python studies/photos.py stamps/usr/share/tuxpaint/stamps

The photographs are those of Tux Paint in four categories. Each is held out in one of the splits. Options of training
follow the others: `--schedule.epochs 50`. With `--frozen FILE` logistic regression on the features of
`tf_efficientnet_lite0`, with weights of examples/lite0.py, takes the place of training.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from torchvision.transforms.functional import to_tensor

from vilonghorn.engine import Trainer, load_config

CONFIG = Path(__file__).parents[1] / "configs" / "photos.yaml"
CATEGORIES = ["animals", "food", "household", "plants"]  # those with 30 photographs or more
SIDE = 160  # pixels of the longer side, at most


def read_photographs(stamps: Path) -> tuple[list[Image.Image], np.ndarray]:
    """The photographs of all categories, each in the centre of a white square, and the number of its category.

    Drawings (folders `cartoon`) and mirrored copies are left out.
    """
    images, labels = [], []
    for label, category in enumerate(CATEGORIES):
        for file in sorted((stamps / category).rglob("*.png")):
            if "cartoon" not in file.parts and not file.stem.endswith("_mirror"):
                stamp = Image.open(file).convert("RGBA")
                stamp.thumbnail((SIDE, SIDE))
                side = max(stamp.size)
                image = Image.new("RGBA", (side, side), "white")
                image.alpha_composite(stamp, ((side - stamp.width) // 2, (side - stamp.height) // 2))
                images.append(image.convert("RGB"))
                labels.append(label)
    if not images:
        raise FileNotFoundError(
            f"{stamps} has no photographs in {', '.join(CATEGORIES)}: give the folder of the stamps"
        )
    return images, np.array(labels)


def histogram(image: Image.Image) -> np.ndarray:
    """The frequencies of 4 x 4 x 4 colours, (64,)."""
    counts, _ = np.histogramdd(np.asarray(image).reshape(-1, 3), bins=4, range=[(0, 256)] * 3)
    return counts.ravel() / counts.sum()


def svm_accuracy(images: list[Image.Image], labels: np.ndarray, train: np.ndarray, val: np.ndarray) -> float:
    """Held-out accuracy in percent of an SVM on the roots of the histograms, its C chosen by cross-validation."""
    features = np.array([histogram(image) for image in images])
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    svm = GridSearchCV(SVC(), {"C": 10.0 ** np.arange(-1, 4)}, cv=folds)
    model = make_pipeline(FunctionTransformer(np.sqrt), svm).fit(features[train], labels[train])
    return 100 * model.score(features[val], labels[val])


def train(images: list[Image.Image], labels: np.ndarray, folder: Path, parts: dict, options: Sequence[str]) -> float:
    """Held-out accuracy in percent of the last weights of a run; `parts` are the indices of "train" and "val"."""
    for part, indices in parts.items():
        for index in indices:
            file = folder / part / CATEGORIES[labels[index]] / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            images[index].save(file)
    data = [f"--data.{part}={folder / part}" for part in parts]
    config = load_config(CONFIG, *data, "--data.workers=0", f"--run.dir={folder / 'run'}", *options)
    return Trainer(config).fit()["top1"]


@torch.inference_mode()
def frozen_features(images: list[Image.Image], weights: Path) -> np.ndarray:
    """The average of the last map of `tf_efficientnet_lite0` for each image at 160 px, (N, 1280)."""
    overlay = dict(file=str(weights))
    model = timm.create_model("tf_efficientnet_lite0", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    batch = torch.stack([to_tensor(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images])
    maps = [model.forward_features((part - 0.5) / 0.5) for part in batch.split(16)]
    return model.forward_head(torch.cat(maps), pre_logits=True).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("stamps", type=Path, help="folder usr/share/tuxpaint/stamps of the package")
    parser.add_argument("--splits", type=int, nargs="+", default=range(5), help="which of the five splits (all)")
    parser.add_argument("--frozen", type=Path, help="weights of tf_efficientnet_lite0; nothing is trained")
    parser.add_argument("--seed", type=int, default=0, help="seed of the splits (0)")
    args, options = parser.parse_known_args()
    torch.set_num_threads(1)
    images, labels = read_photographs(args.stamps)
    features = None if args.frozen is None else frozen_features(images, args.frozen)
    splits = list(StratifiedKFold(5, shuffle=True, random_state=args.seed).split(labels, labels))
    rows = []
    for number in args.splits:
        parts = dict(zip(("train", "val"), splits[number]))
        svm = svm_accuracy(images, labels, **parts)
        if features is not None:
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
            probe.fit(features[parts["train"]], labels[parts["train"]])
            rows.append((len(parts["val"]), svm, 100 * probe.score(features[parts["val"]], labels[parts["val"]])))
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append((len(parts["val"]), svm, train(images, labels, Path(folder), parts, options)))
    counts = ", ".join(f"{count} {name}" for name, count in zip(CATEGORIES, np.bincount(labels)))
    print(f"\n{len(images)} photographs: {counts}\n")
    method = "training" if features is None else "frozen features"
    print(f"| split | held out | colour histogram and SVM | {method} |\n|---|---|---|---|")
    for number, (held_out, svm, ours) in zip(args.splits, rows):
        print(f"| {number + 1} | {held_out} | {svm:.1f}% | {ours:.1f}% |")
    _, svm, ours = np.array(rows).T
    print(
        f"| mean ± standard deviation | | {svm.mean():.1f} ± {svm.std():.1f}% | {ours.mean():.1f} ± {ours.std():.1f}% |"
    )


if __name__ == "__main__":
    main()
