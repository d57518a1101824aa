"""Targets and tables say what the rows of a report say."""

import copy

import pytest

from vilonghorn.bench.report import model_lines, problems, scan_lines, target_lines, targets, tokens

RULES = ("longhorn", "longhorn_exact")
MODELS = {
    "deit_tiny_patch16_224": 100.0,
    "vilonghorn_tiny": 40.0,
    "deit_small_patch16_224": 300.0,
    "vilonghorn_small": 330.0,
}


@pytest.fixture
def report():
    """All targets met: scans at 1.5 times their bound, models at 0.4 (small: 1.1) of DeiT's time, and linear."""
    scan = [
        dict(
            rule=rule,
            backend="cpu",
            train=train,
            ms=[1.5, 1.5, 9.0],
            compute_bound_ms=[1.0] * 3,
            memory_gb=0.1,
            problem=None,
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


def test_each_target_is_met_by_a_report_that_meets_it(report):
    found = targets(report)
    assert len(found) == 17 and {target["verdict"] for target in found} == {"met"}
    lines = [list(line.values()) for line in target_lines(report)]
    assert lines == [[t["target"], f"{t['at_most']:.2f}", f"{t['value']:.2f}", "met"] for t in found]


@pytest.mark.parametrize(
    "subject, which, change, missed",
    [
        ("scan", ("longhorn", False), dict(ms=[1.9] * 3), "scan, longhorn, forward: time to its compute bound"),
        (
            "scan",
            ("longhorn_exact", True),
            dict(ms=[1.7, 1.7, 9.0]),
            "scan, forward + backward: time of longhorn_exact to longhorn",
        ),
        (
            "models",
            ("vilonghorn_tiny", 512, True),
            dict(ms=[400.0] * 3),
            "vilonghorn_tiny to deit_tiny_patch16_224, 512 px, forward + backward",
        ),
        (
            "models",
            ("vilonghorn_small", 224, False),
            dict(ms=[361.0] * 3),
            "vilonghorn_small to deit_small_patch16_224, 224 px, forward",
        ),
        (
            "growth",
            ("vilonghorn_tiny", 1248, False),
            dict(ms=[1.3 * 40 * 6085 / 197] * 3),
            "vilonghorn_tiny, forward: time of a token at 1248 px to 224 px",
        ),
        (
            "models",
            ("vilonghorn_tiny", 512, True),
            dict(memory_gb=1.01),
            "vilonghorn_tiny to deit_tiny_patch16_224, 512 px: peak memory of forward + backward",
        ),
    ],
)
def test_each_target_is_missed_by_a_report_that_misses_it(subject, which, change, missed, report):
    keys = ("rule", "train") if subject == "scan" else ("model", "size", "train")
    [row] = [row for row in report[subject] if tuple(row[key] for key in keys) == which]
    row |= change
    assert [target["target"] for target in targets(report) if target["verdict"] == "NOT MET"] == [missed]
    assert [line["target"] for line in target_lines(report) if line["verdict"] == "**NOT MET**"] == [missed]


def test_ratios_are_medians_of_the_rounds_ratios(report):
    scans = {(row["rule"], row["train"]): row for row in report["scan"]}
    scans["longhorn_exact", False]["ms"], scans["longhorn", False]["ms"] = [10.0, 1.0, 4.0], [9.9, 1.0, 2.0]
    [found] = [t for t in targets(report) if t["target"] == "scan, forward: time of longhorn_exact to longhorn"]
    assert found["value"] == pytest.approx(10 / 9.9)
    scans["longhorn", False] |= dict(
        ms=[1.0, 3.0, 2.0], compute_bound_ms=[1.0, 2.0, 0.1]
    )  # 1, 1.5 and 20 times the bound
    [found] = [t for t in targets(report) if t["target"] == "scan, longhorn, forward: time to its compute bound"]
    assert found["value"] == pytest.approx(1.5)


def test_what_is_missing_or_failed_is_not_measured(report):
    assert {(line["measured"], line["verdict"]) for line in target_lines({})} == {("-", "not measured")}
    for row in report["models"]:
        if row["model"] == "deit_tiny_patch16_224" and row["size"] == 1024:
            row.update(ms=None, memory_gb=None, problem="out of memory")
    unknown = [target["target"] for target in targets(report) if target["verdict"] == "not measured"]
    what = "vilonghorn_tiny to deit_tiny_patch16_224, 1024 px"
    assert unknown == [f"{what}, forward", f"{what}, forward + backward"]


def test_tokens_count_the_class_token_and_the_batch():
    assert tokens(dict(batch=2, size=224)) == 394


def test_losses_are_bold_and_a_row_without_figures_is_a_dash(report):
    for row in report["models"]:
        row["compiled"] = False
    assert not problems(report)
    for row in report["models"]:
        if (row["model"], row["size"], row["train"]) == ("vilonghorn_small", 224, True):
            row.update(ms=None, memory_gb=None, problem="out of memory")
    lines = [list(line.values()) for line in model_lines(report)]
    [line] = [cells for px, _, model, *cells in lines if (px, model) == ("224", "`vilonghorn_small`")]
    assert line == ["330", "838", "**1.10**", "-", "-", "-", "-", "-"]
    [line] = [cells for px, _, model, *cells in lines if (px, model) == ("224", "`vilonghorn_tiny`")]
    assert line == ["40.0", "102", "0.40", "40.0", "102", "0.40", "0.40", "0.40"]
    assert problems(report) == ["vilonghorn_small, 224, forward + backward: out of memory"]


def test_a_scan_is_compared_to_the_loop_and_its_roofline(report):
    bounds = dict(compute_bound_ms=[1.0, 2.0, 2.0], memory_bound_ms=[0.5] * 3, memory_gb=0.1, problem=None)
    cell = dict(workload="B=8", rule="mamba", train=False, **bounds)
    rows = [cell | dict(backend="torch loop", ms=[8.0] * 3), cell | dict(backend="cpu", ms=[2.0, 4.0, 1.0])]
    [_, line] = scan_lines(dict(scan=rows))["B=8"]
    assert list(line.values()) == ["mamba", "cpu", "forward", "2.00", "1.00 to 4.00", "4.0", "2.00", "4.00"]
    peer = [row | dict(backend=name, compute_bound_ms=None) for row, name in zip(rows, ("mamba_ssm", "cuda"))]
    [_, line] = scan_lines(dict(scan=peer))["B=8"]
    assert line["times faster than mamba_ssm"] == "4.0" and line["time to compute bound"] == "-"
