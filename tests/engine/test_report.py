"""What is drawn and logged."""

import math
from collections import Counter

import pytest
import torch
from drawn_text import drawn_texts, misplaced
from torch import nn
from toy_run import Recited, toy_config

from vilonghorn.engine import Distributed, report
from vilonghorn.engine.checkpoint import read_log
from vilonghorn.engine.device import autocast
from vilonghorn.engine.logger import draw_curves
from vilonghorn.engine.report import (
    Example,
    Predictions,
    draw_confidence,
    draw_confusion,
    draw_predictions,
    predict_all,
)

LINES = [dict(kind="train", epoch=1, update=i, loss=2.0, lr=1e-3) for i in range(3)]


def test_predictions_are_counted_and_the_most_confident_mistakes_are_kept():
    truths = torch.arange(60) % 2
    scores = 4.0 * truths
    scores[8], scores[31], scores[40] = 2.0, -7.0, math.nan
    loader = Recited(torch.stack([1 - scores, scores], 1), truths, 30)
    found = predict_all(nn.Identity(), loader, autocast("off", torch.device("cpu")), Distributed())
    assert found.counts == {(0, 0): 28, (1, 1): 29, (0, 1): 1, (1, 0): 1, (0, -1): 1}
    assert [example[1:3] for example in found.mistakes] == [(0, 1), (1, 0), (-1, 0)]
    assert found.mistakes[0].probability == pytest.approx(1 / (1 + math.exp(-15)))
    assert found.confidence.sum(1).tolist() == [3, 57] and found.confidence[0].tolist() == [1, *[0] * 8, 2]
    assert 30 <= len(found.sample) <= 40 and all(example.guess == example.truth for example in found.sample)


@pytest.mark.parametrize("names", [["W" * 80, "n02123045 tabby, tabby cat " * 4], ["$\\cat$", "$x_{$"]])
def test_names_of_classes_are_drawn_as_they_are_and_do_not_overlap(tmp_path, monkeypatch, names):
    figures, png = [], report.png
    monkeypatch.setattr(report, "png", lambda figure: figures.append(figure) or png(figure))
    image = torch.zeros(3, 8, 8)
    mistakes = [Example(image, 0, 1, 0.9), Example(image, -1, 1, 0.0)]
    sample = [Example(image, i % 2, i % 2, 0.75) for i in range(2)]
    counts = Counter({(0, 0): 6, (1, 1): 6, (1, 0): 20, (1, -1): 1})
    found = Predictions(counts, torch.tensor([[0] * 9 + [21], [0] * 9 + [1012]]), mistakes, sample)
    draw_predictions(tmp_path / "a.png", found, names, toy_config(tmp_path), "last weights (ema, epoch 12)")
    texts = [text for text, _ in drawn_texts(figures[0])]
    assert misplaced(figures[0]) == [] and len(texts) == 5
    assert any("2 of 21 mistakes (red, " in text and "2 of 1,012 right" in text for text in texts)
    expected = {"$\\cat$ (90%),\nnot $x_{$", "NaN (0%),\nnot $x_{$", "$x_{$ (75%)"}
    assert names[0][0] == "W" or expected <= {*texts}
    draw_confusion(tmp_path / "b.png", found, names)
    texts = [text for text, _ in drawn_texts(figures[1])]
    assert misplaced(figures[1]) == [] and {"NaN", "20", "true class"} <= {*texts}
    draw_confidence(tmp_path / "c.png", found)
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in "abc")


def test_curves_are_drawn_from_the_first_line_on(tmp_path):
    path, scores = tmp_path / "curves.png", {"top1": 50.0, "top5": 90.0, "loss": 1.0}
    for more in ([], [{**LINES[1], "loss": None}], [{"kind": "epoch", "epoch": 1, "model": scores, "ema": scores}]):
        draw_curves(path, [*LINES[: len(more)], *more], 5)
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    damaged = [b"\0\0\0", b"[" * 5000, b"[1]", b'{"kind": "\xff"}', b'{"kind": "tr']
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([b'{"kind": "epoch"}', *damaged]))
    assert read_log(tmp_path / "log.jsonl") == [{"kind": "epoch"}]
