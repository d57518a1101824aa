"""The loop: what one update does, what an epoch leaves, what is refused before it."""

import base64
import csv
import errno
import json
import math
import os
import signal
from functools import partial
from html import escape

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.utils import ModelEmaV3
from toy_run import ToyLoader, toy_trainer

from vilonghorn.engine import Interrupted, checkpoint, trainer
from vilonghorn.engine.checkpoint import load_state, load_weights, read_log
from vilonghorn.engine.evaluate import average_lags

PLAIN = ["--task.mixup=0", "--task.cutmix=0", "--model.drop_path=0", "--optimizer.clip_grad=null"]


def weights_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def log_of(directory, kind):
    return [record for record in read_log(directory / "log.jsonl") if record["kind"] == kind]


class Poisoned(ToyLoader):
    """Gives images of infinities in some batches of the first epoch."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def epoch(self, epoch, start=0):
        for batch, (images, targets) in enumerate(super().epoch(epoch, start), start):
            yield images * (math.inf if epoch == 0 and batch in self.batches else 1), targets


def test_a_run_learns_and_leaves_its_files_and_a_page(tmp_path, capsys, pictures, monkeypatch):
    monkeypatch.setattr(ToyLoader, "class_names", ["<a>", "\x1b[31m", "c", "d"])
    trainer = toy_trainer(tmp_path, *PLAIN, "--schedule.epochs=15", "--optimizer.lr=6e-3", "--run.tensorboard=true")
    result = trainer.fit()
    assert result["top1"] > 80 and result["weights"] == "ema" and result["epochs"] == 15 and result["images"] == 32
    assert {file.name for file in tmp_path.iterdir()} == set(
        ".lock last.pt last.safetensors best.safetensors config.yaml environment.json classes.txt log.jsonl curves.png "
        "confusion.png confidence.png predictions.png predictions.csv report.html tensorboard".split()
    )
    page = (tmp_path / "report.html").read_text()
    for name in ("curves", "confusion", "confidence", "predictions"):
        assert base64.b64encode((tmp_path / f"{name}.png").read_bytes()).decode() in page
    for which in ("best", "last"):
        record = load_weights(tmp_path / f"{which}.safetensors")[1]
        scores = f"<td>{record['top1']:.2f} %</td><td>{record['loss']:.4f}</td>"
        assert f"<td>{which}</td><td>ema</td><td>{record['epoch']}</td>{scores}" in page
    assert escape((tmp_path / "config.yaml").read_text()) in page and "last weights (ema, epoch 15)" in page
    assert "top-5" not in page and "vilonghorn evaluate " in page and "--what cam" in page
    with open(tmp_path / "predictions.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["file"] for row in rows] == [f"sample {i}" for i in range(32)]
    assert [row["true_class"] for row in rows] == ["<a>", r"\x1b[31m", "c", "d"] * 8
    assert 100 * sum(row["right"] == "true" for row in rows) / 32 == pytest.approx(result["top1"])
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["processes"] == 1
    assert environment["backends"]["reference"] == "ready"
    epochs = log_of(tmp_path, "epoch")
    assert [record["epoch"] for record in epochs] == list(range(1, 16))
    assert epochs[-1]["ema"] == {key: result[key] for key in ("top1", "loss")}  # of four classes top-5 is 100%
    assert max(record["ema"]["top1"] for record in epochs) == result["best"]["top1"]
    assert epochs[result["best"]["epoch"] - 1]["ema"]["top1"] == result["best"]["top1"]
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    assert [record["update"] for record in log_of(tmp_path, "train")] == list(range(2, 91, 2))
    assert "epoch 15/15" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(record["update"], pytest.approx(record["loss"])) for record in log_of(tmp_path, "train")]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == losses
    assert [event.step for event in events.Scalars("epoch/ema/top1")] == list(range(6, 91, 6))


def test_accumulated_batches_make_the_gradient_of_their_union(tmp_path):
    batches = list(ToyLoader().epoch(0))[:2]
    trainer = toy_trainer(tmp_path, *PLAIN, "--optimizer.accumulate=2", "--data.batch_size=8")
    images, targets = (torch.cat(parts) for parts in zip(*batches))
    state, smoothing = trainer.train_state, trainer.config.task.label_smoothing
    loss = F.cross_entropy(state.model.train()(images), targets, label_smoothing=smoothing)
    gradients = torch.autograd.grad(loss, list(state.model.parameters()))
    seen = {}
    state.optimizer.step = lambda: seen.update({n: p.grad.clone() for n, p in state.model.named_parameters()})
    trainer.make_update(iter(batches), range(2))
    trainer.read_update()
    assert trainer.progress.losses[0] == pytest.approx(loss.item(), rel=1e-5)
    for gradient, other in zip(gradients, seen.values()):
        torch.testing.assert_close(gradient, other)
    assert trainer.steps.updates_per_epoch == 3 and trainer.update == 1


def test_the_gradient_is_clipped_to_its_norm(tmp_path):
    trainer = toy_trainer(tmp_path, "--optimizer.clip_grad=0.01")
    norms = []
    trainer.train_state.optimizer.step = lambda: norms.append(
        torch.nn.utils.get_total_norm([p.grad for p in trainer.train_state.model.parameters()])
    )
    trainer.make_update(ToyLoader().epoch(0), range(1))
    assert trainer.unread[0][1] > 0.01 and norms[0].item() == pytest.approx(0.01, rel=1e-3)


def test_the_average_follows_its_recurrence(tmp_path):
    trainer = toy_trainer(tmp_path, "--ema.decay=0.8", "--ema.warmup=false")
    stream = trainer.train_loader.epoch(0)
    trainer.make_update(stream, trainer.steps.next_batches(trainer.progress))
    expected = weights_of(trainer.train_state.model)
    assert equal(weights_of(trainer.train_state.ema.module), expected)
    for batch in (1, 2, 3):
        trainer.make_update(stream, range(batch, batch + 1))
        expected = {n: 0.8 * expected[n] + 0.2 * value for n, value in weights_of(trainer.train_state.model).items()}
    for name, value in trainer.train_state.ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert isinstance(trainer.train_state.ema, ModelEmaV3)


@pytest.mark.parametrize("fused", ["false", "true"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path, fused):
    options = ["--optimizer.name=adamw", f"--optimizer.kwargs={{fused: {fused}}}"]
    trainer = toy_trainer(tmp_path, *options, train=Poisoned({1, 4}))
    stream = trainer.train_loader.epoch(0)
    trainer.make_update(stream, trainer.steps.next_batches(trainer.progress))
    model = weights_of(trainer.train_state.model)
    moments = json.dumps(trainer.train_state.optimizer.state_dict()["state"], default=lambda tensor: tensor.tolist())
    trainer.make_update(stream, trainer.steps.next_batches(trainer.progress))
    assert equal(weights_of(trainer.train_state.model), model)
    state = trainer.train_state.optimizer.state_dict()["state"]
    assert moments == json.dumps(state, default=lambda tensor: tensor.tolist())
    trainer.read_update()
    assert (trainer.progress.skipped, trainer.progress.skipped_in_row) == (1, 1)
    trainer.make_update(stream, trainer.steps.next_batches(trainer.progress))
    trainer.read_update()
    assert not equal(weights_of(trainer.train_state.model), model)
    assert (trainer.progress.skipped, trainer.progress.skipped_in_row) == (1, 0)
    (tmp_path / "notes.txt").write_text("mine")
    result = toy_trainer(tmp_path, *options, overwrite=True, train=Poisoned({1, 4})).fit()
    assert result["skipped"] == 2 and (tmp_path / "notes.txt").exists()
    assert all(math.isfinite(record["loss"]) for record in log_of(tmp_path, "train"))


def test_an_update_with_a_fused_optimizer_reads_no_number_from_the_device(tmp_path, monkeypatch):
    trainer = toy_trainer(tmp_path, "--optimizer.name=adamw", "--optimizer.kwargs={fused: true}")
    stream = trainer.train_loader.epoch(0)
    trainer.make_update(stream, trainer.steps.next_batches(trainer.progress))
    batch, state, read = next(stream), trainer.train_state, []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: read.append(name))
    state.update(iter([batch]), [(0, 0, 1)], 2)
    monkeypatch.undo()
    assert not read and not trainer.progress.losses
    trainer.read_update()
    assert len(trainer.progress.losses) == 1 and math.isfinite(trainer.progress.losses[0])


def test_too_many_skipped_updates_in_a_row_end_the_run_in_a_state_to_resume(tmp_path):
    options = ["--run.max_skipped=2", "--run.checkpoint_updates=1"]
    with pytest.raises(FloatingPointError, match="3 updates in a row, up to update 5 .loss nan.*optimizer.lr"):
        toy_trainer(tmp_path, *options, train=Poisoned({2, 3, 4})).fit()
    state = load_state(tmp_path / "last.pt")
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert state["progress"]["batch"] == 4


@pytest.mark.parametrize("compile, mode", [("true", None), ("reduce-overhead", "reduce-overhead")])
def test_a_compiled_model_trains_the_same_weights_in_the_given_mode(tmp_path, monkeypatch, compile, mode):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: compiled.append((model, mode)) or model)
    state = toy_trainer(tmp_path, f"--run.compile={compile}").train_state
    assert compiled == [(state.model, mode)] and state.forward is state.model


def test_a_memory_budget_keeps_less_for_backward_and_changes_no_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    saved, kept, gradients = [], [], []
    for budget in (1.0, 0.4):
        torch.compiler.reset()
        options = ["--run.compile=true", f"--run.memory_budget={budget}", "--model.name=vilonghorn_nano"]
        options += ["--model.kwargs={patch_size: 2, depth: 2, embed_dim: 16}", "--model.drop_path=0"]
        state = toy_trainer(tmp_path / str(budget), *options).train_state
        state.model.train()
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            loss = state.forward(images).square().sum()
        loss.backward()
        kept.append(sum(saved))
        saved.clear()
        gradients.append([p.grad for p in state.model.parameters()])
    assert kept[1] < 0.7 * kept[0]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="run.memory_budget is 0.4, but the model is not compiled: set run.compile"):
        toy_trainer(tmp_path / "eager", "--run.memory_budget=0.4")


def test_a_signal_inside_an_evaluation_resumes_with_that_evaluation(tmp_path):
    class Stopping(ToyLoader):
        def epoch(self, epoch, start=0):
            os.kill(os.getpid(), signal.SIGTERM)
            yield from super().epoch(epoch, start)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM in epoch 1, after 6 of 6 batches.*--resume") as raised:
        toy_trainer(tmp_path / "a", val=Stopping(32, training=False)).fit()
    assert raised.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    toy_trainer(tmp_path / "a", resume=True).fit()
    toy_trainer(tmp_path / "b").fit()
    assert (tmp_path / "a/last.safetensors").read_bytes() == (tmp_path / "b/last.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["last.pt", "best.safetensors", "config.yaml", "predictions.csv"])
def test_a_directory_with_a_run_or_a_file_of_one_is_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("mine")
    what = "a run in .*--resume" if name == "last.pt" else f"a {name} in"
    with pytest.raises(FileExistsError, match=f"there is {what}.*--run.dir.*--overwrite"):
        toy_trainer(tmp_path)
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_of_epochs_with_the_same_top1_the_one_with_the_lowest_loss_is_best(tmp_path, monkeypatch):
    scores = [(50, 2.0), (75, 1.5), (75, math.nan), (75, 0.5), (75, 0.5), (50, 0.1), (75, 0.7)]
    results = iter([{"top1": float(top1), "top5": 100.0, "loss": loss} for top1, loss in scores])
    monkeypatch.setattr(trainer, "evaluate", lambda *arguments, **keywords: {"model": next(results)})
    result = toy_trainer(tmp_path, "--ema.decay=0", "--schedule.epochs=7").fit()
    assert result["best"] == {"epoch": 4, "top1": 75.0, "loss": 0.5}
    assert load_weights(tmp_path / "best.safetensors")[1]["epoch"] == 4


@pytest.mark.parametrize(
    ("model", "ema", "images", "lags"),
    [((90, 0), (20, 0), 32, 1), ((90, 0), (80, 0), 32, 0), ((90, 0), (80, 0), 1000, 1), ((80, 0), (90, 0), 1000, 0)]
    + [((None, 0.5), (None, 0.6), 9, 1), ((None, 0.5), (None, 0.51), 9, 0), ((100, 0), (100, 0), 9, 0)],
)
def test_an_average_that_lags_behind_is_said_once_at_the_end(tmp_path, monkeypatch, capsys, model, ema, images, lags):
    both = [
        {"loss": loss} | ({} if top1 is None else {"top1": float(top1), "top5": 100.0}) for top1, loss in (model, ema)
    ]
    results = dict(zip(("model", "ema"), both))
    assert average_lags(results, images) == bool(lags) and not average_lags({"model": both[0]}, images)
    if images == 32:
        monkeypatch.setattr(trainer, "evaluate", lambda *arguments, **keywords: results)
        toy_trainer(tmp_path, "--schedule.epochs=2").fit()
        remedy = "clearly worse than the last weights: lower ema.decay (0.9), or make it 0 for a short run\n"
        assert capsys.readouterr().out.count(remedy) == lags


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's device that is always full")
@pytest.mark.parametrize("name", ["log.jsonl", "last.pt", "best.safetensors"])
def test_a_disk_that_fills_up_ends_a_run_with_the_file_and_what_to_do(tmp_path, name):
    run = toy_trainer(tmp_path, "--schedule.epochs=2")
    if name == "log.jsonl":
        run.directory.log = open("/dev/full", "ab", buffering=0)
    else:
        (tmp_path / f"{name}.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"no space left for {tmp_path}/{name}: free some space.*--resume {tmp_path}"):
        run.fit()
    toy_trainer(tmp_path, "--schedule.epochs=2", resume=True).fit()


def test_held_out_images_that_are_the_training_images_are_said(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to("photos")
    with pytest.warns(UserWarning, match="link is data.train, too: the results are not of held-out images"):
        toy_trainer(tmp_path / "run", f"--data.train={tmp_path}/photos", f"--data.val={tmp_path}/link")


@pytest.mark.parametrize("name", ["environment.json", "last.pt"])
def test_a_disk_that_is_full_before_the_first_checkpoint_leaves_nothing_to_resume(tmp_path, monkeypatch, name):
    write = checkpoint.atomic_write

    def fill(path):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "atomic_write", fill)
        with pytest.raises(OSError, match=f"no space left for {tmp_path}/{name}: free .*, then start again by --over"):
            toy_trainer(tmp_path)
    (tmp_path / "predictions.csv").touch()
    toy_trainer(tmp_path, overwrite=True)
    assert not (tmp_path / "predictions.csv").exists()


def test_a_run_without_a_finite_update_logs_null_and_its_seed_decides_its_weights(tmp_path):
    options = ["--schedule.epochs=2", "--ema.decay=0", "--optimizer.accumulate=4", "--run.log_updates=1"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = toy_trainer(tmp_path / name, *options, f"--run.seed={seed}", train=Poisoned(set(range(6))))
        assert run.fit()["weights"] == "model"
    a, b, c = ((tmp_path / name / "last.safetensors").read_bytes() for name in "abc")
    assert a == b and a != c
    first, *_ = lines = log_of(tmp_path / "a", "train")
    assert [record["update"] for record in lines] == [1, 2, 3, 4]  # 6 batches: 4 and 2 of them
    assert all(record["images_per_second"] > 0 and 0 <= record["data_wait"] <= 1 for record in lines)
    assert first["loss"] is None and first["grad_norm"] is None
    epoch = log_of(tmp_path / "a", "epoch")[0]
    assert epoch["train_loss"] is None and "ema" not in epoch
    assert load_state(tmp_path / "a/last.pt")["ema"] is None
