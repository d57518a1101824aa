"""The command `vilonghorn train` as a script, for torchrun and a source tree: `python train_imagenet.py --help`."""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see vilonghorn/cli/__init__.py

from vilonghorn.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
