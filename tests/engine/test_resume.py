"""A run that is killed, stopped or crashed goes on, and ends as if nothing had happened."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from toy_run import Signalling, ToyLoader, dies, kill_at, kill_between_write_and_replace, toy_config, toy_trainer

import vilonghorn.engine.commands
import vilonghorn.engine.trainer
from vilonghorn.engine import Interrupted, Trainer, build_parser
from vilonghorn.engine.checkpoint import load_state, read_log, save_state
from vilonghorn.engine.commands import make_trainer

TIMES = ("seconds", "images_per_second", "data_wait")


def log_without_times(directory: Path) -> list[dict]:
    lines = read_log(directory / "log.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def assert_same_end(directory: Path, reference: Path) -> None:
    for name in ("last.safetensors", "best.safetensors"):
        assert (directory / name).read_bytes() == (reference / name).read_bytes(), name
    a, b = load_state(directory / "last.pt"), load_state(reference / "last.pt")
    for part in ("model", "ema"):
        assert all(torch.equal(a[part][name], b[part][name]) for name in b[part])
    for index, moments in b["optimizer"]["state"].items():
        assert all(torch.equal(a["optimizer"]["state"][index][name], value) for name, value in moments.items())
    assert a["scaler"] == b["scaler"]
    assert {**a["progress"], "seconds": 0, "log_size": 0} == {**b["progress"], "seconds": 0, "log_size": 0}
    assert log_without_times(directory) == log_without_times(reference)


OPTIONS = ("--run.checkpoint_updates=2",)
MODEL = ("--model.name=vilonghorn_nano", "--model.kwargs={patch_size: 4, depth: 2, embed_dim: 32}")
MASKED = ("--task.kind=masked", "--task.mask_ratio=0.5", "--task.mask_normalize=true")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    torch.set_num_threads(1)
    toy_trainer(directory, *OPTIONS).fit()
    return directory


def test_a_run_killed_again_and_again_ends_bit_for_bit_as_the_uninterrupted_one(tmp_path, uninterrupted):
    dies(kill_at, tmp_path, 0, 1, OPTIONS, False)  # before any checkpoint inside an epoch
    assert load_state(tmp_path / "last.pt")["progress"]["batch"] == 0
    dies(kill_at, tmp_path, 1, 5, OPTIONS, True)
    state = load_state(tmp_path / "last.pt")
    assert (state["progress"]["epoch"], state["progress"]["batch"]) == (1, 4)
    assert len(log_without_times(tmp_path)) > 0
    toy_trainer(tmp_path, *OPTIONS, resume=True).fit()
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.parametrize("task", ["masks", "logits of a teacher", "features of a teacher"])
def test_every_task_killed_twice_ends_bit_for_bit_as_the_uninterrupted_one(tmp_path, uninterrupted, task):
    kind = task.partition(" ")[0]
    teacher = (f"--task.teacher={uninterrupted}", f"--task.teacher_output={kind}")
    options = (*OPTIONS, *((*MODEL, *MASKED) if kind == "masks" else teacher))
    toy_trainer(tmp_path / "whole", *options).fit()
    for i, place in enumerate(sorted(random.Random(task).sample([*itertools.product(range(3), range(6))], 2))):
        dies(kill_at, tmp_path / "killed", *place, options, i > 0)
    toy_trainer(tmp_path / "killed", *options, resume=True).fit()
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    losses = [line["model"]["loss"] for line in read_log(tmp_path / "whole/log.jsonl") if line["kind"] == "epoch"]
    assert kind != "masks" or losses[0] > losses[-1] > 0


@pytest.mark.parametrize(("file", "nth"), [("last.pt", 6), ("best.safetensors", 1)])
def test_a_run_killed_inside_a_write_goes_on_from_the_version_before(tmp_path, uninterrupted, file, nth):
    dies(kill_between_write_and_replace, tmp_path, file, nth, OPTIONS)
    assert list(tmp_path.glob(f"{file}.*.partial"))
    load_state(tmp_path / "last.pt")
    toy_trainer(tmp_path, *OPTIONS, resume=True).fit()
    assert_same_end(tmp_path, uninterrupted)
    assert not list(tmp_path.glob("*.partial"))


def test_a_signal_saves_the_update_just_made_and_says_how_to_go_on(tmp_path, uninterrupted, pictures):
    train = Signalling(signal.SIGUSR1, 1, 2)
    with pytest.raises(Interrupted, match=f"epoch 2, after 3 of 6 batches.*--resume {tmp_path}") as raised:
        toy_trainer(tmp_path, *OPTIONS, train=train).fit()
    assert raised.value.signum == signal.SIGUSR1
    assert load_state(tmp_path / "last.pt")["progress"]["batch"] == 3
    assert (tmp_path / "curves.png").exists()
    toy_trainer(tmp_path, *OPTIONS, resume=True).fit()
    assert_same_end(tmp_path, uninterrupted)


def test_a_signal_inside_the_first_save_is_obeyed_after_it(tmp_path, monkeypatch):
    replace = os.replace

    def signalled(partial, path):
        os.kill(os.getpid(), signal.SIGINT if Path(path).name == "last.pt" else 0)
        replace(partial, path)

    monkeypatch.setattr(os, "replace", signalled)
    with pytest.raises(Interrupted, match=f"SIGINT in epoch 1, after 0 of 6 batches.*--resume {tmp_path}"):
        toy_trainer(tmp_path)
    assert load_state(tmp_path / "last.pt")["progress"]["batch"] == 0


def test_a_second_signal_acts_at_once(tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in a process in the background

    class Impatient(ToyLoader):
        def epoch(self, epoch, start=0):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield from super().epoch(epoch, start)

    with pytest.raises(KeyboardInterrupt):
        toy_trainer(tmp_path, train=Impatient()).fit()


@pytest.mark.parametrize(
    ("options", "stop"),
    [(("--optimizer.accumulate=4",), (0, 1)), (("--run.amp=fp16", "--optimizer.clip_grad=1"), (1, 2))],
)
def test_accumulated_updates_and_a_scaled_loss_resume_where_they_were(tmp_path, options, stop):
    with pytest.raises(Interrupted, match="after [34] of 6 batches"):
        toy_trainer(tmp_path / "a", *options, train=Signalling(signal.SIGTERM, *stop)).fit()
    toy_trainer(tmp_path / "a", *options, resume=True).fit()
    toy_trainer(tmp_path / "b", *options).fit()
    assert_same_end(tmp_path / "a", tmp_path / "b")


def test_time_alone_makes_checkpoints_due(tmp_path):
    options = ("--run.checkpoint_seconds=1e-9", "--run.checkpoint_updates=null")
    trainer = toy_trainer(tmp_path, *options, train=Signalling(signal.SIGINT, 0, 3))
    saved = []
    trainer.save = lambda save=trainer.save: (saved.append(trainer.progress.batch), save())
    with pytest.raises(Interrupted):
        trainer.fit()
    assert saved == [1, 2, 3, 4, 4]


def test_another_configuration_is_refused_by_the_names_of_its_keys(tmp_path):
    toy_trainer(tmp_path, "--schedule.epochs=2")
    with pytest.raises(ValueError, match="another optimizer.lr, schedule.epochs: "):
        toy_trainer(tmp_path, "--schedule.epochs=4", "--optimizer.lr=1", resume=True)
    toy_trainer(tmp_path, "--schedule.epochs=2", "--run.log_updates=5", "--data.train=moved", resume=True)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["log_updates"] == 5


def test_a_log_that_has_lost_lines_is_said(tmp_path):
    toy_trainer(tmp_path).fit()
    (tmp_path / "log.jsonl").write_bytes(b"")
    with pytest.warns(UserWarning, match="log.jsonl has lost lines: the curves of this run have a gap"):
        toy_trainer(tmp_path, resume=True)


@pytest.mark.parametrize("arguments", [{"resume": True}, {"overwrite": True}])
def test_a_directory_where_another_process_trains_is_left_alone(tmp_path, arguments):
    toy_trainer(tmp_path)
    before = (tmp_path / "last.pt").read_bytes()
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=f"another process is training in {tmp_path}"):
            toy_trainer(tmp_path, **arguments)
        other.kill()
    assert (tmp_path / "last.pt").read_bytes() == before
    toy_trainer(tmp_path, **arguments)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("scaler"),
        lambda state: state["model"].popitem(),
        lambda state: state.update(model="hello"),
        lambda state: state["optimizer"].clear(),
        lambda state: state["progress"].update(mood="good"),
    ],
)
def test_a_checkpoint_that_is_not_of_this_run_is_refused_in_one_sentence(tmp_path, spoil):
    toy_trainer(tmp_path)
    state = load_state(tmp_path / "last.pt")
    spoil(state)
    save_state(tmp_path / "last.pt", state)
    with pytest.raises(ValueError, match="last.pt is not the state of") as raised:
        toy_trainer(tmp_path, resume=True)
    assert "\n" not in str(raised.value)


def test_auto_starts_anew_what_was_killed_before_its_first_checkpoint_but_spares_other_files(tmp_path):
    toy_trainer(tmp_path / "killed")
    (tmp_path / "killed/last.pt").unlink()
    toy_trainer(tmp_path / "killed", resume="auto")
    (tmp_path / "killed/last.pt").unlink()
    (tmp_path / "killed/report.html").write_text("mine")
    with pytest.raises(FileExistsError, match="there is a report.html"):
        toy_trainer(tmp_path / "killed", resume="auto")


def test_other_data_and_updates_of_other_batches_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no last.pt in"):
        toy_trainer(tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()
    two, val = "--optimizer.accumulate=2", ToyLoader(32, training=False)
    toy_trainer(tmp_path, two, train=ToyLoader(40))
    with pytest.raises(ValueError, match="batches per update is 1, .* started with 2: .* same optimizer.accumulate"):
        toy_trainer(tmp_path, train=ToyLoader(40), resume=True)
    with pytest.raises(ValueError, match=r"images is 48, .* started with 40: .* same data"):
        toy_trainer(tmp_path, two, resume=True)
    val.fingerprint = "checks"
    with pytest.raises(ValueError, match="fingerprint of data.val .* is checks, .* started with stri"):
        toy_trainer(tmp_path, two, resume=True, train=ToyLoader(40), val=val)


@pytest.mark.parametrize("fail", ["data", "kill", "signal"])
def test_a_run_that_saved_no_update_does_not_block_the_next(tmp_path, fail):
    class Damaged(ToyLoader):
        def epoch(self, epoch, start=0):
            yield from itertools.islice(super().epoch(epoch, start), 3)
            raise ValueError("a.jpg: not a readable image")

    if fail == "data":
        with pytest.raises(ValueError, match="a.jpg"):
            toy_trainer(tmp_path, train=Damaged()).fit()
        assert read_log(tmp_path / "log.jsonl")
    elif fail == "kill":
        dies(kill_between_write_and_replace, tmp_path, "last.pt", 1, ())
        assert not (tmp_path / "last.pt").exists()
    else:
        toy_trainer(tmp_path)
    options = ("--optimizer.lr=1e-3", "--schedule.epochs=1", "--schedule.warmup_epochs=0")
    for resume in (False, "auto"):  # another configuration, as nothing was learned with the first
        trainer = toy_trainer(tmp_path, *options, resume=resume)
        assert log_without_times(tmp_path) == []
        (tmp_path / "best.safetensors").write_text("mine")
        with pytest.raises(FileExistsError, match="there is a best.safetensors"):
            toy_trainer(tmp_path)
        (tmp_path / "best.safetensors").unlink()
    trainer.fit()
    with pytest.raises(FileExistsError, match="there is a run in"):
        toy_trainer(tmp_path)


def test_a_resumed_run_removes_only_its_own_partial_files(tmp_path):
    toy_trainer(tmp_path)
    (tmp_path / "config.yaml.77.partial").mkdir()
    kept, gone = ("photos.onnx.12.partial", "last.pt.x.partial"), ("last.pt.7.partial", "teacher-ab.npy.8.partial")
    for name in (*kept, *gone):
        (tmp_path / name).write_text("half")
    toy_trainer(tmp_path, resume=True)
    assert {path.name for path in tmp_path.glob("*.partial")} == {*kept, "config.yaml.77.partial"}


def test_a_directory_that_cannot_hold_a_run_is_refused_before_the_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(vilonghorn.engine.trainer, "build_loader", None)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    before = {path.name for path in tmp_path.iterdir()}
    reasons = {"loop/a": "symbolic links|Symlink", "dangling": "a broken link", "file": "a file"}
    reasons |= {"file/run": "Not a directory", f"a/b/{'c' * 300}": "name too long", "/proc/x/y": "No such|Operation"}
    for directory, reason in reasons.items():
        expected = rf"^--run.dir is .*, which cannot hold a run \(.*({reason}).*\): choose"
        with pytest.raises(OSError, match=expected) as raised:
            toy_trainer(tmp_path / directory, train=None, val=None)
        assert "Errno" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match=r"run.dir is 'a\\x00b', expected a name or a path"):
        toy_trainer("a\0b")


def test_a_run_without_progress_ends_early_and_goes_on_without_patience(tmp_path, capsys, monkeypatch):
    quality = {1: 50.0, 2: 70.0, 3: 60.0, 4: 70.0, 5: 80.0, 6: 10.0}
    options = ("--schedule.epochs=6", "--schedule.patience=2")

    def scored(trainer):
        def evaluate(*arguments, **keywords):
            scores = {"top1": quality[trainer.progress.epoch + 1], "top5": 100.0, "loss": 1.0}
            return {"model": scores, "ema": scores}

        monkeypatch.setattr(vilonghorn.engine.trainer, "evaluate", evaluate)
        return trainer

    whole = scored(toy_trainer(tmp_path / "whole", *options)).fit()
    why = "after 4 of 6 epochs, because the last 2 were not better than epoch 2 (schedule.patience)"
    assert whole["epochs"] == 4 and whole["best"]["epoch"] == 2 and f"the run ends {why}\n" in capsys.readouterr().out
    assert read_log(tmp_path / "whole/log.jsonl")[-1] == {"kind": "end", "epoch": 4, "reason": why}
    with pytest.raises(Interrupted):
        scored(toy_trainer(tmp_path / "cut", *options, train=Signalling(signal.SIGINT, 3, 2))).fit()
    scored(toy_trainer(tmp_path / "cut", *options, resume=True)).fit()
    assert_same_end(tmp_path / "cut", tmp_path / "whole")

    run = f"{tmp_path}/cut"
    arguments = build_parser().parse_args(["--resume", run])
    loaders = {"train": ToyLoader(), "val": ToyLoader(32, training=False)}
    monkeypatch.setattr(vilonghorn.engine.commands, "Trainer", partial(Trainer, **loaders))
    assert make_trainer(toy_config(run, *options), arguments).fit()["epochs"] == 4
    said = capsys.readouterr().out
    assert f"the run in {run} was finished, {why}: go on by --resume {run} --schedule.patience null, or train" in said
    trainer = scored(make_trainer(toy_config(run, *options[:1]), arguments))
    assert trainer.fit()["best"] == {"epoch": 5, "top1": 80.0, "loss": 1.0} and trainer.finished == "after 6 epoch(s)"


def test_a_run_that_another_process_has_made_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    toy_trainer(tmp_path / "other", "--schedule.epochs=1", "--schedule.warmup_epochs=0").fit()
    opened = Trainer._open

    def open_late(self, *arguments):
        shutil.copytree(tmp_path / "other", tmp_path / "run", dirs_exist_ok=True)
        opened(self, *arguments)

    monkeypatch.setattr(Trainer, "_open", open_late)
    with pytest.raises(FileExistsError, match="there is a run in .*run: resume it by --resume"):
        toy_trainer(tmp_path / "run")
    for name in ("last.pt", "log.jsonl", "best.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
