"""`vilonghorn web` serves a page on this machine alone, and removes it when it ends."""

import json
import os
import signal
import sys
import tarfile
import tempfile
from queue import Queue
from threading import Thread
from urllib.request import urlopen

import pytest
from left_run import NAMES, leave_run

from vilonghorn.cli import main, web
from vilonghorn.export.web_page import RUNTIME, RUNTIME_FILES


def visit(lines, end, found):
    """Reads the page, and ends the command with a signal."""
    try:
        line = lines.get(timeout=60)
        address = line.split()[4]
        found += [line, json.load(urlopen(f"{address}model.json"))["classes"], urlopen(address).read()]
    finally:
        os.kill(os.getpid(), end)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_page_of_a_run_is_served_until_a_signal(end, tmp_path, monkeypatch, capsys):
    leave_run(tmp_path / "run", depth=1)
    hub, temporary = tmp_path / "torch/hub", tmp_path / "temporary"
    hub.mkdir(parents=True), temporary.mkdir()
    with tarfile.open(hub / RUNTIME, "w:gz") as archive:
        for name in RUNTIME_FILES:
            archive.add(__file__, f"package/dist/{name}")
    lines, found = Queue(), []
    monkeypatch.setenv("TORCH_HOME", str(hub.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(web, "print", lambda line, flush: lines.put(line), raising=False)
    visitor = Thread(target=visit, args=(lines, end, found))
    visitor.start()
    with pytest.raises(SystemExit, match=str(128 + end)):
        sys.exit(main(["web", str(tmp_path / "run")]))
    visitor.join()
    line, classes, page = found
    assert line.startswith("the page is at http://127.0.0.1:") and classes == NAMES
    assert b"<title>Image classifier</title>" in page
    assert capsys.readouterr().err.endswith("interrupted\n") == (end == signal.SIGINT)
    assert not any(temporary.glob("vilonghorn-web-*"))


def test_another_model_and_one_without_classes_are_refused(capsys):
    refused = {
        "resnet18": "resnet18 is neither the directory of a run nor one of this library's models",
        "vilonghornv2_nano.lite0": "a web page needs a classifier of images in RGB: give a model with classes",
    }
    for model, words in refused.items():
        assert main(["web", model]) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_does_not_exist_is_refused(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["web", "vilonghornv2_nano.icons480", "--port", port])
    assert capsys.readouterr().err.startswith("error: argument --port: invalid ")
