"""Processes that read a folder ignore requests to stop, end with their loader, and fail in one sentence."""

import errno
import multiprocessing
import os
import signal
import time
from multiprocessing import active_children

import pytest
import torch
from torch.utils.data import DataLoader, _utils

import vilonghorn.data.loaders.loader as module
from vilonghorn.data import create_loader
from vilonghorn.data.image_folder import ImageFolder
from vilonghorn.data.loaders.processes import read_batches

EVAL = {"batch_size": 2, "image_size": 16, "training": False, "workers": 2}
SHORT = r"folder.*: a process that reads images failed or was killed \(.*\); if memory is short, lower workers"


def ended(within=10):
    """Whether no process is left after some seconds."""
    deadline = time.monotonic() + within
    while active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not active_children()


def test_requests_to_stop_do_not_stop_the_readers(folder):
    batches = create_loader(folder, **EVAL).epoch(0)
    for _ in range(2):  # one of each process: both have started
        next(batches)
    for reader in active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(reader.pid, number)
    assert sum(len(targets) for _, targets in batches) == 23 and ended()


def test_a_reader_that_is_killed_ends_the_epoch_within_10_seconds(folder):
    batches, handler = create_loader(folder, **EVAL).epoch(0), signal.getsignal(signal.SIGCHLD)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) == handler  # torch's would raise an error anywhere
    os.kill(active_children()[0].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ChildProcessError, match=SHORT):
        list(batches)
    assert ended() and time.monotonic() - start < 10


def test_a_consumer_that_fails_and_keeps_its_batches_leaves_no_reader(folder):
    with pytest.raises(ZeroDivisionError) as kept:
        with module.closing(create_loader(folder, **EVAL).epoch(0)) as batches:
            next(batches)
            raise ZeroDivisionError
    assert kept.traceback and ended()


def test_processes_end_by_themselves_before_they_are_killed(folder, monkeypatch):
    """One that is killed may hold a lock of torch's event, for which torch would then wait for ever."""
    process, alive = multiprocessing.process.BaseProcess, []
    kill = process.kill
    monkeypatch.setattr(process, "kill", lambda self: alive.append(self.is_alive()) or kill(self))
    batches = create_loader(folder, **EVAL).epoch(0)
    next(batches)
    batches.close()
    assert alive == [False, False]


def test_busy_processes_are_not_waited_for_one_by_one(folder, monkeypatch):
    read = ImageFolder.__getitem__
    monkeypatch.setattr(ImageFolder, "__getitem__", lambda self, i: (i < 2 or time.sleep(60), read(self, i))[1])
    batches = create_loader(folder, **EVAL | {"workers": 4}).epoch(0)
    next(batches)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 10 and ended()  # torch would wait 15 seconds


@pytest.fixture
def torchs_handler():
    """The handler of SIGCHLD that torch sets with the first DataLoader that has workers."""
    before = signal.getsignal(signal.SIGCHLD)
    _utils.signal_handling._SIGCHLD_handler_set = False
    assert len(list(DataLoader([0, 1], num_workers=1))) == 2
    yield
    signal.signal(signal.SIGCHLD, before)


def test_shared_memory_that_is_full_is_one_sentence(folder, monkeypatch, torchs_handler):
    def full(samples):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(module, "default_collate", full)
    with pytest.raises(ChildProcessError, match=SHORT) as raised:
        next(create_loader(folder, **EVAL).epoch(0))
    assert "No space left" in str(raised.value) and "\n" not in str(raised.value) and ended()


def test_readers_of_a_start_that_fails_are_ended(folder, monkeypatch):
    start, started = multiprocessing.process.BaseProcess.start, []

    def second_fails(process):
        if started:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        started.append(start(process))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", second_fails)
    with pytest.raises(ChildProcessError, match=SHORT):
        next(create_loader(folder, **EVAL).epoch(0))
    assert started and ended()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_disk_names_the_file(folder, monkeypatch, workers):
    def fail(self, index):
        raise OSError(errno.EIO, "Input/output error", self.paths[index])

    monkeypatch.setattr(ImageFolder, "__getitem__", fail)
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error: '.*cat/00.png'$"):
        next(create_loader(folder, **EVAL | {"workers": workers}).epoch(0))
    assert ended()


def test_an_error_of_this_process_is_not_one_of_a_reader():
    def fail(samples):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        list(read_batches(DataLoader([torch.zeros(1)], collate_fn=fail), "x"))
