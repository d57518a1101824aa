"""No worker outlives its pool or the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest
from study.processes import worker_pool

# One worker sleeps; the other one saves on SIGTERM, as training does, and would then go on waiting for calls.
PARENT = """
import os, signal, sys, time
from pathlib import Path
from study.processes import worker_pool

def train(file):
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    print("ready", flush=True)
    signal.pause()
    signal.signal(signal.SIGTERM, previous)
    Path(file).write_text("saved")

def sleep():
    print("ready", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    with worker_pool(2) as pool:
        pool.submit(train, sys.argv[1])
        pool.submit(sleep).result()
"""


def test_sigterm_ends_the_block_and_the_call_in_progress():
    with pytest.raises(KeyboardInterrupt), worker_pool(1) as pool:
        worker = psutil.Process(pool.submit(os.getpid).result())
        call = pool.submit(time.sleep, 1000)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    assert call.cancelled() or isinstance(call.exception(), BrokenProcessPool)
    assert not worker.is_running() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_workers_save_and_end_when_their_parent_is_killed(tmp_path):
    script, saved = tmp_path / "parent.py", tmp_path / "saved"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "studies")}
    command = [sys.executable, script, saved]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        descendants = psutil.Process(parent.pid).children(recursive=True)
        assert len(descendants) >= 2
        parent.kill()
    assert psutil.wait_procs(descendants, timeout=60)[1] == []
    assert saved.read_text() == "saved"
