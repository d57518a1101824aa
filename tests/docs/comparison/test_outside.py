"""The tasks with published figures: every answer is in its sequence, and a finished run is kept."""

import re
from functools import partial

import numpy as np
import outside
import pytest
from numpy.random import default_rng


def answer(name, tokens, place):
    """What a reader of the tokens up to `place` answers."""
    before = tokens[: place + 1].tolist()
    if name == "parity":
        return sum(before) % 2
    if name == "selective copying":
        return [token for token in before[: before.index(15)] if token != 14][len(before) - 2 - before.index(15)]
    first = before.index(before[place])  # the key, as it was seen first
    return before[first + 1]


@pytest.mark.parametrize("name", ["parity", "mqar64", "in-context recall", "noisy recall", "selective copying"])
def test_a_reader_of_the_sequence_finds_each_answer(name):
    tokens, targets = outside.TASKS[name].make(default_rng(3), 50, False)
    places = np.argwhere(targets != outside.IGNORE)
    assert {row for row, _ in places} == set(range(50))
    for row, place in places:
        assert answer(name, tokens[row], place) == targets[row, place]
    if name == "noisy recall":
        assert 0.1 < (tokens >= 16).mean() < 0.3


def kinds(row):
    """A letter for each token of fuzzy recall: of a key, of a value, or padding."""
    return "".join("k" if token < 7 else "v" if token < 15 else "p" for token in row)


@pytest.mark.parametrize("training", [True, False])
def test_fuzzy_recall_asks_for_the_values_of_keys_that_were_seen(training):
    tokens, targets = outside.TASKS["fuzzy recall"].make(default_rng(3), 300, training)
    sizes = set()
    for row, wanted in zip(tokens, targets):
        row = np.append(row, wanted[-1])  # the last target is the token after the last
        assert len(row) == 129 and re.fullmatch("p*(k{1,3}v{1,3})+", kinds(row))
        values = {}
        for pair in re.finditer("(k+)(v+)", kinds(row)):
            key, value = (tuple(row[slice(*pair.span(group))]) for group in (1, 2))
            asked = wanted[pair.start(2) - 1 : pair.end(2) - 1]
            if not training:
                assert (asked == (value if key in values else outside.IGNORE)).all()
            assert values.setdefault(key, value) == value and len(set(key)) == len(key)
            sizes.add(len(key))
        assert training or (asked == value).all()
    assert sizes == ({1, 2, 3} if training else {3})


def test_memorized_values_are_one_for_each_key_in_training_and_test():
    seen = {}
    for training in (True, False):
        tokens, targets = outside.TASKS["memorization"].make(default_rng(int(training)), 300, training)
        for key, value in zip(tokens[:, 0::2].ravel().tolist(), targets[:, 1::2].ravel().tolist()):
            assert seen.setdefault(key, value) == value
    assert len(seen) == len(set(seen.values())) == 127


def test_a_run_is_kept_and_not_made_again(tmp_path, monkeypatch, capsys):
    make = partial(outside.memorization, length=8)
    task = outside.TASKS["memorization"]._replace(make=make, epochs=2, train=32, test=32, batch=32, width=32)
    monkeypatch.setattr(outside, "TASKS", {"memorization": task})
    monkeypatch.setattr(outside, "RULES", ["longhorn"])
    monkeypatch.setattr(outside, "RESULTS", tmp_path / "outside.json")
    outside.main([])
    assert capsys.readouterr().out.count("'task': 'memorization'") == 1
    (run,) = outside.read_runs()
    assert run["epochs"] == len(run["validation"]) == 2 and 0 <= run["tests"]["accuracy"] <= 100
    outside.main([])
    assert capsys.readouterr().out == "" and outside.read_runs() == [run]
    monkeypatch.setattr(outside, "TASKS", {"memorization": task._replace(enough=0)})
    assert outside.train("memorization", "longhorn")["epochs"] == 1  # it ends when enough is right
