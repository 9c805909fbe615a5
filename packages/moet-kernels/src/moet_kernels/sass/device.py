"""Run a bundle of cubins and expectations on a GPU: `python device.py BUNDLE OUT`.

A bundle is a folder with plan.json, cubins and arrays (`moet_kernels.sass.bundle` makes it). This
file needs numpy and cuda-bindings alone, so that it runs where the package is not installed. Faulty
kernels run in processes of their own, which a watchdog ends; a hang or a crash costs one process.
"""

import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

_LAUNCHES = 1000
_FAULT_LAUNCHES = 12
_FAULT_SECONDS = 20
_TIMED = 20
_PROCESSES = 6


class Device:
    """The first GPU, through the driver."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self._check(driver.cuInit(0))
        self.device = self._check(driver.cuDeviceGet(0))
        context = self._check(driver.cuDevicePrimaryCtxRetain(self.device))
        self._check(driver.cuCtxSetCurrent(context))

    def _check(self, result):
        code, *values = result
        if int(code):
            raise RuntimeError(f"the driver returned {code!s}")
        return values[0] if len(values) == 1 else values

    def name(self) -> str:
        """What the GPU is called."""
        raw = self._check(self.driver.cuDeviceGetName(64, self.device))
        return raw.split(b"\0")[0].decode()

    def driver_version(self) -> int:
        """CUDA version of the driver, 1000 * major + 10 * minor."""
        return int(self._check(self.driver.cuDriverGetVersion()))

    def function(self, image: bytes, kernel: str):
        """Load a kernel of a cubin."""
        module = self._check(self.driver.cuModuleLoadData(image))
        return self._check(self.driver.cuModuleGetFunction(module, kernel.encode()))

    def upload(self, array: np.ndarray) -> int:
        """Copy an array to the GPU and return its address."""
        data = np.ascontiguousarray(array)
        address = int(self._check(self.driver.cuMemAlloc(max(data.nbytes, 256))))
        self._check(self.driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
        return address

    def refill(self, address: int, array: np.ndarray) -> None:
        """Copy an array to memory taken before."""
        data = np.ascontiguousarray(array)
        self._check(self.driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def allocate(self, size: int) -> int:
        """Take memory."""
        return int(self._check(self.driver.cuMemAlloc(size)))

    def free(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self._check(self.driver.cuMemFree(address))

    def poison(self, address: int, size: int) -> None:
        """Fill with a pattern that no kernel writes."""
        self._check(self.driver.cuMemsetD8Async(address, 0xA5, size, 0))

    def download(self, address: int, size: int) -> np.ndarray:
        """Copy memory back."""
        data = np.empty(size, np.uint8)
        self._check(self.driver.cuMemcpyDtoH(data.ctypes.data, address, size))
        return data

    def launch(self, function, grid, threads: int, parameters: bytes) -> None:
        """Start a kernel; `parameters` as they lie in its parameter space."""
        import ctypes

        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        size = ctypes.c_size_t(len(parameters))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        self._check(
            self.driver.cuLaunchKernel(
                function, *grid, threads, 1, 1, 0, 0, 0, ctypes.addressof(extra)
            )
        )

    def wait(self) -> None:
        """Wait until all is done."""
        self._check(self.driver.cuCtxSynchronize())

    def time(self, work, count: int) -> list[float]:
        """Microseconds of `count` runs of `work`, by device events."""
        events = [self._check(self.driver.cuEventCreate(0)) for _ in range(count + 1)]
        for _ in range(3):
            work()
        self._check(self.driver.cuEventRecord(events[0], 0))
        for event in events[1:]:
            work()
            self._check(self.driver.cuEventRecord(event, 0))
        self.wait()
        return [
            1000 * float(self._check(self.driver.cuEventElapsedTime(a, b)))
            for a, b in itertools.pairwise(events)
        ]


class Case:
    """A case of a bundle on the GPU."""

    def __init__(self, device: Device, folder: Path, plan: dict) -> None:
        self.device, self.plan = device, plan
        data = np.load(folder / plan["file"])
        self.arrays = [data[f"input{i}"] for i in range(plan["inputs"])]
        self.inputs = [device.upload(array) for array in self.arrays]
        self.expected = data["expected"].view(np.uint8).reshape(-1)
        self.reference = data.get("reference")
        self.size = self.expected.size
        self.out = device.allocate(self.size)
        numbers = np.array(plan["numbers"], np.uint32).tobytes()
        self.parameters = np.array([self.out, *self.inputs], np.uint64).tobytes() + numbers

    def restore(self) -> None:
        """Write the inputs again: a faulty kernel may have stored anywhere."""
        for address, array in zip(self.inputs, self.arrays, strict=True):
            self.device.refill(address, array)

    def run(self, function) -> np.ndarray:
        """Launch once over poisoned memory and return the output."""
        self.device.poison(self.out, self.size)
        self.device.launch(function, self.plan["grid"], self.plan["threads"], self.parameters)
        self.device.wait()
        return self.device.download(self.out, self.size)


def run_cases(device: Device, folder: Path, plan: dict) -> list[dict]:
    """Every variant of every kernel on every case, against the emulator and exact arithmetic."""
    rows: list[dict] = []
    for case_plan in plan["cases"]:
        case = Case(device, folder, case_plan)
        for variant, file in plan["variants"][case_plan["kernel"]].items():
            function = device.function((folder / file).read_bytes(), case_plan["kernel"])
            try:
                got = case.run(function)
            except RuntimeError as error:
                print(case_plan["name"], variant, error, flush=True)  # noqa: T201
                return rows  # the context is lost
            row = {
                "kernel": case_plan["kernel"],
                "variant": variant,
                "case": case_plan["name"],
                "bytes": case.size,
                "different_bytes": int((got != case.expected).sum()),
            }
            if case.reference is not None:
                value = got.view(np.float32).astype(np.float64)
                top = np.abs(case.reference).max()
                row["relative_error"] = float(
                    np.abs(value - case.reference.reshape(-1)).max() / top
                )
            if case_plan.get("repeat") and variant != "twin":
                wrong = sum(bool((case.run(function) != got).any()) for _ in range(_LAUNCHES))
                row["launches"], row["unequal_launches"] = _LAUNCHES, wrong
            rows.append(row)
            if variant != "twin" and row["different_bytes"]:
                np.save(folder / f"got-{case_plan['name']}-{variant}.npy", got)
    return rows


def run_one_ops(device: Device, folder: Path, plan: dict) -> tuple[list[dict], dict]:
    """The one-operation kernels against the emulator."""
    rows: list[dict] = []
    kept: dict[str, np.ndarray] = {}
    data = np.load(folder / plan["one_ops"]["file"])
    image = (folder / plan["one_ops"]["cubin"]).read_bytes()
    for name in plan["one_ops"]["names"]:
        function = device.function(image, name)
        different, cases = 0, 0
        for seed in range(plan["one_ops"]["seeds"]):
            words, expected = data[f"{name}.{seed}.in"], data[f"{name}.{seed}.out"]
            source, out = device.upload(words), device.allocate(expected.nbytes)
            device.poison(out, expected.nbytes)
            parameters = np.array([out, source], np.uint64).tobytes()
            device.launch(function, (1, 1, 1), plan["one_ops"]["threads"], parameters)
            device.wait()
            got = device.download(out, expected.nbytes).view(np.uint32)
            device.free(source, out)
            different += int((got != expected).sum())
            cases += got.size
            kept[f"{name}.{seed}"] = got
        rows.append({"name": name, "cases": cases, "mismatches": different})
    return rows, kept


def run_times(device: Device, folder: Path, plan: dict) -> list[dict]:
    """Time of every variant, on inputs larger than the cache, in turn."""
    chance = np.random.default_rng(0)
    rows = []
    for timed in plan["times"]:
        inputs = [
            device.upload(chance.integers(low, high, size, np.uint8))
            for size, low, high in timed["inputs"]
        ]
        out = device.allocate(timed["output_bytes"])
        numbers = np.array(timed["numbers"], np.uint32).tobytes()
        parameters = np.array([out, *inputs], np.uint64).tobytes() + numbers
        samples: dict[str, list[float]] = {}
        functions = {
            variant: device.function((folder / file).read_bytes(), timed["kernel"])
            for variant, file in plan["variants"][timed["kernel"]].items()
        }
        for _ in range(2):
            for variant, function in functions.items():
                samples.setdefault(variant, []).extend(
                    device.time(
                        partial(
                            device.launch,
                            function,
                            timed["grid"],
                            timed["threads"],
                            parameters,
                        ),
                        _TIMED,
                    )
                )
        half = timed["output_bytes"] // 2
        copied = device.time(
            lambda o=out, h=half: device.driver.cuMemcpyDtoDAsync(o, o + h, h, 0), _TIMED
        )
        rows.append(
            {
                "kernel": timed["kernel"],
                "name": timed["name"],
                "moved_bytes": timed["moved_bytes"],
                "microseconds": samples,
                "device_copy": {"bytes": 2 * half, "microseconds": copied},
            }
        )
        device.free(out, *inputs)
    return rows


def run_fault_batch(folder: Path, plan: dict, start: int, stop: int) -> None:
    """Run faults one after the other; one line of JSON for each, before and after it."""
    device = Device()
    cases: dict[str, Case] = {}
    for index in range(start, stop):
        fault = plan["faults"][index]
        print(json.dumps({"fault": index, "state": "begun"}), flush=True)  # noqa: T201
        case_plan = plan["cases"][fault["case"]]
        if case_plan["name"] not in cases:
            cases[case_plan["name"]] = Case(device, folder, case_plan)
        case = cases[case_plan["name"]]
        case.restore()
        image = bytearray((folder / fault["cubin"]).read_bytes())
        word = bytes.fromhex(fault["word"])
        image[fault["offset"] : fault["offset"] + 16] = word
        function = device.function(bytes(image), case_plan["kernel"])
        wrong = sum(
            bool((case.run(function) != case.expected).any()) for _ in range(_FAULT_LAUNCHES)
        )
        print(json.dumps({"fault": index, "state": "done", "wrong": wrong}), flush=True)  # noqa: T201


def run_faults(folder: Path, plan: dict, seconds: float) -> list[dict]:
    """All faults, in batches by several processes; what hangs or crashes costs its own process."""
    begun, count, size = time.monotonic(), len(plan["faults"]), plan["fault_batch"]
    batches = [(start, min(start + size, count)) for start in range(0, count, size)]

    def work(batch: tuple[int, int]) -> dict[int, dict]:
        outcomes: dict[int, dict] = {}
        start, stop = batch
        while start < stop and time.monotonic() - begun < seconds:
            outcomes.update(_run_batch(folder, start, stop))
            start = max(max(outcomes, default=start), start) + 1
        return outcomes

    with ThreadPoolExecutor(_PROCESSES) as pool:
        found = [row for outcomes in pool.map(work, batches) for row in outcomes.values()]
    return sorted(found, key=lambda row: row["fault"])


def _run_batch(folder: Path, start: int, stop: int) -> dict[int, dict]:
    command = [sys.executable, __file__, "--faults", str(folder), str(start), str(stop)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ended = "crashed"
    try:
        said, _ = process.communicate(timeout=_FAULT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        ended = "hung"
    outcomes: dict[int, dict] = {}
    for line in said.splitlines():
        row = json.loads(line)
        index = row["fault"]
        outcomes[index] = {"fault": index, "outcome": ended}
        if row["state"] == "done":
            wrong = row["wrong"]
            outcomes[index] |= {"outcome": "wrong" if wrong else "same", "wrong_launches": wrong}
    return outcomes


def run_section(name: str, folder: Path, out: Path) -> None:
    """One part of the plan, in this process."""
    plan = json.loads((folder / "plan.json").read_text())
    if name == "faults":
        result: object = run_faults(folder, plan, plan["fault_seconds"])
    else:
        device = Device()
        if name == "cases":
            result = run_cases(device, folder, plan)
        elif name == "one_ops":
            result, kept = run_one_ops(device, folder, plan)
            np.savez_compressed(out / "one_ops_got.npz", **kept)
        else:
            result = {"gpu": device.name(), "driver_cuda": device.driver_version()}
            result["rows"] = run_times(device, folder, plan)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))


def main(folder: Path, out: Path) -> None:
    """Run all of a bundle, each part in a process of its own, into one file a part."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("cases", "one_ops", "times", "faults"):
        begun = time.monotonic()
        command = [sys.executable, __file__, "--section", name, str(folder), str(out)]
        code = subprocess.run(command, check=False).returncode
        print(name, "exit", code, f"{time.monotonic() - begun:.1f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1] == "--section":
        run_section(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        sys.exit()
    if sys.argv[1] == "--faults":
        bundle = Path(sys.argv[2])
        run_fault_batch(
            bundle,
            json.loads((bundle / "plan.json").read_text()),
            int(sys.argv[3]),
            int(sys.argv[4]),
        )
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
