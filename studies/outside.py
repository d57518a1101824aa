"""Tasks of token sequences with published figures: parity, MQAR and MAD, with the mixers of this library used causally.

    python studies/outside.py            # all tasks
    python studies/outside.py parity mqar64

A finished run is a line of results/outside.json and is not run again; several processes may train different tasks.
`python studies/pages.py` makes a table of the runs and of the figures in results/published.json.

Sources of the tasks: parity in Grazzi et al., arXiv 2411.12537; MQAR in Arora et al., arXiv 2312.04927; the others in
MAD, Poli et al., arXiv 2403.17844. Training is cut: see `Task.epochs`. It ends early at 99% of the validation answers,
as Zoology's does, but not for parity. One learning rate and one seed a run.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, default_rng
from study.command import revision
from timm.layers import SwiGLU
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from vilonghorn.data.atomic_files import write_json
from vilonghorn.layers import Mixer

RESULTS = Path(__file__).parent / "results" / "outside.json"
RULES = ("longhorn", "longhorn_exact", "mamba")
IGNORE = -100  # a target without a loss
TEST, VALIDATION = 1, 2  # seeds of sequences; those of training are lists

Arrays = tuple[np.ndarray, np.ndarray]  # tokens and targets, (count, length) each


def parity(rng: Generator, count: int, training: bool, length: int = 40) -> Arrays:
    """Bits; the target is the parity of all bits so far, in tests of the whole sequence."""
    bits = rng.integers(0, 2, (count, length))
    targets = bits.cumsum(1) % 2
    if not training:
        targets[:, :-1] = IGNORE
    return bits, targets


def mqar(rng: Generator, count: int, training: bool, length: int, pairs: int, vocabulary: int = 8192) -> Arrays:
    """Pairs of key and value, then each key once more, at gaps of a power law; the target is its value."""
    half, context = vocabulary // 2, 2 * pairs
    keys = np.stack([rng.choice(half - 1, pairs, replace=False) + 1 for _ in range(count)])
    values = np.stack([rng.choice(half, pairs, replace=False) + half for _ in range(count)])
    space = (length - context) // 2
    log_p = -0.99 * np.log(np.arange(1, space + 1))
    gaps = np.argsort(-(log_p + rng.gumbel(size=(count, space))), axis=1)[:, :pairs]  # without replacement
    tokens, targets = np.zeros((count, length), np.int64), np.full((count, length), IGNORE)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    np.put_along_axis(tokens, context + 2 * gaps, keys, 1)
    np.put_along_axis(targets, context + 2 * gaps, values, 1)
    return tokens, targets


def recall(rng: Generator, count: int, training: bool, length: int = 128, noise: float = 0.0) -> Arrays:
    """Pairs of one of 8 keys and its value, which differs between sequences; noise replaces pairs by other tokens.

    Training has the next token as target everywhere, tests have the value of each key that has been seen.
    """
    pairs = length // 2
    rows = np.arange(count)[:, None]
    keys, table = rng.integers(0, 8, (count, pairs)), rng.integers(8, 16, (count, 8))
    noisy = rng.random((count, pairs)) < noise
    noisy[rows[:, 0], rng.integers(0, pairs - 1, count)] = False
    noisy[:, -1] = False
    shown = np.where(noisy, -1, keys)
    seen = np.stack([(shown[:, :i] == keys[:, i : i + 1]).any(1) for i in range(pairs)], 1) & ~noisy
    for row in np.flatnonzero(~seen[:, -1]):  # the last key is one that has been seen
        keys[row, -1] = rng.choice(shown[row, :-1][shown[row, :-1] >= 0])
    seen[:, -1] = True
    sequence = np.stack([keys, table[rows, keys]], 2)
    sequence = np.where(noisy[:, :, None], rng.integers(16, 32, sequence.shape), sequence).reshape(count, length)
    targets = sequence.copy()
    if not training:
        targets[:, 0::2] = IGNORE
        targets[:, 1::2][~seen] = IGNORE
    return sequence[:, :-1], targets[:, 1:]


def fuzzy(rng: Generator, count: int, training: bool, length: int = 128, longest: int = 3) -> Arrays:
    """Keys of 1 to 3 different tokens of 7, in tests always 3, each with a value of 1 to 3 different tokens of 8, which
    differs between sequences; the last key was seen before. Padded at the front (15). Targets as in `recall`.
    """

    def key() -> tuple[int, ...]:
        return tuple(rng.permutation(7)[: rng.integers(longest) + 1 if training else longest].tolist())

    def value() -> tuple[int, ...]:
        return tuple((7 + rng.permutation(8)[: rng.integers(longest) + 1]).tolist())

    tokens, targets = np.full((count, length + 1), 15), np.full((count, length + 1), IGNORE)
    for row in range(count):
        asked, last = key(), False
        values, seen, sequence, wanted = {asked: value()}, set(), [], []
        end = length - len(asked + values[asked]) - 2 * longest
        start = rng.integers(end - 2 * longest + 1)  # the first pair from here on has the key that is asked at the end
        while not last:
            last = len(sequence) >= end
            shown = asked if last or (len(sequence) >= start and asked not in seen) else key()
            answer = values.setdefault(shown, value())
            sequence += shown + answer
            wanted += [IGNORE] * len(shown) + (list(answer) if shown in seen else [IGNORE] * len(answer))
            seen.add(shown)
        tokens[row, -len(sequence) :] = sequence
        targets[row, -len(sequence) :] = sequence if training else wanted
    return tokens[:, :-1], targets[:, 1:]


def copying(rng: Generator, count: int, training: bool, length: int = 256, copied: int = 16) -> Arrays:
    """Tokens among blanks (14), then a mark (15) and blanks, whose targets are the tokens in their order."""
    blanks = length - 2 * copied - 1
    copy = rng.integers(0, 14, (count, copied))
    tokens, targets = np.full((count, length), 14), np.full((count, length), IGNORE)
    before = np.sort(rng.integers(0, copied, (count, blanks)), 1)  # number of tokens before each blank
    place = np.arange(copied) + np.stack([(before <= i).sum(1) for i in range(copied)], 1)
    np.put_along_axis(tokens, place, copy, 1)
    tokens[:, copied + blanks] = 15
    targets[:, -copied:] = copy
    return tokens, targets


def memorization(rng: Generator, count: int, training: bool, length: int = 32) -> Arrays:
    """Keys, each followed by a mark (255), whose target is the key's value, equal in all sequences."""
    values = default_rng(12345).permutation(np.arange(127, 255))[:127]
    keys = rng.integers(0, 127, (count, length // 2))
    tokens = np.stack([keys, np.full_like(keys, 255)], 2).reshape(count, length)
    targets = np.stack([np.full_like(keys, IGNORE), values[keys]], 2).reshape(count, length)
    return tokens, targets


def compression(rng: Generator, count: int, training: bool, length: int = 32) -> Arrays:
    """Random tokens and a mark (15), from whose output all tokens are decoded."""
    tokens = np.concatenate([rng.integers(0, 15, (count, length - 1)), np.full((count, 1), 15)], 1)
    return tokens, tokens


class Task(NamedTuple):
    """A task, its model and its training."""

    make: Callable[..., Arrays]
    vocabulary: int
    tests: dict[str, dict[str, int]] = {"accuracy": {}}  # changed arguments of `make` by name of the figure
    width: int = 128
    mlps: bool = True  # a gated MLP after each of the two mixers
    decode: bool = False  # all tokens from the output of the last one
    train: int = 12_800  # sequences; 0: new ones in each epoch, of 12,800
    test: int = 1_280
    batch: int = 128
    epochs: int = 20
    rate: float = 1e-3
    enough: float = 99.0  # percent of validation answers at which training ends


TASKS = {
    "parity": Task(
        parity, 2, {"40": {"length": 40}, "256": {"length": 256}}, width=64, train=0, epochs=30, enough=math.inf,
    ),
    "mqar64": Task(
        partial(mqar, length=64, pairs=4), 8192, width=64, mlps=False, train=100_000, test=3_000, epochs=8, rate=5e-3
    ),
    "memorization": Task(memorization, 256, train=256, epochs=200),
    "compression": Task(compression, 16, decode=True),
    "in-context recall": Task(recall, 16),
    "noisy recall": Task(partial(recall, noise=0.2), 32),
    "fuzzy recall": Task(fuzzy, 16, epochs=10),
    "selective copying": Task(copying, 16, epochs=10),
}  # fmt: skip


class Sequences(nn.Module):
    """Two causal mixers, each with a gated MLP if `mlps`, between an embedding of tokens and a classifier of each."""

    def __init__(self, task: Task, rule: str) -> None:
        super().__init__()
        width = task.width
        self.embed = nn.Embedding(task.vocabulary, width)
        self.branches = nn.ModuleList()
        for _ in range(2):
            mixer = Mixer(width, rule=rule, reverse=(False,), num_branches=4)
            self.branches.append(nn.Sequential(nn.RMSNorm(width), mixer))
            if task.mlps:
                self.branches.append(nn.Sequential(nn.RMSNorm(width), SwiGLU(width, 8 * width // 3, bias=False)))
        nn.init.normal_(self.embed.weight, std=0.02)
        layers = (nn.RMSNorm(width), nn.Linear(width, width), nn.GELU())
        self.decoder = (
            nn.Sequential(*layers, nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()) if task.decode else None
        )
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, task.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens to features (B, L, width), which `head` classifies."""
        x = self.embed(tokens)
        for branch in self.branches:
            x = x + branch(x)
        if self.decoder is not None:
            x = self.decoder(x[:, -1:] + positions(tokens.shape[1], x.shape[2]))
        return x


def positions(length: int, width: int) -> Tensor:
    """Sines and cosines, (length, width)."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.cat([angles.sin(), angles.cos()], 1)


def sequences(task: Task, *arguments: Any, **options: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets that `task.make` returns, as tensors."""
    tokens, targets = task.make(*arguments, **options)
    return torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()


def batches(tokens: Tensor, targets: Tensor, size: int, rng: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches in random order."""
    for index in torch.from_numpy(rng.permutation(len(tokens))).split(size)[: len(tokens) // size]:
        yield tokens[index], targets[index]


def train(name: str, rule: str, seed: int = 0) -> dict:
    """Trains a model with AdamW (weight decay 0.1) and a cosine to 0; returns the fields of its run."""
    task, rng, start = TASKS[name], default_rng([seed, 0]), time.monotonic()
    torch.manual_seed(seed)
    model = Sequences(task, rule)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=task.rate, weight_decay=0.1)
    count = task.train or 12_800
    updates = task.epochs * (count // task.batch)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=updates // 20)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates - updates // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [updates // 20])
    data, curve = sequences(task, rng, count, True), []
    for epoch in range(task.epochs):
        if not task.train and epoch:
            data = sequences(task, rng, count, True)
        for tokens, targets in batches(*data, task.batch, rng):
            asked = targets != IGNORE
            loss = F.cross_entropy(model.head(model(tokens)[asked]), targets[asked])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        curve.append(round(accuracy(model, task, VALIDATION, 256), 2))
        if curve[-1] >= task.enough:
            break
    tests = {figure: round(accuracy(model, task, TEST, **options), 3) for figure, options in task.tests.items()}
    row = {"task": name, "rule": rule, "seed": seed, "rate": task.rate, "epochs": len(curve), "tests": tests}
    size = sum(p.numel() for p in model.parameters())
    row |= {"validation": curve[:: max(1, len(curve) // 20)], "parameters": size}
    return row | {"seconds": round(time.monotonic() - start), "commit": revision()}


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, seed: int, count: int | None = None, **options: int) -> float:
    """Right tokens of those asked for, in percent, on the sequences of a seed; `count` is `task.test` by default."""
    tokens, targets = sequences(task, default_rng(seed), count or task.test, False, **options)
    right = asked = 0
    for some, expected in zip(tokens.split(task.batch), targets.split(task.batch)):
        found = expected != IGNORE
        right += (model.head(model(some)[found]).argmax(1) == expected[found]).sum().item()
        asked += found.sum().item()
    return 100 * right / asked


def read_runs() -> list[dict]:
    """The finished runs."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []


def main(names: list[str]) -> None:
    """Trains what is missing, and keeps each finished run."""
    for name in names or TASKS:
        for rule in RULES:
            if not any((run["task"], run["rule"]) == (name, rule) for run in read_runs()):
                run = train(name, rule)
                print(run, flush=True)
                write_json(RESULTS, {"command": ["python", "studies/outside.py"], "runs": [*read_runs(), run]})


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(TASKS):
        sys.exit(f"{', '.join(sorted(unknown))}: expected some of {', '.join(TASKS)}")
    main(sys.argv[1:])
