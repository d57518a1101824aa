"""The tasks with published figures: every answer is in its sequence, and a finished run is kept."""

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
