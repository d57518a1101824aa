"""Floors are counted for every rule, and held against a rate that is measured here."""

import pytest

from vilonghorn.bench import floor as bench_floor
from vilonghorn.bench.floor import Shape, arithmetic_ms, bytes_ms, rate_contenders, rates
from vilonghorn.bench.turns import Race
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.validate import RULES


def test_every_rule_has_a_floor_and_backward_adds_to_it():
    shape = Shape(8, 197, 384, 16)
    for rule in RULES:
        assert 0 < arithmetic_ms(rule, False, shape, 58e9) < arithmetic_ms(rule, True, shape, 58e9)
    assert arithmetic_ms("longhorn_exact", True, shape, 58e9) < arithmetic_ms("longhorn", True, shape, 58e9)


@pytest.mark.parametrize(
    "rule, train, ms", [("longhorn", False, 1.1), ("longhorn_exact", False, 1.0), ("longhorn", True, 4.9)]
)
def test_the_floors_of_a_core_of_117_gflops_are_those_the_targets_were_set_by(rule, train, ms):
    assert arithmetic_ms(rule, train, Shape(8, 197, 384, 16), 117e9 / 2) == pytest.approx(ms, rel=0.04)


def test_a_floor_is_in_proportion_to_tokens_and_channels_and_the_rate():
    once = arithmetic_ms("longhorn", False, Shape(1, 2, 3, 16), 1e9)
    assert arithmetic_ms("longhorn", False, Shape(2, 6, 15, 16), 1e9) == pytest.approx(30 * once)
    assert arithmetic_ms("longhorn", False, Shape(1, 2, 3, 16), 2e9) == pytest.approx(once / 2)
    assert once == pytest.approx(6 * (4 * 16 + 46) / 1e6)
    assert bytes_ms(3_000_000, 1.5) == pytest.approx(2)


@pytest.mark.parametrize("level", native.levels())
def test_multiply_adds_are_counted(level):
    lanes = {"v2": 4, "v3": 8, "v4": 16, "generic": 4}[level]
    for rounds in (1, 10):
        assert native.multiply_adds(rounds, native.levels()[level]) == rounds * 64 * 12 * lanes


def raced(threads: int, moved: int):
    contenders = rate_contenders(moved, threads, ["a", "b"])
    with Race(contenders, threads) as race:
        return rates(race.run("b", rounds=3), moved, threads), list(contenders)


def test_rates_are_of_every_level_and_of_a_copy():
    found, names = raced(2, moved=4096)
    assert list(found["slots_per_s"]) == names[:-1] == list(native.levels() or ["torch.mm"])
    assert all(len(rates) == 3 and min(rates) > 1e6 for rates in found["slots_per_s"].values())
    assert len(found["gb_per_s"]) == 3 and min(found["gb_per_s"]) > 1e-3


def test_rates_are_what_was_done_by_its_time_round_by_round(monkeypatch):
    times = dict(ms=[1.0, 2.0, 50.0], problem=None)
    found = rates(dict.fromkeys([*native.levels(), "torch.mm", "copy"], times), 8000, threads=3)
    for name, level in native.levels().items():
        done = 3 * native.multiply_adds(bench_floor.ROUNDS, level)
        assert found["slots_per_s"][name] == [done / (ms / 1e3) for ms in times["ms"]]
    assert found["gb_per_s"] == pytest.approx([8e-3, 4e-3, 0.16e-3])
    monkeypatch.setattr(bench_floor.native, "levels", dict)
    alone = rates({"torch.mm": times, "copy": times}, 8000, 3)["slots_per_s"]
    assert alone == {"torch.mm": [1024**3 / (ms / 1e3) for ms in times["ms"]]}


def test_a_rate_that_failed_is_named():
    with pytest.raises(RuntimeError, match="copy gave no rate: out of memory"):
        rates(dict(copy=dict(ms=None, problem="out of memory")), 8, 1)
