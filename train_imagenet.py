"""The command `vilonghorn train` as a script, for torchrun and a source tree: `python train_imagenet.py --help`."""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see vilonghorn/commands.py

from vilonghorn.engine.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
