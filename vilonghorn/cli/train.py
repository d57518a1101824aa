"""Trains, resumes or evaluates an image classifier, or estimates the cost of a run: `vilonghorn train`."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from ..data.digits import write_digits
from ..engine import Config, Distributed, Trainer, command_line, evaluate_run
from ..engine.checkpoint import RunDirectory
from ..engine.dry_run import dry_run
from ..engine.evaluate import summarize
from ..engine.probe import probe_run, summarize_probe

USAGE = """vilonghorn train [--config NAME] [--SECTION.KEY VALUE ...]

the options most used (all options follow):
  --config photos           a YAML file, or one of vilonghorn's: digits, photos, photos_finetune, imagenet/...
  --data.train DIR          a folder with a folder of images for each class, or a .beton file
  --data.val DIR            the images to measure on
  --run.dir DIR             where the run writes its weights, log and report
  --model.name NAME         any model of timm, ours included
  --data.image_size 224     height and width of the images that the model sees, in pixels
  --data.batch_size 64      images in a batch of one process
  --schedule.epochs 100     passes over the training images
  --optimizer.lr 1e-3       peak learning rate, for updates of optimizer.lr_batch images
  --resume DIR              resume the run in this folder

examples:
  vilonghorn train --config photos --data.train DIR --data.val DIR --run.dir runs/mine
  vilonghorn train --config FILE.yaml --optimizer.lr 1e-3
  vilonghorn train --resume runs/mine                    resume from the last checkpoint
  vilonghorn train --config photos --dry-run             updates, FLOPs and time of a run
  vilonghorn train                                       handwritten digits, written to data/digits
  torchrun --nproc-per-node=8 -m vilonghorn train ...    on eight GPUs: docs/training.md"""
DIGITS = Path("data/digits")  # of configs/digits.yaml
parser = command_line.build_parser(prog="vilonghorn train", description="Train an image classifier.", usage=USAGE)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, 2 for an error of the user, 128 plus the number of a signal."""
    return command_line.run(train, argv)


def write_missing_digits(config: Config) -> None:
    """Writes the digits of configs/digits.yaml if a run shall read them and their folder is not there."""
    if Path(config.data.train) == DIGITS / "train" and not DIGITS.exists():
        write_digits(DIGITS)
        print(f"wrote scikit-learn's handwritten digits to {DIGITS}", flush=True)


def train(argv: Sequence[str]) -> None:
    """Trains, evaluates, or estimates the cost of a run.

    Raises:
        ValueError, OSError, ImportError, FloatingPointError: errors that the user can fix.
        Interrupted: a signal stopped the run, which is saved.
    """
    dist = Distributed()
    config, options = command_line.parse(parser, argv, "digits")
    dist.init()
    dist.run_on_all(lambda: write_missing_digits(config) if dist.is_main else None)
    if options.dry_run:
        if dist.is_main:
            cost = dry_run(config, options.processes, options.train_images)
            print(f"{yaml.safe_dump(config.to_dict(), sort_keys=False)}\n{cost}")
        return
    if options.probe and options.evaluate is None:
        raise ValueError("--probe measures a run: give vilonghorn evaluate RUN --probe")
    if options.probe:
        result = probe_run(options.evaluate, config, options.checkpoint)
        lines = [summarize_probe(config.run.dir, options.checkpoint, result)]
    elif options.evaluate is not None:
        result = evaluate_run(options.evaluate, config, options.checkpoint)
        lines = [summarize(config.run.dir, options.checkpoint, result["record"], result)]
    else:
        if dist.restarts and options.overwrite:
            raise ValueError("restarted by torchrun, --overwrite would replace this run itself: use --resume")
        resume = options.resume is not None or ("auto" if options.auto_resume or dist.restarts else False)
        trainer = Trainer(config, resume=resume, overwrite=options.overwrite)
        if trainer.progress.epoch == config.schedule.epochs and dist.is_main:
            more = f"train on from its weights by --model.weights {config.run.dir} and another --run.dir"
            print(f"the run in {config.run.dir} was finished, after {config.schedule.epochs} epoch(s): {more}")
        images = trainer.fit()["images"]
        records = RunDirectory(config.run.dir).records()
        lines = [summarize(config.run.dir, name, found, {**found, "images": images}) for name, found in records.items()]
    if dist.is_main:
        print(*lines, sep="\n")
