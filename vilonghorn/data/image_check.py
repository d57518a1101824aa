"""Opens all images of a folder before work starts.

Images that can be read are kept in the user's cache by name, size and times, so that each is read once.
"""

import hashlib
import os
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import PIL
from tqdm import tqdm

from .. import __version__
from .atomic_files import atomic_write
from .image_file import UnreadableImage, printable, read_image
from .image_folder import ImageFolder
from .threads import available_cpus, in_order

DIGEST = 16  # bytes


def cache_folder() -> Path:
    """Where findings are kept: `$XDG_CACHE_HOME/vilonghorn/images`; without the variable in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vilonghorn", "images")


class ImageCheck:
    """The check of a folder's N images. Several processes may each open a part of them.

    Attributes:
        digests: (N, DIGEST) uint8, BLAKE2b of each file; 0 where there is a problem.
        problems: (N,) why an image cannot be read, or ""; None: it was not opened yet.
    """

    def __init__(self, folder: ImageFolder) -> None:
        self.folder, self.names = folder, folder.names
        self._stats = np.array([*map(_stat, folder.paths)], np.int64)  # before the files are read
        facts = "\0".join([os.path.realpath(folder.path), str(folder.max_pixels), __version__, PIL.__version__])
        self._file = cache_folder() / f"{hashlib.sha256(facts.encode(errors='surrogateescape')).hexdigest()}.npz"
        self.digests = np.zeros((len(self.names), DIGEST), np.uint8)
        self.problems = np.full(len(self.names), None, object)
        if os.path.isfile(self._file):  # False where the folder is of another user
            self._recall()

    def open(self, rank: int = 0, world_size: int = 1) -> None:
        """Opens those that were not opened yet, or the part of a process; process 0 shows its progress.

        If the disk or the memory fails (OSError), and after Ctrl+C, the cache keeps what was found up to then.
        """
        positions = [i for i in range(rank, len(self.names), world_size) if self.problems[i] is None]
        bar = {"desc": f"opening {self.folder.path}", "unit": "img", "disable": bool(rank) or not positions}
        try:
            with closing(in_order(self._open_one, positions, available_cpus())) as results:
                for _ in tqdm(results, total=len(positions), **bar):
                    pass
        finally:
            if positions and not rank:
                self.keep()

    def keep(self) -> None:
        """Writes to the cache which images can be read. Warns if that is not possible."""
        good = np.flatnonzero(self.problems == "")
        names = np.array([os.fsencode(self.names[i]) for i in good])
        try:
            if not self._file.is_absolute():  # "~" of a user without a home would be a folder of that name
                raise OSError("its path is not absolute; set XDG_CACHE_HOME to an absolute path")
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._file) as file:
                np.savez(file, names=names, stats=self._stats[good], digests=self.digests[good])
        except OSError as error:
            warnings.warn(f"{self._file} cannot be written, so that all images are opened again: {error}", stacklevel=2)

    def _open_one(self, position: int) -> None:
        path = self.folder.paths[position]
        try:
            read_image(path, self.folder.max_pixels)
            with open(path, "rb") as file:
                digest = hashlib.blake2b(file.read(), digest_size=DIGEST).digest()
            self.digests[position], self.problems[position] = np.frombuffer(digest, np.uint8), ""
        except UnreadableImage as error:
            self.problems[position] = str(error).removeprefix(f"{printable(path)}: ")

    def _recall(self) -> None:
        """Takes from the cache the files that have the same size and times."""
        try:
            with np.load(self._file) as old:  # compares the CRC-32 of each array
                names, stats, digests = (old[key] for key in ("names", "stats", "digests"))
            position = {name: i for i, name in enumerate(names.tolist())}
            at = np.array([position.get(os.fsencode(name), -1) for name in self.names], np.int64)
            same = (at >= 0) & (self._stats[:, 0] >= 0)
            same[same] = (stats[at[same]] == self._stats[same]).all(1)
            self.digests[same], self.problems[same] = digests[at[same]], ""
        except Exception as error:  # a damaged archive raises nearly any exception
            warnings.warn(f"{self._file} is damaged, so that all images are opened again: {error}", stacklevel=2)


def _stat(path: str) -> tuple[int, int, int]:
    """Size and times of a file; negative if it is not there, so that it is opened each time."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
