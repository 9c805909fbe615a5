"""The header of a pack: what its rows are, and which model they belong to.

    0     8  magic "MOETPACK"
    8     4  format version, 1
    12    4  J, length of the JSON object
    16    J  JSON object: the fields of `PackSpec`
    ...      zeros
    4088  8  XXH3-64 of bytes 0 to 4088

Integers are unsigned and little-endian. docs/pack-format.md is the specification.
"""

import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import xxhash
from msgspec import structs

from moet_core.codecs import get_codec
from moet_core.row import ROW_ALIGNMENT, RowLayout
from moet_store.errors import PackError, PackErrorKind
from moet_store.identity import bytes_identity

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "PackSpec",
    "check_same",
    "decode_header",
    "encode_header",
    "expert_spec",
    "header_digest",
    "plain_spec",
]

MAGIC = b"MOETPACK"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
"""One page: rows behind it stay aligned, and one O_DIRECT read fetches it."""

_PREFIX = struct.Struct("<8sII")
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = HEADER_BYTES - _DIGEST.size

# Far above every model known, and small enough that no product of them needs a second look.
MAX_EXPERTS = 2**16
MAX_LAYER = 2**16
MAX_ROW_BYTES = 2**30
MAX_NAME = 64

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
_HEX = frozenset("0123456789abcdef")


class PackSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity and geometry of a pack.

    Attributes:
        checkpoint: Identity of the checkpoint, 64 hexadecimal digits; see
            `moet_store.identity.checkpoint_identity`.
        codec: Name of the codec of the rows, lower case.
        layout: Id of the byte order inside a row; changes whenever a byte would.
        tier: Which of a model's packs this is, "base" for the one that serves every step.
        hidden: H, the model's hidden size.
        intermediate: I, the expert's intermediate size on one tensor-parallel rank.
        payload_bytes: Length of a row without its padding.
        layers: Model indices of the layers, ascending, in file order.
        experts: Experts of a layer, over all stripes.
        rank: Tensor-parallel rank of the rows.
        size: Tensor-parallel size.
        stripe: Which stripe this file is: it holds the experts e with e % stripes == stripe.
        stripes: Number of files that the experts are spread over.
    """

    checkpoint: str
    codec: str
    layout: str
    tier: str = "base"
    hidden: int
    intermediate: int
    payload_bytes: int
    layers: tuple[int, ...]
    experts: int
    rank: int = 0
    size: int = 1
    stripe: int = 0
    stripes: int = 1

    @property
    def row_bytes(self) -> int:
        """Length of a row, a multiple of 4096."""
        return -(-self.payload_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def held(self) -> range:
        """The experts in this file, in file order."""
        return range(self.stripe, self.experts, self.stripes)

    @property
    def layer_bytes(self) -> int:
        """Length of a layer in this file."""
        return len(self.held) * self.row_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the pack file."""
        return HEADER_BYTES + len(self.layers) * self.layer_bytes

    def offset(self, layer: int, expert: int) -> int:
        """Return where in the file the row of `expert` in model layer `layer` begins.

        Raises:
            PackError: ROW_MISSING, the file holds no such row.
        """
        if layer not in self.layers or expert not in self.held:
            raise PackError(
                PackErrorKind.ROW_MISSING,
                None,
                wanted=f"a layer of {list(self.layers)} and an expert of {self.held}",
                found=f"layer {layer}, expert {expert}",
                layer=layer,
                expert=expert,
            )
        row = self.layers.index(layer) * len(self.held) + expert // self.stripes
        return HEADER_BYTES + row * self.row_bytes

    def striped(self, stripe: int, stripes: int) -> "PackSpec":
        """Return the specification of one of several files that share the experts."""
        return structs.replace(self, stripe=stripe, stripes=stripes)


def expert_spec(
    layout: RowLayout,
    *,
    checkpoint: str,
    layers: tuple[int, ...],
    experts: int,
    rank: int = 0,
    size: int = 1,
    tier: str = "base",
) -> PackSpec:
    """Describe a pack of expert rows as `moet_core.row` lays them out."""
    return PackSpec(
        checkpoint=checkpoint,
        codec=layout.codec,
        layout=get_codec(layout.codec).layout,
        tier=tier,
        hidden=layout.hidden,
        intermediate=layout.intermediate,
        payload_bytes=layout.payload_bytes,
        layers=layers,
        experts=experts,
        rank=rank,
        size=size,
    )


def plain_spec(name: str, *, payload_bytes: int, layers: tuple[int, ...], experts: int) -> PackSpec:
    """Describe a pack of rows that come from no checkpoint and no codec.

    Args:
        name: What the rows are; packs of other names are refused in their place.
        payload_bytes: Length of a row.
        layers: First numbers of the rows' keys, ascending.
        experts: How many second numbers there are, from 0.
    """
    return PackSpec(
        checkpoint=bytes_identity(name.encode()),
        codec="plain",
        layout="plain",
        hidden=payload_bytes,
        intermediate=1,
        payload_bytes=payload_bytes,
        layers=layers,
        experts=experts,
    )


def encode_header(spec: PackSpec) -> bytes:
    """Return the header page of a pack.

    Raises:
        PackError: SPEC_INVALID, a field has no sensible value, or there are too many layers to
            name them in one page.
    """
    _check_spec(spec, None)
    body = msgspec.json.encode(spec)
    if _PREFIX.size + len(body) > _DIGEST_AT:
        raise _invalid(None, "layers", f"at most {_DIGEST_AT - 16} bytes of JSON", f"{len(body)}")
    page = (_PREFIX.pack(MAGIC, FORMAT_VERSION, len(body)) + body).ljust(_DIGEST_AT, b"\0")
    return page + _DIGEST.pack(xxhash.xxh3_64_intdigest(page))


def header_digest(page: bytes) -> int:
    """Return the checksum that ends a header page; manifests name their pack by it."""
    return int(_DIGEST.unpack_from(page, _DIGEST_AT)[0])


def decode_header(page: bytes, path: Path) -> PackSpec:
    """Read a header page, strictly; nothing but the page is looked at.

    Args:
        page: The first 4096 bytes of the file, or fewer where it has fewer.
        path: The file, for errors.

    Raises:
        PackError: NOT_A_PACK, VERSION, WRONG_SIZE, HEADER_DAMAGED or SPEC_INVALID.
    """
    if page[: len(MAGIC)] != MAGIC:
        raise PackError(
            PackErrorKind.NOT_A_PACK,
            path,
            wanted=f"a file that begins with {MAGIC!r}",
            found=repr(page[: len(MAGIC)]),
            advice="Name the .pack file, or the folder that holds it.",
        )
    if len(page) < HEADER_BYTES:
        raise PackError(
            PackErrorKind.WRONG_SIZE,
            path,
            wanted=f"a header of {HEADER_BYTES} bytes",
            found=f"{len(page)}",
            advice="Copy the file again, or open it for writing to resume it.",
        )
    _, version, length = _PREFIX.unpack_from(page)
    if version != FORMAT_VERSION:
        raise PackError(
            PackErrorKind.VERSION,
            path,
            wanted=f"format version {FORMAT_VERSION}",
            found=f"{version}",
            advice="Read it with the release that wrote it, or write the pack again.",
            field="version",
        )
    digest = xxhash.xxh3_64_intdigest(page[:_DIGEST_AT])
    if digest != header_digest(page):
        raise _damaged(path, f"checksum {header_digest(page):016x}", f"{digest:016x}")
    if length > _DIGEST_AT - _PREFIX.size:
        raise _damaged(path, f"at most {_DIGEST_AT - _PREFIX.size} bytes of JSON", f"{length}")
    body = page[_PREFIX.size : _PREFIX.size + length]
    try:
        spec = msgspec.json.decode(body, type=PackSpec)
    except msgspec.DecodeError as error:
        raise _damaged(path, "a JSON object with the fields of a pack", str(error)) from error
    except UnicodeDecodeError as error:
        raise _damaged(path, "UTF-8", f"byte {error.object[error.start]:#x}") from error
    _check_spec(spec, path)
    # Whatever the checksum says, only one sequence of bytes stands for a specification.
    if page != encode_header(spec):
        raise _damaged(path, "the header as this format writes it", "other bytes of equal meaning")
    return spec


def check_same(wanted: PackSpec, found: PackSpec, path: Path, *, stripes: bool = True) -> None:
    """Raise OTHER_PACK for the first field that differs, with both values.

    Args:
        wanted: What the caller needs.
        found: What the file says.
        path: The file, for the error.
        stripes: Compare stripe and stripes too.
    """
    for name in PackSpec.__struct_fields__:
        if not stripes and name in ("stripe", "stripes"):
            continue
        want, have = getattr(wanted, name), getattr(found, name)
        if want != have:
            raise PackError(
                PackErrorKind.OTHER_PACK,
                path,
                wanted=f"{name} {_shown(want)}",
                found=f"{name} {_shown(have)}",
                advice="Name the pack of this model, codec and rank, or write it.",
                field=name,
            )


def _check_spec(spec: PackSpec, path: Path | None) -> None:
    for name in ("codec", "layout", "tier"):
        value = getattr(spec, name)
        if not 0 < len(value) <= MAX_NAME or not _NAME_CHARACTERS.issuperset(value):
            wanted = f"{name} of 1 to {MAX_NAME} characters a-z 0-9 - _ ."
            raise _invalid(path, name, wanted, repr(value))
    if len(spec.checkpoint) != 64 or not _HEX.issuperset(spec.checkpoint):
        wanted = "checkpoint of 64 digits 0-9 a-f"
        raise _invalid(path, "checkpoint", wanted, repr(spec.checkpoint))
    limits = {
        "hidden": (1, 2**31),
        "intermediate": (1, 2**31),
        "payload_bytes": (1, MAX_ROW_BYTES),
        "experts": (1, MAX_EXPERTS),
        "size": (1, 2**16),
        "rank": (0, spec.size - 1),
        "stripes": (1, spec.experts),
        "stripe": (0, spec.stripes - 1),
    }
    for name, (low, high) in limits.items():
        value = getattr(spec, name)
        if not low <= value <= high:
            raise _invalid(path, name, f"{name} from {low} to {high}", f"{value}")
    layers = spec.layers
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > MAX_LAYER:
        wanted = f"layers that ascend, from 0 to {MAX_LAYER}, one at least"
        raise _invalid(path, "layers", wanted, _shown(layers))


def _shown(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _invalid(path: Path | None, field: str, wanted: str, found: str) -> PackError:
    return PackError(PackErrorKind.SPEC_INVALID, path, wanted=wanted, found=found, field=field)


def _damaged(path: Path, wanted: str, found: str) -> PackError:
    return PackError(
        PackErrorKind.HEADER_DAMAGED,
        path,
        wanted=wanted,
        found=found,
        advice="Copy the file again or write the pack again.",
    )
