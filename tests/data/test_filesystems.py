"""Training from a folder and `beton --overwrite` on a file system without locks that cannot flush folders."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vilonghorn.data import check_beton, write_beton

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
int fsync(int fd) {  /* CIFS and FUSE: files only */
    struct stat status;
    if (!fstat(fd, &status) && S_ISDIR(status.st_mode)) { errno = EINVAL; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
static int control(const char *name, int fd, int command, void *argument) {
    if (command == F_SETLK || command == F_SETLKW) { errno = ENOLCK; return -1; }
    return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, name))(fd, command, argument);
}
int fcntl(int fd, int command, ...) {
    va_list rest; va_start(rest, command); void *argument = va_arg(rest, void *); va_end(rest);
    return control("fcntl", fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
    va_list rest; va_start(rest, command); void *argument = va_arg(rest, void *); va_end(rest);
    return control("fcntl64", fd, command, argument);
}
"""
COMMANDS = """
import os, sys
from vilonghorn.cli import main
from vilonghorn.engine import report, trainer
report.draw_curves = trainer.predict_all = trainer.write_report = lambda *arguments: None  # for speed
try:
    os.fsync(os.open(".", os.O_RDONLY))
    sys.exit("the library is not loaded")
except OSError as error:
    assert error.errno == 22
assert main(["beton", "photos", "x.beton", "--overwrite", "--quiet"]) == 0
train = ["train", "--config", "digits", "--data.train", "photos", "--data.val", "photos", "--data.workers", "1"]
train += ["--data.batch_size", "2", "--model.kwargs", "{embed_dims: [8, 8, 8]}", "--run.dir", "run"]
assert main([*train, "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"]) == 0
assert main(["evaluate", "run", "--data.val", "cats"]) == 0  # another class is missing
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs LD_PRELOAD and a C compiler")
def test_folders_that_cannot_be_flushed_and_missing_locks_stop_nothing(tmp_path):
    (tmp_path / "shim.c").write_text(SHIM)
    build = ["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"]
    subprocess.run(build, cwd=tmp_path, check=True)
    for name in ("photos/cat", "photos/dog", "cats/cat"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((32, 32, 3), 40 * i, np.uint8)).save(tmp_path / name / f"{i}.png")
    old = write_beton([(np.zeros((8, 8, 3), np.uint8), 0)], tmp_path / "x.beton", progress=False)
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "shim.so")}
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    new = check_beton(tmp_path / "x.beton", images=True)
    assert (old.num_samples, new.num_samples, new.classes) == (1, 8, ["cat", "dog"])
    assert not list(tmp_path.glob("*.partial")) and json.loads(
        (tmp_path / "run" / "log.jsonl").read_text().split("\n")[0]
    )
    assert "warning: cats: no image of 1 of 2 classes: dog\n" in done.stderr
    assert "held-out top-1" in done.stdout and "on 4 images" in done.stdout
