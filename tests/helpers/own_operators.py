"""Which operators of this library run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OwnOperators(TorchDispatchMode):
    """Records what torch's dispatcher is asked for of this library: names, and what the operators are given."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "vilonghorn":
            self.names.append(function.name().removeprefix("vilonghorn::"))
            self.arguments.append(args)
        return function(*args, **kwargs or {})
