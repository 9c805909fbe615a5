"""Make the SM120 cubins: `python -m moet_kernels.sm120.build [--check]`.

For every kernel written by hand: its `.sass` source, the twin compiled by nvcc, and the source
assembled with both kinds of control fields into copies of the twin, audited. The cubins are
committed, so that a user needs no CUDA toolkit; `manifest.json` has the SHA-256 of each and of all
that it was made from. `--check` makes everything anew and compares.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from moet_kernels.committed import builder, differing, digest, write_manifest
from moet_kernels.sass.arch import SM120A
from moet_kernels.sass.assemble import assemble, disassemble
from moet_kernels.sass.audit import audit
from moet_kernels.sass.cubin import Cubin
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.link import link
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source, write_source
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import compile_cuda, tool_version
from moet_kernels.sm120.manifest import (
    COMPILED,
    FOLDER,
    Built,
    Manifest,
    cubin_path,
    listing_path,
)
from moet_kernels.sm120.write import KERNELS, Kernel, sass_source
from moet_kernels.sm120.write_tiles import TILES_KERNELS, tiles_source

__all__ = ["ALL_KERNELS", "build", "differences", "source_text", "sources_of"]

ALL_KERNELS = (*KERNELS, *TILES_KERNELS)
"""Those written by hand, for decode and for prefill."""

_SCHEDULES = {"tuned": tuned, "safe": safe}
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def sources_of(kernel: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """File names of what a kernel's cubins are made from, the headers of its own included."""
    found = [] if kernel in COMPILED else [f"{kernel}.sass"]
    unread = [f"{kernel}.cu"]
    while unread:
        found.append(unread.pop())
        included = _INCLUDE.findall((folder / found[-1]).read_text())
        unread += [name for name in included if name not in (*found, *unread)]
    return tuple(found)


def build(out: Path) -> Manifest:
    """Write all sources of hand-written kernels, all cubins and the manifest into a folder.

    Raises:
        SassError: a source is wrong, or the audit found something.
        ToolError: a program of the CUDA toolkit is missing.
    """
    for kernel in ALL_KERNELS:
        (out / f"{kernel.name}.sass").write_text(source_text(kernel))
        (out / f"{kernel.name}.cu").write_text(_twin(kernel))
    for path in (*FOLDER.glob("*.cuh"), *(FOLDER / f"{name}.cu" for name in COMPILED)):
        if out != FOLDER:
            (out / path.name).write_bytes(path.read_bytes())
    # Scheduling takes seconds of Python each; `spawn`, because a fork may not hold other threads.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        # The longest first, so that no process waits for it at the end.
        order = sorted(ALL_KERNELS, key=lambda kernel: -len(source_text(kernel)))
        built = dict(zip(order, pool.map(_build_hand_written, order, repeat(out)), strict=True))
    kernels = {kernel.name: built[kernel] for kernel in ALL_KERNELS}
    kernels |= {name: _build_compiled(name, out) for name in COMPILED}
    manifest = Manifest({name: tool_version(name) for name in ("nvcc", "ptxas")}, kernels)
    write_manifest(out, manifest)
    return manifest


def source_text(kernel: Kernel) -> str:
    """Return the `.sass` of a kernel."""
    return tiles_source(kernel) if kernel in TILES_KERNELS else sass_source(kernel)


def _twin(kernel: Kernel) -> str:
    tiles = kernel in TILES_KERNELS
    parts = ["DOWN" if kernel.down else "GATE_UP", "TILES" if tiles else ""]
    arguments = [kernel.name, kernel.codec, str(kernel.steps)]
    if kernel.codec in ("nv", "bf16"):
        parts.append(arguments.pop(1).upper())
    macro = "_".join(part for part in parts if part)
    header = "tiles" if tiles else "decode_bf16" if kernel.codec == "bf16" else "decode"
    writer = "write_tiles.py" if tiles else "write.py"
    return (
        f"// Written by {writer}'s table of kernels. Twin of {kernel.name}.sass.\n"
        f'#include "{header}.cuh"\n\n{macro}({", ".join(arguments)})\n'
    )


def _build_hand_written(kernel: Kernel, out: Path) -> Built:
    table = committed_table(SM120A)
    images = {"twin": _compile(kernel.name, out)}
    source = parse_source(source_text(kernel))
    for variant, schedule in _SCHEDULES.items():
        program = schedule(source, table)
        image = link(images["twin"], program, assemble(program, table))
        findings = audit(Cubin(image), kernel.name, table, program)
        if findings:
            first = findings[0]
            raise SassError(
                f"The audit of {kernel.name} ({variant}) found {len(findings)} flaws, first at "
                f"{first.address:#x} `{first.instruction}`: {first.message}"
            )
        images[variant] = image
    return _write(kernel.name, images, out)


def _build_compiled(name: str, out: Path) -> Built:
    image = _compile(name, out)
    listing = write_source(disassemble(Cubin(image), name))
    listing_path(out, name).write_text(listing)
    return _write(name, {"twin": image}, out)


def _compile(name: str, out: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / f"{name}.cubin"
        compile_cuda(out / f"{name}.cu", cubin, SM120A.name)
        return cubin.read_bytes()


def _write(name: str, images: Mapping[str, bytes], out: Path) -> Built:
    for variant, image in images.items():
        cubin_path(out, name, variant).write_bytes(image)
    cubins = {variant: Cubin(image) for variant, image in images.items()}
    return Built(
        {source: digest((out / source).read_bytes()) for source in sources_of(name, out)},
        {variant: digest(image) for variant, image in images.items()},
        {variant: cubin.registers(name) for variant, cubin in cubins.items()},
        cubins["twin"].shared_bytes(name),
    )


def differences(folder: Path = FOLDER) -> list[str]:
    """Make everything anew elsewhere and list the files that differ from the committed ones."""
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        build(fresh)
        return differing(fresh, folder)


def main(arguments: list[str]) -> int:
    """Build into the package, or check; the exit status."""
    return builder(
        "moet_kernels.sm120.build",
        arguments,
        build=lambda: [
            f"{name}: registers {built.registers}, shared memory {built.shared} bytes"
            for name, built in build(FOLDER).kernels.items()
        ],
        differences=differences,
        same="all cubins are what their sources give",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
