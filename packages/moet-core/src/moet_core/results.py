"""Result files: what was measured, of what, on what, and by which command.

Every figure that README and docs show comes from such a file. A file keeps its raw samples, so
that a reader can check the summary, and is never overwritten by accident.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from moet_core.errors import ConfigError

__all__ = [
    "SCHEMA_VERSION",
    "Command",
    "Commit",
    "Machine",
    "Measurement",
    "Result",
    "measurement",
    "read_result",
    "recorded_command",
    "write_result",
]

SCHEMA_VERSION = 1


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured quantity; use `measurement` to make one from its samples."""

    name: str
    unit: str
    samples: tuple[float, ...]
    median: float
    min: float
    max: float

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"measurement {self.name!r} has no samples")
        found = (self.median, self.min, self.max)
        wanted = _summary(self.samples)
        if found != wanted:
            raise ValueError(
                f"measurement {self.name!r}: median, min, max are {found}, its samples say {wanted}"
            )


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkout that ran; `dirty` if tracked files differed from the commit."""

    id: str
    dirty: bool


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it ran on; `cores` are those the process may use, `driver` is NVIDIA's."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The exact command line, and that of the server it started, if any."""

    argv: tuple[str, ...]
    server: tuple[str, ...] | None = None


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One result file.

    Attributes:
        schema: `SCHEMA_VERSION` of the writer.
        kind: what kind of benchmark this is, for example "serve" or "codecs".
        recipe: the recipe that was served, None where nothing was.
        suite: the suite of measurements, None where the kind has only one.
        started: start of the run, UTC.
        finished: end of the run, UTC.
        commit: None outside a checkout.
        versions: name to version of what took part.
        machine: what it ran on.
        command: what was run.
        measurements: what was found.
        notes: what a reader must know to read the figures rightly.
    """

    schema: int = SCHEMA_VERSION
    kind: str
    recipe: str | None = None
    suite: str | None = None
    started: datetime
    finished: datetime
    commit: Commit | None
    versions: dict[str, str]
    machine: Machine
    command: Command
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.started.tzinfo is None or self.finished.tzinfo is None:
            raise ValueError("started and finished need a time zone (UTC)")


def recorded_command(argv: Sequence[str], server: Sequence[str] | None = None) -> Command:
    """Return command lines as a reader can repeat them, without this machine's own folders.

    Programs of the running environment lose their folder, the current folder becomes relative,
    the home folder `~` and the folder for temporary files `TMP`.
    """

    def portable(word: str) -> str:
        for folder, name in (
            (f"{sys.prefix}/bin/", ""),
            (f"{Path.cwd()}/", ""),
            (str(Path.home()), "~"),
            (tempfile.gettempdir(), "TMP"),
        ):
            if len(folder) > 1:  # never take a home of "/" out of every path
                word = word.replace(folder, name)
        return word

    words = tuple(portable(word) for word in argv)
    return Command(words, None if server is None else tuple(portable(word) for word in server))


def measurement(name: str, unit: str, samples: Sequence[float]) -> Measurement:
    """Summarise raw samples.

    Raises:
        ValueError: there are no samples.
    """
    values = tuple(float(sample) for sample in samples)
    if not values:
        raise ValueError(f"measurement {name!r} has no samples")
    return Measurement(name, unit, values, *_summary(values))


def write_result(path: Path, result: Result, *, force: bool = False) -> None:
    """Write a result file in one step: readers see the whole file or none.

    Args:
        path: where to; its folder is made if need be.
        result: what to write.
        force: replace an existing file.

    Raises:
        ConfigError: the file exists and `force` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        if force:
            Path(name).replace(path)
        else:
            os.link(name, path)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise ConfigError(
            f"The result file {path} exists already; name another file, or pass --force "
            "to replace it."
        ) from None
    finally:
        Path(name).unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Read a result file, strictly.

    Raises:
        ConfigError: no such file, another schema version, or not a result file.
    """
    try:
        data = path.read_bytes()
        header = msgspec.json.decode(data, type=_Header)
        if header.schema != SCHEMA_VERSION:
            raise ConfigError(
                f"The result file {path} has schema version {header.schema}, this moet reads "
                f"version {SCHEMA_VERSION}; read it with the moet that wrote it."
            )
        return msgspec.json.decode(data, type=Result)
    except OSError as error:
        raise ConfigError(f"The result file {path} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a result file: {error}.") from error


class _Header(msgspec.Struct, frozen=True):
    schema: int


def _summary(samples: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(samples), min(samples), max(samples)
