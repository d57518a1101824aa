"""The command `vilonghorn`: its table, its help, what it refuses, and what a bug report needs."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from left_run import leave_run, make_image

import vilonghorn
from vilonghorn.cli import COMMANDS, env, main

ROOT = Path(__file__).parents[2]
EXEMPT = ("check", "model_kwargs", "to")  # options without a default
CODE = "import sys; from vilonghorn.cli import main; status = main(sys.argv[1:]); print('torch' in sys.modules)"

STOPPED = """import os, signal, sys  # of a process that gets a signal when the first file is complete, but not renamed
def stop(*_):
    if any(".partial" in name for name in os.listdir()):
        print("there is a part", flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))
os.fsync = os.sync = stop
os.chdir(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
from vilonghorn.cli import main
sys.exit(main(sys.argv[3:]))"""


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> str:
    """What pip makes of the entry point, and prints last whether torch was imported."""
    path = tmp_path_factory.mktemp("bin") / "vilonghorn"
    path.write_text(CODE + "; sys.exit(status)")
    return str(path)


def test_help_needs_no_torch_and_a_closed_pipe_is_no_error(script):
    assert python(script, "--version").stdout == f"vilonghorn {vilonghorn.__version__}\nFalse\n"
    found = python(script, "--help")
    assert found.returncode == 0 and "classify image files" in found.stdout and found.stdout.endswith("False\n")
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run([sys.executable, script, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (found.returncode, found.stderr) == (141, "")


@pytest.mark.parametrize("closed, command, status", [("2>&-", "oops", 2), ("<&- >&- 2>&-", "--help", 0)])
def test_what_is_for_a_closed_stream_is_not_written_to_another(closed, command, status):
    run = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "vilonghorn", command]
    found = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert (found.returncode, found.stdout, found.stderr) == (status, "", "")


@pytest.mark.parametrize(
    "command, end, status",
    [
        ("export {run} --to onnx --output a.onnx", signal.SIGTERM, 143),
        ("interpret {run} {image} --out a.png", signal.SIGTERM, 143),
        ("data split {images} a", signal.SIGTERM, 143),
        ("beton {images} a.beton", signal.SIGTERM, 143),
        ("beton {images} a.beton", signal.SIGINT, 130),
    ],
)
def test_a_command_that_a_signal_ends_leaves_no_part_of_a_file(command, end, status, tmp_path):
    leave_run(tmp_path / "run", depth=1)
    files = [tmp_path / f"images/{name}/{i}.png" for name in "ab" for i in range(5)]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        make_image(file, i)
    (out := tmp_path / "out").mkdir()
    arguments = command.format(run=tmp_path / "run", images=tmp_path / "images", image=files[0]).split()
    found = python("-c", STOPPED, str(out), str(int(end)), *arguments)
    assert (found.returncode, found.stdout) == (status, "there is a part\n"), found.stderr
    assert not list(out.iterdir())


def test_in_a_folder_that_was_removed_the_error_says_so(tmp_path):
    run = f"import os, sys; os.chdir({str(tmp_path)!r}); os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    found = python("-c", run, sys.executable, "-m", "vilonghorn", "predict", "vim_tiny", "a.png")
    error = "error: the current folder was removed: change to another one\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", error)


def test_python_m_is_the_same_command():
    found = python("-X", "importtime", "-m", "vilonghorn", "evaluat")
    assert found.returncode == 2 and "error: there is no command 'evaluat'; did you mean evaluate?" in found.stderr
    assert " torch\n" not in found.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "error: give a command"),
        (["run", "train.py"], "there is no command 'run'; did you mean vilonghorn exec"),
        (["bench", "--quick"], "there is no command 'bench'; did you mean python benchmarks/models.py in a clone?"),
        (["xyzzy"], "there is no command 'xyzzy'; expected one of train, pretrain, evaluate"),
    ],
)
def test_what_is_no_command_gets_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert re.search(words, err) and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv, orig_argv, expected",
    [
        (["/usr/bin/vilonghorn", "train"], ["python", "/usr/bin/vilonghorn", "train"], True),
        (["-m", "train"], ["python", "-u", "-m", "vilonghorn", "train"], True),
        (["-m", "vilonghorn"], ["python", "-m", "pytest", "vilonghorn"], False),
        (["-c"], ["python", "-c", "import vilonghorn"], False),
    ],
)
def test_only_the_command_itself_delays_the_import_of_torch(argv, orig_argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert vilonghorn._is_command() == expected


def test_training_lets_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setitem(sys.modules, "vilonghorn.cli.train", env)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert main(["env"]) == 0 and "OMP_WAIT_POLICY" not in os.environ
    assert main(["train"]) == 0 and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["train"]) == 0 and os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_says_defaults(name):
    parser = import_module(f"vilonghorn.cli.{name}").parser
    text = parser.format_help()
    assert text.startswith(f"usage: vilonghorn {name} ") and f"examples:\n  vilonghorn {name}" in text
    for action in parser._actions if name != "train" else ():  # jsonargparse says them by itself
        flag = action.nargs == 0 or action.required or not action.option_strings
        assert flag or "default" in action.help or action.dest in EXEMPT, action


def test_a_command_whose_packages_are_missing_is_one_sentence(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vilonghorn.cli.predict", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["predict", "runs/a", "a.png"]) == 2
    assert capsys.readouterr().err.startswith("error: import of tqdm halted")


def test_evaluate_is_the_evaluation_of_train(tmp_path, monkeypatch, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "there is no" in capsys.readouterr().err
    given = []
    monkeypatch.setattr("vilonghorn.cli.train.main", given.append)
    assert main(["evaluate", "runs/a"]) == 0
    assert main(["evaluate", "runs/a", "--data.val", "b", "--checkpoint", "last"]) == 0
    assert main(["evaluate", "--csv", "c.csv", "-x a", "--json=j.json", "--run.amp=off"]) == 0
    assert given == [
        ["--evaluate=runs/a", "--checkpoint=best"],
        ["--evaluate=runs/a", "--checkpoint=last", "--data.val", "b"],
        ["--evaluate=-x a", "--checkpoint=best", "--json=j.json", "--csv=c.csv", "--run.amp=off"],
    ]


def test_a_report_of_the_environment_says_what_runs_and_why_not(monkeypatch, capsys):
    monkeypatch.setenv("VILONGHORN_TEST", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["torch"] == torch.__version__ and found["vilonghorn"] == vilonghorn.__version__
    assert found["backends"]["cpu"]["reference"] == "ready" and set(found["backends"]) == {"cpu", "cuda"}
    assert found["variables"]["VILONGHORN_TEST"] == "1" and "secret" not in text
    assert found["package"] == str(ROOT / "vilonghorn")
    if found["libraries"]["cpu"]:
        assert found["chosen"] in found["instruction_sets"]
    monkeypatch.setattr(env.cpu, "_reason", "VILONGHORN_ISA is 'v9', expected ...")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for line in (f"\ntorch: {torch.__version__}\n", "chosen: null", "cpu: VILONGHORN_ISA is 'v9'"):
        assert line in text
