"""What is drawn and logged."""

import csv
import json
import math
import subprocess
from collections import Counter
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from drawn_text import drawn_texts, misplaced
from torch import nn
from toy_run import Recited, toy_config

from vilonghorn.engine import Distributed
from vilonghorn.engine.checkpoint import RunDirectory, read_log, save_weights
from vilonghorn.engine.device import autocast
from vilonghorn.engine.distributed import shell_path
from vilonghorn.engine.evaluate import predict_all
from vilonghorn.engine.logger import draw_curves
from vilonghorn.engine.predictions import Prediction, Predictions
from vilonghorn.engine.report import draw_confusion, draw_predictions, write_report

LINES = [dict(kind="train", epoch=1, update=i, loss=2.0, lr=1e-3) for i in range(3)]


def predicted(logits: torch.Tensor, targets: torch.Tensor, names: list[str], files: list[str] | None = None):
    loader = Recited(logits, targets, max(1, len(logits) // 2))
    loader.class_names, loader.num_classes, loader.sample_names = names, len(names), files
    return predict_all(nn.Identity(), loader, autocast("off", torch.device("cpu")), Distributed())


def test_predictions_are_in_the_order_of_the_data_and_the_most_confident_mistakes_are_kept():
    truths = torch.arange(60) % 2
    scores = 4.0 * truths
    scores[8], scores[31], scores[40] = 2.0, -7.0, math.nan
    found = predicted(torch.stack([1 - scores, scores], 1), truths, ["a", "b"])
    assert [row.index for row in found.rows] == [*range(60)] and found.rows[7].file == "sample 7"
    assert Counter((row.truth, row.guess) for row in found.rows) == {
        **{(0, 0): 28, (1, 1): 29},
        **{(0, 1): 1, (1, 0): 1, (0, -1): 1},
    }
    assert [(row.guess, row.truth, row.index) for _, row in found.mistakes] == [(0, 1, 31), (1, 0, 8), (-1, 0, 40)]
    assert found.rows[31].probability == pytest.approx(1 / (1 + math.exp(-15)))
    assert found.rows[31].second == 1 and found.rows[31].second_probability == pytest.approx(math.exp(-15), rel=1e-4)
    assert found.scores["top1"] == pytest.approx(95) and math.isnan(found.scores["loss"])
    assert 30 <= len(found.sample) <= 40 and all(row.guess == row.truth for _, row in found.sample)


def test_scores_of_a_class_that_are_undefined_are_none_and_the_worst_class_comes_first():
    guesses, truths = [0, 0, 0, 1, 1, 4], [0, 0, 0, 0, 1, 2]
    logits = 9 * F.one_hot(torch.tensor(guesses), 5).float()
    found = predicted(logits, torch.tensor(truths), [*"abcde"])
    a = {"class": "a", "images": 4, "precision": 100, "recall": 75, "f1": pytest.approx(600 / 7)}
    b = {"class": "b", "images": 1, "precision": 50, "recall": 100, "f1": pytest.approx(200 / 3)}
    c = {"class": "c", "images": 1, "precision": None, "recall": 0, "f1": 0}  # never predicted
    d = {"class": "d", "images": 0, "precision": None, "recall": None, "f1": None}
    assert found.per_class() == [c, b, a, d, {**d, "class": "e", "precision": 0}]
    assert found.confusions() == [
        {"images": 1, "true": "a", "predicted": "b"},
        {"images": 1, "true": "c", "predicted": "e"},
    ]
    assert json.loads(json.dumps(found.per_class())) == found.per_class()


def test_names_survive_a_csv_file_and_what_is_unknown_is_empty():
    names = ['=1+1, "x"', "Bär\n"]
    files = [f"{name}/;{i}.png" for i, name in enumerate(names)]
    rows = [*csv.DictReader(StringIO(predicted(torch.eye(2), torch.tensor([0, 0]), names, files).csv().decode()))]
    assert [row["file"] for row in rows] == files and [row["right"] for row in rows] == ["true", "false"]
    assert rows[1]["predicted_class"] == rows[0]["second_class"] == r"Bär\n" and rows[0]["true_class"] == names[0]
    assert float(rows[0]["probability"]) == pytest.approx(0.731059) == 1 - float(rows[0]["second_probability"])
    one, nan = (
        predicted(torch.full((2, n), math.nan if n > 1 else 3.0), torch.zeros(2).long(), names[:n]) for n in (1, 2)
    )
    assert one.csv().decode().splitlines()[1] == 'sample 0,"=1+1, ""x""","=1+1, ""x""",1.000000,,,true'
    assert nan.csv().decode().splitlines()[2] == 'sample 1,"=1+1, ""x""",,,,,false'


@pytest.mark.parametrize("names", [["W" * 80, "n02123045 tabby, tabby cat " * 4], ["$\\cat$", "$x_{$"]])
def test_names_of_classes_and_files_are_drawn_as_they_are_and_do_not_overlap(tmp_path, names):
    image, files = torch.zeros(3, 8, 8), ["$\\cat$/1.png", f"{names[1]}/{'W' * 90}.jpg"]
    mistakes = [(image, Prediction(0, files[0], 1, 0, 1, 0.9, 0.1)), (image, Prediction(1, files[1], 1, -1, -1, 0, 0))]
    sample = [(image, Prediction(2 + i, "c", i % 2, i % 2, 0, 0.75, 0.25)) for i in range(12)]
    wrong, right = [row for _, row in mistakes], [row for _, row in sample]
    rows = [*20 * wrong[:1], wrong[1], *6 * right[:1], *1006 * right[1:2]]
    found = Predictions(names, {}, rows, mistakes, sample)
    figure = draw_predictions(found, toy_config(tmp_path), "last weights (ema, epoch 12)")
    texts = [text for text, _ in drawn_texts(figure)]
    assert misplaced(figure) == [] and len(texts) == 17
    assert any("2 of 21 mistakes (red, " in text and "12 of 1,012 right" in text for text in texts)
    expected = {"$\\cat$ (90%),\nnot $x_{$", "NaN (0%),\nnot $x_{$", "$x_{$ (75%)"}
    assert names[0][0] == "W" or expected <= {*texts}
    assert files[0] in texts and any(text.startswith(files[1][:4]) and text.endswith(".jpg") for text in texts)
    figure = draw_confusion(found)
    texts = [text for text, _ in drawn_texts(figure)]
    assert misplaced(figure) == [] and {"NaN", "20", "true class"} <= {*texts}


@pytest.mark.parametrize(
    ("classes", "words"),
    [(1, "There is one class only"), (3, "The scores of 4 images contain NaN"), (60, "10 classes are not shown")],
)
def test_a_page_says_that_there_is_one_class_only_or_that_scores_are_nan(tmp_path, classes, words):
    directory, config = RunDirectory(tmp_path / "-a 'b'"), toy_config(tmp_path, f"--data.val={tmp_path}")
    (tmp_path / "c d.png").touch()
    directory.open(config, {}, None, None, overwrite=False)
    logits = torch.full((4, classes), math.nan) if classes > 1 else torch.ones(4, 1)
    found = predicted(logits, torch.zeros(4).long(), [*map(str, range(classes))], ["c d.png"] * 4)
    found.mistakes = [(torch.zeros(3, 8, 8), row) for _, row in found.mistakes]
    found.sample = [(torch.zeros(3, 8, 8), row) for _, row in found.sample]
    record = {"weights": "model", "epoch": 1, "kwargs": {"num_classes": classes}, "model": "m", **found.scores}
    save_weights(directory.weights("best"), {"a": torch.zeros(1)}, record)
    (directory.path / "curves.png").touch()
    result = {"weights": "model", "epochs": 1, "images": 4, "seconds": 1, "skipped": 0}
    write_report(directory, config, found, result)
    page = unescape((directory.path / "report.html").read_text())
    assert (words in page) and ("top-5" in page) == (classes > 5)
    assert f"vilonghorn predict '{tmp_path}/-a '\"'\"'b'\"'\"'' '{tmp_path}/c d.png'\n" in page


def test_a_folder_is_one_argument_of_a_shell_and_no_option():
    for path in ("runs/a", "-a b", "it's", '"$HOME"', "~", "~/a", "a\nb"):
        typed = subprocess.run(f"echo {shell_path(Path(path))}", shell=True, capture_output=True, text=True).stdout
        assert Path(typed.removesuffix("\n")) == Path(path) and not typed.startswith(("-", "~"))


def test_curves_are_drawn_from_the_first_line_on(tmp_path):
    path, scores = tmp_path / "curves.png", {"top1": 50.0, "top5": 90.0, "loss": 1.0}
    for more in ([], [{**LINES[1], "loss": None}], [{"kind": "epoch", "epoch": 1, "model": scores, "ema": scores}]):
        draw_curves(path, [*LINES[: len(more)], *more], 5)
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    damaged = [b"\0\0\0", b"[" * 5000, b"[1]", b'{"kind": "\xff"}', b'{"kind": "tr']
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([b'{"kind": "epoch"}', *damaged]))
    assert read_log(tmp_path / "log.jsonl") == [{"kind": "epoch"}]
