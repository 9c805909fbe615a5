"""What runs in a process of its own: each takes the bundle, its plan and the task's arguments."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from moet_kernels.sass.gpu.case import Case, Image, Plan, read_plan
from moet_kernels.sass.gpu.driver import Device
from moet_kernels.sass.gpu.task import Row

__all__ = ["task_rows"]

Task = Callable[..., Iterator[Row]]

_FAULT_LAUNCHES = 12
_TIMED = 20
_ROUNDS = 2


def _cases(bundle: Path, plan: Plan, kernel: str) -> Iterator[Case]:
    device = Device()
    for case in plan["cases"]:
        if case["kernel"] == kernel:
            yield Case(device, bundle, case)


def run_once(bundle: Path, plan: Plan, kernel: str, variant: str) -> Iterator[Row]:
    """Every case of a kernel once, against the emulator and exact arithmetic."""
    image = Image(bundle, plan, kernel, variant).data
    for case in _cases(bundle, plan, kernel):
        yield {"begun": case.plan["name"]}
        got = case.run(image)
        yield {
            "case": case.plan["name"],
            "bytes": got.size,
            "different": int((got != case.expected).sum()),
            "relative_error": case.relative_error(got),
        }


def run_often(bundle: Path, plan: Plan, kernel: str, variant: str, launches: int) -> Iterator[Row]:
    """Some cases of a kernel many times; every launch must give what the emulator gives."""
    image = Image(bundle, plan, kernel, variant).data
    for case in _cases(bundle, plan, kernel):
        if not case.plan["repeat"]:
            continue
        yield {"begun": case.plan["name"]}
        function = case.device.function(case.device.load(image), kernel)
        unequal = sum(
            not np.array_equal(case.launch(function), case.expected) for _ in range(launches)
        )
        yield {"case": case.plan["name"], "launches": launches, "unequal": unequal}


def run_cut(bundle: Path, plan: Plan, kernel: str, variant: str) -> Iterator[Row]:
    """The kernel cut after 0, 1, 2, ... instructions, until the driver reports an error.

    The rest is EXIT, also where a branch leads, so the first cut that fails names the first
    instruction that the GPU does not take. Cut after 0, the container alone is tried.
    """
    image = Image(bundle, plan, kernel, variant)
    case = next(_cases(bundle, plan, kernel))
    for count in range(len(image.texts) + 1):
        yield {"begun": count}
        case.run(image.cut(count))


def run_counted(bundle: Path, plan: Plan, kernel: str, variant: str, count: int) -> Iterator[Row]:
    """The first case of a kernel with another register count."""
    image = Image(bundle, plan, kernel, variant)
    case = next(_cases(bundle, plan, kernel))
    got = case.run(image.with_registers(count))
    yield {"different": int((got != case.expected).sum())}


def run_without(bundle: Path, plan: Plan, kernel: str, variant: str, index: int) -> Iterator[Row]:
    """The first case of a kernel with a NOP in the place of one instruction."""
    image = Image(bundle, plan, kernel, variant)
    case = next(_cases(bundle, plan, kernel))
    got = case.run(image.without(index))
    yield {"different": int((got != case.expected).sum())}


def run_faults(bundle: Path, plan: Plan, indices: list[int]) -> Iterator[Row]:
    """Seeded faults, one after the other, a few launches each."""
    device = Device()
    cases: dict[int, Case] = {}
    for index in indices:
        fault = plan["faults"][index]
        yield {"begun": index}
        number = fault["case"]
        if number not in cases:
            cases[number] = Case(device, bundle, plan["cases"][number])
        case = cases[number]
        case.restore()
        image = Image(bundle, plan, case.plan["kernel"], fault["variant"])
        changed = image.with_word(fault["index"], bytes.fromhex(fault["word"]))
        function = device.function(device.load(changed), case.plan["kernel"])
        wrong = sum(
            not np.array_equal(case.launch(function), case.expected) for _ in range(_FAULT_LAUNCHES)
        )
        yield {"fault": index, "wrong_launches": wrong}


def run_one_ops(bundle: Path, plan: Plan) -> Iterator[Row]:
    """The one-operation kernels against the emulator."""
    device, wanted = Device(), plan["one_ops"]
    data = np.load(bundle / wanted["file"])
    module = device.load((bundle / wanted["cubin"]).read_bytes())
    for name in wanted["names"]:
        function = device.function(module, name)
        different, cases = 0, 0
        for seed in range(wanted["seeds"]):
            words, expected = data[f"{name}.{seed}.in"], data[f"{name}.{seed}.out"]
            source, out = device.upload(words), device.allocate(expected.nbytes)
            device.poison(out, expected.nbytes)
            parameters = np.array([out, source], np.uint64).tobytes()
            device.launch(function, (1, 1, 1), wanted["threads"], parameters)
            device.wait()
            got = device.download(out, expected.nbytes).view(np.uint32)
            device.free(source, out)
            different += int((got != expected).sum())
            cases += got.size
        yield {"name": name, "cases": cases, "mismatches": different}


def run_times(bundle: Path, plan: Plan, variants: dict[str, list[str]]) -> Iterator[Row]:
    """Microseconds of the variants of each kernel, in turn, on inputs larger than the cache."""
    device, chance = Device(), np.random.default_rng(0)
    for timed in plan["times"]:
        kernel = timed["kernel"]
        inputs = [
            device.upload(chance.integers(low, high, size, np.uint8))
            for size, low, high in timed["inputs"]
        ]
        out = device.allocate(timed["output_bytes"])
        numbers = np.array(timed["numbers"], np.uint32).tobytes()
        parameters = np.array([out, *inputs], np.uint64).tobytes() + numbers
        samples: dict[str, list[float]] = {}
        functions = {
            variant: device.function(device.load(Image(bundle, plan, kernel, variant).data), kernel)
            for variant in variants[kernel]
        }
        for _ in range(_ROUNDS):
            for variant, function in functions.items():
                work = partial(device.launch, function, timed["grid"], timed["threads"], parameters)
                samples.setdefault(variant, []).extend(device.time(work, _TIMED))
        half = timed["output_bytes"] // 2
        copied = device.time(partial(device.copy, out, out + half, half), _TIMED)
        yield {
            "kernel": kernel,
            "name": timed["name"],
            "moved_bytes": timed["moved_bytes"],
            "microseconds": samples,
            "device_copy": {"bytes": 2 * half, "microseconds": copied},
        }
        device.free(out, *inputs)


def describe(bundle: Path, plan: Plan) -> Iterator[Row]:
    """What the GPU is."""
    del bundle, plan
    device = Device()
    yield {"gpu": device.name(), "cuda": device.cuda_version()}


_TASKS: dict[str, Task] = {
    "describe": describe,
    "once": run_once,
    "often": run_often,
    "cut": run_cut,
    "counted": run_counted,
    "without": run_without,
    "faults": run_faults,
    "one_ops": run_one_ops,
    "times": run_times,
}


def task_rows(bundle: Path, name: str, arguments: list) -> Iterator[Row]:
    """The rows of a task."""
    plan = read_plan(bundle)
    return _TASKS[name](bundle, plan, *arguments)
