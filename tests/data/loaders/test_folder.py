"""Worker processes ignore signals: the training process handles them."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data import create_loader


@pytest.mark.filterwarnings("ignore:FFCV is not installed")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_decoders_does_not_stop_them(tmp_path, signum):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(16):
            Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(tmp_path / name / f"{i:02}.png")
    loader = create_loader(tmp_path, batch_size=2, image_size=8, training=False, workers=2)
    batches = loader.epoch(0)
    for _ in range(2):  # one of each worker: both have started
        next(batches)
    for decoder in multiprocessing.active_children():
        os.kill(decoder.pid, signum)
    assert sum(len(targets) for _, targets in batches) == 28
