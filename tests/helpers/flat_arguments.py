"""The arguments of an operator from its tensors by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vilonghorn.ops.arguments import LAYOUTS, unflatten


def from_tensors(kind: type, given: Mapping[str, Tensor | None], *options: Any) -> Any:
    """The arguments of an operator from its tensors by their flat names, None for those not given, and its options."""
    return unflatten(kind, [*map(given.get, LAYOUTS[kind].tensors), *options])
