"""What is drawn and logged."""

import base64
from html import escape

import pytest
import torch
from drawn_text import drawn_texts, misplaced
from torch import nn
from toy_run import ToyLoader, toy_config, toy_trainer

from vilonghorn.engine import report
from vilonghorn.engine.build import autocast
from vilonghorn.engine.checkpoint import load_weights, read_log
from vilonghorn.engine.report import draw_curves, draw_predictions, predict_examples

LINES = [dict(kind="train", epoch=1, update=i, loss=2.0, lr=1e-3) for i in range(3)]


class Images:
    """Images whose first pixel is the class that `Reciting` predicts."""

    def __init__(self, guesses, truths):
        self.guesses, self.truths, self.batch_size = torch.tensor(guesses), torch.tensor(truths), 7

    def __len__(self):
        return -(-len(self.truths) // self.batch_size)

    def epoch(self, epoch, start=0):
        images = torch.zeros(len(self.truths), 3, 8, 8)
        images[:, 0, 0, 0] = self.guesses
        yield from zip(images.split(self.batch_size), self.truths.split(self.batch_size))


class Reciting(nn.Module):
    def forward(self, images):
        return torch.stack([1 - images[:, 0, 0, 0], images[:, 0, 0, 0]], 1)


def test_mistakes_come_first_and_then_a_sample_of_the_other_images():
    truths = [i % 2 for i in range(60)]
    guesses = [float(truth) for truth in truths]
    guesses[8], guesses[31], guesses[40] = 1, 0, float("nan")
    found = predict_examples(Reciting(), Images(guesses, truths), autocast("off", torch.device("cpu")))
    assert [example and example[1:] for example in found[:10]] == [(1, 0), (0, 1), (-1, 0), *[None] * 7]
    assert 30 <= len(found[10:]) <= 40 and all(guess == truth for _, guess, truth in found[10:])


@pytest.mark.parametrize("names", [["W" * 80, "n02123045 tabby, tabby cat " * 4], ["$\\cat$", "$x_{$"]])
def test_names_of_classes_are_drawn_as_they_are_and_do_not_overlap(tmp_path, monkeypatch, names):
    figures, png = [], report.png
    monkeypatch.setattr(report, "png", lambda figure: figures.append(figure) or png(figure))
    image = torch.zeros(3, 8, 8)
    examples = [(image, 0, 1), (image, -1, 1), *[None] * 8, *[(image, i % 2, i % 2) for i in range(12)]]
    draw_predictions(tmp_path / "a.png", examples, names, toy_config(tmp_path), "last weights (ema, epoch 12)")
    assert misplaced(figures[0]) == [] and len(drawn_texts(figures[0])) == 15
    texts = [text for text, _ in drawn_texts(figures[0])]
    assert names[0][0] == "W" or {"$\\cat$,\nnot $x_{$", "NaN,\nnot $x_{$", "$x_{$"} <= {*texts}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_curves_are_drawn_from_the_first_line_on(tmp_path):
    path, scores = tmp_path / "curves.png", {"top1": 50.0, "top5": 90.0, "loss": 1.0}
    for more in ([], [{**LINES[1], "loss": None}], [{"kind": "epoch", "epoch": 1, "model": scores, "ema": scores}]):
        draw_curves(path, [*LINES[: len(more)], *more], 5)
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"kind": "epoch"}\n\0\0\0\n[1]\n{"kind": "\xff"}\n{"kind": "tr')
    assert read_log(tmp_path / "log.jsonl") == [{"kind": "epoch"}]


def test_the_page_of_a_run_contains_its_results_its_pictures_and_its_configuration(tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(ToyLoader, "class_names", ["<a>", "\x1b[31m", "c", "d"])
    result = toy_trainer(tmp_path, "--schedule.epochs=2", "--model.name=vit_tiny_patch16_224").fit()
    page = (tmp_path / "report.html").read_text()
    for checkpoint in ("best", "last"):
        record = load_weights(tmp_path / f"{checkpoint}.safetensors")[1]
        scores = f"<td>{record['top1']:.2f} %</td><td>{record['top5']:.2f} %</td><td>{record['loss']:.4f}</td>"
        assert f"<td>{checkpoint}</td><td>ema</td><td>{record['epoch']}</td>{scores}" in page
    assert f"{result['top1']:.2f} %" in page and "last weights (ema, epoch 2)" in page
    for name in ("curves.png", "predictions.png"):
        assert base64.b64encode((tmp_path / name).read_bytes()).decode() in page
    assert escape((tmp_path / "config.yaml").read_text()) in page
