"""The device and the precision of a run."""

import torch

from .distributed import Distributed


def pick_device(name: str, option: str = "run.device") -> torch.device:
    """The device of a name, of each process its own GPU; "auto" is CUDA if it is there, else the CPU."""
    dist = Distributed()
    try:
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if name == "auto" else name)
        if device.type == "cuda" and dist.local_size > 1:
            if name not in ("auto", "cuda"):
                raise ValueError(f"{option} is {name!r} for {dist.local_size} processes: make it auto or cuda")
            device = torch.device("cuda", dist.local_rank)
            torch.cuda.set_device(device)
        torch.zeros((), device=device).item()  # a device such as "meta" computes nothing
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{option} is {name!r}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def autocast(amp: str, device: torch.device) -> torch.autocast:
    """The autocast context of `run.amp`; "auto" is bfloat16 on CUDA devices that support it."""
    if amp == "auto":
        amp = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "off"
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp != "off")
