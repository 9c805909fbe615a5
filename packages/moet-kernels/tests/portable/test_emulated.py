"""The decode kernels as compiled for sm_90, run instruction by instruction in our emulator.

Triton's interpreter shows that the source is right; this shows that the machine code is, with no
GPU: which lane holds what, and every choice of layout the compiler made. Races are not looked
for, because Triton lets several threads store the same value to one word.
"""

import os
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moet_core.codecs import codec_names
from moet_core.row import decode_row, row_layout
from moet_kernels.portable import decode, ptx
from moet_kernels.portable.few import DOWN_SHAPE, GATE_UP_SHAPE, launch_options
from moet_kernels.portable.interpret import _OPERATIONS as PTX_OPERATIONS
from moet_kernels.portable.tier import row_constants
from moet_kernels.sass import emulate as emulator
from moet_kernels.sass.assemble import disassemble
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.machine import WARP, Buffer, Machine
from moet_kernels.sass.memory_ops import _addresses
from moet_kernels.sass.tools import find_tool, have_tools
from moet_kernels.sass.values import integer, raw, signed

TOP_K, EXPERTS = 2, 6
_TRITONS = str(Path(triton.__file__).parent / "backends/nvidia/bin")

# -- instructions that Triton uses and our own kernels do not


def spread(machine, value):
    return np.broadcast_to(np.asarray(value), machine.count).astype(np.uint32)


def predicates_to_register(machine, file, statement, mask):
    d, _, base, wanted = statement.instruction.operands
    wanted = spread(machine, integer(machine, file, wanted, mask))
    bits = sum(file.predicates[i].astype(np.uint32) << np.uint32(i) for i in range(7))
    kept = spread(machine, integer(machine, file, base, mask)) & ~wanted
    machine.write(file, d.values[0], kept | bits & wanted, mask)


def reduce_warp(machine, _file, statement, mask):
    d, a = statement.instruction.operands
    values = signed(spread(machine, integer(machine, machine.vector, a, mask)))
    values, active = values.reshape(-1, WARP).astype(np.int64), mask.reshape(-1, WARP)
    neutral, reduce = {"SUM": (0, np.sum), "MIN": (2**31 - 1, np.min)}[
        statement.instruction.modifiers[0]
    ]
    found = reduce(np.where(active, values, neutral), axis=1) & 0xFFFFFFFF
    machine.write(machine.uniform, d.values[0], found.astype(np.uint32), active.any(axis=1))


def vote(machine, _file, statement, mask):
    active = mask.reshape(-1, WARP)
    ballot = (active.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
    number = statement.instruction.operands[0].values[0]
    machine.write(machine.uniform, number, ballot.astype(np.uint32), active.any(axis=1))


def atomic_add(machine, file, statement, mask):
    place, source = statement.instruction.operands[-2:]
    addends = spread(machine, integer(machine, file, source, mask))
    addresses = _addresses(machine, file, place, mask)
    for buffer, threads, offset in machine.global_index(addresses, 4, mask):
        np.add.at(buffer.data.view(np.uint32), offset // 4, addends[threads])


def matrices(machine, file, statement, mask):
    """LDSM, STSM: 8 by 8 matrices of 16 bits; lane r of each 8 has the address of row r."""
    modifiers = statement.instruction.modifiers
    storing = statement.instruction.opcode == "STSM"
    place, register = statement.instruction.operands[:: 1 if storing else -1]
    addresses = _addresses(machine, file, place, mask)
    lane = np.arange(machine.count) % WARP
    for matrix in range(4 if "4" in modifiers else 2 if "2" in modifiers else 1):
        words = np.zeros(machine.count, np.uint32)
        if storing:
            words = spread(machine, raw(machine, file, register, mask, matrix))
        for half in range(2):
            row, column = lane // 4, 2 * (lane % 4) + half
            if "MT88" in modifiers:
                row, column = column, row
            source = np.arange(machine.count) - lane + 8 * matrix + row
            at = machine.shared_index(addresses[source] + (2 * column).astype(np.uint64), 2, mask)
            index = machine.block_of[mask][:, None], at[mask][:, None] + np.arange(2)
            if storing:
                parts = (words >> np.uint32(16 * half)).astype(np.uint16)[mask]
                machine.shared[index] = parts[:, None].view(np.uint8)
                machine.shared_known[index] = True
            else:
                assert machine.shared_known[index].all()
                parts = np.ascontiguousarray(machine.shared[index]).view(np.uint16)[:, 0]
                words[mask] |= parts.astype(np.uint32) << np.uint32(16 * half)
        if not storing:
            machine.write(file, register.values[0] + matrix, words, mask)


def add_then_least(machine, file, statement, mask):
    d, a, b, c, least = statement.instruction.operands
    a, b, c = (spread(machine, integer(machine, file, each, mask)) for each in (a, b, c))
    kind = np.uint32 if "U32" in statement.instruction.modifiers else np.int32
    total, other = (a + b).view(kind), c.view(kind)
    least = machine.read_predicate(file, least, mask)
    found = np.where(least, np.minimum(total, other), np.maximum(total, other))
    machine.write(file, d.values[0], np.ascontiguousarray(found).view(np.uint32), mask)


def special_function(machine, file, statement, mask):
    d, a = statement.instruction.operands
    value = spread(machine, raw(machine, file, a, mask)).view(np.float32).astype(np.float64)
    value = np.abs(value) if a.absolute else value
    value = -value if a.negate else value
    function = {"EX2": np.exp2, "RCP": np.reciprocal}[statement.instruction.modifiers[0]]
    with np.errstate(all="ignore"):
        found = function(value).astype(np.float32)
    machine.write(file, d.values[0], found.view(np.uint32), mask)


def multiply_pairs(machine, file, statement, mask):
    assert "BF16_V2" in statement.instruction.modifiers
    d, *sources = statement.instruction.operands
    factors = []
    for operand in sources[:2]:
        if operand.template == "H":  # two immediates
            high, low = (each.values[0] for each in sources[sources.index(operand) :][:2])
            factors.append(spread(machine, high << 16 | low))
        else:
            value = spread(machine, raw(machine, file, operand, mask))
            factors.append(value ^ np.uint32(0x80008000) if operand.negate else value)
    multiply = PTX_OPERATIONS["fma.rn.bf16x2"]
    factors = [np.where(mask, factor, 0).astype(np.uint32) for factor in factors]
    found = multiply(*factors, np.full(machine.count, 0x80008000, np.uint32))
    machine.write(file, d.values[0], found, mask)


def local_memory(machine, file, statement, mask):
    """LDL, STL of 32 bits: where threads keep what they have no register for."""
    assert not statement.instruction.modifiers, statement.text
    storing = statement.instruction.opcode == "STL"
    place, register = statement.instruction.operands[:: 1 if storing else -1]
    at = _addresses(machine, file, place, mask)[mask].astype(np.int64) % 4096 // 4
    local = machine.__dict__.setdefault("local", np.zeros((machine.count, 1024), np.uint32))
    if storing:
        local[mask, at] = spread(machine, raw(machine, file, register, mask))[mask]
        return
    words = np.zeros(machine.count, np.uint32)
    words[mask] = local[mask, at]
    machine.write(file, register.values[0], words, mask)


def nothing(_machine, _file, _statement, _mask):
    pass


MORE_OPERATIONS = {
    "P2R": predicates_to_register,
    "REDUX": reduce_warp,
    "VOTEU": vote,
    "ATOMG": atomic_add,
    "STSM": matrices,
    "LDSM": matrices,
    "VIADDMNMX": add_then_least,
    "MUFU": special_function,
    "HMUL2": multiply_pairs,
    "STL": local_memory,
    "LDL": local_memory,
    "MEMBAR": nothing,
    "ERRBAR": nothing,
    "CGAERRBAR": nothing,
    "CCTL": nothing,
}


@pytest.fixture(autouse=True)
def _more_operations(monkeypatch):
    monkeypatch.setenv("PATH", _TRITONS, prepend=os.pathsep)
    for opcode, operation in MORE_OPERATIONS.items():
        monkeypatch.setitem(emulator._OPERATIONS, opcode, operation)
    monkeypatch.setattr(Machine, "track_shared", lambda *_args, **_options: None)
    begin = Machine.__init__

    def with_garbage(self, *args):
        # The compiler may change bits of a register nobody wrote, if nobody uses the others.
        begin(self, *args)
        garbage = np.random.default_rng(7).integers(0, 2**32, self.vector.registers.shape)
        garbage &= 0x3F3F3F3F  # finite as any kind of number
        self.vector.registers[:255] = garbage[:255]
        self.vector.registers[1] = 0  # the stack pointer
        self.vector.known[:] = True

    monkeypatch.setattr(Machine, "__init__", with_garbage)
    yield
    find_tool.cache_clear()  # others may not find Triton's nvdisasm, which is older than theirs


# -- launches


@cache
def compiled(name, codec, hidden, intermediate, fine=None):
    """The program of a kernel, its argument names, and the shared memory it asks for."""
    kernel = getattr(decode, name)
    tiers = [row_constants(row_layout(c, hidden, intermediate)) for c in (codec, fine) if c]
    shape = GATE_UP_SHAPE if name == "gate_up" else DOWN_SHAPE
    options = launch_options(shape, two_tiers=fine is not None)
    constants = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "BASE": tiers[0],
        "FINE": tiers[1] if fine else (),
        "TOP_K": TOP_K,
        "PAIRS": 16 * TOP_K,
        "CLAMP": True,
        "COUNT": True,
        "MARK": True,
        "BLOCKS": options.pop("BLOCKS"),
        "WARPS": options.pop("WARPS"),
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    kinds = {"x": "*bf16", "activated": "*bf16", "parts": "*fp32", "limit": "fp32"}
    kinds |= dict.fromkeys(("base_pool", "fine_pool", "wanted"), "*u8")
    kinds |= dict.fromkeys(("pairs", "experts", "levels"), "i32")
    signature = {
        arg: "constexpr" if arg in constants else kinds.get(arg, "*i32") for arg in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (arg, kind) in enumerate(signature.items())
        if kind.startswith("*") and arg != "ids"
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    program = disassemble(Cubin(built.asm["cubin"]), name)
    arguments = [(arg, kind) for arg, kind in signature.items() if kind != "constexpr"]
    return program, arguments, built.metadata.shared, constants["BLOCKS"]


def bfloat16(values):
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Step:
    """A decode step: its arguments, a run of one kernel in the emulator, and float64."""

    def __init__(
        self, rows, codec, hidden, intermediate, tokens, slots, fine=None, fine_slots=None
    ):
        chance = np.random.default_rng(3)
        self.sizes = codec, hidden, intermediate, fine
        self.hidden, self.intermediate = hidden, intermediate
        self.tokens, self.limit = tokens, 0.5
        self.ids = np.stack([chance.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
        self.x = bfloat16(chance.standard_normal((tokens, hidden)))
        self.activated = bfloat16(chance.standard_normal((tokens * TOP_K, intermediate)))
        self.tiers = [self._tier(rows, codec, slots), self._tier(rows, fine, fine_slots)]

    def _tier(self, rows, codec, slots):
        if codec is None:
            return None
        made = rows(codec, self.hidden, self.intermediate, EXPERTS).numpy()
        pool = np.full_like(made, 0xFF)
        for expert, slot in enumerate(slots):
            if slot >= 0:
                pool[slot] = made[expert]
        return pool, np.array(slots, np.int32), row_layout(codec, self.hidden, self.intermediate)

    def place(self, pair):
        """The tier and slot of a pair's expert, None for an absent one."""
        expert = self.ids.reshape(-1)[pair]
        for tier in reversed(self.tiers):
            if tier is not None and tier[1][expert] >= 0:
                return tier[2], tier[0][tier[1][expert]]
        return None

    def run(self, name):
        """Return the result [pairs, columns], which pairs were written, missing and wanted."""
        program, arguments, shared, blocks = compiled(name, *self.sizes)
        base, fine = self.tiers[0], self.tiers[1] or self.tiers[0]
        pairs = self.tokens * TOP_K
        columns, dtype = self.hidden, np.float32
        if name == "gate_up":
            columns, dtype = self.intermediate, np.uint16
        arrays = {
            "x": self.x,
            "activated": self.activated,
            "ids": self.ids.astype(np.int32),
            "base_slot_of": base[1],
            "base_pool": base[0],
            "fine_slot_of": fine[1],
            "fine_pool": fine[0],
            "missing": np.zeros(1, np.int32),
            "wanted": np.zeros(EXPERTS, np.uint8),
            "scratch": np.zeros(64, np.uint8),
        }
        page = 1 << 28
        buffers = {
            key: Buffer.of(page * (place + 2), array)
            for place, (key, array) in enumerate(arrays.items())
        }
        result = "activated" if name == "gate_up" else "parts"
        buffers[result] = Buffer.empty(page, pairs * columns * np.dtype(dtype).itemsize)
        numbers = {"pairs": pairs, "experts": EXPERTS, "levels": ptx.W2_LEVELS, "limit": self.limit}
        packed = b""
        for arg, kind in [*arguments, ("scratch", "*"), ("scratch", "*")]:
            code = "Q" if kind.startswith("*") else "f" if kind == "fp32" else "i"
            packed += b"\0" * (-len(packed) % struct.calcsize(code))
            value = buffers[arg].address if kind.startswith("*") else numbers[arg]
            packed += struct.pack(f"<{code}", value)
        grid = (-(-columns // (16 * blocks)), pairs, 1)
        launch = emulator.Launch(grid, 128, packed, dynamic_shared=shared)
        emulator.emulate(program, launch, list(buffers.values()))
        found = buffers[result].data.view(dtype).reshape(pairs, columns)
        written = buffers[result].written.reshape(pairs, -1)
        assert (written.all(axis=1) == written.any(axis=1)).all(), "a pair is written in part"
        missing = buffers["missing"].data.view(np.int32)[0]
        return found, written.all(axis=1), missing, buffers["wanted"].data.tolist()

    def float64(self, name):
        out = np.zeros((self.tokens * TOP_K, self.hidden))
        if name == "gate_up":
            out = np.zeros((self.tokens * TOP_K, self.intermediate))
        for pair in range(len(out)):
            if self.place(pair) is None:
                continue
            w13, w2 = decode_row(*self.place(pair))
            if name == "down":
                out[pair] = w2 @ from_bfloat16(self.activated[pair])
                continue
            gate, up = np.split(w13 @ from_bfloat16(self.x[pair // TOP_K]), 2)
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
            out[pair] = gate / (1 + np.exp(-gate)) * up
        return out

    def check(self, name):
        found, written, missing, wanted = self.run(name)
        expected = self.float64(name)
        present = [self.place(pair) is not None for pair in range(len(expected))]
        assert written.tolist() == present
        if name == "gate_up":
            found = from_bfloat16(found)
            absent = set(self.ids.reshape(-1)[~np.array(present)].tolist())
            assert missing == len(absent)
            assert wanted == [int(e in self.ids) for e in range(EXPERTS)]
        error = np.linalg.norm((found - expected)[present]) / np.linalg.norm(expected)
        assert error < (4e-3 if name == "gate_up" else 1e-6)


pytestmark = pytest.mark.skipif(
    not (Path(_TRITONS) / "nvdisasm").exists() and not have_tools("nvdisasm"),
    reason="needs nvdisasm, which comes with Triton",
)

SLOTS = [2, 0, -1, 3, 5, 1]


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (512, 512)])
def test_machine_code_agrees_with_float64(rows, name, codec, hidden, intermediate):
    Step(rows, codec, hidden, intermediate, 5, SLOTS).check(name)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_machine_code_of_two_tiers_takes_the_fine_one_if_it_is_there(rows, name):
    Step(rows, "w2", 128, 64, 5, SLOTS, "fp4-nv", [-1, 1, -1, 0, -1, -1]).check(name)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_machine_code_gives_a_token_the_same_bits_in_every_batch_and_slot(rows, name):
    whole = Step(rows, "w2", 512, 512, 16, SLOTS)
    together = whole.run(name)[0]
    moved = Step(rows, "w2", 512, 512, 16, [0, 4, -1, 5, 2, 3])
    assert np.array_equal(moved.run(name)[0], together)
    for token in (0, 7, 8, 15):
        alone = Step(rows, "w2", 512, 512, 1, SLOTS)
        pairs = slice(token * TOP_K, (token + 1) * TOP_K)
        alone.ids, alone.x = whole.ids[token : token + 1], whole.x[token : token + 1]
        alone.activated = whole.activated[pairs]
        assert np.array_equal(alone.run(name)[0], together[pairs]), token


def test_machine_code_takes_more_pairs_of_an_expert_than_a_matrix_instruction(rows):
    step = Step(rows, "w2", 64, 96, 16, SLOTS)
    step.ids[:] = [1, 1]
    step.check("down")
