"""Trains a classifier from tar files of WebDataset that are too large to write to a .beton.

    torchrun --nproc-per-node=2 examples/train_from_tars.py --config photos --data.train 'shards/train-{000..099}.tar' \
        --data.val photos/val --classes names.txt --augmentation.repeats 1 --run.dir runs/tars

Options are those of `vilonghorn train`, also `--resume RUN`, which needs `--classes` again. A sample is an image and a
`.cls` file with its label, as for `vilonghorn beton`. The tar files are on a disk. Each is checked to its end before
training and its samples are counted; the index file keeps the counts by path, size and time.
In training, an image or a label that is missing or damaged is an error that names tar file and sample.

What this gives up against a .beton file or a folder:

- The order of an epoch depends on the number of processes and `data.workers`. The same numbers give the same order.
- A run that resumes inside an epoch reads the batches before that point again.
- An epoch has as many images as the tar files, but each process and worker repeats its own tar files: if these have
  different numbers of images, some images appear twice and others not at all. Tar files of equal numbers, as many as a
  multiple of processes times workers, keep that below a batch for each worker.
- Images are shuffled among `BUFFER` of each worker, not among all. An image is cropped alike wherever it appears twice.
- A changed image is not noticed if the size of its tar file is the same. Images are not decoded before training.
- No repeated augmentation, no `task.teacher_cache`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader, default_collate

from vilonghorn.data.atomic_files import write_json
from vilonghorn.data.beton.sources import count_labels, read_tars, tar_sample
from vilonghorn.data.loaders.config import LoaderConfig
from vilonghorn.data.loaders.loader import Batch, Loader, SeededDataset
from vilonghorn.data.loaders.processes import ignore_signals, read_batches
from vilonghorn.data.rng import seeded, uniform
from vilonghorn.engine import Config, Distributed, Interrupted, Trainer, build_parser, parse
from vilonghorn.engine.command_line import run
from vilonghorn.engine.commands import print_results
from vilonghorn.engine.device import pick_device

BUFFER = 1000  # samples among which a worker shuffles


def update_index(tars: list[str], index: Path) -> None:
    """Checks and counts tar files that are new or changed, and writes {path: [size, time, samples]} to `index`.

    Raises:
        ValueError: some of the tar files are missing, damaged or without labels; all are named.
    """
    known, problems = json.loads(index.read_text()) if index.exists() else {}, []
    for tar in tars:
        try:
            state = os.stat(tar)
            if known.get(tar, [])[:2] != [state.st_size, state.st_mtime_ns]:
                known[tar] = [state.st_size, state.st_mtime_ns, count_labels(tar)]
            if not known[tar][2]:
                problems.append(f"{tar}: it has no .cls files")
        except (ValueError, OSError) as error:
            problems.append(str(error))
    write_json(index, known)
    if problems:
        raise ValueError("\n".join([f"{len(problems)} of {len(tars)} tar files cannot be trained on:", *problems]))


class TarLoader(Loader):
    """Batches of tar files, of which each process reads a part in every epoch; see `vilonghorn.data.Loader`.

    Args:
        source: the name of the data in messages.
        index: {path: [size, time, samples]} of the tar files.
        config: `classes` are the class names by label.
    """

    def __init__(self, source: str, index: dict[str, list[int]], config: LoaderConfig) -> None:
        self.tars, names = list(index), config.classes
        if len(self.tars) < config.world_size:
            raise ValueError(
                f"{source}: {len(self.tars)} tar file(s) for {config.world_size} processes: give more files"
            )
        if config.repeats > 1:
            raise ValueError(f"augmentation.repeats is {config.repeats}; tar files are read once: make it 1")
        facts = [[os.path.basename(path), size, samples] for path, (size, _, samples) in index.items()]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        labels = np.zeros(sum(samples for _, _, samples in facts), np.int64)  # only their number is known
        super().__init__(
            SimpleNamespace(
                path=source, labels=labels, num_classes=len(names), classes=names, digest=digest, content=None
            ),
            config,
        )

    def _read(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        config = self.config
        order = np.random.default_rng([config.seed, epoch]).permutation(len(self.tars))
        own = [self.tars[i] for i in order[config.rank :: config.world_size]]
        stream = webdataset.DataPipeline(
            webdataset.SimpleShardList(own),
            webdataset.split_by_worker,
            read_shards,
            webdataset.detshuffle(BUFFER, seed=hash((config.seed, epoch, config.rank))),
            webdataset.map(ReadSample(config, epoch, SeededDataset(self.data, config, epoch).transform)),
        ).repeat()
        loader = DataLoader(
            stream,
            self.batch_size,
            num_workers=min(config.workers, len(own)),
            collate_fn=collate,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # the default would draw from torch's global generator
        )
        with closing(read_batches(loader, str(self.data.path))) as read:
            for batch in islice(read, len(self) - len(batches), len(self)):
                if isinstance(batch, Exception):
                    raise batch
                yield batch


def read_shards(shards: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The samples of tar files, in webdataset's form."""
    return read_tars(shard["url"] for shard in shards)


class ReadSample:
    """A sample of webdataset to its image (3, H, W) uint8, cropped and flipped, and its label; or to its error."""

    def __init__(self, config: LoaderConfig, epoch: int, transform: Any) -> None:
        self.config, self.epoch, self.transform = config, epoch, transform

    def __call__(self, parts: dict[str, Any]) -> tuple[torch.Tensor, int] | Exception:
        name, read = tar_sample(self.config.max_pixels, parts)
        try:
            image, label = read()
            if label >= len(self.config.classes):
                raise ValueError(f"{name}: its label is {label}, but there are {len(self.config.classes)} classes")
        except (ValueError, OSError) as error:
            return error
        key = np.array([zlib.crc32(name.encode())])
        with seeded(int(uniform(self.config.seed, self.epoch, key, 1)[0, 0] * 2**32)):
            return torch.as_tensor(self.transform(image)), label


def collate(samples: list) -> list[torch.Tensor] | Exception:
    return next((sample for sample in samples if isinstance(sample, Exception)), None) or default_collate(samples)


def make_loader(config: Config, tars: list[str], index: Path, classes: list[str]) -> TarLoader:
    """The loader of `data.train`, with the options of a configuration."""
    dist, counts = Distributed(), json.loads(index.read_text())
    known = {field.name for field in fields(LoaderConfig)}
    given = {key: value for key, value in (vars(config.data) | vars(config.augmentation)).items() if key in known}
    given |= dict(workers=1 if given["workers"] is None else given["workers"], classes=classes, training=True)
    given |= dict(interpolation=given["interpolation"] or "bicubic", labelled=config.task.labelled)
    given |= dict(rank=dist.rank, world_size=dist.world_size, seed=config.run.seed)
    options = LoaderConfig(**given, device=pick_device(config.run.device))
    return TarLoader(config.data.train, {tar: counts[tar] for tar in tars}, options)


def main(argv: list[str]) -> None:
    parser = build_parser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=Path, required=True, help="file with a class name on each line, from label 0")
    parser.add_argument("--index", type=Path | None, help="index file; null: index.json beside the first tar file")
    config, options = parse(parser, argv)
    if options.evaluate is not None or options.dry_run:
        raise ValueError("--evaluate and --dry-run are options of vilonghorn train")
    if config.task.teacher_cache:
        raise ValueError("task.teacher_cache is true, but the order of tar files is not that of a cache: make it false")
    classes = options.classes.read_text(encoding="utf-8").splitlines()
    if not all(classes) or len(set(classes)) < max(2, len(classes)):
        raise ValueError(f"{options.classes}: expected a class name on each line, at least two, each of them once")
    tars, dist = webdataset.shardlists.expand_urls(config.data.train), Distributed()
    index = options.index or Path(tars[0]).parent / "index.json"
    dist.init()
    dist.run_on_all(lambda: update_index(tars, index) if dist.is_main else None)
    loader = dist.run_on_all(lambda: make_loader(config, tars, index, classes))
    resume = options.resume is not None or ("auto" if options.auto_resume or dist.restarts else False)
    trainer = Trainer(config, train=loader, resume=resume, overwrite=options.overwrite)
    try:
        print_results(config, trainer.fit())
    except Interrupted as stop:
        raise Interrupted(stop.signum, f"{stop} (but with this script in place of vilonghorn train)") from stop


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
