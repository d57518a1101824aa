"""Trains, resumes or evaluates an image classifier, or estimates the cost of a run: `vilonghorn train`."""

from collections.abc import Sequence

from ..engine.command_line import build_parser, run
from ..engine.commands import configure, make_trainer, print_cost, print_evaluation, print_results

USAGE = """vilonghorn train [--config NAME] [--SECTION.KEY VALUE ...]

the options most used (all options follow):
  --config photos           a YAML file, or one of vilonghorn's: digits, photos, photos_finetune, imagenet/...
  --data.train DIR          a folder with a folder of images for each class, or a .beton file
  --data.val DIR            the images to measure on
  --run.dir DIR             where the run writes its weights, log and report
  --model.name NAME         any model of timm, ours included
  --data.image_size 224     height and width of the images that the model sees, in pixels; or '[192, 256]'
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
parser = build_parser(prog="vilonghorn train", description="Train an image classifier.", usage=USAGE)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, 2 for an error of the user, 128 plus the number of a signal."""
    return run(train, argv)


def train(argv: Sequence[str]) -> None:
    """Trains, evaluates, or estimates the cost of a run.

    Raises:
        ValueError, OSError, ImportError, FloatingPointError: errors that the user can fix.
        Interrupted: a signal stopped the run, which is saved.
    """
    config, options = configure(parser, argv)  # YAML files, then options
    if options.dry_run:
        print_cost(config, options)
    elif options.evaluate is not None:
        print_evaluation(config, options)
    else:
        trainer = make_trainer(config, options)  # model, data, optimizer, schedule: new, or from the last checkpoint
        result = trainer.fit()  # epochs of updates and evaluation, with checkpoints, log and report
        print_results(config, result)  # of the best and the last weights, on the held-out images
