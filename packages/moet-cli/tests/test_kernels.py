import json
from pathlib import Path
from typing import NamedTuple

import pytest

import moet_kernels.sass.kernels
from moet_cli.main import main
from moet_kernels.sass.tools import have_tools

SOURCES = Path(moet_kernels.sass.kernels.__file__).parent
TWIN = Path(__file__).parents[2] / "moet-kernels/tests/sass/data/copy.sm_90a.cubin"
HEADER = ".arch sm_90a\n.kernel copy\n.twin copy.cu\n.registers 8\n.parameters 20\n"
STORE = "[B------:R-:W-:Y:S05] "

needs_disassembler = pytest.mark.skipif(
    not have_tools("nvdisasm"), reason="nvdisasm is not installed (nox -s sass installs it)"
)
needs_compiler = pytest.mark.skipif(
    not have_tools("nvdisasm", "nvcc", "ptxas"),
    reason="the CUDA programs are not installed (nox -s sass installs them)",
)
needs_no_compiler = pytest.mark.skipif(have_tools("nvcc"), reason="nvcc is installed")


@pytest.fixture
def kernels(capsys, monkeypatch):
    """Run a command in this process; the one test of a process of its own is at the end."""
    monkeypatch.setenv("COLUMNS", "250")

    def run(*args):
        code = main(["kernels", *map(str, args)])
        return Finished(code, *capsys.readouterr())

    return run


class Finished(NamedTuple):
    code: int
    out: str
    err: str

    def objects(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def source(tmp_path):
    """Write a source file after a header of five lines."""

    def write(*lines, header=HEADER):
        path = tmp_path / "kernel.sass"
        path.write_text(header + "\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def cubin(kernels, tmp_path):
    """Our copy kernel, assembled."""
    path = tmp_path / "copy.cubin"
    done = kernels("asm", SOURCES / "copy.sass", "--twin", TWIN, "--out", path)
    assert done.code == 0, done.err
    return path


class TestAsm:
    @pytest.mark.parametrize("control", ["safe", "tuned"])
    def test_into_a_copy_of_the_twin(self, control, kernels, tmp_path):
        out = tmp_path / "out.cubin"
        done = kernels(
            "asm", SOURCES / "copy.sass", "--control", control, "--twin", TWIN, "--out", out
        )
        assert (done.code, done.err) == (0, "")
        assert done.out == f"copy: 38 instructions for sm_90a in {out}\n"
        assert out.read_bytes()[:4] == b"\x7fELF"

    def test_json(self, kernels, tmp_path):
        out = tmp_path / "out.cubin"
        args = (SOURCES / "copy.sass", "--twin", TWIN, "--out", out, "--json")
        (found,) = kernels("asm", *args).objects()
        assert found == {"event": "asm", "kernel": "copy", "instructions": 38, "out": str(out)}

    @pytest.mark.parametrize(
        ("line", "place", "message"),
        [
            ("FROB R1, R2", "line 7, column 1", "unknown form"),
            (STORE + "FROB R1, R2", "line 7, column 23", "unknown form"),
            ("  IADD3 R1, R2, 0x100000000, RZ", "line 7, column 3", "operand out of reach"),
            ("  MOV R8, R2", "line 7, column 3", "declares 8"),
            ("  LDC.64 R3, c[0x0][0x210]", "line 7, column 3", "register alignment"),
            ("[B------:R-:W-:-:S12] EXIT", "line 7, column 1", "longer ones need 'Y'"),
            ("BRA nowhere", "line 7, column 5", "no label of this file"),
            (".registers 9", "line 7, column 1", "given twice"),
            ("iadd3 r1", "line 7, column 1", "no instruction"),
        ],
    )
    def test_a_flaw_is_named_with_file_line_and_column(
        self, line, place, message, kernels, source, tmp_path
    ):
        path, out = source("MOV R1, RZ", line), tmp_path / "out.cubin"
        done = kernels("asm", path, "--twin", TWIN, "--out", out)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"moet: {path}: {place}: ")
        assert message in done.err
        assert len(done.err.splitlines()) == 1
        assert not out.exists()

    def test_a_flaw_as_json(self, kernels, source, tmp_path):
        path = source("FROB R1, R2")
        done = kernels("asm", path, "--twin", TWIN, "--out", tmp_path / "x", "--json")
        (found,) = done.objects()
        assert (done.code, found["event"], found["exit_code"]) == (1, "error", 1)
        assert f"{path}: line 6, column 1: unknown form" in found["error"]

    def test_a_missing_control_field_is_named(self, kernels, source, tmp_path):
        args = (source("EXIT"), "--control", "source", "--twin", TWIN, "--out", tmp_path / "x")
        done = kernels("asm", *args)
        assert done.code == 1
        assert "line 6, column 1: control field: no control field" in done.err

    def test_too_many_registers(self, kernels, source, tmp_path):
        path = source("EXIT", header=HEADER.replace("registers 8", "registers 254"))
        done = kernels("asm", path, "--twin", TWIN, "--out", tmp_path / "x")
        assert done.code == 1
        assert "line 4, column 12: directive: .registers wants at most 253, not 254" in done.err

    def test_a_twin_that_does_not_fit(self, kernels, source, tmp_path):
        path = source("EXIT", header=HEADER.replace("parameters 20", "parameters 24"))
        done = kernels("asm", path, "--twin", TWIN, "--out", tmp_path / "x")
        assert done.code == 1
        assert f"{TWIN}: copy declares 24 bytes of parameters, its twin takes 20" in done.err

    def test_a_twin_that_is_no_cubin(self, kernels, tmp_path):
        args = ("--twin", SOURCES / "copy.cu", "--out", tmp_path / "x")
        done = kernels("asm", SOURCES / "copy.sass", *args)
        assert done.code == 1
        assert "copy.cu: This is no cubin" in done.err

    def test_no_twin_at_all(self, kernels, source, tmp_path):
        path = source("EXIT", header=HEADER.replace(".twin copy.cu\n", ""))
        done = kernels("asm", path, "--out", tmp_path / "x")
        assert done.code == 2
        assert "names no .twin; add one, or give its cubin with --twin" in done.err

    def test_a_twin_that_is_not_there(self, kernels, source, tmp_path):
        done = kernels("asm", source("EXIT"), "--out", tmp_path / "x")
        assert done.code == 1
        assert f"there is no {tmp_path / 'copy.cu'}" in done.err

    def test_a_folder_that_is_not_there(self, kernels, tmp_path):
        out = tmp_path / "absent/out.cubin"
        done = kernels("asm", SOURCES / "copy.sass", "--twin", TWIN, "--out", out)
        assert done.code == 1
        assert f"The cubin {out} cannot be written: No such file or directory" in done.err

    def test_what_is_no_text(self, kernels, tmp_path):
        done = kernels("asm", TWIN, "--twin", TWIN, "--out", tmp_path / "x")
        assert done.code == 1
        assert "is no text: byte" in done.err

    @needs_no_compiler
    def test_without_a_compiler_the_wheel_is_named(self, kernels, tmp_path):
        done = kernels("asm", SOURCES / "copy.sass", "--out", tmp_path / "x")
        assert done.code == 1
        assert "pip install nvidia-cuda-nvcc" in done.err


class TestUsage:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("asm", SOURCES / "copy.sass"), "Missing option '--out'"),
            (("asm", "absent.sass", "--out", "x"), "'absent.sass' does not exist"),
            (("asm", SOURCES / "copy.sass", "--out", "x", "--control", "fast"), "'fast'"),
            (("disasm",), "Missing argument 'CUBIN'"),
            (("disasm", "absent.cubin"), "does not exist"),
            (("audit", SOURCES), "is a directory"),
            (("emulate", SOURCES / "copy.sass", "--seed", "-1"), "--seed"),
            (("emulate", SOURCES / "copy.sass", "--shape", "1", "2"), "--shape"),
            (("verfy", SOURCES / "copy.sass"), "did you mean 'verify'?"),
            (("verify", SOURCES / "copy.sass", "--jsn"), "did you mean '--json'?"),
            (("measure",), "Missing option '--out'"),
            (("record", SOURCES, SOURCES), "Missing option '--to'"),
        ],
    )
    def test_exit_code_2(self, args, message, kernels):
        done = kernels(*args)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
        assert "Traceback" not in done.err

    def test_verbose_shows_where(self, kernels, source, tmp_path):
        args = ("asm", source("FROB"), "--twin", TWIN, "--out", tmp_path / "x")
        done = kernels(*args, "--verbose")
        assert done.code == 1
        assert "Traceback" in done.err
        assert "SourceError" in done.err


class TestEmulate:
    def test_copy(self, kernels):
        done = kernels("emulate", SOURCES / "copy.sass")
        assert (done.code, done.out, done.err) == (0, "copy: exact\n", "")

    @pytest.mark.parametrize("name", ["w2_gemm_bf16", "w2_gemm_e4m3"])
    def test_json(self, name, kernels):
        args = ("--shape", "3", "16", "512", "--exact", "--seed", "7", "--json")
        done = kernels("emulate", SOURCES / f"{name}.sass", *args)
        assert done.code == 0
        assert done.objects() == [
            {"event": "emulate", "kernel": name, "exact": True, "relative_error": 0.0}
        ]

    def test_a_wrong_result(self, kernels, tmp_path):
        text = (SOURCES / "w2_gemm_e4m3.sass").read_text()
        path = tmp_path / "wrong.sass"
        path.write_text(text.replace("FADD R20, R20, R23", "FADD R20, R20, R22"))
        done = kernels("emulate", path, "--shape", "1", "16", "512")
        assert done.code == 1
        assert "w2_gemm_e4m3: relative error" in done.out
        assert "1e-06 is allowed" in done.err

    def test_a_fault_names_instruction_and_thread(self, kernels, tmp_path):
        path = tmp_path / "wrong.sass"
        text = (SOURCES / "copy.sass").read_text()
        path.write_text(text.replace("LDG.E.128.CONSTANT R8, desc[UR8][R20.64]", "NOP"))
        done = kernels("emulate", path)
        assert done.code == 1
        assert f"moet: {path}: uninitialised read at 0x01e0 `STG.E.128" in done.err
        assert "block 0, thread 0" in done.err

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("copy", "--exact"), "copy has no shape"),
            (("copy", "--shape", "1", "16", "128"), "copy has no shape"),
            (("w2_gemm_bf16", "--shape", "0", "16", "128"), "M of 1 or more"),
            (("w2_gemm_bf16", "--shape", "1", "8", "128"), "N a multiple of 16"),
            (("w2_gemm_bf16", "--shape", "1", "16", "64"), "K one of 128"),
        ],
    )
    def test_an_option_that_does_not_fit(self, args, message, kernels):
        done = kernels("emulate", SOURCES / f"{args[0]}.sass", *args[1:])
        assert done.code == 2
        assert message in done.err

    def test_a_kernel_that_is_none_of_ours(self, kernels, source):
        done = kernels("emulate", source("EXIT", header=HEADER.replace("l copy", "l mine")))
        assert done.code == 2
        assert "mine is none of our kernels" in done.err


@needs_disassembler
class TestDisasm:
    def test_the_source_again(self, kernels, cubin, tmp_path):
        done = kernels("disasm", cubin)
        assert (done.code, done.err) == (0, "")
        again, out = tmp_path / "again.sass", tmp_path / "again.cubin"
        again.write_text(done.out)
        args = ("--control", "source", "--twin", TWIN, "--out", out)
        assert kernels("asm", again, *args).code == 0
        assert out.read_bytes() == cubin.read_bytes()

    def test_json(self, kernels, cubin):
        (found,) = kernels("disasm", cubin, "--kernel", "copy", "--json").objects()
        assert (found["event"], found["kernel"]) == ("disasm", "copy")
        assert ".registers 40\n" in found["source"]
        assert "LDG.E.128.CONSTANT" in found["source"]

    def test_a_kernel_that_is_not_there(self, kernels, cubin):
        done = kernels("disasm", cubin, "--kernel", "cpy")
        assert done.code == 2
        assert "Choose a kernel with --kernel: copy." in done.err

    def test_what_is_no_cubin(self, kernels):
        done = kernels("disasm", SOURCES / "copy.cu")
        assert done.code == 1
        assert "copy.cu: This is no cubin" in done.err


@needs_disassembler
class TestAudit:
    def test_nothing_found(self, kernels, cubin):
        done = kernels("audit", cubin)
        assert (done.code, done.out, done.err) == (0, "copy: nothing found\n", "")

    @pytest.fixture
    def flawed(self, cubin):
        """The same with a register count that leaves none in reserve."""
        data = cubin.read_bytes()
        count = data.index(bytes([0x04, 0x2F, 8, 0])) + 8
        cubin.write_bytes(data[:count] + bytes([40, 0, 0, 0]) + data[count + 4 :])
        return cubin

    def test_findings(self, kernels, flawed):
        done = kernels("audit", flawed)
        assert done.code == 1
        assert "R38 is named; the cubin counts 40 registers" in done.out
        assert done.err == f"moet: The audit of copy in {flawed} found 10 flaws.\n"

    def test_findings_as_json(self, kernels, flawed):
        done = kernels("audit", flawed, "--json")
        found, error = done.objects()
        assert (done.code, found["event"], error["event"]) == (1, "audit", "error")
        assert {finding["rule"] for finding in found["findings"]} == {"form", "registers"}


@needs_compiler
class TestVerify:
    def test_both_schedules_and_the_emulator(self, kernels):
        done = kernels("verify", SOURCES / "w2_gemm_e4m3.sass", "--json")
        assert done.code == 0, done.err
        safe, tuned, emulated = done.objects()
        assert (safe["control"], tuned["control"]) == ("safe", "tuned")
        assert safe["findings"] == tuned["findings"] == []
        assert safe["stalls"] > tuned["stalls"]
        assert emulated["exact"] is True

    def test_copy(self, kernels):
        done = kernels("verify", SOURCES / "copy.sass")
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[-1] == "copy: exact"

    def test_a_flaw_has_its_place(self, kernels, source):
        done = kernels("verify", source("FROB R1, R2"))
        assert (done.code, done.out) == (1, "")
        assert "line 6, column 1: unknown form" in done.err

    def test_a_twin_that_does_not_compile(self, kernels, source, tmp_path):
        (tmp_path / "copy.cu").write_text("this is no CUDA\n")
        done = kernels("verify", source("EXIT"))
        assert done.code == 1
        assert f"{tmp_path / 'copy.cu'}: `nvcc" in done.err


def test_in_a_process_of_its_own(moet):
    done = moet("kernels", "emulate", str(SOURCES / "copy.sass"))
    assert (done.code, done.out, done.err) == (0, "copy: exact\n", "")


class TestSm120Kernels:
    """Those of `moet_kernels.sm120`, which are emulated on experts of their own."""

    def source(self, name):
        return SOURCES.parents[1] / f"sm120/kernels/{name}.sass"

    @pytest.mark.parametrize(
        "name", ["w2_gate_up", "nv_down_k64", "bf16_down", "w2_gate_up_tiles", "fp4_down_tiles_k64"]
    )
    @pytest.mark.parametrize("more", [[], ["--exact"]])
    def test_emulate(self, kernels, name, more):
        finished = kernels("emulate", self.source(name), "--json", *more)
        assert finished.code == 0
        (found,) = finished.objects()
        assert (found["kernel"], found["flaw"], found["exact"]) == (name, None, bool(more))

    def test_a_wrong_one_fails(self, kernels, tmp_path):
        path = tmp_path / "wrong.sass"
        text = self.source("w2_down").read_text()
        path.write_text(text.replace("0x4838b8c8", "0x48b838c8"))
        finished = kernels("emulate", path)
        assert finished.code == 1
        assert "w2_down is wrong: element [0, 0] is" in finished.err

    def test_columns_of_another_kernel(self, kernels):
        finished = kernels("emulate", self.source("w2_down_k64"), "--shape", 1, 64, 128)
        assert finished.code == 2
        assert "K an odd multiple of 64" in finished.err

    @pytest.mark.parametrize("shape", [(9, 64, 256), (1, 48, 256), (1, 64, 192)])
    def test_a_shape_that_it_does_not_take(self, kernels, shape):
        finished = kernels("emulate", self.source("w2_down"), "--shape", *shape)
        assert finished.code == 2
        assert "wanted M of 1 to 8, N a multiple of 32, K a multiple of 128" in finished.err

    def test_a_tile_has_up_to_16_vectors(self, kernels):
        source = self.source("w2_down_tiles")
        assert kernels("emulate", source, "--shape", 16, 64, 128).code == 0
        finished = kernels("emulate", source, "--shape", 17, 64, 128)
        assert finished.code == 2
        assert "wanted M of 1 to 16, N a multiple of 64, K a multiple of 128" in finished.err
