"""The portable kernels compiled for any architecture, on machines without a GPU, and looked at.

`python -m moet_kernels.portable.compiled` prints registers, shared memory, stack (where spills
go) and the instructions of the main loop of every kernel, codec and architecture.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moet_core.codecs import codec_names
from moet_core.row import row_layout
from moet_kernels.portable import decode, few, many, prefill
from moet_kernels.portable.tier import row_constants

__all__ = ["ARCHITECTURES", "KERNELS", "Compiled", "compile_kernel"]

ARCHITECTURES = (80, 90, 100, 120)
KERNELS = ("gate_up", "down", "gate_up_tiles", "down_tiles")

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {
    "*bf16": ("x", "base_x", "fine_x", "activated"),
    "*i32": ("ids", "order", "expert_of", "base_slot_of", "fine_slot_of", "missing"),
    "*u8": ("base_pool", "fine_pool", "wanted"),
    "*fp32": ("parts",),
    "i32": ("pairs", "experts", "levels"),
    "fp32": ("limit",),
}
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names}


class Compiled(NamedTuple):
    """What a compiled kernel uses: registers, stack and shared memory in bytes, its main loop.

    `loop` counts the instructions of the shortest loop around matrix instructions.
    """

    registers: int
    stack: int
    shared: int
    loop: Counter[str]

    def count(self, *prefixes: str) -> int:
        """Return how many instructions of the loop begin with one of some prefixes."""
        return sum(n for name, n in self.loop.items() if name.startswith(prefixes))


def compile_kernel(
    name: str,
    number: int,
    codec: str,
    *,
    fine: str | None = None,
    hidden: int = 6144,
    intermediate: int = 2048,
    top_k: int = 8,
    clamp: bool = True,
) -> Compiled:
    """Compile a kernel for an architecture as its launches in `few` and `many` would.

    Args:
        name: One of KERNELS.
        number: The architecture, 90 for sm_90.
        codec: Codec of the base tier.
        fine: Codec of the fine tier, None for none.
        hidden: H.
        intermediate: I.
        top_k: Experts of a token.
        clamp: With a swiglu_limit.
    """
    tiers = [
        row_constants(row_layout(each, hidden, intermediate)) for each in (codec, fine) if each
    ]
    constants: dict[str, Any] = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "BASE": tiers[0],
        "FINE": tiers[1] if fine else (),
        "TOP_K": top_k,
        "CLAMP": clamp,
        "COUNT": True,
        "MARK": True,
        "PAIRS": triton.next_power_of_2(few.DECODE_TOKENS * top_k),
    }
    if name.endswith("_tiles"):
        kernel = getattr(prefill, name)
        shape = many.tile_shape(number, pairs=2**16, experts=256)
        which = name.removesuffix("_tiles")
        constants |= {"BLOCKS": getattr(shape, f"{which}_blocks"), "GROUP": shape.group}
        options = {"num_warps": getattr(shape, f"{which}_warps"), "num_stages": shape.stages}
    else:
        kernel = getattr(decode, name)
        shape_of = {"gate_up": few.GATE_UP_SHAPE, "down": few.DOWN_SHAPE}
        launch = few.launch_options(shape_of[name], two_tiers=fine is not None)
        constants |= {key: launch.pop(key) for key in ("BLOCKS", "WARPS")}
        options = launch
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else _TYPES[arg] for arg in kernel.arg_names}
    # What a launch tells the compiler: ids may lie anywhere, 16 divides 256 experts and W2_LEVELS.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (arg, kind) in enumerate(signature.items())
        if (kind.startswith("*") and arg != "ids") or arg in ("experts", "levels")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    return _look_at(built.asm["cubin"], built.metadata.shared)


def _look_at(cubin: bytes, shared: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no resources: {usage!r}")
    return Compiled(int(found[1]), int(found[2]), shared, _main_loop(listing))


def _tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _main_loop(listing: str) -> Counter[str]:
    """Count the instructions of the shortest backward branch's range with a matrix instruction."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if found := re.match(r"\.(L_x_\d+):", line):
            labels[found[1]] = len(instructions)
        if found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1])
    loops = []
    for place, text in enumerate(instructions):
        target = re.search(r"\bBRA\b.*`\(\.(L_x_\d+)\)", text)
        if target and labels[target[1]] < place:
            body = instructions[labels[target[1]] : place + 1]
            loops.append(Counter(re.sub(r"^@!?U?P\w+ ", "", each).split()[0] for each in body))
    matrix = [loop for loop in loops if any("MMA" in name for name in loop)]
    return min(matrix, key=Counter.total, default=Counter())


def main() -> None:
    """Print a line for every kernel, codec and architecture."""
    print("arch kernel codec: registers, stack, shared; main loop")  # noqa: T201
    for number in ARCHITECTURES:
        for name in KERNELS:
            for codec in codec_names():
                found = compile_kernel(name, number, codec)
                loop = ", ".join(f"{n} {op}" for op, n in found.loop.most_common(8))
                print(  # noqa: T201
                    f"sm_{number} {name} {codec}: {found.registers}, {found.stack}, "
                    f"{found.shared}; {found.loop.total()}: {loop}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
