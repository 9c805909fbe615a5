"""What a drive gives to fio, or to a plain loop where fio is not installed."""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import msgspec

from moet_store.errors import PackError, PackErrorKind
from moet_store.memory import aligned_buffer
from moet_store.spec import HEADER_BYTES, PackSpec

__all__ = ["FIO_DEPTHS", "Sample", "fio_version", "run_fio", "run_loop"]

FIO_DEPTHS = (1, 2, 4, 8, 16)

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio cannot ask for such memory itself; virtual drives serve it at up to twice the rate."""


class Sample(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        rate: Bytes a second.
        cpu: Processor seconds for each gigabyte (10^9 bytes), user and kernel.
        latency: Median time of one row in seconds.
    """

    rate: float
    cpu: float
    latency: float


class _Latency(msgspec.Struct):
    percentile: dict[str, float]


class _Reads(msgspec.Struct):
    bw_bytes: float
    runtime: float
    total_ios: int
    lat_ns: _Latency


class _Job(msgspec.Struct):
    read: _Reads
    usr_cpu: float
    sys_cpu: float
    error: int


class _Output(msgspec.Struct):
    jobs: list[_Job]


def fio_version() -> str | None:
    """Return the version of the installed fio, None if there is none."""
    if shutil.which("fio") is None:
        return None
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run_fio(path: Path, spec: PackSpec, *, depth: int, seconds: float, engine: str) -> Sample:
    """Read random rows of a pack past the page cache, as many at a time as `depth` says.

    Registered buffers and files, huge pages as `aligned_buffer` has them, a row in one request, no
    row twice in a pass.

    Args:
        path: The pack.
        spec: Its specification.
        depth: Rows at a time.
        seconds: How long.
        engine: fio's name of the engine, "io_uring" or "psync".

    Raises:
        PackError: UNAVAILABLE, fio failed.
    """
    command = [
        "fio",
        "--name=rows",
        f"--filename={path}",
        f"--offset={HEADER_BYTES}",
        f"--size={spec.file_bytes - HEADER_BYTES}",
        f"--bs={spec.row_bytes}",
        "--rw=randread",
        "--randrepeat=0",
        "--direct=1",
        "--readonly",
        "--thread",
        f"--ioengine={engine}",
        "--time_based",
        f"--runtime={round(seconds * 1000)}ms",
        "--output-format=json",
        # From the submission on, as the reader counts.
        "--lat_percentiles=1",
        "--clat_percentiles=0",
    ]
    if engine == "io_uring":
        command += [f"--iodepth={depth}", "--registerfiles=1", "--fixedbufs=1"]
    else:
        command += [f"--numjobs={depth}", "--group_reporting"]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | HUGE_PAGES)
    try:
        (job,) = msgspec.json.decode(done.stdout[done.stdout.find(b"{") :], type=_Output).jobs
    except (msgspec.DecodeError, ValueError) as error:
        raise _failed(done.stderr.decode(errors="replace")) from error
    if job.error or not job.read.total_ios:
        raise _failed(f"error {job.error}")
    busy = (job.usr_cpu + job.sys_cpu) / 100 * job.read.runtime / 1000
    busy *= 1 if engine == "io_uring" else depth
    total = job.read.total_ios * spec.row_bytes
    latency = job.read.lat_ns.percentile["50.000000"] / 1e9
    return Sample(rate=job.read.bw_bytes, cpu=busy / total * 1e9, latency=latency)


def run_loop(path: Path, spec: PackSpec, *, seconds: float) -> Sample:
    """Read random rows of a pack past the page cache with preadv, one at a time.

    Raises:
        OSError: The file system refuses direct reads.
    """
    buffer = aligned_buffer(spec.row_bytes)
    rows = list(range(len(spec.layers) * len(spec.held)))
    random.shuffle(rows)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    times: list[float] = []
    try:
        begin, cpu = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) - begin < seconds:
            row = rows[len(times) % len(rows)]
            count = os.preadv(fd, [buffer], HEADER_BYTES + row * spec.row_bytes)
            if count != spec.row_bytes:
                raise _failed(f"{count} bytes of a row of {spec.row_bytes}")
            times.append(time.perf_counter() - now)
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    finally:
        os.close(fd)
    total = len(times) * spec.row_bytes
    return Sample(total / elapsed, cpu / total * 1e9, sorted(times)[len(times) // 2])


def _failed(found: str) -> PackError:
    return PackError(
        PackErrorKind.UNAVAILABLE, None, wanted="a measurement to compare with", found=found.strip()
    )
