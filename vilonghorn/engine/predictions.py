"""What a model predicts for each held-out image, and the scores of each class."""

import csv
import math
from collections import Counter
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import torch

COLUMNS, ROWS = 10, 5  # of the picture of predictions


def hide_top5(scores: dict[str, float], num_classes: int) -> dict[str, float]:
    """Scores to show: without `top5` if there are at most five classes, where it is 100%."""
    return {name: score for name, score in scores.items() if name != "top5" or num_classes > 5}


class Prediction(NamedTuple):
    """The prediction for an image. A class of -1: the scores contain NaN, or there is no second class."""

    index: int  # of the image in the data
    file: str  # its name, printable
    truth: int  # true class
    guess: int  # predicted class
    second: int  # second best class
    probability: float  # of the predicted class
    second_probability: float


@dataclass
class Predictions:
    """What a model predicts for the held-out images."""

    names: list[str]  # of the classes by label, printable
    scores: dict[str, float]  # of `evaluate`
    rows: list[Prediction]  # in the order of the data
    mistakes: list[tuple[torch.Tensor, Prediction]]  # with (3, H, W) images; the highest probabilities, at most COLUMNS
    sample: list[tuple[torch.Tensor, Prediction]]  # right predictions, evenly spaced

    def confusions(self) -> list[dict[str, Any]]:
        """Pairs of a true and another predicted class (None: NaN) with their number of images, most frequent first."""
        counts = Counter((row.truth, row.guess) for row in self.rows if row.guess != row.truth).most_common()
        return [{"images": n, "true": self.names[t], "predicted": [*self.names, None][g]} for (t, g), n in counts]

    def per_class(self) -> list[dict[str, Any]]:
        """Images, and precision, recall and F1 in percent (None: undefined), of each class; the lowest F1 first."""
        from sklearn.metrics import precision_recall_fscore_support  # slow to import

        _, _, truth, guess, *_ = zip(*self.rows)
        options = {"labels": np.arange(len(self.names)), "zero_division": np.nan}
        found = []
        for name, *scores, images in zip(self.names, *precision_recall_fscore_support(truth, guess, **options)):
            precision, recall, f1 = (None if math.isnan(score) else 100 * float(score) for score in scores)
            f1 = f1 if images else None  # scikit-learn: 0 if the class was predicted
            found.append({"class": name, "images": int(images), "precision": precision, "recall": recall, "f1": f1})
        return sorted(found, key=lambda row: (row["images"] == 0, row["f1"]))

    def csv(self) -> bytes:
        """A CSV file with a row for each image; what is unknown is empty."""
        names, text = [*self.names, ""], StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow("file true_class predicted_class probability second_class second_probability right".split())
        for _, file, truth, guess, second, *scores in self.rows:
            labels = zip((guess, second), scores)
            first, then = ((names[i], f"{score:.6f}" if i >= 0 else "") for i, score in labels)
            writer.writerow([file, names[truth], *first, *then, str(guess == truth).lower()])
        return text.getvalue().encode()
