"""Tables in Markdown of the rows of `run_interleaved`, and pages that have them.

A row also has `train`, and what was measured.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from interleaved import Row

from vilonghorn.data.atomic_files import atomic_write

Line = dict[str, str]  # of a table: text by column


def by(rows: Sequence[Row], *keys: str) -> dict[tuple, Row]:
    """Rows with figures, by the values of some keys and by `train`."""
    return {(*(row[key] for key in keys), row["train"]): row for row in rows if row["ms"]}


def ratio(row: Row | None, other: Row | None, key: str = "ms") -> float | None:
    """The median over rounds of a row's `ms` to another's `key`, or the ratio of `memory_gb`; None if one is absent."""
    if not (row and other and row["ms"] and other.get(key)):
        return None
    if key == "memory_gb":
        return row[key] / other[key]
    return statistics.median(a / b for a, b in zip(row["ms"], other[key]))


def median(row: Row | None) -> float | None:
    """The median time of a row, None without one."""
    return statistics.median(row["ms"]) if row else None


def figure(value: float | None, digits: int = 2, bold_above: float = math.inf) -> str:
    """A figure as text, "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.{digits if value < 100 else 0}f}"
    return f"**{text}**" if value > bold_above else text


def markdown(lines: Sequence[Line]) -> str:
    """A Markdown table; lines may lack columns."""
    columns = list(dict.fromkeys(column for line in lines for column in line))
    cells = [columns, ["---"] * len(columns), *([line.get(column, "") for column in columns] for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def fill_page(text: str, name: str, content: str) -> str:
    """A page with `content` between its lines <!-- NAME --> and <!-- end of NAME -->.

    Raises:
        ValueError: the page lacks these lines.
    """
    marks = re.compile(rf"(<!-- {name}\b[^>]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text, count = marks.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if not count:
        raise ValueError(f"the page lacks the lines <!-- {name} --> and <!-- end of {name} -->")
    return text


def filled(path: Path, contents: Mapping[str, str]) -> str:
    """The text of a page with `contents`, by the names of their marks. Raises as `fill_page`."""
    text = path.read_text(encoding="utf-8")
    for name, content in contents.items():
        text = fill_page(text, name, content)
    return text


def write_page(path: Path, contents: Mapping[str, str]) -> None:
    """Writes the text of `filled` to the page."""
    text = filled(path, contents)
    with atomic_write(path, "w") as file:
        file.write(text)
