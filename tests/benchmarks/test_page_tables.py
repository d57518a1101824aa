"""Tables say what the rows say."""

import pytest
from page_tables import fill_page, ratio


def test_ratios_are_medians_of_the_rounds_ratios():
    row, other = dict(ms=[10.0, 1.0, 4.0]), dict(ms=[9.9, 1.0, 2.0])
    assert ratio(row, other) == pytest.approx(10 / 9.9)
    assert ratio(row, None) is ratio(row, dict(ms=None)) is None
    assert ratio(row | dict(memory_gb=3.0), other | dict(memory_gb=2.0), "memory_gb") == 1.5


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the lines <!-- speed -->"):
        fill_page("# A README", "speed", "")
