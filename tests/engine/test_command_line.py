"""Training as a person runs it: on an image folder, stopped, resumed, measured, and given nonsense."""

import csv
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from rank_run import some_digits
from toy_run import OPTIONS

import vilonghorn
from vilonghorn.cli import main
from vilonghorn.cli.train import train
from vilonghorn.data import ImageFolder, write_beton
from vilonghorn.engine import commands, config_file, dry_run, load_run
from vilonghorn.engine.command_line import load_config, run
from vilonghorn.engine.config import FIELDS
from vilonghorn.engine.config_file import config_names, configs_folder
from vilonghorn.engine.logger import RunLogger
from vilonghorn.export.load import load_for_export

SCRIPT = Path(__file__).parents[2] / "train_imagenet.py"
RESUME = "vilonghorn train --resume"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Options of a run on folders of 30 and 20 digits."""
    return [*OPTIONS, *some_digits(tmp_path_factory.mktemp("data"), 3, 2)[-2:], "--data.workers=0"]


@pytest.mark.filterwarnings("ignore:FFCV is not installed")
def test_a_run_is_trained_and_measured_again_with_the_same_result(data, tmp_path, capsys):
    growing = ["--augmentation.start_size=16", "--augmentation.ramp=[1, 2]"]
    train([*data, f"--run.dir={tmp_path}/run", "--schedule.epochs=6", *growing])
    trained = capsys.readouterr().out.splitlines()[-2:]
    scores = r"held-out (top-1 [\d.]+%, top-5 [\d.]+%, loss [\d.]+) on 20 images"
    for checkpoint, line in zip(("best", "last"), trained):
        train(
            [
                f"--evaluate={tmp_path}/run",
                f"--checkpoint={checkpoint}",
                "--data.batch_size=5",
                "--data.image_size=[16, 16]",
            ]
        )
        assert capsys.readouterr().out.splitlines()[-1] == line
        assert re.fullmatch(rf"{scores}: {checkpoint} weights \(ema, epoch \d\) of {tmp_path}/run", line)
    assert "last weights (ema, epoch 6)" in trained[1]
    scores, images = tmp_path / "scores.json", tmp_path / "images.csv"
    others, written = tmp_path / "few", tmp_path / "written"
    written.mkdir()
    for link in (scores, images):
        link.symlink_to(written / link.name)
    shutil.copytree(data[-2].partition("=")[2], others)
    [file.unlink() for file in others.glob("[2-9]/*")]
    with pytest.warns(UserWarning, match="no image of 8 of 10 classes"):
        train([f"--evaluate={tmp_path}/run", f"--data.val={others}", f"--json={scores}", f"--csv={images}"])
    assert scores.is_symlink() and {path.name for path in written.iterdir()} == {scores.name, images.name}
    found, rows = json.loads(scores.read_text()), [*csv.DictReader(StringIO(images.read_text()))]
    assert [row["file"] for row in rows] == sorted(str(path.relative_to(others)) for path in others.rglob("*.png"))
    assert found["images"] == len(rows) == 4 and found["data"] == str(others) and found["checkpoint"] == "best"
    assert found["top1"] == 25 * sum(row["right"] == "true" for row in rows) and found["top5"] >= found["top1"]
    assert found["epoch"] == load_run(tmp_path / "run")[1]["epoch"] and found["weights"] == "ema"
    assert [row["images"] for row in found["classes"]] == [2, 2, *[0] * 8] and found["classes"][9]["recall"] is None
    assert sum(row["images"] for row in found["confusions"]) == sum(row["right"] == "false" for row in rows)
    capsys.readouterr()
    with pytest.raises(ValueError, match="another optimizer.lr"):
        train([f"--resume={tmp_path}/run", "--optimizer.lr=1"])
    (tmp_path / "run").rename(tmp_path / "moved")
    train(["--resume", f"{tmp_path}/moved"])
    finished, *again = capsys.readouterr().out.splitlines()
    assert [line.replace("moved", "run") for line in again] == trained
    assert finished.startswith(f"the run in {tmp_path}/moved was finished, after 6 epoch(s): train on from its weights")
    assert yaml.safe_load((tmp_path / "moved/config.yaml").read_text())["run"]["dir"] == f"{tmp_path}/moved"


@pytest.mark.parametrize("source", ["folder", pytest.param("beton", marks=pytest.mark.needs_ffcv)])
def test_a_run_on_rectangular_images_is_resumed_measured_and_used(data, tmp_path, capsys, source):
    paths = [next(o for o in data if o.startswith(f"--data.{split}=")).partition("=")[2] for split in ("train", "val")]
    if source == "beton":
        paths = [str(write_beton(path, tmp_path / f"{i}.beton", progress=False).path) for i, path in enumerate(paths)]
    model = ["--model.name=vilonghorn_nano", "--model.kwargs={patch_size: 4, depth: 2, embed_dim: 32}"]
    given = [f"--data.train={paths[0]}", f"--data.val={paths[1]}", "--data.image_size=[12, 20]", "--data.crop_pct=1.0"]
    run, options = f"{tmp_path}/run", ["--schedule.epochs=2", "--data.crop_mode=squash", "--run.amp=off"]
    train([*data, *model, *given, *options, f"--run.dir={run}"])
    assert yaml.safe_load(Path(run, "config.yaml").read_text())["data"]["image_size"] == [12, 20]
    before = Path(run, "last.safetensors").read_bytes()
    train([f"--resume={run}"])
    assert Path(run, "last.safetensors").read_bytes() == before
    train([f"--evaluate={run}", "--checkpoint=last"])
    scores = capsys.readouterr().out.splitlines()[-1]
    loaded, val = vilonghorn.load(run, "last", device="cpu"), ImageFolder(Path(data[-2].partition("=")[2]))
    images = torch.stack([loaded.transform(val[i][0]) for i in range(len(val))])
    with torch.inference_mode():
        loss = F.cross_entropy(loaded.model(images), torch.as_tensor(val.labels)).item()
    assert images.shape[2:] == (12, 20)
    assert float(re.search(r"loss ([\d.]+)", scores)[1]) == pytest.approx(loss, abs=1e-2)
    exported = load_for_export(run, "last")
    assert exported.patch_embed.img_size == (12, 20) and exported.pretrained_cfg["input_size"] == (3, 12, 20)


@pytest.mark.filterwarnings("ignore:FFCV is not installed")
def test_control_c_leaves_a_run_to_resume_and_says_how(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(RunLogger, "log_epoch", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
    assert run(train, [*data, f"--run.dir={tmp_path}/run"]) == 130
    errors = capsys.readouterr().err
    assert f"stopped by SIGINT in epoch 2, after 1 of 3 batches; resume with: {RESUME} {tmp_path}/run\n" in errors
    monkeypatch.undo()
    assert run(train, ["--resume", f"{tmp_path}/run"]) == 0
    resumed = f"resuming {tmp_path}/run in epoch 2, after 1 of 3 batches (update 4 of 9)\n"
    assert resumed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error", "words"),
    [
        (["--data.train=nowhere"], FileNotFoundError, "data.train is nowhere, but .* /.*/nowhere: expected a folder"),
        (["--data.val=a/b"], FileNotFoundError, "data.val is a/b, .* or a .beton file"),
        (["--data.train=hfds/me/a:train"], ValueError, "type vilonghorn beton hf:me/a:train a-train.beton"),
        (["--data.val=hfds/a:b[:9%]"], ValueError, r"data.val is .* type vilonghorn beton 'hf:a:b\[:9%\]' a-b-9.beton"),
        (["--data.train=wds/x/train-*.tar"], ValueError, r"type vilonghorn beton x/train-\*.tar train.beton"),
        (["--data.train=wds/x/shards"], ValueError, r"type vilonghorn beton x/shards/\*.tar shards.beton"),
        (["--model.num_classes=7"], ValueError, "model.num_classes is 7 but the data has 10"),
        (["--resume=a", "--evaluate=b"], ValueError, "--evaluate: not allowed with argument --resume"),
        (["--evaluate=a", "--overwrite"], ValueError, "--overwrite: not allowed with argument --evaluate"),
        (["--resume=a"], ValueError, "the run is a, but --run.dir is .*: leave out --run.dir"),
        ([f"--run.dir={__file__}"], FileExistsError, "--run.dir is .*test_command_line.py, .*a file"),
        (["--model.kwargs.in_chans=1"], ValueError, "does not turn images"),
        (["--resum=nowhere"], ValueError, "--resume"),
        (["--schedule.patience="], ValueError, "^schedule.patience is '', expected int"),
        (["--task.teacher="], ValueError, r"task.teacher is '', expected a name or a path; its default is \[\]"),
        (["--data.image_size=99999999999999999999"], ValueError, r"must lie in \[1, 20000\]"),
        (["--data.batch_size=64"], ValueError, "batch_size"),
        (["--run.device=tpu9"], ValueError, "run.device is 'tpu9', which cannot be used here"),
    ],
)
@pytest.mark.filterwarnings("ignore:FFCV is not installed")
def test_what_cannot_run_is_refused_and_nothing_is_written(data, tmp_path, argv, error, words):
    with pytest.raises(error, match=words) as raised:
        train([*data, f"--run.dir={tmp_path}/run", *argv])
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--probe"], "there is no option --probe; expected one of --help, --config, --data.batch_size"),
        (["--data.vall=x"], "did you mean --data.val"),
        (["--csv={0}/no/a.csv"], "csv.: File is not creatable since parent directory does not exist: '{0}/no/a.csv'"),
        (["--csv={0}/a", "--json={0}"], "json.: File is not creatable since path already exists: '{0}'"),
    ],
)
def test_options_of_an_evaluation_are_checked_before_it_and_hints_apply(tmp_path, options, words, monkeypatch):
    monkeypatch.setattr(commands, "evaluate_run", pytest.fail)
    config = load_config("digits", f"--run.dir={tmp_path}/run").to_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises((ValueError, OSError), match=words.format(tmp_path)):
        train([f"--evaluate={tmp_path}", *(option.format(tmp_path) for option in options)])
    with pytest.raises(ValueError, match="--json and --csv are for the evaluation of a run"):
        train(["--json=a"])


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_run_that_is_not_there_is_named(option):
    with pytest.raises(FileNotFoundError, match="nowhere is not the directory of a run"):
        train([f"{option}=nowhere"])


def test_help_names_every_key_with_its_meaning_and_the_default_is_the_digits(capsys):
    for option in ("--help", "--print_config"):
        with pytest.raises(SystemExit, match="0"):
            train([option])
    text, _, config = capsys.readouterr().out.partition("\ndata:")
    assert all(f"--{key} " in text for key in FIELDS)
    assert "peak learning rate" in text
    used = re.findall(r"^  (--\S+)", text.partition("options most used")[2].partition("examples:")[0], re.MULTILINE)
    assert len(used) == 10 and all(f"\n  {option} " in text.partition("\noptions:")[2] for option in used)
    config = yaml.safe_load(f"data:{config}")
    assert config["model"]["name"] == "vilonghornv2_nano" and config["data"]["train"] == "data/digits/train"


def test_a_configuration_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()  # a folder of photographs is no configuration
    assert load_config("photos") == load_config(configs_folder() / "photos.yaml")
    (tmp_path / "photos.yaml").write_text("model: {name: vim_nano}")
    assert load_config("photos.yaml").model.name == "vim_nano"
    assert load_config("photos").model.name == "vilonghornv2_nano.lite0"
    with pytest.raises(FileNotFoundError, match="no configuration ~nobody-of-this-name/a.yaml, file or name"):
        load_config("~nobody-of-this-name/a.yaml")
    with pytest.raises(FileNotFoundError, match="no configuration imagenet/vim_tin.* did you mean imagenet/vim_tiny"):
        load_config("imagenet/vim_tin")
    assert "imagenet/vim_tiny" in config_names()
    monkeypatch.setattr(config_file, "__file__", str(tmp_path / "vilonghorn/engine/config_file.py"))
    assert configs_folder() == tmp_path / "configs"
    (tmp_path / "vilonghorn/configs").mkdir(parents=True)
    assert configs_folder() == tmp_path / "vilonghorn/configs"


def test_the_script_is_the_command_written_out(capsys):
    spec = importlib.util.spec_from_file_location("train_imagenet", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert inspect.getsource(script.train) == inspect.getsource(train)
    done = subprocess.run([sys.executable, SCRIPT, "--config=oops"], cwd=SCRIPT.parent, capture_output=True, text=True)
    assert main(["train", "--config=oops"]) == done.returncode == 2
    assert done.stderr == capsys.readouterr().err and done.stderr.startswith("error: there is no configuration oops")


def test_without_options_the_digits_are_written_and_trained_on_in_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "SECONDS", 0.05)
    for written in (True, False):
        train(["--dry-run"])
        out = capsys.readouterr().out
        assert ("handwritten digits to data/digits" in out) == written and "images     1,442 an epoch" in out
    assert len([*(tmp_path / "data/digits/val").rglob("*.png")]) == 355
