"""What needs programs of the CUDA toolkit; `nox -s sass` brings them."""

import multiprocessing
import re
import struct
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

import moet_kernels.sass.kernels as folder
from moet_kernels.sass.arch import ARCHITECTURES, SM90A
from moet_kernels.sass.assemble import assemble, disassemble, disassemble_all
from moet_kernels.sass.audit import audit
from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.cubin import RESERVED_REGISTERS, Cubin
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.link import link
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.one_op import ONE_OPS, THREADS, inputs_of, ptx_module
from moet_kernels.sass.operands import parse
from moet_kernels.sass.schedule import safe, tuned
from moet_kernels.sass.source import parse_source
from moet_kernels.sass.study import study
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import compile_cuda, compile_ptx, have_tools, run_tool

pytestmark = pytest.mark.skipif(
    not have_tools("ptxas", "nvdisasm", "nvcc", "cuobjdump"),
    reason="the CUDA programs are not installed (nox -s sass installs them)",
)

KERNELS = ("copy", "w2_gemm_bf16", "w2_gemm_e4m3")


@pytest.fixture(scope="session")
def studies(tmp_path_factory):
    """Both architectures at once: each keeps one core busy."""
    folders = [tmp_path_factory.mktemp(name) for name in ARCHITECTURES]
    # Threads of this process may hold locks, so nothing is forked.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(partial(study, seeds=(0,)), ARCHITECTURES.values(), folders)
        return dict(zip(ARCHITECTURES, found, strict=True))


@pytest.fixture
def studied(studies, arch):
    return studies[arch.name]


class TestCorpus:
    def test_the_committed_table_is_what_is_learnt(self, studied, arch):
        committed = committed_table(arch)
        assert studied.table.tools == committed.tools
        assert studied.table.forms == committed.forms
        assert studied.table.refused == committed.refused
        assert studied.table.timing == committed.timing

    def test_words_read_back(self, studied):
        assert studied.words >= 50_000
        assert studied.read_back >= 0.999 * studied.words
        assert {form.split()[1].split(".")[0] for form in studied.refused} == {"BRX", "CALL", "RET"}

    def test_a_table_of_half_of_it_never_gives_wrong_bytes(self, studied):
        (halves,) = studied.halves
        assert halves.wrong == ()
        assert halves.right > 2_000
        assert halves.refused > 0  # the second half has forms that the first has not

    def test_compiled_code_has_no_hazard(self, studied):
        assert studied.kernels > 400
        assert studied.hazards == ()

    def test_compiled_code_has_precedent(self, studied):
        assert studied.unprecedented == ()

    def test_compiled_code_never_names_the_reserved_registers(self, studied):
        assert studied.spare_registers == (RESERVED_REGISTERS,)


@pytest.mark.parametrize("limit", [24, 64, 255])
def test_no_limit_makes_the_compiler_name_the_reserved_registers(limit, arch, tmp_path):
    values = range(300)  # more than there are registers, all alive at once
    loads = "".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in values)
    stores = "".join(f"st.global.f32 [%rd1+{4 * i}], %f{i};\n" for i in values)
    ptx, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    ptx.write_text(
        f".version 8.8\n.target {arch.name}\n.address_size 64\n"
        ".visible .entry k(.param .u64 p) {\n.reg .u64 %rd<2>;\n.reg .f32 %f<300>;\n"
        f"ld.param.u64 %rd0, [p];\ncvta.to.global.u64 %rd1, %rd0;\n{loads}{stores}ret;\n}}\n"
    )
    compile_ptx(ptx, cubin, arch.name, "-O3", f"--maxrregcount={limit}")
    named = {int(n) for n in re.findall(r"\bR(\d+)\b", run_tool("nvdisasm", ["-c", cubin]))}
    assert Cubin.open(cubin).registers("k") == limit
    assert max(named) == limit - 1 - RESERVED_REGISTERS


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    """The compiled twin of each of our kernels."""
    found = {}
    for name in KERNELS:
        cubin = tmp_path_factory.mktemp("twins") / f"{name}.cubin"
        source = Path(folder.__file__).parent / f"{name}.cu"
        compile_cuda(source, cubin, kernel_source(name).arch.name)
        found[name] = cubin.read_bytes()
    return found


@pytest.fixture(params=[safe, tuned], ids=["safe", "tuned"])
def schedule(request):
    return request.param


@pytest.fixture(params=KERNELS)
def linked(request, twins, schedule):
    """A kernel of ours, scheduled, and its cubin."""
    name = request.param
    source = kernel_source(name)
    table = committed_table(source.arch)
    program = schedule(source, table)
    return program, Cubin(link(twins[name], program, assemble(program, table)))


def findings(cubin, program):
    return audit(cubin, program.kernel, committed_table(program.arch), program)


class TestLinked:
    def test_passes_the_audit(self, linked):
        program, cubin = linked
        assert findings(cubin, program) == []

    def test_is_read_by_nvidias_tools(self, linked, tmp_path):
        program, cubin = linked
        path = tmp_path / "linked.cubin"
        path.write_bytes(cubin.build())
        assert f".text.{program.kernel}" in run_tool("nvdisasm", [path])
        listing = run_tool("cuobjdump", ["-sass", path])
        assert f"Function : {program.kernel}" in listing
        assert listing.count("EXIT") == len(program.exits)
        assert f"REG:{program.registers + RESERVED_REGISTERS}" in run_tool(
            "cuobjdump", ["-res-usage", path]
        )


@pytest.fixture
def copied(twins, table):
    """Our copy kernel, tuned, and its words."""
    program = tuned(kernel_source("copy"), table)
    return program, assemble(program, table)


class TestAudit:
    def rules(self, twins, program, words):
        cubin = Cubin(link(twins["copy"], program, words))
        return {finding.rule for finding in findings(cubin, program)}

    def test_a_reserved_register(self, twins, copied):
        program, words = copied
        fewer = msgspec.structs.replace(program, registers=38)  # R38 and R39 are named
        found = findings(Cubin(link(twins["copy"], fewer, words)), program)
        about = [f.message for f in found if f.rule == "registers"]
        assert about
        assert about[0].startswith("R38 is named; the cubin counts 40 registers")

    def test_a_flag_that_the_compiler_never_sets(self, twins, copied, table):
        program, words = copied
        at = next(i for i, s in enumerate(program.statements) if s.text == "LEA R0, R2, R0, 0x8")
        minus = table.encode(parse("LEA R0, -R2, R0, 0x8", SM90A))
        words[at] = minus | program.statements[at].control.bits
        found = audit(Cubin(link(twins["copy"], program, words)), "copy", table)
        assert [(f.rule, f.address) for f in found] == [("precedent", 16 * at)]
        assert "never has a minus sign on operand 2" in found[0].message

    def test_a_word_of_no_form(self, twins, copied):
        program, words = copied
        # Bit 13 of a move's opcode makes another instruction of it, or none.
        assert self.rules(twins, program, [words[0] ^ 1 << 76, *words[1:]]) >= {"form"}

    def test_another_text_than_the_source(self, twins, copied):
        program, words = copied
        assert "text" in self.rules(twins, program, [*words[:12], words[13], *words[13:]])

    def test_a_missing_exit(self, twins, copied, table):
        program, words = copied
        unlisted = msgspec.structs.replace(program, statements=program.statements[:-1])
        cubin = Cubin(link(twins["copy"], unlisted, words))
        assert "exits" in {finding.rule for finding in audit(cubin, "copy", table)}

    def test_a_barrier_that_is_not_declared(self, twins, table):
        text = (
            ".arch sm_90a\n.kernel copy\n.registers 8\n.parameters 20\n"
            "LDC R1, c[0x0][0x28]\nBAR.SYNC.DEFER_BLOCKING 0x0\nEXIT\n"
        )
        program = safe(parse_source(text), table)
        assert self.rules(twins, program, assemble(program, table)) == {"barriers"}

    def test_a_hazard(self, twins, copied, table):
        program, _ = copied
        at = next(i for i, s in enumerate(program.statements) if s.control.wait)
        statements = list(program.statements)
        control = msgspec.structs.replace(statements[at].control, wait=0)
        statements[at] = msgspec.structs.replace(statements[at], control=control)
        broken = msgspec.structs.replace(program, statements=tuple(statements))
        assert self.rules(twins, broken, assemble(broken, table)) == {"hazard"}


@pytest.fixture
def one_ops(arch, tmp_path):
    source, cubin = tmp_path / "one_ops.ptx", tmp_path / "one_ops.cubin"
    source.write_text(ptx_module(arch.name))
    compile_ptx(source, cubin, arch.name, "-O3")
    return Cubin.open(cubin)


class TestOneOperationKernels:
    def test_they_equal_numpy(self, one_ops):
        programs = {program.kernel: program for program in disassemble_all([one_ops])}
        for op in ONE_OPS:
            words = inputs_of(op.kind, 0)
            buffers = [Buffer.empty(1 << 16, 8 * THREADS), Buffer.of(1 << 20, words)]
            launch = Launch((1, 1, 1), THREADS, struct.pack("<QQ", 1 << 16, 1 << 20))
            emulate(programs[op.name], launch, buffers)
            if op.truth is not None:
                with np.errstate(all="ignore"):
                    want = op.truth(words[:THREADS], words[THREADS : 2 * THREADS], words[-THREADS:])
                assert (buffers[0].data.view(np.uint32)[:THREADS] == want).all(), op.name

    def test_disassembled_they_assemble_to_their_words(self, one_ops, arch):
        table = committed_table(arch)
        for program in disassemble_all([one_ops]):
            words = assemble(program, table)
            assert words == one_ops.words(program.kernel)[: len(words)], program.kernel

    def test_one_alone_is_read_as_among_all(self, one_ops):
        alone = disassemble(one_ops, "fma_f32")
        (among,) = [p for p in disassemble_all([one_ops]) if p.kernel == "fma_f32"]
        assert alone == among
        assert alone.arch != SM90A or alone.parameters == 16
