"""A bundle's plan, its cubins and its cases."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet_kernels.sass.gpu.driver import Device

__all__ = ["Case", "Image", "Plan", "read_plan"]

Plan = dict[str, Any]


def read_plan(bundle: Path) -> Plan:
    """Read plan.json of a bundle."""
    return json.loads((bundle / "plan.json").read_text())


class Image:
    """A cubin of a bundle, and changed copies of it.

    Args:
        bundle: the folder.
        plan: the bundle's plan.
        kernel: name of the kernel.
        variant: twin, safe or tuned.
    """

    def __init__(self, bundle: Path, plan: Plan, kernel: str, variant: str) -> None:
        described = plan["kernels"][kernel]["variants"][variant]
        self.data = (bundle / described["file"]).read_bytes()
        self.code_at: int = described["code_at"]
        self.count_at: int = described["count_at"]
        self.texts: list[str] = described["texts"]
        self._exit = bytes.fromhex(plan["exit"])
        self._nop = bytes.fromhex(plan["nop"])

    def with_word(self, index: int, word: bytes) -> bytes:
        """The cubin with one instruction replaced."""
        at = self.code_at + 16 * index
        return self.data[:at] + word + self.data[at + 16 :]

    def without(self, index: int) -> bytes:
        """The cubin with one instruction replaced by a NOP."""
        return self.with_word(index, self._nop)

    def cut(self, count: int) -> bytes:
        """The cubin with EXIT in the place of every instruction but the first `count`."""
        start, end = self.code_at + 16 * count, self.code_at + 16 * len(self.texts)
        return self.data[:start] + self._exit * (len(self.texts) - count) + self.data[end:]

    def with_registers(self, count: int) -> bytes:
        """The cubin with another register count."""
        number = count.to_bytes(4, "little")
        return self.data[: self.count_at] + number + self.data[self.count_at + 4 :]

    @property
    def registers(self) -> int:
        """The register count."""
        return int.from_bytes(self.data[self.count_at : self.count_at + 4], "little")


class Case:
    """A case of a bundle, on the GPU."""

    def __init__(self, device: Device, bundle: Path, plan: Plan) -> None:
        self.device, self.plan = device, plan
        data = np.load(bundle / plan["file"])
        self.arrays = [data[f"input{i}"] for i in range(plan["inputs"])]
        self.inputs = [device.upload(array) for array in self.arrays]
        self.expected: NDArray[np.uint8] = data["expected"].view(np.uint8).reshape(-1)
        self.reference = data.get("reference")
        self.out = device.allocate(self.expected.size)
        numbers = np.array(plan["numbers"], np.uint32).tobytes()
        self.parameters = np.array([self.out, *self.inputs], np.uint64).tobytes() + numbers

    def restore(self) -> None:
        """Write the inputs again: a faulty kernel may have stored anywhere."""
        for address, array in zip(self.inputs, self.arrays, strict=True):
            self.device.refill(address, array)

    def run(self, image: bytes) -> NDArray[np.uint8]:
        """Load a cubin, launch it once over poisoned memory and return the output."""
        module = self.device.load(image)
        got = self.launch(self.device.function(module, self.plan["kernel"]))
        self.device.unload(module)
        return got

    def launch(self, function: Any) -> NDArray[np.uint8]:
        """Launch once over poisoned memory and return the output."""
        self.device.poison(self.out, self.expected.size)
        self.device.launch(function, self.plan["grid"], self.plan["threads"], self.parameters)
        self.device.wait()
        return self.device.download(self.out, self.expected.size)

    def relative_error(self, got: NDArray[np.uint8]) -> float | None:
        """Largest error against exact arithmetic, over the largest value; None for a copy."""
        if self.reference is None:
            return None
        want = self.reference.reshape(-1)
        value = got.view(np.float32).astype(np.float64)
        return float(np.abs(value - want).max() / np.abs(want).max())
