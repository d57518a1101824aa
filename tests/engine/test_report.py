"""What is drawn and logged."""

import base64
from html import escape

import pytest
import torch
from drawn_text import drawn_texts, misplaced
from matplotlib.axes import Axes
from torch import nn
from toy_run import ToyLoader, toy_trainer

from vilonghorn.engine import evaluate, report
from vilonghorn.engine.build import autocast
from vilonghorn.engine.checkpoint import Log, load_weights, read_log
from vilonghorn.engine.report import Predictions, draw_curves, draw_predictions, predict, worst_classes


class Images:
    """Images whose first pixel tells the label that is recited for them."""

    class_names = ["cat", "dog"]
    num_classes = 2

    def __init__(self, guesses, truths):
        self.guesses, self.truths = torch.tensor(guesses), torch.tensor(truths)
        self.num_samples = len(guesses)

    def __len__(self):
        return -(-self.num_samples // 7)

    def epoch(self, epoch, start=0):
        images = torch.zeros(self.num_samples, 3, 8, 8)
        images[:, 0, 0, 0] = self.guesses.float()
        for part in torch.arange(self.num_samples).split(7):
            yield images[part], self.truths[part]


class Reciting(nn.Module):
    def forward(self, images):
        return torch.stack([1 - images[:, 0, 0, 0], images[:, 0, 0, 0]], 1)


@pytest.fixture
def titles(monkeypatch):
    seen = []
    original = Axes.set_title

    def note(self, label, **style):
        seen.append((label, style))
        return original(self, label, **style)

    monkeypatch.setattr(Axes, "set_title", note)
    return seen


def draw(path, loader):
    amp = autocast("off", torch.device("cpu"))
    draw_predictions(path, predict(Reciting(), loader, amp), (0.5,) * 3, (0.5,) * 3, "last weights")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_mistakes_come_first_and_are_named(tmp_path, titles):
    truths = [i % 2 for i in range(60)]
    guesses = list(truths)
    guesses[8], guesses[31] = 1, 0
    draw(tmp_path / "predictions.png", Images(guesses, truths))
    assert [label for label, _ in titles[:2]] == ["dog,\nnot cat", "cat,\nnot dog"]
    assert [style["color"] for _, style in titles] == ["red", "red"] + ["black"] * (len(titles) - 2)
    assert {label for label, _ in titles[2:]} == {"cat", "dog"}
    assert 30 <= len(titles) - 2 <= 40


def test_long_names_do_not_overlap_and_the_picture_names_its_weights(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "png", lambda figure: figures.append(figure) or b"")
    for names in (["W" * 80, "n02123045 tabby, tabby cat " * 4], ["cat", "dog"]):
        sample = [(torch.zeros(3, 8, 8), i % 2, 1) for i in range(12)]
        found = Predictions(torch.tensor([[3, 2], [4, 5]]), names, [(torch.zeros(3, 8, 8), 0, 1)] * 3, sample)
        draw_predictions(tmp_path / "a.png", found, (0.5,) * 3, (0.5,) * 3, "last weights (ema, epoch 12)")
        assert misplaced(figures[-1]) == [] and len(drawn_texts(figures[-1])) == 16
        assert figures[-1].get_suptitle().startswith("last weights (ema, epoch 12): 6 of 14 held-out images are wrong")
    assert "cat,\nnot dog" in [text for text, _ in drawn_texts(figures[-1])]


def test_curves_are_drawn_from_the_first_line_on(tmp_path):
    path = tmp_path / "curves.png"
    draw_curves(path, [], 5)
    train = {"kind": "train", "epoch": 1, "update": 5, "loss": None, "lr": 1e-3}
    draw_curves(path, [train, {**train, "loss": 2.0, "update": 6}], 5)
    scores = {"top1": 50.0, "top5": 90.0, "loss": 1.0}
    draw_curves(path, [train, {"kind": "epoch", "epoch": 1, "model": scores, "ema": scores}], 5)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_log_is_cut_back_to_the_size_that_a_checkpoint_noted(tmp_path):
    path, lines = tmp_path / "log.jsonl", [dict(kind="train", epoch=1, update=i, loss=2.0, lr=1e-3) for i in range(3)]
    log = Log(path, 0)
    log.write(**lines[0])
    size = log.sync()
    log.write(**lines[1])
    log.file.write(b'{"kind": "tr')  # the line that a killed process did not finish
    log.file.flush()
    Log(path, size).write(**lines[2])
    assert read_log(path) == [lines[0], lines[2]]
    Log(path, 0)
    assert read_log(path) == []


@pytest.mark.parametrize("damage", [b"\0\0\0", b"[1]", b'{"kind": "tra', b'{"kind": "train"}', b'{"kind": "\xff"}'])
def test_a_damaged_line_of_a_log_is_named_and_left_out(tmp_path, damage):
    path = tmp_path / "log.jsonl"
    log, line = Log(path, 0), dict(kind="train", epoch=1, update=1, loss=2.0, lr=1e-3)
    log.write(**line)
    log.file.write(damage + b"\n")
    log.write(**line)
    with pytest.warns(UserWarning, match="line 2 of .*log.jsonl is damaged") as warned:
        assert read_log(path) == [line, line]
    assert len(warned) == 1


def test_a_run_with_a_damaged_line_in_its_log_resumes_and_is_drawn(tmp_path, pictures):
    result = toy_trainer(tmp_path, "--schedule.epochs=2").fit()
    data = (tmp_path / "log.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(b"#" + data[1:])
    (tmp_path / "curves.png").unlink()
    with pytest.warns(UserWarning, match=f"line 1 of {tmp_path}/log.jsonl is damaged"):
        assert toy_trainer(tmp_path, "--schedule.epochs=2", resume=True).fit() == result
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_worst_classes_are_told_with_what_they_are_taken_for():
    names = ["cat", "dog", "owl"]
    confusion = torch.tensor([[1, 2, 1, 0], [0, 5, 0, 0], [1, 0, 3, 0]])
    rows = worst_classes(Predictions(confusion, names, [], []))
    assert [row["name"] for row in rows] == ["cat", "owl"]
    assert rows[0] == {"name": "cat", "images": 4, "top1": 25.0, "predicted": {"dog": 2, "owl": 1}}
    assert rows[1]["predicted"] == {"cat": 1} and rows[1]["top1"] == 75.0
    many = worst_classes(Predictions(1 - torch.eye(12, 13).long(), [*map(str, range(12))], [], []))
    assert len(many) == 10


def test_every_prediction_is_counted_once():
    truths, guesses = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    found = predict(Reciting(), Images(guesses, truths), autocast("off", torch.device("cpu")))
    assert found.confusion.tolist() == [[2, 2, 0], [1, 6, 0]] and found.names == ["cat", "dog", "NaN"]
    assert [(guess, truth) for _, guess, truth in found.mistakes] == [(1, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("score", [0.0, float("nan")])
def test_pictures_and_scores_agree_on_images_without_one_best_class(score):
    class Constant(nn.Module):
        def forward(self, images):
            return torch.full((len(images), 10), score)

    loader, amp = Images([0] * 40, [i % 4 for i in range(40)]), autocast("off", torch.device("cpu"))
    loader.num_classes, loader.class_names = 10, None
    found = predict(Constant(), loader, amp)
    top1 = evaluate({"m": Constant()}, loader, amp=amp)["m"]["top1"]
    assert 100 * int(found.confusion.trace()) / int(found.confusion.sum()) == pytest.approx(top1)
    assert len(found.mistakes) == 10


def test_the_page_of_a_run_holds_its_results_its_pictures_and_its_configuration(tmp_path, pictures):
    loader = ToyLoader(32, training=False)
    loader.class_names = ToyLoader.class_names = ["<a>", "\x1b[31m", "c", "d"]
    try:
        result = toy_trainer(tmp_path, "--schedule.epochs=2", val=loader).fit()
    finally:
        ToyLoader.class_names = ["a", "b", "c", "d"]
    page = (tmp_path / "report.html").read_text()
    for checkpoint in ("best", "last"):
        record = load_weights(tmp_path / f"{checkpoint}.safetensors")[1]
        scores = f"<td>{record['top1']:.2f} %</td><td>{record['top5']:.2f} %</td><td>{record['loss']:.4f}</td>"
        assert f"<td>{checkpoint}</td><td>ema</td><td>{record['epoch']}</td>{scores}" in page
    assert f"{result['top1']:.2f} %" in page and "last weights (ema, epoch 2)" in page
    for name in ("curves.png", "predictions.png"):
        assert base64.b64encode((tmp_path / name).read_bytes()).decode() in page
    assert escape((tmp_path / "config.yaml").read_text()) in page
    assert "&lt;a&gt;" in page and "<a>" not in page
    assert "\\x1b[31m" in page and "\x1b" not in page


def test_a_few_images_with_names_that_look_like_formulas_are_drawn_once_each(tmp_path, titles):
    images = Images([0, 1, 1], [0, 1, 0])
    images.class_names = ["$\\cat$", "$x_{$"]
    draw(tmp_path / "predictions.png", images)
    assert sorted(label for label, _ in titles) == ["$\\cat$", "$x_{$", "$x_{$,\nnot $\\cat$"]
