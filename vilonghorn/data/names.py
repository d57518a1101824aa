"""Names of classes and files: which are valid, and how they are printed."""

from collections import Counter


def printable(name: str) -> str:
    """Escapes control characters, which a terminal obeys, and bytes that are not UTF-8, as repr does."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def is_utf8(name: str) -> bool:
    """Whether a name can be written as UTF-8. Python holds other bytes of a file name as lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


def class_names_problem(classes: object) -> str | None:
    """What is wrong with class names, which are None or a list of distinct strings; None if nothing is."""
    if classes is None:
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return "the classes are not a list of distinct names"
    if (odd := next((name for name in classes if not is_utf8(name)), None)) is not None:
        return f"the class name {printable(odd)!r} is not UTF-8"
    twice = next((name for name, count in Counter(classes).items() if count > 1), None)
    return None if twice is None else f"the classes are not distinct names: {twice!r} occurs twice"
