"""`vilonghorn web` serves a page on this machine alone, and removes it when it ends."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.request import urlopen

import pytest
from left_run import NAMES, leave_run

from vilonghorn.cli import main
from vilonghorn.export.web_page import RUNTIME, RUNTIME_FILES


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_page_of_a_run_is_served_until_an_interrupt(end, tmp_path):
    leave_run(tmp_path / "run", depth=1)
    hub, temporary = tmp_path / "torch/hub", tmp_path / "temporary"
    hub.mkdir(parents=True), temporary.mkdir()
    with tarfile.open(hub / RUNTIME, "w:gz") as archive:
        for name in RUNTIME_FILES:
            archive.add(__file__, f"package/dist/{name}")
    environment = os.environ | dict(TORCH_HOME=str(hub.parent), TMPDIR=str(temporary))
    command = [sys.executable, "-m", "vilonghorn", "web", str(tmp_path / "run")]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **options) as server:
        line = server.stdout.readline()
        assert line.startswith("the page is at http://127.0.0.1:"), server.stderr.read()
        address = line.split()[4]
        assert json.load(urlopen(f"{address}model.json"))["classes"] == NAMES
        assert b"<title>Image classifier</title>" in urlopen(address).read()
        server.send_signal(end)
        assert server.wait(60) == 130 and server.stderr.read().endswith("interrupted\n")
    assert not any(temporary.glob("vilonghorn-web-*"))


def test_another_model_is_refused(capsys):
    assert main(["web", "resnet18"]) == 2
    assert "resnet18 is neither the directory of a run nor one of this library's models" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_does_not_exist_is_refused(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["web", "vilonghornv2_nano.icons480", "--port", port])
    assert capsys.readouterr().err.startswith("error: argument --port: invalid ")
