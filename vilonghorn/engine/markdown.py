"""Tables in Markdown."""

import re
from collections.abc import Sequence


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table; rows may lack columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


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
