"""Tables in Markdown."""

from collections.abc import Sequence


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table; rows may lack columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)
