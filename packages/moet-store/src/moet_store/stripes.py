"""Which file holds which expert: packs on several drives that belong together."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from moet_store.errors import PackError, PackErrorKind
from moet_store.pack import Pack
from moet_store.spec import PackSpec, check_same

__all__ = ["Stripes"]

File = TypeVar("File")


class Stripes(Generic[File]):
    """The files of each stripe; several files of one stripe are mirrors.

    Args:
        packs: The packs that are to be read together.
        partial: Accept that stripes are missing.

    Raises:
        PackError: STRIPES, no packs or a stripe is not among them; OTHER_PACK.
    """

    def __init__(self, packs: Sequence[Pack], *, partial: bool = False) -> None:
        if not packs:
            raise PackError(PackErrorKind.STRIPES, None, wanted="a pack at least", found="none")
        first = packs[0].spec
        for pack in packs[1:]:
            expected = first.striped(pack.spec.stripe, first.stripes)
            check_same(expected, pack.spec, pack.path)
        found = {pack.spec.stripe for pack in packs}
        if len(found) < first.stripes and not partial:
            raise PackError(
                PackErrorKind.STRIPES,
                packs[0].path,
                wanted=f"all stripes from 0 to {first.stripes - 1}",
                found=f"only {sorted(found)}",
                advice="Name the folders of all drives.",
            )
        self.spec: PackSpec = first.striped(0, 1)
        self._files: list[list[File]] = [[] for _ in range(first.stripes)]

    def __len__(self) -> int:
        return len(self._files)

    def add(self, stripe: int, file: File) -> None:
        """Add the open file of a stripe, or of a mirror of it."""
        self._files[stripe].append(file)

    def of(self, key: tuple[int, int]) -> list[File]:
        """Return the files that hold a row.

        Raises:
            PackError: ROW_MISSING, no file does.
        """
        layer, expert = key
        if layer in self.spec.layers and 0 <= expert < self.spec.experts:
            files = self._files[expert % len(self._files)]
            if files:
                return files
        raise PackError(
            PackErrorKind.ROW_MISSING,
            None,
            wanted=f"a layer of {list(self.spec.layers)} and an expert below {self.spec.experts}",
            found=f"layer {layer}, expert {expert}",
            layer=layer,
            expert=expert,
        )
