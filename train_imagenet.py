"""Trains or evaluates an image classifier.

python train_imagenet.py                                  handwritten digits: configs/digits.yaml
python train_imagenet.py --config FILE --optimizer.lr 1e-3 --run.dir runs/mine
python train_imagenet.py --resume runs/mine               resume from the last checkpoint
python train_imagenet.py --evaluate runs/mine             held-out accuracy of the best weights
python train_imagenet.py --dry-run                        updates, memory and time of a run
torchrun --nproc-per-node=8 train_imagenet.py ...         on eight GPUs: docs/training.md
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads of torch leave the cores to the decoders

import yaml  # noqa: E402

from vilonghorn.engine import Distributed, Trainer, build_parser, complete, evaluate_run, parse  # noqa: E402
from vilonghorn.engine.command_line import run  # noqa: E402
from vilonghorn.engine.dry_run import dry_run  # noqa: E402


def main(argv: Sequence[str]) -> None:
    """Trains, evaluates, or estimates the cost of a run."""
    title, usage = __doc__.split("\n", 1)
    parser = build_parser(prog="train_imagenet.py", description=title, usage=usage.strip())
    dist = Distributed()
    config, options = parse(parser, complete(argv, Path(__file__).parent / "configs" / "digits.yaml"))

    if options.dry_run:
        cost = dry_run(config, options.processes, options.train_images, options.images_per_second)
        print(f"{yaml.safe_dump(config.to_dict(), sort_keys=False)}\n{cost}")
        return
    if options.evaluate is not None:
        result = evaluate_run(options.evaluate, config, options.checkpoint)
        which = f"{options.checkpoint} weights ({result['record']['weights']}, epoch {result['record']['epoch']})"
    else:
        if dist.restarts and options.overwrite:
            raise ValueError("restarted by torchrun, --overwrite would replace this run itself: use --resume")
        resume = options.resume is not None or ("auto" if options.auto_resume or dist.restarts else False)
        result = Trainer(config, resume=resume, overwrite=options.overwrite).fit()
        best = f"best {result['best']['top1']:.2f}% in epoch {result['best']['epoch']}"
        which = f"final weights ({result['weights']}, epoch {result['epochs']}; {best}; {result['seconds']:.0f} s)"
    scores = f"top-1 {result['top1']:.2f}%, top-5 {result['top5']:.2f}%, loss {result['loss']:.4f}"
    if dist.is_main:
        print(f"held-out {scores} on {result['images']} images: {which} of {config.run.dir}")


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
