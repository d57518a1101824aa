"""Models the cycles that warps take for a piece of compiled code on one scheduler of sm_90.

Instructions issue in order, one a cycle, by the control codes of the machine code (SASS): stall counts and the six
scoreboards that loads, shuffles and special functions set. Known are the widths of the pipes and latencies: 500 cycles
of a load from global memory, 29 from shared memory, 24 of a shuffle, 28 of a special function, 26 of a tensor core,
which takes 8 cycles for a TF32 product of 16 x 8 x 8. Not modelled are caches,
bank conflicts, barriers between warps, and bandwidth. It is a model. A scan took 1.1 to 1.5 times as
long on an H100 (gpu.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# Cycles from the end of an instruction in its pipe to its result.
LATENCY = dict(
    HMMA=26, LDSM=29, LDS=29, STS=20, SHFL=24, MUFU=28, LDG=500, LDGSTS=500, STG=30, LDC=40, LDCU=40, S2R=30, BAR=30
)
READ = 10  # cycles until the operands of such an instruction are read
QUEUE = 64  # cycles of work that the queue of the memory pipe holds
FP32, HALF_RATE = {"FFMA", "FMUL", "FADD"}, {"IMAD", "HFMA2"}
INTEGER = set(
    "IADD3 LOP3 ISETP FSETP FSEL SEL FMNMX PRMT SHF LEA MOV VIADD CS2R F2FP P2R R2P PLOP3 VIMNMX I2FP".split()
)


class Instruction(NamedTuple):
    """What the model knows of an instruction."""

    opcode: str
    pipe: str | None
    cycles: int  # that it occupies its pipe
    stall: int  # cycles until the warp's next instruction
    sets: tuple[int, ...]  # scoreboards of its result and of its operands; 7: none
    waits: int  # a bit for each scoreboard


def decode(line: str, control: int) -> Instruction:
    """An instruction from its text and the upper half of its encoding."""
    opcode = re.sub(r"^@!?U?P\w+\s+", "", line.strip()).split()[0]
    base, bits = opcode.partition(".")[0], control >> 41
    pipe, cycles = None, 1
    if base in FP32:
        pipe = "fma"
    elif base in HALF_RATE:
        pipe, cycles = "fma", 2
    elif base in INTEGER:
        pipe, cycles = "integer", 2
    elif base == "MUFU":
        pipe, cycles = "special", 8
    elif base == "HMMA":
        pipe, cycles = "tensor", 8 if "1688" in opcode else 4
    elif base == "LDSM":
        pipe, cycles = "memory", 16
    elif base in ("LDS", "STS", "SHFL", "LDG", "STG", "LDGSTS"):
        pipe, cycles = "memory", 16 if ".128" in opcode else 8 if ".64" in opcode else 4
    return Instruction(base, pipe, cycles, max(1, bits & 15), (bits >> 5 & 7, bits >> 8 & 7), bits >> 11 & 63)


def cycles(trace: Sequence[Instruction], warps: int, rounds: int = 4) -> float:
    """Cycles of a round of all warps, where `warps` warps share a scheduler and each runs the trace `rounds` times."""
    position, finished = [0] * warps, [0] * warps
    ready, boards = [7 * i for i in range(warps)], [[0] * 6 for _ in range(warps)]
    free: dict[str, int] = {}
    now = last = 0
    while min(finished) < rounds:
        following = None
        for k in range(warps):  # greedy: the last warp first
            warp = (last + k) % warps
            if finished[warp] == rounds:
                continue
            instruction = trace[position[warp]]
            earliest = ready[warp]
            for board in range(6):
                if instruction.waits >> board & 1:
                    earliest = max(earliest, boards[warp][board])
            if instruction.pipe:
                queue = QUEUE if instruction.pipe == "memory" else 0
                earliest = max(earliest, free.get(instruction.pipe, 0) - queue)
            if earliest > now:
                following = earliest if following is None else min(following, earliest)
                continue
            start = max(free.get(instruction.pipe, 0), now) if instruction.pipe else now
            if instruction.pipe:
                free[instruction.pipe] = start + instruction.cycles
            done = start + (instruction.cycles if instruction.pipe else 0) + LATENCY.get(instruction.opcode, 0)
            for board, time in zip(instruction.sets, (done, start + READ)):
                if board < 6:
                    boards[warp][board] = max(boards[warp][board], time)
            ready[warp], position[warp], last = now + instruction.stall, position[warp] + 1, warp
            if position[warp] == len(trace):
                position[warp] = 0
                finished[warp] += 1
            following = now + 1
            break
        now = max(now + 1, following or 0)
    return now / rounds
