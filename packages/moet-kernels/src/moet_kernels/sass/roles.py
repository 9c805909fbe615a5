"""Learn which registers an instruction reads and writes, from `nvdisasm`'s live ranges.

One word of every form, its registers set wide apart, goes into one long kernel; the live-range
columns of the listing then say, for each register, whether the instruction defines (`^`), uses
(`v`) or does both (`x`), and so how many registers each operand spans.
"""

import functools
import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import Control
from moet_kernels.sass.cubin import MOST_REGISTERS, Cubin
from moet_kernels.sass.link import replace_code
from moet_kernels.sass.operands import NO_PREDICATE, Instruction, parse
from moet_kernels.sass.table import Form, Roles, Table
from moet_kernels.sass.tools import run_tool

__all__ = ["Access", "accesses", "learn_roles", "register_slots", "register_tokens"]

_FLOW = frozenset(
    [
        "BRA",
        "BRX",
        "BRXU",
        "EXIT",
        "RET",
        "CALL",
        "JMP",
        "JMX",
        "BSSY",
        "BSYNC",
        "BREAK",
        "WARPSYNC",
        "BPT",
        "KILL",
        "YIELD",
    ]
)
_STEP = {"R": 12, "UR": 4, "P": 1, "UP": 1}
_FIRST = {"R": 12, "UR": 4, "P": 0, "UP": 0}
_LAST = {"R": 244, "UR": 56, "P": 6, "UP": 6}
_COLUMNS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
_SPAN = 8

Access = tuple[str, int]
"""A register: its file (R, UR, P, UP) and number."""


def register_tokens(instruction: Instruction) -> list[tuple[int, str, int]]:
    """List the registers an instruction names: (slot, file, number), in operand order.

    The guard is not among them; that it is read goes without saying.
    """
    slots = instruction.slots
    return [(slot, file, int(slots[slot])) for slot, file in register_slots(instruction.key)]


def _bare(template: str) -> str:
    """Strip from a template the letters that stand for themselves."""
    template = re.sub(r"SR_?[A-Z0-9_.]+", "", template)
    template = template.replace("desc[", "[").replace("cx[", "[").replace("c[", "[")
    return re.sub(r"\.(?!reuse)[A-Z][A-Z0-9_]*", "", template)


def accesses(
    instruction: Instruction, form: Form
) -> tuple[frozenset[Access], tuple[tuple[Access, str], ...]]:
    """What an instruction writes, and what it reads through which operand.

    Zero registers and true predicates are left out. Operands are named by their place; the guard
    is named `@`.
    """
    return _accesses(instruction, form.roles)


@functools.lru_cache(1 << 16)  # the schedulers ask for the same program hundreds of times
def _accesses(
    instruction: Instruction, roles: tuple[Roles, ...]
) -> tuple[frozenset[Access], tuple[tuple[Access, str], ...]]:
    writes: set[Access] = set()
    reads: list[tuple[Access, str]] = []
    named = register_tokens(instruction)
    roles = roles or (Roles(0, 1),) * len(named)
    for place, ((_, file, number), role) in enumerate(zip(named, roles, strict=True)):
        if number == (NO_PREDICATE if file in ("P", "UP") else 255) or (file, number) == ("UR", 63):
            continue
        writes |= {(file, number + i) for i in range(role.writes)}
        reads += [((file, number + i), str(place)) for i in range(role.reads)]
    if instruction.guard != NO_PREDICATE:
        reads.append((("UP" if instruction.guard_uniform else "P", instruction.guard), "@"))
    return frozenset(writes), tuple(reads)


def learn_roles(table: Table, arch: Architecture, twin: bytes, kernel: str) -> Table:
    """Fill in the roles of every form that can stand in straight-line code.

    Args:
        table: what `learn` found.
        arch: its architecture.
        twin: a cubin of that architecture to put the long kernel into.
        kernel: the kernel in it that is replaced.
    """
    spread = dict(_spread_words(table))
    end = table.encode(parse("EXIT", arch)) | Control().bits
    words = [word | Control().bits for word, _ in spread.values()] + [end]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roles.cubin"
        exits = [16 * (len(words) - 1)]
        path.write_bytes(replace_code(Cubin(twin), kernel, words, MOST_REGISTERS, exits))
        listing = run_tool("nvdisasm", ["-c", "-lrm", "narrow", path])
    rows = dict(_live_rows(listing))
    forms = dict(table.forms)
    for index, (key, (_, named)) in enumerate(spread.items()):
        writes, reads = rows.get(16 * index, (set(), set()))
        roles = tuple(
            Roles(_run(writes, file, number), _run(reads, file, number)) for file, number in named
        )
        forms[key] = msgspec.structs.replace(forms[key], roles=roles)
    return msgspec.structs.replace(table, forms=forms)


def _spread_words(table: Table) -> Iterator[tuple[str, tuple[int, list[Access]]]]:
    for key, form in table.forms.items():
        mnemonic = key.split(" ")[1]
        if mnemonic.split(".")[0] in _FLOW:
            continue
        found = _spread(form, register_slots(key))
        if found is not None:
            yield key, found


@functools.cache
def register_slots(key: str) -> list[tuple[int, str]]:
    """The slots of a form that hold register and predicate numbers: (slot, file)."""
    _, _, operands = key.split(" ", 2)
    found = []
    slot = 2
    for text in re.split(r",(?![^\[]*\])(?![^{]*\})", operands) if operands else []:
        template = text.lstrip("-~|!")
        letters = re.findall(r"UR|UP|SB|[RPBIFHDLN]", _bare(template))
        registers = sum(letter in ("R", "UR") for letter in letters)
        for letter in letters:
            if letter in _STEP:
                found.append((slot, letter))
            slot += 1
        if "[" in template and not template.startswith("c"):
            slot += registers
        elif template.startswith(("R", "UR", "c[", "cx[")):
            slot += 4
        elif template in ("P", "UP"):
            slot += 1
    return found


def _spread(form: Form, registers: list[tuple[int, str]]) -> tuple[int, list[Access]] | None:
    """Encode a form with registers far apart; where it cannot, leave the sample's registers."""
    slots = list(form.slots)
    slots[0], slots[1] = 0, NO_PREDICATE
    following = dict(_FIRST)
    named = []
    for slot, file in registers:
        number = following[file]
        slots[slot] = number
        named.append((file, number))
        following[file] = min(number + _STEP[file], _LAST[file])
    word = form.encode(tuple(slots))
    return None if word is None else (word, named)


def _run(accessed: set[Access], file: str, first: int) -> int:
    """How many consecutive registers of a file are accessed, from the first on."""
    count, span = 0, 1 if file in ("P", "UP") else _SPAN
    while count < span and (file, first + count) in accessed:
        count += 1
    return count


def _live_rows(listing: str) -> Iterator[tuple[int, tuple[set[Access], set[Access]]]]:
    """Read the live-range columns: address -> (defined, used)."""
    columns: dict[int, Access] = {}
    lines = iter(listing.splitlines())
    for line in lines:
        if re.search(r"// \|.*\|?\s*(GPR|PRED|UGPR|UPRED)\s", line) and not columns:
            header = [line]
            for following in lines:
                if "// +" in following:
                    break
                header.append(following)
            columns = _columns(header)
            continue
        match = re.match(r"^\s+/\*([0-9a-f]{4,})\*/", line)
        if match and columns and "// |" in line:
            tail = line[line.index("// |") + 3 :]
            marks = [(access, tail[at]) for at, access in columns.items() if at < len(tail)]
            writes = {access for access, mark in marks if mark in "^x"}
            yield int(match[1], 16), (writes, {access for access, mark in marks if mark in "vx"})


def _columns(header: list[str]) -> dict[int, Access]:
    """Column -> register; numbers are written downwards."""
    rows = [line[line.index("// |") + 3 :] for line in header]
    bars = [at for at, char in enumerate(rows[0]) if char == "|"]
    found = {}
    for left, right in itertools.pairwise(bars):
        file = _COLUMNS.get(rows[0][left + 1 : right].strip())
        if file is None:
            continue
        start = left + 1 + rows[-1][left + 1 : right].find("#") + 1
        for at in range(start, right):
            digits = "".join(row[at] for row in rows[1:] if at < len(row) and row[at].isdigit())
            if digits:
                found[at] = (file, int(digits))
    return found
