"""Cubin files: just enough ELF to read a kernel's code and to put other code in its place.

Layout (read off files that `ptxas` wrote): sections in the order of their offsets, section headers,
program headers at the end. `.text.K` holds the code of kernel K, padded with NOPs to 128 bytes;
`.nv.info` and `.nv.info.K` are lists of attributes (format byte, attribute byte, 16-bit value or
size, payload).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moet_kernels.sass.arch import ARCHITECTURES, Architecture
from moet_kernels.sass.errors import SassError

__all__ = ["MOST_REGISTERS", "RESERVED_REGISTERS", "Attribute", "Cubin"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_CUDA_MACHINE = 190
_NOBITS = (8, 0x70000015)  # sections without bytes in the file
_ALLOC = 2
_LOAD = 1

# Every kernel of the corpus, on both architectures and at every limit from 24 to 255, counts two
# registers more than the highest that its code names. Code that names those two has no precedent.
RESERVED_REGISTERS = 2
MOST_REGISTERS = 255 - RESERVED_REGISTERS

REGISTER_COUNT = 0x2F
EXIT_OFFSETS = 0x1C
FUNCTION = 2


class Attribute(msgspec.Struct):
    """One attribute of a `.nv.info` section; `payload` only in format 4."""

    format: int
    code: int
    value: int
    payload: bytes = b""


class _Section(msgspec.Struct):
    name: str
    fields: list[int]  # name, type, flags, address, offset, size, link, info, alignment, entry size
    data: bytearray

    @property
    def has_bytes(self) -> bool:
        return self.fields[1] not in (0, *_NOBITS)


class Cubin:
    """A cubin in memory.

    Args:
        data: the file's bytes.

    Raises:
        SassError: it is no 64-bit CUDA ELF file.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._read(data)
        except (struct.error, ValueError, IndexError) as error:
            raise SassError(f"This is no cubin, or a damaged one: {error}.") from error

    @classmethod
    def open(cls, path: Path) -> "Cubin":
        """Read a cubin from a file."""
        try:
            return cls(path.read_bytes())
        except OSError as error:
            raise SassError(f"The cubin {path} cannot be read: {error.strerror}.") from error

    def _read(self, data: bytes) -> None:
        self.header = list(_HEADER.unpack_from(data))
        if self.header[0][:5] != b"\x7fELF\x02" or self.header[2] != _CUDA_MACHINE:
            raise ValueError("it does not begin with a 64-bit ELF header for CUDA")
        segments, sections = self.header[5], self.header[6]
        self._segments_at = segments
        self.segments = [
            list(_SEGMENT.unpack_from(data, segments + _SEGMENT.size * i))
            for i in range(self.header[10])
        ]
        self.sections = []
        for i in range(self.header[12]):
            fields = list(_SECTION.unpack_from(data, sections + _SECTION.size * i))
            section = _Section("", fields, bytearray())
            if section.has_bytes:
                section.data[:] = data[fields[4] : fields[4] + fields[5]]
            self.sections.append(section)
        names = self.sections[self.header[13]].data
        for section in self.sections:
            start = section.fields[0]
            section.name = names[start : names.index(0, start)].decode()
        self._covered = [self._sections_in(segment) for segment in self.segments]

    def _sections_in(self, segment: list[int]) -> list[int]:
        """Which sections a LOAD segment holds; the segment of the program headers has none."""
        kind, _, offset, _, _, file_size, _, _ = segment
        if kind != _LOAD or offset == self._segments_at:
            return []
        found = []
        for i, section in enumerate(self.sections):
            start, size = section.fields[4], section.fields[5]
            if not section.fields[2] & _ALLOC or section.fields[1] == 0:
                continue
            if section.has_bytes:
                inside = size and offset <= start and start + size <= offset + file_size
            else:
                inside = file_size == 0 and start == offset
            if inside:
                found.append(i)
        return found

    @property
    def arch(self) -> Architecture:
        """What it was compiled for."""
        flags = self.header[7]
        for arch in ARCHITECTURES.values():
            if arch.number in (flags & 0xFF, flags >> 8 & 0xFF):
                return arch
        raise SassError(
            f"The cubin's ELF flags {flags:#x} name no architecture known here "
            f"({', '.join(ARCHITECTURES)})."
        )

    @property
    def kernels(self) -> list[str]:
        """Names of its functions with code of their own, device functions included."""
        return [s.name[6:] for s in self.sections if s.name.startswith(".text.")]

    def section(self, name: str) -> _Section:
        """Find a section by name."""
        for section in self.sections:
            if section.name == name:
                return section
        raise SassError(f"The cubin has no section {name}; it has kernels {self.kernels}.")

    def words(self, kernel: str) -> list[int]:
        """The instruction words of a kernel, padding included."""
        code = self.section(f".text.{kernel}").data
        return [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), 16)]

    def attributes(self, section: str) -> list[Attribute]:
        """Read the attributes of a `.nv.info` section."""
        return list(_attributes(self.section(section).data))

    def set_attributes(self, section: str, attributes: list[Attribute]) -> None:
        """Replace the attributes of a `.nv.info` section."""
        data = b"".join(
            struct.pack("<BBH", a.format, a.code, len(a.payload) if a.format == 4 else a.value)
            + a.payload
            for a in attributes
        )
        self.section(section).data[:] = data

    def symbol(self, kernel: str) -> int:
        """Index of a kernel's function symbol."""
        symbols, names = self.section(".symtab").data, self.section(".strtab").data
        for index in range(len(symbols) // _SYMBOL.size):
            name, info, *_ = _SYMBOL.unpack_from(symbols, index * _SYMBOL.size)
            if info & 15 == FUNCTION and names[name : names.index(0, name)].decode() == kernel:
                return index
        raise SassError(f"The cubin has no function symbol for kernel {kernel}.")

    def registers(self, kernel: str) -> int:
        """How many registers a thread of a kernel gets; RESERVED_REGISTERS are not for code."""
        wanted = self.symbol(kernel)
        for attribute in self.attributes(".nv.info"):
            if attribute.code == REGISTER_COUNT:
                symbol, count = struct.unpack("<II", attribute.payload)
                if symbol == wanted:
                    return int(count)
        raise SassError(f"The cubin does not say how many registers {kernel} has.")

    def register_count_at(self, kernel: str) -> int:
        """Offset in the file of the 32-bit register count of a kernel."""
        section, wanted = self.section(".nv.info"), self.symbol(kernel)
        at = section.fields[4]
        for attribute in self.attributes(".nv.info"):
            if attribute.code == REGISTER_COUNT and attribute.payload[:4] == struct.pack(
                "<I", wanted
            ):
                return at + 8
            at += 4 + len(attribute.payload)
        raise SassError(f"The cubin does not say how many registers {kernel} has.")

    def shared_bytes(self, kernel: str) -> int:
        """Static shared memory of a kernel, without what the system reserves in front of it."""
        sizes = [s.fields[5] for s in self.sections if s.name == f".nv.shared.{kernel}"]
        return sum(sizes) - self.arch.shared_base if sizes else 0

    def parameter_bytes(self, kernel: str) -> int:
        """Bytes of kernel parameters; 0 for a device function, which has no bank for them."""
        self.section(f".text.{kernel}")
        sizes = [s.fields[5] for s in self.sections if s.name == f".nv.constant0.{kernel}"]
        return sum(sizes) - self.arch.parameters if sizes else 0

    def set_function_size(self, kernel: str, size: int) -> None:
        """Set the size of a kernel's symbol, and the range that its unwinding entry covers."""
        symbols, symbol = self.section(".symtab").data, self.symbol(kernel)
        struct.pack_into("<Q", symbols, symbol * _SYMBOL.size + 16, size)
        for section in self.sections:
            if section.name != ".rela.debug_frame":
                continue
            for place, info, _ in _RELOCATION.iter_unpack(section.data):
                if info >> 32 == symbol:  # the entry's start; its length follows
                    struct.pack_into("<Q", self.section(".debug_frame").data, place + 8, size)

    def build(self) -> bytes:
        """Lay the file out anew."""
        out = bytearray(_HEADER.size)
        for section in self.sections[1:]:
            out += bytes(-len(out) % max(section.fields[8], 1))
            section.fields[4] = len(out)
            if section.has_bytes:
                section.fields[5] = len(section.data)
                out += section.data
        sections_at = len(out)
        segments_at = sections_at + _SECTION.size * len(self.sections)
        for segment, covered in zip(self.segments, self._covered, strict=True):
            self._place(segment, covered, segments_at)
        for section in self.sections:
            out += _SECTION.pack(*section.fields)
        if self.segments:
            for segment in self.segments:
                out += _SEGMENT.pack(*segment)
            self.header[5] = self._segments_at = segments_at
        self.header[6] = sections_at
        _HEADER.pack_into(out, 0, *self.header)
        return bytes(out)

    def _place(self, segment: list[int], covered: list[int], segments_at: int) -> None:
        if segment[2] == self._segments_at:
            segment[2] = segments_at
            return
        held = [self.sections[i] for i in covered]
        if not held:
            return
        start = min(section.fields[4] for section in held)
        segment[2] = start
        in_file = [section for section in held if section.has_bytes]
        if in_file:
            size = max(s.fields[4] + s.fields[5] for s in in_file) - start
            whole = len(in_file) == len(held)
            segment[5], segment[6] = size, size if whole else max(size, segment[6])


def _attributes(data: bytes | bytearray) -> Iterator[Attribute]:
    at = 0
    while at < len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            yield Attribute(form, code, 0, bytes(data[at : at + value]))
            at += value
        else:
            yield Attribute(form, code, value)
