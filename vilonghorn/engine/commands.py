"""The steps of `vilonghorn train` and of train_imagenet.py: configuration, trainer, and what is printed."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ..data.atomic_files import atomic_write, write_json
from ..data.digits import write_digits
from ..data.image_file import printable
from .checkpoint import RunDirectory
from .command_line import parse
from .config import Config
from .distributed import Distributed
from .dry_run import dry_run
from .evaluate import evaluate_run, summarize
from .predictions import hide_top5
from .trainer import Trainer

DIGITS = Path("data/digits")  # of configs/digits.yaml


def configure(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Config, Namespace]:
    """The configuration of a command line, by default that of the digits, which are then written; and all options."""
    config, options = parse(parser, argv, "digits")
    dist = Distributed()
    dist.init()
    reads_digits = Path(config.data.train or "") == DIGITS / "train" and not DIGITS.exists()
    dist.run_on_all(lambda: write_digits(DIGITS) if dist.is_main and reads_digits else None)
    if reads_digits:
        dist.print(f"wrote scikit-learn's handwritten digits to {DIGITS}")
    return config, options


def make_trainer(config: Config, options: Namespace) -> Trainer:
    """The trainer of a run that is started, replaced or resumed, as the options say. Raises the errors of `Trainer`."""
    dist = Distributed()
    if dist.restarts and options.overwrite:
        raise ValueError("restarted by torchrun, --overwrite would replace this run itself: use --resume")
    resume = options.resume is not None or ("auto" if options.auto_resume or dist.restarts else False)
    trainer = Trainer(config, resume=resume, overwrite=options.overwrite)
    if trainer.finished:
        more = f"train on from its weights by --model.weights {config.run.dir} and another --run.dir"
        if trainer.progress.epoch < config.schedule.epochs:
            more = f"go on by --resume {config.run.dir} --schedule.patience null, or {more}"
        dist.print(f"the run in {config.run.dir} was finished, {trainer.finished}: {more}")
    return trainer


def print_results(config: Config, result: dict[str, Any]) -> None:
    """Prints the held-out scores of the best and the last weights of a run, from the result of `Trainer.fit`."""
    if Distributed().is_main:
        for name, record in RunDirectory(config.run.dir).records().items():
            print(summarize(config.run.dir, name, record, {**record, "images": result["images"]}))


def print_cost(config: Config, options: Namespace) -> None:
    """Prints the updates, memory and time of a run (--dry-run), which all processes measure."""
    Distributed().print(dry_run(config, options.processes, options.train_images))


def print_evaluation(config: Config, options: Namespace) -> None:
    """Measures the run in `config.run.dir` (--evaluate), prints the scores, writes the files of --json, --csv.

    Links to files stay, and their files are written.
    """
    run, checkpoint = config.run.dir, options.checkpoint
    result = evaluate_run(run, config, checkpoint)
    record, found = result["record"], result["predictions"]
    if Distributed().is_main:
        print(summarize(run, checkpoint, record, result))
        if options.json:
            scores = hide_top5(found.scores, len(found.names)).items()
            facts = {"run": run, "data": printable(config.data.held_out or ""), "images": len(found.rows)}
            facts |= {"checkpoint": checkpoint, "weights": record["weights"], "epoch": record["epoch"]}
            facts |= {name: score if math.isfinite(score) else None for name, score in scores}
            facts |= {"classes": found.per_class(), "confusions": found.confusions()}
            write_json(os.path.realpath(options.json), facts)
        if options.csv:
            with atomic_write(os.path.realpath(options.csv)) as file:
                file.write(found.csv())
