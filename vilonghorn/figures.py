"""Pictures of matplotlib, and texts that fit into them."""

from io import BytesIO

from matplotlib.figure import Figure
from matplotlib.text import Text

SMALLEST = 6.0  # points of a letter


def png(figure: Figure) -> bytes:
    """The bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def cut_middle(text: str, length: int) -> str:
    """Cuts a text in its middle to at most `length` characters."""
    return text if len(text) <= length else text[: length // 2] + "…" + text[len(text) - (length - 1) // 2 :]


def fit_text(text: Text, width: float, height: float) -> None:
    """Fits a text into a box of inches: reduces the font down to `SMALLEST`, then leaves out letters."""

    def excess() -> float:
        box = text.get_window_extent()
        return max(box.width / width, box.height / height) / text.get_figure(root=True).dpi

    while excess() > 1 and text.get_fontsize() > SMALLEST:
        text.set_fontsize(max(SMALLEST, 0.97 * text.get_fontsize() / excess()))
    lines = text.get_text().split("\n")
    length = max(map(len, lines))
    while length > 1 and (too_large := excess()) > 1:
        length = min(length - 1, int(length / too_large))
        text.set_text("\n".join(cut_middle(line, length) for line in lines))
