import json

import pytest

from moet_cli.main import main

torch = pytest.importorskip("torch")  # the environment of the SASS toolchain has none

from moet_kernels import arch  # noqa: E402
from moet_kernels.sm120 import driver, trust  # noqa: E402


class Device:
    identity = "an SM120 GPU"

    def __init__(self, _device):
        pass


@pytest.fixture
def on_sm120(monkeypatch):
    monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
    monkeypatch.setattr(driver, "CudaDriver", Device)

    def answers(*flaws):
        found = [trust.Answer("w2_down", f"variant {i}", flaw) for i, flaw in enumerate(flaws)]
        monkeypatch.setattr(trust, "examine", lambda _driver: found)

    return answers


@pytest.mark.parametrize("found", [None, (9, 0)])
def test_another_machine_is_told_what_is_wanted(capsys, monkeypatch, found):
    monkeypatch.setattr(arch, "capability", lambda _device: found)
    assert main(["kernels", "verify", "--device"]) == 1
    assert "needs an NVIDIA GPU of sm_120, found" in capsys.readouterr().err


def test_the_table_of_a_right_device(capsys, on_sm120):
    on_sm120(None, None)
    assert main(["kernels", "verify", "--device"]) == 0
    shown = capsys.readouterr().out
    assert "SM120 kernels on an SM120 GPU" in shown
    assert shown.count("right") == 2


def test_a_flaw_fails(capsys, on_sm120):
    on_sm120(None, "element [0, 0] is 3, wanted 1.")
    assert main(["kernels", "verify", "--device", "--json"]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[0])["kernels"]
    assert [row["answer"] for row in rows] == ["right", "element [0, 0] is 3, wanted 1."]
    assert "1 of 2 kernels may not be used here" in err + out


@pytest.mark.parametrize("arguments", [[], ["--device", __file__]])
def test_a_source_or_the_device(capsys, arguments):
    assert main(["kernels", "verify", *arguments]) == 2
    assert "either a source file or --device" in capsys.readouterr().err
