"""Trains an image classifier: `python train_imagenet.py --config imagenet/vilonghornv2_tiny`; `--help` lists options.

It is the command `vilonghorn train`, written out for readers. On eight GPUs: `torchrun --nproc-per-node=8
train_imagenet.py ...`.
"""

import os
import sys
from collections.abc import Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see vilonghorn/cli/__init__.py

from vilonghorn.cli import exit_status  # noqa: E402
from vilonghorn.cli.train import parser  # noqa: E402
from vilonghorn.engine.command_line import run  # noqa: E402
from vilonghorn.engine.commands import configure, make_trainer, print_cost, print_evaluation, print_results  # noqa: E402


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


if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(train, sys.argv[1:])))
