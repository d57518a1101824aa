"""Tables say what the rows say."""

import pytest

from vilonghorn.bench.tables import fill_page, model_lines, ratio


def test_ratios_are_medians_of_the_rounds_ratios():
    row, other = dict(ms=[10.0, 1.0, 4.0]), dict(ms=[9.9, 1.0, 2.0])
    assert ratio(row, other) == pytest.approx(10 / 9.9)
    assert ratio(row, None) is ratio(row, dict(ms=None)) is None
    assert ratio(row | dict(memory_gb=3.0), other | dict(memory_gb=2.0), "memory_gb") == 1.5


def test_losses_are_bold_and_a_row_without_figures_has_no_line():
    times = dict(deit_small_patch16_224=300.0, vilonghorn_small=330.0, vilonghornv2_small=None)
    rows = [
        dict(model=name, size=224, batch=8, train=train, ms=ms and [ms] * 3, memory_gb=(ms or 0) / 300)
        for name, ms in times.items()
        for train in (False, True)
    ]
    first, second = (list(line.values()) for line in model_lines(rows))
    assert first == ["224", "8", "`deit_small_patch16_224`", "300", "1.00", "300", "1.00", "1.00", "1.00"]
    assert second == ["224", "8", "`vilonghorn_small`", "330", "**1.10**", "330", "**1.10**", "1.10", "**1.10**"]


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the lines <!-- speed -->"):
        fill_page("# A README", "speed", "")
