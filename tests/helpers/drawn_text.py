"""The texts of a figure as they are drawn: where they overlap or leave the figure."""

from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text


def drawn_texts(figure: Figure) -> list[tuple[str, tuple[float, float, float, float]]]:
    """Each visible text with its box in pixels: left, bottom, right, top."""
    figure.draw_without_rendering()
    axes_off = [axes for axes in figure.axes if not axes.axison]  # their ticks and labels are not drawn
    hidden = {t for axes in axes_off for axis in (axes.xaxis, axes.yaxis) for t in axis.findobj(Text)}
    texts = [t for t in figure.findobj(Text) if t not in hidden and t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent().extents) for t in texts]


def misplaced(figure: Figure) -> list[tuple[str, ...]]:
    """Texts that leave the figure, and pairs of texts that overlap."""
    texts, (width, height) = drawn_texts(figure), figure.bbox.size
    outside = [(text,) for text, (x0, y0, x1, y1) in texts if x0 < 0 or y0 < 0 or x1 > width or y1 > height]
    return outside + [
        (a, b)
        for (a, p), (b, q) in combinations(texts, 2)
        if max(p[0], q[0]) < min(p[2], q[2]) and max(p[1], q[1]) < min(p[3], q[3])
    ]
