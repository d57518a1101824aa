"""The command `vilonghorn`: its table, its help, what it refuses, completion, and what a bug report needs."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from left_run import NAMES, leave_run, make_image
from PIL import Image

import vilonghorn
from vilonghorn import commands
from vilonghorn.commands import COMMANDS, main
from vilonghorn.tools import completion, env, evaluate

ROOT = Path(__file__).parents[1]
EXEMPT = ("check", "labels", "model_kwargs", "push", "to")  # options without a default
CODE = "import sys; from vilonghorn.commands import main; status = main(sys.argv[1:]); print('torch' in sys.modules)"


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> str:
    """What pip makes of the entry point, and prints last whether torch was imported."""
    path = tmp_path_factory.mktemp("bin") / "vilonghorn"
    path.write_text(CODE + "; sys.exit(status)")
    return str(path)


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--help"], 0, "classify image files"),
        (["--version"], 0, f"vilonghorn {vilonghorn.__version__}"),
        ([], 2, "classify image files"),
        (["predcit"], 2, "error: there is no command 'predcit'; the nearest known are predict"),
        (["xyzzy"], 2, "there is no command 'xyzzy'; known are train, evaluate"),
    ],
)
def test_help_and_a_misspelt_command_are_answered_without_torch(script, arguments, status, words):
    found = python(script, *arguments)
    assert found.returncode == status and words in found.stdout + found.stderr
    assert found.stdout.endswith("False\n")


def test_a_closed_pipe_ends_a_command_in_silence(script):
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run([sys.executable, script, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (found.returncode, found.stderr) == (141, "")


def test_python_m_is_the_same_command():
    found = python("-X", "importtime", "-m", "vilonghorn", "evaluat")
    assert found.returncode == 2 and "nearest known are evaluate" in found.stderr
    assert " torch\n" not in found.stderr


@pytest.mark.parametrize(
    "argv, orig_argv, expected",
    [
        (["/usr/bin/vilonghorn", "train"], ["python", "/usr/bin/vilonghorn", "train"], True),
        ([r"vilonghorn.exe"], ["vilonghorn.exe"], True),
        (["-m", "train"], ["python", "-u", "-m", "vilonghorn", "train"], True),
        (["-m"], ["python", "-mvilonghorn"], True),
        (["-m", "vilonghorn"], ["python", "-m", "pytest", "vilonghorn"], False),
        (["-m"], ["python", "-m", "vilonghorn.tools.predict"], False),
        (["-c"], ["python", "-c", "import vilonghorn"], False),
        ([], [], False),
    ],
)
def test_only_the_command_itself_puts_off_the_import_of_torch(argv, orig_argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert commands.is_program() == expected


def test_training_lets_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setitem(COMMANDS, "train", ("tools.env", "replaced"))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert main(["env"]) == 0 and "OMP_WAIT_POLICY" not in os.environ
    assert main(["train"]) == 0 and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["train"]) == 0 and os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_says_defaults(name):
    parser = import_module(f"vilonghorn.{COMMANDS[name][0]}").build_parser()
    text = parser.format_help()
    assert text.startswith(f"usage: vilonghorn {name} ") and f"examples:\n  vilonghorn {name}" in text
    for action in parser._actions if name != "train" else ():  # jsonargparse says them by itself
        flag = action.nargs == 0 or action.required or not action.option_strings
        assert flag or "default" in action.help or action.dest in EXEMPT, action


def test_a_command_whose_packages_are_missing_is_one_sentence(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vilonghorn.tools.completion")
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err.startswith("error: vilonghorn completion cannot start: import of shtab halted")


def test_evaluate_is_the_evaluation_of_train(monkeypatch):
    given = []
    monkeypatch.setattr(evaluate.train, "main", lambda argv: given.append(argv) or 0)
    assert main(["evaluate", "runs/a"]) == 0
    assert main(["evaluate", "runs/a", "--data.val", "b", "--checkpoint", "last"]) == 0
    assert given == [
        ["--evaluate", "runs/a", "--checkpoint", "best"],
        ["--evaluate", "runs/a", "--checkpoint", "last", "--data.val", "b"],
    ]


def test_evaluate_refuses_what_train_refuses(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_bash_completes_commands_options_names_and_files(tmp_path, capsys):
    assert completion.main(["bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "photos.yaml").touch()
    ask = """
source ./completion
for line in "vilonghorn ex" "vilonghorn train --optimizer.l" "vilonghorn train --config ph" \
    "vilonghorn evaluate runs/a --checkpoint l" "vilonghorn predict comp"; do
  COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_vilonghorn vilonghorn "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo $(printf '%s\\n' "${COMPREPLY[@]}" | sort)
done"""
    found = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.splitlines() == [
        "export",
        "--optimizer.layer_decay --optimizer.lr --optimizer.lr_batch",
        "photos photos.yaml photos_finetune",
        "last",
        "completion",
    ], found.stderr
    assert completion.main(["zsh"]) == 0 and capsys.readouterr().out.startswith("#compdef vilonghorn")


def test_a_report_of_the_environment_says_what_runs_and_why_not(monkeypatch, capsys):
    monkeypatch.setenv("VILONGHORN_TEST", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert env.main(["--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["vilonghorn"] == vilonghorn.__version__
    assert found["backends"]["cpu"]["reference"] == "ready" and set(found["backends"]) == {"cpu", "cuda"}
    assert found["variables"]["VILONGHORN_TEST"] == "1" and "secret" not in text
    assert found["vilonghorn"] == str(ROOT / "vilonghorn")
    if found["libraries"]["cpu"]:
        assert Path(found["libraries"]["cpu"]).is_file()
        assert found["processor"]["chosen"] in found["processor"]["instruction_sets"]
    assert env.main([]) == 0
    assert f"\n  torch: {torch.__version__}\n" in capsys.readouterr().out


def test_a_report_of_the_environment_says_that_no_kernel_runs(monkeypatch):
    monkeypatch.setattr(env.cpu, "_reason", "VILONGHORN_ISA is 'v9', expected ...")
    found = env.report()
    assert found["processor"]["chosen"] is None and found["backends"]["cpu"]["cpu"].startswith("VILONGHORN_ISA is 'v9'")


def test_load_gives_the_model_of_a_run_ready_for_photographs(tmp_path):
    model, image = leave_run(tmp_path / "run"), make_image(tmp_path / "a.png", 1)
    loaded = vilonghorn.load(tmp_path / "run")
    assert loaded.class_names == NAMES and not loaded.model.training
    given = loaded.transform(Image.open(tmp_path / "a.png"))
    torch.testing.assert_close(loaded.model(given[None]), model(image), rtol=0, atol=1e-5)
    with pytest.raises(FileNotFoundError, match="last"):
        vilonghorn.load(tmp_path / "run", checkpoint="last")
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        vilonghorn.laod  # noqa: B018
