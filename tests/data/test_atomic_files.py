"""A file that is written atomically is the new one or the old one, never a part."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from vilonghorn.data import atomic_files
from vilonghorn.data.atomic_files import atomic_folder, atomic_write, atomic_writes, lock, write_json


@pytest.mark.parametrize(("mode", "content"), [("wb", b"n\xc3\xa9w\n"), ("w", "néw\n")])
def test_a_block_that_ends_puts_the_new_content_in_place(tmp_path, mode, content):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic_write(str(path), mode) as file:
        file.write(content)
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"n\xc3\xa9w\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["block", "fsync", "replace"])
def test_an_error_leaves_the_old_content_and_nothing_beside_it(tmp_path, monkeypatch, where):
    def fail(*arguments):
        raise OSError("input/output error")

    path = tmp_path / "a"
    path.write_bytes(b"old")
    if where != "block":
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="input/output error"), atomic_write(path) as file:
        file.write(b"new")
        if where == "block":
            fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_and_folder_are_flushed_to_the_disk_around_the_renaming(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    with atomic_write(tmp_path / "a") as file:
        file.write(b"new")
    assert done == [os.stat(tmp_path / "a").st_ino, "replace", os.stat(tmp_path).st_ino]


def test_a_signal_after_the_renaming_keeps_the_new_files(tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        path.write_bytes(b"old")
    monkeypatch.setattr(atomic_files, "sync_folder", interrupt)
    with pytest.raises(KeyboardInterrupt), atomic_writes(*paths) as files:
        for file in files:
            file.write(b"new")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(paths, b"new")


@pytest.mark.parametrize(
    "failing, left", [(2, {"a": b"old", "b": b"old"}), (3, {f"a.{os.getpid()}.old": b"old", "b": b"new"})]
)
def test_an_error_between_renames_never_puts_the_first_old_file_beside_a_new_one(tmp_path, monkeypatch, failing, left):
    replaced, replace = [], os.replace

    def fail_once(*paths):
        replaced.append(paths)
        if len(replaced) == failing:
            raise OSError("input/output error")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail_once)
    for name in "ab":
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(OSError, match="input/output error"), atomic_writes(tmp_path / "a", tmp_path / "b") as files:
        for file in files:
            file.write(b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left


def test_sigterm_ends_a_forked_process_and_leaves_the_files_of_its_parent(tmp_path):
    with atomic_write(tmp_path / "a") as file:
        if not (child := os.fork()):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0) == (child, signal.SIGTERM)
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_second_sigterm_does_not_interrupt_the_removal_of_files(tmp_path, monkeypatch):
    def remove(folder, **options):
        signal.raise_signal(signal.SIGTERM)
        rmtree(folder, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(SystemExit), atomic_folder(tmp_path / "folder"):
        signal.raise_signal(signal.SIGTERM)
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_sigterm_that_is_set_inside_stays(tmp_path):
    def handler(*_):
        raise InterruptedError

    with atomic_write(tmp_path / "a"):
        signal.signal(signal.SIGTERM, handler)
    found = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert found == handler


def test_sigterm_has_its_own_handler_again_after_the_block(tmp_path):
    for handler in (signal.SIG_IGN, lambda *_: None, signal.SIG_DFL):  # the last one stays for other tests
        signal.signal(signal.SIGTERM, handler)
        with atomic_write(tmp_path / "a"):
            assert (signal.getsignal(signal.SIGTERM) == handler) == (handler != signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) == handler
        thread = threading.Thread(target=write_json, args=(tmp_path / "b.json", {}))  # which cannot set handlers
        thread.start()
        thread.join()
        assert json.loads((tmp_path / "b.json").read_text()) == {}
        (tmp_path / "b.json").unlink()


def test_json_has_a_line_for_each_entry_and_each_row(tmp_path):
    values = {"name": "é", "sizes": [1, 2], "rows": [{"a": 1, "b": [0.5]}, {"a": 2}], "none": []}
    write_json(tmp_path / "a.json", values)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == values
    assert text.splitlines()[:5] == ["{", ' "name": "é",', ' "sizes": [1, 2],', ' "rows": [', '  {"a": 1, "b": [0.5]},']


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_systems_that_cannot_flush_are_written(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with atomic_write(tmp_path / "a") as file:
        file.write(b"new")
    with atomic_folder(tmp_path / "b") as folder:
        (folder / "c").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_other_errors_of_a_disk_name_the_path(tmp_path, monkeypatch, write, code):
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=f"{os.strerror(code)}: '{tmp_path}/a'"), write(tmp_path / "a"):
        pass


@pytest.mark.parametrize("inherited", [True, False])
def test_a_lock_is_kept_from_others_and_not_needed_where_there_are_none(tmp_path, monkeypatch, inherited):
    held = lock(tmp_path / "a", inherited)
    code = "import fcntl, sys; fcntl.{}(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code.format("flock" if inherited else "lockf"), str(tmp_path / "a")]
    assert subprocess.run(command, stderr=subprocess.PIPE).returncode == 1
    assert (lock(tmp_path / "a", inherited) is None) == inherited
    held.close()
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, lambda *arguments: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    assert lock(tmp_path / "a", inherited) is not None


@pytest.mark.parametrize("write", [atomic_write, lock])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_neither_replaced_nor_waited_for(tmp_path, write, make):
    make(tmp_path / "x")
    kept = (tmp_path / "x").stat()
    with pytest.raises(FileExistsError, match="x is not a file: remove it, or give another name"):
        with write(tmp_path / "x"):
            pass
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").stat() == kept
