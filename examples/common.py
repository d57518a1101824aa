"""Options, training loop and picture that the examples share."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scenes import CLASSES, SIZES, DigitScenes, Scene
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.utils import make_grid

from vilonghorn.data.atomic_files import atomic_write

MEAN, STD = 0.3, 0.25  # of the scenes' pixels, about
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
    """Trains a model on new scenes, and leaves it in evaluation mode.

    AdamW, linear warm-up and cosine decay of the learning rate, gradients clipped to norm 1. `loss` computes the loss
    of a batch of scenes by the model.
    """
    scenes = DigitScenes(args.steps * args.batch, args.side, most=args.digits, seed=args.seed)
    loader = DataLoader(scenes, args.batch, collate_fn=list)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / args.steps))
    )
    model.train()
    start, recent = time.perf_counter(), []
    for step, batch in enumerate(loader, 1):
        value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(value.item())
        if step % 50 == 0 or step == args.steps:
            spent = f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of processor time"
            print(f"step {step}/{args.steps}: loss {sum(recent) / len(recent):.3f}, {spent}", flush=True)
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
