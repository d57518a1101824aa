"""A run learns from teachers: the loss, what is respected of a teacher, the cache, and what is refused."""

import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rank_run import ended, start_ranks
from toy_run import ToyLoader, dies, toy_config, toy_trainer

from vilonghorn.engine import Trainer, load_run
from vilonghorn.engine.checkpoint import load_weights, save_weights
from vilonghorn.engine.dry_run import dry_run
from vilonghorn.engine.tasks.distillation import Distillation, Teacher

CPU, OFF, NAMES = torch.device("cpu"), torch.autocast("cpu", enabled=False), ToyLoader.class_names


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> list[str]:
    """Two runs of one epoch, whose images have another size and other statistics."""
    folder = tmp_path_factory.mktemp("teachers")
    other = ["--schedule.epochs=1", "--schedule.warmup_epochs=0", "--data.mean=[0.1,0.2,0.3]", "--data.std=[0.5,1,2]"]
    for seed in (1, 2):
        sizes = {"train": ToyLoader(size=24), "val": ToyLoader(32, training=False, size=24)}
        toy_trainer(folder / str(seed), *other, f"--run.seed={seed}", "--data.image_size=24", **sizes).fit()
    return [str(folder / str(seed)) for seed in (1, 2)]


def write_stripes(folder: Path) -> None:
    """The images of the toy loader as files, four classes of twelve."""
    loader = ToyLoader()
    for index in range(48):
        file = folder / "abcd"[index % 4] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(loader.image(0, index) * 64 + 128, 0, 255).astype(np.uint8)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(file)


def folder_options(folder: Path, teachers: list[str], *options: str) -> list[str]:
    data = [f"--data.train={folder}", f"--data.val={folder}", "--data.workers=0", "--run.checkpoint_updates=2"]
    return [*data, f"--task.teacher={teachers}", "--task.teacher_cache=true", "--task.teacher_temperature=2", *options]


def train_on_files(directory: Path, options: list[str], resume: bool = False) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training and held-out images are the same here
        Trainer(toy_config(directory, *options), resume=resume).fit()


def kill_in_cache(directory: Path, options: list[str], batch: int) -> None:
    """In a process of its own: trains until SIGKILL, when the teachers have computed some batches."""
    logits, left = Distillation.logits, [batch]

    def die(self, images):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return logits(self, images)

    Distillation.logits = die
    train_on_files(directory, options)


def mean_of_probabilities(teachers: list[str], images: torch.Tensor) -> torch.Tensor:
    """What teachers of 24 px say of normalised images of 16 px, by hand."""
    pixels = images * torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    pixels = pixels + torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    own = (pixels - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 1, 2])[:, None, None]
    own = torch.nn.functional.interpolate(own, size=(24, 24), mode="bilinear", antialias=True)
    with torch.no_grad():
        return sum(load_run(run)[0](own).softmax(1) for run in teachers) / len(teachers)


def test_the_loss_of_two_teachers_is_that_of_the_mean_of_their_probabilities(teachers, tmp_path):
    options = [f"--task.teacher={teachers}", "--task.teacher_weight=0.3", "--task.teacher_temperature=2"]
    options += ["--task.cutmix=0", "--task.mixup=0", "--task.label_smoothing=0.1"]
    task = Distillation(toy_config(tmp_path, *options), 4, CPU, NAMES)
    images, labels, scores = torch.randn(8, 3, 16, 16), torch.arange(8) % 4, torch.randn(8, 4)
    found = task.loss(lambda _: scores, *task.augment(images, labels), OFF)
    target = mean_of_probabilities(teachers, images).log().div(2).softmax(1)
    divergence = (target * (target.log() - (scores / 2).log_softmax(1))).sum(1).mean()
    of_labels = torch.nn.functional.cross_entropy(scores, labels, label_smoothing=0.1)
    torch.testing.assert_close(found, 0.7 * of_labels + 0.3 * 4 * divergence)


@pytest.mark.parametrize("cutmix", [0, 1])
def test_cached_logits_are_mixed_as_the_labels(teachers, tmp_path, cutmix):
    mixing = [f"--task.cutmix={cutmix}", f"--task.mixup={1 - cutmix}"]
    config = toy_config(tmp_path, f"--task.teacher={teachers}", "--task.teacher_cache=true", *mixing)
    task, logits = Distillation(config, 4, CPU, NAMES), torch.randn(8, 4)
    targets = torch.cat([torch.arange(8)[:, None] % 4, logits], 1)
    np.random.seed(3)
    _, mixed = task.augment(torch.zeros(8, 3, 16, 16), targets)
    labels, soft = mixed.chunk(2, 1)
    plain = torch.nn.functional.one_hot(torch.arange(8) % 4, 4) * 0.9 + 0.1 / 4
    lam = ((labels - plain.flip(0))[0, 0] / (plain - plain.flip(0))[0, 0]).item()
    assert 0 < lam < 1
    torch.testing.assert_close(labels, lam * plain + (1 - lam) * plain.flip(0))
    torch.testing.assert_close(soft, lam * logits.softmax(1) + (1 - lam) * logits.softmax(1).flip(0))


def test_classes_are_matched_by_their_names(teachers, tmp_path):
    config = toy_config(tmp_path, f"--task.teacher={teachers[0]}")
    images = torch.randn(4, 3, 16, 16)
    straight, turned = (Distillation(config, 4, CPU, names).logits(images) for names in (NAMES, NAMES[::-1]))
    torch.testing.assert_close(turned, straight.flip(1))
    (weights, record), file = load_weights(Path(teachers[0], "best.safetensors")), tmp_path / "other.safetensors"
    save_weights(file, weights, record | {"class_names": ["cafe\u0301", "b", "c", "d"]})
    assert Teacher(str(file), config, 4, CPU, ["d", "caf\u00e9", "b", "c"]).order == [3, 0, 1, 2]


def test_a_run_from_cached_logits_ends_the_same_after_kills_also_inside_the_cache(teachers, tmp_path):
    write_stripes(tmp_path / "data")
    options = folder_options(tmp_path / "data", teachers)
    train_on_files(tmp_path / "whole", options)
    dies(kill_in_cache, tmp_path / "killed", options, 3)
    assert not list((tmp_path / "killed").glob("*.npy"))
    train_on_files(tmp_path / "killed", options, resume=True)
    for name in ("last.safetensors", "best.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (file,) = (tmp_path / "whole").glob("teacher-*.npy")
    assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()
    found = torch.from_numpy(np.load(file).astype(np.float32))
    trainer = Trainer(toy_config(tmp_path / "killed", *options), resume=True)
    images = torch.cat([images for images, _ in trainer.val_loader.epoch(0)])
    torch.testing.assert_close(found.softmax(1), mean_of_probabilities(teachers, images), rtol=2e-3, atol=2e-3)
    whole = file.read_bytes()
    logit, order, header = (bytearray(whole) for _ in range(3))
    logit[150] ^= 1
    order[whole.index(b"<f2")] ^= 2  # of the bytes of a logit
    header[10] ^= 1
    for damaged in (whole[:-2], b"", b"text", bytes(logit), bytes(order), bytes(header), whole[:-32]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="npy is damaged .* remove it"):
            trainer.train_state.task.prepare(trainer.train_loader, file.parent, lambda: None)


def test_two_processes_write_the_cache_that_one_writes(teachers, tmp_path):
    write_stripes(tmp_path / "data")
    options = folder_options(tmp_path / "data", teachers, "--schedule.epochs=1", "--schedule.warmup_epochs=0")
    train_on_files(tmp_path / "one", [*options, "--data.batch_size=10"])
    assert ended(start_ranks(2, train_on_files, tmp_path / "two", [*options, "--data.batch_size=10"])) == [0, 0]
    one, two = (np.load(next((tmp_path / run).glob("teacher-*.npy"))) for run in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=2e-3)


def test_features_of_a_teacher_are_learned_through_a_linear_layer_that_is_resumed(teachers, tmp_path):
    options = [f"--task.teacher={teachers[0]}", "--task.teacher_output=features", "--schedule.epochs=2"]
    model = "--model.kwargs={patch_size: 4, depth: 1, embed_dim: 24, num_heads: 2}"
    trainer = toy_trainer(tmp_path / "a", *options, model)
    task, images = trainer.train_state.task, torch.randn(2, 3, 16, 16)
    wrapped = trainer.train_state.trained.eval()
    own = wrapped.student.forward_head(wrapped.student.forward_features(images), pre_logits=True)
    theirs = task.teachers[0](images)
    scores = wrapped.student(images)
    expected = torch.nn.functional.cross_entropy(scores, torch.eye(4)[:2]) + (task.extra(own) - theirs).square().mean()
    torch.testing.assert_close(task.loss(wrapped, images, torch.eye(4)[:2], trainer.train_state.amp), expected / 2)
    before = task.extra.weight.clone()
    trainer.fit()
    assert (task.extra.weight != before).any()
    again = toy_trainer(tmp_path / "a", *options, model, resume=True)
    assert torch.equal(again.train_state.task.extra.weight, task.extra.weight)
    assert not any("projection" in name for name in load_weights(tmp_path / "a" / "last.safetensors")[0])


def test_a_file_and_a_name_are_teachers_too(teachers, tmp_path):
    config = toy_config(tmp_path, "--task.teacher=x")
    alone = tmp_path / "alone.safetensors"
    model, record = load_run(teachers[0])
    save_weights(alone, model.state_dict(), record)
    beside = Teacher(f"{teachers[0]}/best.safetensors", config, 4, CPU, NAMES)
    assert beside.digest == Teacher(teachers[0], config, 4, CPU, NAMES).digest
    assert beside.digest == Teacher(str(alone), config, 4, CPU, NAMES).digest
    del record["data"]  # as of an earlier version
    save_weights(alone, model.state_dict(), {**record, "kwargs": {**record["kwargs"], "img_size": 24}})
    assert Teacher(str(alone), config, 4, CPU, NAMES).size == (24, 24)
    icons = timm.get_pretrained_cfg("vilonghornv2_nano").label_names
    teacher = Teacher("vilonghornv2_nano.icons480", config, 480, CPU, icons[::-1])
    assert teacher.size == (64, 64) and teacher(torch.zeros(1, 3, 16, 16)).shape == (1, 480)


@pytest.mark.parametrize(
    ("options", "names", "message"),
    [
        (["--task.teacher=nowhere"], NAMES, "task.teacher is nowhere, which is no run, file of weights or model"),
        (["--task.teacher=RUN"], ["a", "b", "c", "e"], "the teacher .* has no class 'e', which the data has"),
        (["--task.teacher=RUN"], NAMES[:3], "the teacher .* has 4 classes but the data has 3"),
        (
            ["--task.teacher=RUN", "--task.teacher_image_size=15"],
            NAMES,
            r"does not take images \(3, 15, 15\).*image_size",
        ),
        (["--task.teacher=FOLDER"], NAMES, "there are no weights .*best.safetensors"),
        (["--task.teacher_cache=true"], NAMES, r"task.teacher_cache is true, but task.teacher is \[\]"),
        (["--task.teacher=[RUN, RUN]", "--task.teacher_output=features"], NAMES, "features, which takes one teacher"),
        (
            ["--task.teacher=RUN", "--task.teacher_temperature=0"],
            NAMES,
            "task.teacher_temperature is 0.0; it must lie in",
        ),
        (["--task.teacher=['']"], NAMES, "task.teacher is '', expected a name or a path"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_in_a_sentence(teachers, tmp_path, options, names, message):
    options = [option.replace("RUN", teachers[0]).replace("FOLDER", str(tmp_path)) for option in options]
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        Distillation(toy_config(tmp_path, *options), len(names), CPU, names)
    assert "\n" not in str(raised.value)


def test_another_teacher_in_its_place_is_refused_on_resume(teachers, tmp_path):
    toy_trainer(tmp_path, f"--task.teacher={teachers[0]}")
    with pytest.raises(ValueError, match=r"the fingerprint of task.teacher \(.*same"):
        toy_trainer(tmp_path, f"--task.teacher={teachers[1]}", resume=True)
    toy_trainer(tmp_path, f"--task.teacher={teachers[0]}/best.safetensors", resume=True)
    with pytest.raises(ValueError, match=r"task.teacher \(none\) is None, but the run was started with \w+: "):
        toy_trainer(tmp_path, resume=True)


def test_a_teacher_that_a_run_did_not_have_is_refused_on_resume(teachers, tmp_path):
    toy_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"task.teacher .*, but the run was started with None: "):
        toy_trainer(tmp_path, f"--task.teacher={teachers[0]}", resume=True)


def test_a_dry_run_with_a_cache_makes_updates_without_the_teacher(teachers, tmp_path, monkeypatch):
    monkeypatch.setattr("vilonghorn.engine.dry_run.SECONDS", 0.01)
    monkeypatch.setattr(Distillation, "logits", None)
    options = [f"--task.teacher={teachers[0]}", "--task.teacher_cache=true", "--model.num_classes=4"]
    assert "images/s" in dry_run(toy_config(tmp_path, *options), 1, 48)
