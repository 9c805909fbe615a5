"""Which kernels may be used on a device: those that answer known questions rightly, there.

At first use every variant of every kernel is loaded and run on cases whose answers are known:
`tuned` (our SASS, shortest waits), `safe` (the same, longest waits) and `twin` (nvcc's). A layer
uses tuned; where that is refused by the driver or wrong, the twin; where that is wrong too, the
kernel is not used at all and the portable backend computes what needs it. One warning says so. What
was found right is remembered by device, driver and the cubins' digests.
"""

import functools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from moet_core.errors import ConfigError, MoetError
from moet_kernels.arch import runs_sm120
from moet_kernels.committed import digest
from moet_kernels.sm120.driver import CudaDriver, Driver, DriverError
from moet_kernels.sm120.layer import Layer
from moet_kernels.sm120.manifest import COMPILED, FOLDER, Manifest, cubin_path, read_manifest
from moet_kernels.sm120.questions import QUESTIONS, Ask, Result

__all__ = ["Answer", "examine", "layer_on", "load_layer", "report"]

_ORDER = ("tuned", "twin")
"""Variants that a layer may use, the preferred one first."""

_LOG = logging.getLogger("moet_kernels.sm120")


class Answer(msgspec.Struct, frozen=True):
    """What a variant of a kernel did.

    Attributes:
        kernel: its name.
        variant: "tuned", "safe" or "twin".
        flaw: what was wrong, a sentence; None if it was right.
        function: the loaded kernel, None if it could not be loaded.
    """

    kernel: str
    variant: str
    flaw: str | None
    function: Any = None


@functools.cache
def layer_on(device: torch.device) -> Layer | None:
    """Return the kernels that may be used on a device; None on one that is no SM120 GPU.

    Raises:
        ConfigError: the first call is made while a CUDA graph is captured: loading waits for the
            device, and answers are read back.
    """
    if not runs_sm120(device):
        return None
    try:
        driver = CudaDriver(device)
        if driver.is_capturing():
            raise ConfigError(
                f"The SM120 kernels must be tested on {device} before a CUDA graph with them is "
                "captured, and this is the first layer that asks for them. Compute one layer "
                "outside of the capture before it, or ask for the backend portable."
            )
        return load_layer(driver, remembered=_memory())
    except DriverError as error:
        _LOG.warning("%s The portable kernels are used instead.", error)
        return None


def load_layer(driver: Driver, folder: Path = FOLDER, *, remembered: Path | None = None) -> Layer:
    """Load the kernels that may be used, and warn once of those that may not.

    Args:
        driver: Of the device.
        folder: Where cubins and manifest lie.
        remembered: File with the digests of what was right on which device, or None.
    """
    manifest = read_manifest(folder)
    key = digest(f"{driver.identity} {msgspec.json.encode(manifest).decode()}".encode())
    known = remembered is not None and key in _read_memory(remembered)
    answers = list(_load_only(driver, folder, manifest)) if known else []
    if not known or any(answer.flaw for answer in answers):
        # Also where what was right does not load any more: its twin may.
        answers = examine(driver, folder)
    chosen = _chosen(answers)
    flawed = [a for a in answers if a.flaw is not None]
    if flawed:
        _LOG.warning("%s", _warning(flawed, {a.kernel: a.variant for a in chosen}))
    elif remembered is not None and not known:
        _remember(remembered, key)
    return Layer(driver, {answer.kernel: answer.function for answer in chosen})


def _chosen(answers: Iterable[Answer]) -> list[Answer]:
    """The answer of the variant that each kernel is used in."""
    found: dict[str, Answer] = {}
    for variant in _ORDER:
        for answer in answers:
            if answer.variant == variant and answer.flaw is None:
                found.setdefault(answer.kernel, answer)
    return list(found.values())


def _warning(flawed: Iterable[Answer], used: Mapping[str, str]) -> str:
    parts = []
    for answer in flawed:
        instead = used.get(answer.kernel)
        then = f"its {instead} is used" if instead else "the portable backend is used"
        parts.append(f"{answer.kernel} ({answer.variant}): {answer.flaw} So {then}.")
    return "SM120 kernels failed their self-test. " + " ".join(parts)


def examine(driver: Driver, folder: Path = FOLDER) -> list[Answer]:
    """Load every variant of every kernel, ask it what is known, and compare it with its twin."""
    manifest = read_manifest(folder)
    answers: list[Answer] = []
    for name, ask in QUESTIONS.items():
        answers += _examine_variants(name, driver, folder, manifest, ask)
    return answers


def report(answers: Iterable[Answer]) -> list[tuple[str, ...]]:
    """Rows (kernel, variant, what it did) for people."""
    return [(a.kernel, a.variant, a.flaw or "right") for a in answers]


def _examine_variants(
    kernel: str, driver: Driver, folder: Path, manifest: Manifest, ask: Ask
) -> list[Answer]:
    answers, results = [], {}
    for variant in manifest.kernels[kernel].cubins:
        function = None
        try:
            function = _load(driver, folder, manifest, kernel, variant)
            flaw, results[variant] = ask(driver, function)
        except MoetError as error:
            flaw = str(error)
        answers.append(Answer(kernel, variant, flaw, function))
    twin = next(answer for answer in answers if answer.variant == "twin")
    if twin.flaw is not None:
        return answers
    return [
        msgspec.structs.replace(answer, flaw="It differs from its twin, which is right.")
        if answer.flaw is None and not _same(results[answer.variant], results["twin"])
        else answer
        for answer in answers
    ]


def _same(one: Result, other: Result) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in other)


def _load(driver: Driver, folder: Path, manifest: Manifest, kernel: str, variant: str) -> Any:
    path = cubin_path(folder, kernel, variant)
    try:
        image = path.read_bytes()
    except OSError as error:
        raise DriverError(f"{path.name} cannot be read: {error.strerror}.") from error
    wanted, found = manifest.kernels[kernel].cubins[variant], digest(image)
    if found != wanted:
        raise DriverError(
            f"{path.name} is damaged: its SHA-256 begins with {found[:12]}, the manifest's with "
            f"{wanted[:12]}."
        )
    return driver.load(image, kernel)


def _load_only(driver: Driver, folder: Path, manifest: Manifest) -> Iterable[Answer]:
    """Load what a layer prefers, unasked."""
    for kernel in manifest.kernels:
        variant = "twin" if kernel in COMPILED else _ORDER[0]
        function, flaw = None, None
        try:
            function = _load(driver, folder, manifest, kernel, variant)
        except MoetError as error:
            flaw = str(error)
        yield Answer(kernel, variant, flaw, function)


def _memory() -> Path | None:
    """Where what was right is remembered; None for a user without a home folder."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "moet" / "sm120-right.json"


def _read_memory(path: Path) -> dict[str, float]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}


def _remember(path: Path, key: str) -> None:
    known = _read_memory(path) | {key: time.time()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(known))
        part.replace(path)
    except OSError:  # a cache that cannot be written costs the next start a second
        return
