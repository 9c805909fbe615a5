"""Which kernels are used after a self-test, on a driver that computes what it is told to."""

import json
import logging
import shutil

import msgspec
import pytest
import torch

from moet_core.errors import ConfigError
from moet_core.row import row_layout
from moet_kernels import arch, experts
from moet_kernels.committed import digest
from moet_kernels.sm120 import trust
from moet_kernels.sm120.build import ALL_KERNELS
from moet_kernels.sm120.driver import DriverError
from moet_kernels.sm120.manifest import COMPILED, FOLDER, cubin_path, read_manifest

NAMES = [kernel.name for kernel in ALL_KERNELS] + list(COMPILED)
FEW = torch.zeros(16, 8, dtype=torch.int32)
MANY = torch.zeros(17, 8, dtype=torch.int32)


class Driver:
    """Loads anything but what it refuses; the questions below ask it what a kernel answers."""

    identity = "fake"
    device = torch.device("cpu")

    def __init__(self, refused=(), wrong=(), odd=()):
        manifest = read_manifest()
        self.names = {
            sha256: (kernel, variant)
            for kernel, built in manifest.kernels.items()
            for variant, sha256 in built.cubins.items()
        }
        self.refused, self.wrong, self.odd = set(refused), set(wrong), set(odd)
        self.loaded, self.asked = [], []

    def load(self, image, kernel):
        name = self.names[digest(image)]
        assert name[0] == kernel
        if name in self.refused:
            raise DriverError("The CUDA driver says CUDA_ERROR_NO_BINARY_FOR_GPU.")
        self.loaded.append(name)
        return name


def answer(driver, function):
    driver.asked.append(function)
    value = 2 if function in driver.odd else 1
    flaw = "element [0, 0] is 3, wanted 1 (1 of 8 differ)." if function in driver.wrong else None
    return flaw, {"out": torch.tensor([value]).numpy()}


@pytest.fixture(autouse=True)
def _questions(monkeypatch):
    monkeypatch.setattr(trust, "QUESTIONS", dict.fromkeys(NAMES, answer))


def used(layer):
    return dict(layer.functions.values())


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_all_right_uses_tuned_and_says_nothing(caplog):
    driver = Driver()
    layer = trust.load_layer(driver)
    assert used(layer) == {n: "twin" if n in COMPILED else "tuned" for n in NAMES}
    assert sorted(driver.asked) == sorted(driver.names.values())
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("how", ["refused", "wrong", "odd"])
def test_a_flawed_tuned_kernel_gives_way_to_its_twin(caplog, how):
    layer = trust.load_layer(Driver(**{how: [("w2_down", "tuned")]}))
    assert used(layer)["w2_down"] == "twin"
    assert used(layer)["w2_gate_up"] == "tuned"
    (warning,) = warnings_of(caplog)
    said = {
        "refused": "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "wrong": "element [0, 0] is 3, wanted 1",
        "odd": "It differs from its twin, which is right.",
    }[how]
    assert "w2_down (tuned): " in warning
    assert said in warning
    assert warning.endswith("So its twin is used.")


def test_a_flawed_safe_kernel_is_only_mentioned(caplog):
    layer = trust.load_layer(Driver(wrong=[("w2_down", "safe")]))
    assert used(layer)["w2_down"] == "tuned"
    (warning,) = warnings_of(caplog)
    assert warning.endswith("So its tuned is used.")


def test_without_a_right_twin_the_layer_is_portable(caplog):
    flawed = [("w2_down", variant) for variant in ("tuned", "twin")]
    layer = trust.load_layer(Driver(wrong=flawed)).quantising()
    assert "w2_down" not in layer.functions
    (warning,) = warnings_of(caplog)
    assert warning.endswith("So the portable backend is used.")
    assert "its kernel w2_down" in layer.refusal(FEW, row_layout("w2", 256, 128))
    assert layer.refusal(FEW, row_layout("fp4-mx", 256, 128)) is None
    assert layer.refusal(FEW, row_layout("w2", 256, 64)) is None  # w2_down_k64


def test_bfloat16_and_e4m3_kernels_are_trusted_apart():
    flawed = [("bf16_gate_up", variant) for variant in ("tuned", "twin")]
    layer = trust.load_layer(Driver(wrong=flawed))
    assert "its kernel bf16_gate_up" in layer.refusal(FEW, row_layout("w2", 256, 128))
    assert layer.quantising().refusal(FEW, row_layout("w2", 256, 128)) is None
    assert layer.refusal(FEW, row_layout("fp4-nv", 256, 128)) is None


def test_kernels_of_decode_and_prefill_are_trusted_apart():
    flawed = [("w2_down_tiles", variant) for variant in ("tuned", "twin")]
    layer = trust.load_layer(Driver(wrong=flawed))
    assert "its kernel w2_down_tiles," in layer.refusal(MANY, row_layout("w2", 256, 128))
    assert layer.refusal(MANY, row_layout("fp4-mx", 256, 128)) is None
    assert layer.refusal(FEW, row_layout("w2", 256, 128)) is None


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("prepare", True, False),
        ("sort", False, True),
        ("mark", False, True),
        ("combine", True, True),
    ],
)
def test_without_what_is_around_nothing_is_computed(name, few, many):
    layer = trust.load_layer(Driver(refused=[(name, "twin")]))
    for ids, needed in ((FEW, few), (MANY, many)):
        refusal = layer.refusal(ids, row_layout("w2", 256, 128))
        assert (refusal == f"may not use its kernel {name}") == needed


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_cubin_is_not_loaded(caplog, tmp_path, damage):
    folder = tmp_path / "kernels"
    shutil.copytree(FOLDER, folder)
    path = cubin_path(folder, "w2_gate_up", "tuned")
    if damage == "flip":
        image = bytearray(path.read_bytes())
        image[4000] ^= 1
        path.write_bytes(image)
    else:
        path.unlink()
    driver = Driver()
    layer = trust.load_layer(driver, folder)
    assert used(layer)["w2_gate_up"] == "twin"
    assert ("w2_gate_up", "tuned") not in driver.loaded
    (warning,) = warnings_of(caplog)
    said = "is damaged: its SHA-256" if damage == "flip" else "cannot be read"
    assert f"w2_gate_up.tuned.cubin {said}" in warning


class TestMemory:
    def test_what_was_right_is_not_asked_again(self, tmp_path):
        memory = tmp_path / "cache" / "right.json"
        trust.load_layer(Driver(), remembered=memory)
        driver = Driver()
        layer = trust.load_layer(driver, remembered=memory)
        assert driver.asked == []
        assert used(layer)["w2_down"] == "tuned"
        assert {name for name, _ in driver.loaded} == set(NAMES)

    def test_another_driver_is_asked(self, tmp_path):
        memory = tmp_path / "right.json"
        trust.load_layer(Driver(), remembered=memory)
        driver = Driver()
        driver.identity = "newer"
        trust.load_layer(driver, remembered=memory)
        assert driver.asked
        assert len(json.loads(memory.read_bytes())) == 2

    def test_what_was_wrong_is_asked_and_said_every_time(self, caplog, tmp_path):
        memory = tmp_path / "right.json"
        for _ in range(2):
            trust.load_layer(Driver(wrong=[("w2_down", "tuned")]), remembered=memory)
        assert len(warnings_of(caplog)) == 2
        assert not memory.exists()

    def test_a_refusal_later_on_is_said(self, caplog, tmp_path):
        memory = tmp_path / "right.json"
        trust.load_layer(Driver(), remembered=memory)
        driver = Driver(refused=[("w2_down", "tuned")])
        layer = trust.load_layer(driver, remembered=memory)
        assert used(layer)["w2_down"] == "twin"
        assert ("w2_down", "twin") in driver.asked
        (warning,) = warnings_of(caplog)
        assert "w2_down (tuned): The CUDA driver says" in warning

    def test_a_user_without_home_has_none(self, monkeypatch):
        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(trust.Path, "home", no_home)
        assert trust._memory() is None

    def test_a_damaged_memory_is_as_none(self, tmp_path):
        memory = tmp_path / "right.json"
        memory.write_text("[1, 2")
        driver = Driver()
        trust.load_layer(driver, remembered=memory)
        assert driver.asked
        assert msgspec.json.decode(memory.read_bytes(), type=dict[str, float])


class TestDispatch:
    @pytest.mark.parametrize("capability", [None, (9, 0), (12, 1)])
    def test_other_devices_have_no_layer(self, monkeypatch, capability):
        monkeypatch.setattr(arch, "capability", lambda _device: capability)
        assert trust.layer_on.__wrapped__(torch.device("cpu")) is None

    @pytest.mark.parametrize(
        ("tokens", "backend", "codec", "wanted"),
        [
            (1, None, "w2", "sm120"),
            (16, "sm120", "fp4-mx", "sm120"),
            (17, "sm120", "w2", "sm120"),
            (4096, None, "fp4-nv", "sm120"),
            (2, None, "fp4-nv", "sm120"),
            (1, "portable", "w2", "portable"),
        ],
    )
    def test_a_layer_is_computed_by(self, monkeypatch, tokens, backend, codec, wanted):
        layer = trust.load_layer(Driver())
        monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
        monkeypatch.setattr(trust, "layer_on", lambda _device: layer)
        x, ids = torch.zeros(tokens, 256).bfloat16(), torch.zeros(tokens, 8, dtype=torch.int32)
        chosen = experts._gpu_layer(x, ids, (row_layout(codec, 256, 128),), backend)
        assert (chosen is layer) == (wanted == "sm120")

    def test_e4m3_may_be_asked_for(self, monkeypatch):
        layer = trust.load_layer(Driver())
        monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
        monkeypatch.setattr(trust, "layer_on", lambda _device: layer)
        x, ids = torch.zeros(1, 256).bfloat16(), torch.zeros(1, 8, dtype=torch.int32)
        chosen = experts._gpu_layer(x, ids, (row_layout("w2", 256, 128),), "sm120-e4m3")
        assert layer.bfloat16
        assert not chosen.bfloat16
        assert chosen.functions is layer.functions

    def test_rows_without_a_kernel_are_refused_where_sm120_is_asked_for(self, monkeypatch):
        layer = trust.load_layer(Driver())
        monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
        monkeypatch.setattr(trust, "layer_on", lambda _device: layer)
        x, ids = torch.zeros(1, 96).bfloat16(), torch.zeros(1, 8, dtype=torch.int32)
        with pytest.raises(ConfigError, match="sm120 has no kernel for w2 with 96 columns"):
            experts._gpu_layer(x, ids, (row_layout("w2", 96, 128),), "sm120")
        assert experts._gpu_layer(x, ids, (row_layout("w2", 96, 128),), None) is not layer

    def test_a_capture_cannot_be_the_first_to_ask(self, monkeypatch, tmp_path):
        driver, capturing = Driver(), True
        driver.is_capturing = lambda: capturing
        monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
        monkeypatch.setattr(trust, "CudaDriver", lambda _device: driver)
        monkeypatch.setattr(trust, "_memory", lambda: tmp_path / "right.json")
        x, ids = torch.zeros(1, 256).bfloat16(), torch.zeros(1, 8, dtype=torch.int32)
        arguments = x, ids, (row_layout("w2", 256, 128),), None
        trust.layer_on.cache_clear()
        with pytest.raises(ConfigError, match="must be tested on cpu before a CUDA graph"):
            experts._gpu_layer(*arguments)
        assert driver.loaded == []
        capturing = False
        layer = experts._gpu_layer(*arguments)
        capturing, asked = True, len(driver.asked)
        assert experts._gpu_layer(*arguments) is layer
        assert len(driver.asked) == asked > 0
        trust.layer_on.cache_clear()

    def test_missing_bindings_are_said_once(self, monkeypatch, caplog):
        def refuse(_device):
            raise DriverError("No bindings.")

        monkeypatch.setattr(arch, "capability", lambda _device: (12, 0))
        monkeypatch.setattr(trust, "CudaDriver", refuse)
        trust.layer_on.cache_clear()
        assert [trust.layer_on(torch.device("cpu")) for _ in range(2)] == [None, None]
        trust.layer_on.cache_clear()
        assert warnings_of(caplog) == ["No bindings. The portable kernels are used instead."]
