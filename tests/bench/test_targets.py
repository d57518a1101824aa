"""Targets are judged from a report's rows alone."""

import copy

import pytest

from vilonghorn.bench.targets import per_token, report_targets, targets

RULES = ("longhorn", "longhorn_exact")
MODELS = {
    "deit_tiny_patch16_224": 100.0,
    "vilonghorn_tiny": 40.0,
    "deit_small_patch16_224": 300.0,
    "vilonghorn_small": 330.0,
}


@pytest.fixture
def report():
    """All targets met: scans at 1.5 times their floor, models at 0.4 (small: 1.1) of DeiT's time, and linear."""
    scan = [
        dict(
            rule=rule, form="cpu", train=train, ms=[1.5, 1.5, 9.0], arithmetic_ms=[1.0] * 3, memory_gb=0.1, problem=None
        )
        for rule in RULES
        for train in (False, True)
    ]
    models = [
        dict(model=name, size=size, train=train, batch=2, ms=[ms * tokens / 197] * 3, memory_gb=ms / 100, problem=None)
        for name, ms in MODELS.items()
        for size, tokens in ((224, 197), (512, 1025), (1024, 4097), (1248, 6085))
        for train in (False, True)
    ]
    growth = [row for row in models if row["model"] == "vilonghorn_tiny" and row["size"] in (224, 1248)]
    return dict(scan=scan, models=models, growth=copy.deepcopy(growth))


def test_each_is_met_by_a_report_that_meets_it(report, capsys):
    found = report_targets(report)
    assert len(found) == 17 and {row["verdict"] for row in found} == {"met"}
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in found)


def spoil_scan(report):
    report["scan"][0]["ms"] = [1.9] * 3


def spoil_exact(report):
    report["scan"][3]["ms"] = [1.7, 1.7, 9.0]


def model(report, name, size, train):
    return next(r for r in report["models"] if (r["model"], r["size"], r["train"]) == (name, size, train))


def spoil_model(report):
    model(report, "vilonghorn_tiny", 512, True)["ms"] = [400.0] * 3


def spoil_small(report):
    model(report, "vilonghorn_small", 224, False)["ms"] = [361.0] * 3


def spoil_growth(report):
    large = next(row for row in report["growth"] if row["size"] == 1248 and not row["train"])
    large["ms"] = [1.3 * 40 * 6085 / 197] * 3


def spoil_memory(report):
    model(report, "vilonghorn_tiny", 512, True)["memory_gb"] = 1.01


@pytest.mark.parametrize(
    "spoil, said",
    [
        (spoil_scan, ["scan, longhorn, forward: time to its arithmetic floor"]),
        (spoil_exact, ["scan, forward + backward: time of longhorn_exact to longhorn"]),
        (spoil_model, ["vilonghorn_tiny to deit_tiny_patch16_224, 512 px, forward + backward"]),
        (spoil_small, ["vilonghorn_small to deit_small_patch16_224, 224 px, forward"]),
        (spoil_growth, ["vilonghorn_tiny, forward: time of a token at 1248 px to 224 px"]),
        (spoil_memory, ["vilonghorn_tiny to deit_tiny_patch16_224, 512 px: peak memory of forward + backward"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_is_missed_by_a_report_that_misses_it(spoil, said, report):
    spoil(report)
    assert [target.what for target in targets(report) if target.verdict == "NOT MET"] == said


def test_ratios_are_medians_of_the_rounds_ratios(report):
    scans = {(row["rule"], row["train"]): row for row in report["scan"]}
    scans["longhorn_exact", False]["ms"], scans["longhorn", False]["ms"] = [10.0, 1.0, 4.0], [9.9, 1.0, 2.0]
    [found] = [t for t in targets(report) if t.what == "scan, forward: time of longhorn_exact to longhorn"]
    assert found.value == pytest.approx(10 / 9.9)
    scans["longhorn", False] |= dict(ms=[1.0, 3.0, 2.0], arithmetic_ms=[1.0, 2.0, 0.1])  # 1, 1.5 and 20 times the floor
    [found] = [t for t in targets(report) if t.what == "scan, longhorn, forward: time to its arithmetic floor"]
    assert found.value == pytest.approx(1.5)


def test_what_is_missing_or_failed_is_not_measured(report):
    assert {target.verdict for target in targets({})} == {"not measured"}
    for row in report["models"]:
        if row["model"] == "deit_tiny_patch16_224" and row["size"] == 1024:
            row.update(ms=None, memory_gb=None, problem="out of memory")
    unknown = [target.what for target in targets(report) if target.verdict == "not measured"]
    what = "vilonghorn_tiny to deit_tiny_patch16_224, 1024 px"
    assert unknown == [f"{what}, forward", f"{what}, forward + backward"]


def test_a_tokens_time_counts_the_class_token_and_the_batch():
    assert per_token(dict(ms=[197.0 * 4], batch=2, size=224)) == pytest.approx(2)
