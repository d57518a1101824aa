"""Options, training loop and picture that the examples share."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image
from scenes import CLASSES, SIZES, DigitScenes, Scene
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.utils import make_grid
from tqdm import tqdm

from vilonghorn.data.atomic_files import atomic_write

MEAN, STD = 0.3, 0.25  # of the scenes' pixels, about
WEIGHTS = "weights.safetensors"
BACKGROUND_AND_DIGITS = 1 + len(CLASSES)
COLORS = ("#4e79a7 #f28e2b #e15759 #76b7b2 #59a14f #edc948 #b07aa1 #ff9da7 #9c755f #d0d0d0").split()  # of the digits


def options(doc: str, models: Mapping[str, Mapping[str, Any]], argv: Sequence[str] | None) -> argparse.ArgumentParser:
    """Makes a parser with the options of every example.

    Args:
        doc: docstring of the example.
        models: choices of `--model`, each with its own defaults of other options.
        argv: the command line, to find the model whose defaults apply.
    """
    own = dict(batch=8, lr=4e-3, digits=3)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--model", default=next(iter(models)))
    own |= models.get(chosen.parse_known_args(argv)[0].model, {})
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=models, default=next(iter(models)))
    parser.add_argument("--steps", type=int, default=own.get("steps"), help="batches to train on, of new scenes each")
    parser.add_argument("--batch", type=int, default=own["batch"], help="scenes in a batch")
    parser.add_argument("--lr", type=float, default=own["lr"], help="highest learning rate")
    parser.add_argument("--side", type=int, default=96, help="height and width of a scene, in pixels")
    parser.add_argument("--digits", type=int, default=own["digits"], help="digits on a training scene, at most")
    parser.add_argument(
        "--held-out", type=int, default=64, help="scenes to measure on, of digits that no training scene has"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="PNG file to write with predictions on held-out scenes")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the options of `options`, and sets the seeds; exits with a sentence if one is wrong."""
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "digits", "held_out"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    if args.side < SIZES[1]:
        parser.error(f"--side is {args.side}, expected at least {SIZES[1]}, the pixels of a digit")
    if args.picture is not None and (args.picture.suffix != ".png" or not args.picture.parent.is_dir()):
        parser.error(f"--picture is {args.picture}, expected the name of a .png in a folder that exists")
    torch.manual_seed(args.seed)
    return args


def fit(model: nn.Module, loss: Callable[[list[Scene]], Tensor], args: argparse.Namespace) -> None:
    """Trains a model on new scenes with `optimize`. `loss` computes the loss of a batch of scenes by the model."""
    scenes = DigitScenes(args.steps * args.batch, args.side, most=args.digits, seed=args.seed)
    optimize(model, loss, DataLoader(scenes, args.batch, collate_fn=list), args.steps, args.lr)


def optimize(model: nn.Module, loss: Callable[[Any], Tensor], batches: Iterable, steps: int, lr: float) -> None:
    """Trains a model on as many batches as there are steps, and leaves it in evaluation mode.

    AdamW, linear warm-up and cosine decay of the learning rate, gradients clipped to norm 1. `loss` computes the loss
    of a batch by the model.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    model.train()
    start, recent = time.perf_counter(), []
    for step, batch in zip(range(1, steps + 1), batches):
        value = loss(batch)
        if not value.isfinite():
            raise FloatingPointError(f"the loss is {value.item()} at step {step}: lower --lr")
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(value.item())
        if step % 50 == 0 or step == steps:
            spent = f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of processor time"
            print(f"step {step}/{steps}: loss {sum(recent) / len(recent):.3f}, {spent}", flush=True)
            recent.clear()
    model.eval()


def held_out(args: argparse.Namespace) -> DigitScenes:
    """Returns the scenes that an example is evaluated on."""
    return DigitScenes(args.held_out, args.side, train=False, seed=args.seed)


def save_picture(path: Path | None, pictures: Iterable[Tensor], columns: int = 8) -> None:
    """Writes (3, H, W) uint8 pictures as one PNG, unless `path` is None."""
    if path is not None:
        grid = make_grid(list(pictures), columns, padding=3, pad_value=255)
        with atomic_write(path) as file:
            Image.fromarray(np.asarray(grid.permute(1, 2, 0))).quantize(256).save(file, "PNG", optimize=True)
        print(f"{path} shows predictions")


def own_options(doc: str, annotations: str, epochs: int, batch: int, lr: float) -> argparse.ArgumentParser:
    """Makes a parser with the options of the examples on one's own images; `annotations` names what goes with them."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    pair = dict(nargs=2, type=Path, metavar=("IMAGES", annotations), required=True)
    parser.add_argument("--train", **pair, help="data to train on")
    parser.add_argument("--val", **pair, help="held-out data to measure on")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights.safetensors")
    parser.add_argument("--backbone", default="vilonghornv2_nano", help="a vilonghornv2_* model")
    yes_or_no = dict(action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pretrained", **yes_or_no, help="start from the published weights of the backbone")
    parser.add_argument("--flip", **yes_or_no, help="flip training images from left to right at random")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch", type=int, default=batch, help="images in a batch")
    parser.add_argument("--lr", type=float, default=lr, help="highest learning rate")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images; 0: this one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse_own(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the options of `own_options`, makes the folder and sets the seeds; or exits with a sentence."""
    args = parser.parse_args(argv)
    for name in ("epochs", "batch", "size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, expected at least 1")
    wrong = [f"there is no folder {path}" for path, _ in (args.train, args.val) if not path.is_dir()]
    wrong += [f"there is no {path}" for _, path in (args.train, args.val) if not path.exists()]
    if wrong:
        parser.error("; ".join(wrong))
    if (args.out / WEIGHTS).exists():
        parser.error(f"{args.out / WEIGHTS} exists: give another --out")
    if not timm.is_model(args.backbone):
        parser.error(f"--backbone is {args.backbone}, expected one of {', '.join(timm.list_models('vilonghornv2_*'))}")
    if args.pretrained and not timm.is_model_pretrained(args.backbone):
        parser.error(f"there are no published weights of {args.backbone}: give --no-pretrained")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    return args


def check(read: Callable[[Path], Any], paths: Sequence[Path]) -> tuple[dict[Path, Any], list[str]]:
    """Reads files in threads; returns what `read` returns of each, and the messages of its ValueErrors."""

    def result(path: Path) -> Any:
        try:
            return read(path)
        except ValueError as error:
            return error

    with ThreadPoolExecutor() as pool:
        found = dict(zip(paths, tqdm(pool.map(result, paths), "files checked", len(paths), leave=False, disable=None)))
    problems = [str(value) for value in found.values() if isinstance(value, ValueError)]
    return {path: value for path, value in found.items() if not isinstance(value, ValueError)}, problems


def refuse(problems: Sequence[str]) -> None:
    """Ends the script with status 2 and all problems, if there are any."""
    if problems:
        print(
            *problems, f"error: {len(problems)} problem(s) in the data; nothing was trained", sep="\n", file=sys.stderr
        )
        sys.exit(2)


def endless(loader: DataLoader) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


def save(path: Path, model: nn.Module, record: Mapping[str, Any]) -> None:
    """Writes the weights as safetensors, with a record from which the model can be built, and no partial file."""
    with atomic_write(path) as file:
        file.write(safetensors.torch.save(model.state_dict(), {"record": json.dumps(record)}))


def load(path: Path, build: Callable[..., nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    """The model that `save` wrote, made by `build(**record["build"])`, in evaluation mode, and its record."""
    with safetensors.safe_open(path, "pt") as file:
        if "record" not in (file.metadata() or {}):
            raise ValueError(f"{path} has no record of a model: expected weights that this script has saved")
        record = json.loads(file.metadata()["record"])
        model = build(**record["build"])
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return model.eval(), record
