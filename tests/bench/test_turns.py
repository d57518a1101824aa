"""Races: contenders take turns in processes of their own, and one that fails leaves the others."""

from functools import partial

import contenders
import pytest

from vilonghorn.bench import turns as bench_turns
from vilonghorn.bench.turns import Race


def test_the_clock_is_that_of_each_contender():
    with Race({"slow": partial(contenders.sleeping, 0.06), "fast": partial(contenders.sleeping, 0.02)}, 1) as race:
        found = race.run("sleep", rounds=4)
    assert [len(row["ms"]) for row in found.values()] == [4, 4]
    assert min(found["slow"]["ms"]) >= 60 and min(found["fast"]["ms"]) >= 20
    assert [row["problem"] for row in found.values()] == [None, None]


def test_whoever_fails_crashes_or_lacks_a_step_leaves_the_others():
    makers = dict(
        right=partial(contenders.sleeping, 0.001),
        at_once=partial(contenders.failing, 0),
        late=partial(contenders.failing, 30),
        crashing=contenders.crashing,
        sleepless=contenders.sleepless,
    )
    with Race(makers, 1) as race:
        found = race.run("sleep", rounds=3)
        again = race.run("nap", rounds=1)
    assert len(found["right"]["ms"]) == 3 and len(again["right"]["ms"]) == 1
    problems = {name: row["problem"] for name, row in found.items()}
    assert problems["at_once"].startswith("ValueError: nothing to begin with (contenders.py:")
    assert problems["late"].startswith("ValueError: nothing left to do")
    assert problems["crashing"] == "its process ended with exit code 7"
    assert "sleepless" not in found and found["late"]["ms"] is None
    assert again["late"]["problem"] == problems["late"]


@pytest.mark.skipif(bench_turns.resident_bytes("VmRSS") is None, reason="the system does not tell")
def test_the_peak_of_memory_is_of_one_contender_and_one_step():
    with Race({"large": partial(contenders.holding, 200), "small": partial(contenders.holding, 20)}, 1) as race:
        much, little = race.run("much", rounds=1), race.run("little", rounds=1)
    assert 0.2 < much["large"]["memory_gb"] < 0.3 and 0.02 < much["small"]["memory_gb"] < 0.1
    assert 0.02 < little["large"]["memory_gb"] < 0.1


def test_turns_are_taken_and_their_order_turns_round(monkeypatch):
    asked = []

    class Runner:
        def __init__(self, make, threads):
            self.name = make

        def ask(self, order):
            asked.append((self.name, order))
            return dict(ms=1e3 if self.name == "a" else 1.0, memory_gb=None)

        def stop(self):
            asked.append((self.name, "stop"))

    monkeypatch.setattr(bench_turns, "_Runner", Runner)
    with Race(dict(a="a", b="b"), 1) as race:
        assert asked == [("a", None), ("b", None)]
        del asked[:]
        race.run("step", rounds=2)
        once, often = ("a", ("step", 1)), ("b", ("step", 20))
        assert asked == [once, ("b", ("step", 1)), ("b", ("step", 1)), once, often, often, once]
        del asked[:]
        race.run("step", rounds=50, seconds=8)  # a round takes one, and a bit
        assert asked.count(once) == 1 + 7
        del asked[:]
        race.run("step", rounds=50, seconds=0.1)
        assert asked.count(once) == 1 + bench_turns.LEAST_ROUNDS
    assert asked[-2:] == [("a", "stop"), ("b", "stop")]


def test_lives_share_the_rounds_and_only_survivors_begin_another(monkeypatch):
    made = []

    class Runner:
        def __init__(self, make, threads):
            self.name, self.life = make, sum(name == make for name, _ in made)
            made.append((make, threads))

        def ask(self, order):
            if self.name == "b" and self.life == 1 and order:
                return "gone"
            return dict(ms=1e3, memory_gb=1.0 + (self.life == 1))

        def stop(self):
            pass

    monkeypatch.setattr(bench_turns, "_Runner", Runner)
    with Race(dict(a="a", b="b"), 7) as race:
        found = race.run("step", rounds=5, lives=3)
        assert made == [("a", 7), ("b", 7), ("a", 7), ("b", 7), ("a", 7)]
        assert len(race.run("step", rounds=2, lives=3)["a"]["ms"]) == 2 and len(made) == 6
        assert len(race.run("step", rounds=1, lives=3)["a"]["ms"]) == 1 and len(made) == 6
    assert found["a"] == dict(ms=[1e3] * 5, memory_gb=2.0, problem=None)
    assert found["b"] == dict(ms=None, memory_gb=None, problem="gone")


def test_no_process_outlives_its_race():
    with Race({"a": partial(contenders.sleeping, 0)}, 1) as race:
        process = race._runners["a"].process
        assert process.is_alive()
    assert not process.is_alive()
