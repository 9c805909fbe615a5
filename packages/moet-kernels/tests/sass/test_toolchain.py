"""What needs programs of the CUDA toolkit; `nox -s sass` brings them."""

import struct

import numpy as np
import pytest

from moet_kernels.sass.arch import ARCHITECTURES, SM90A, SM120A
from moet_kernels.sass.assemble import assemble, disassemble, disassemble_all
from moet_kernels.sass.audit import audit
from moet_kernels.sass.build import learn_from
from moet_kernels.sass.cases import kernel_source
from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.corpus import build_corpus
from moet_kernels.sass.cubin import RESERVED_REGISTERS, Cubin
from moet_kernels.sass.emulate import Launch, emulate
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.learn import learn, samples_of
from moet_kernels.sass.link import link
from moet_kernels.sass.machine import Buffer
from moet_kernels.sass.one_op import ONE_OPS, THREADS, inputs_of, ptx_module
from moet_kernels.sass.roles import accesses, register_tokens
from moet_kernels.sass.schedule import tuned
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import compile_cuda, compile_ptx, have_tools

pytestmark = pytest.mark.skipif(
    not have_tools("ptxas", "nvdisasm", "nvcc"),
    reason="ptxas, nvdisasm and nvcc are not installed (nox -s sass installs them)",
)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def corpus(request, tmp_path_factory):
    arch = ARCHITECTURES[request.param]
    return arch, build_corpus(arch, tmp_path_factory.mktemp(arch.name))


def touched(instruction, form):
    """All registers of an instruction; those of an unknown form count singly."""
    if form is None:
        return {(file, number) for _, file, number in register_tokens(instruction) if number < 255}
    writes, reads = accesses(instruction, form)
    return writes | {register for register, _ in reads}


def words_of(compiled):
    return [w for c in compiled for kernel in c.cubin.kernels for w in c.cubin.words(kernel)]


def test_the_committed_table_is_what_is_learnt(corpus):
    arch, compiled = corpus
    learnt, committed = learn_from(compiled, arch), committed_table(arch)
    assert learnt.forms == committed.forms
    assert learnt.timing == committed.timing


def test_corpus_words_read_back(corpus):
    arch, compiled = corpus
    words = words_of(compiled)
    assert len(words) >= 50_000
    table = committed_table(arch)
    samples = dict(samples_of(words, arch))
    good = sum(_encodes(table, samples.get(w & ~CONTROL_MASK), w & ~CONTROL_MASK) for w in words)
    assert good >= 0.999 * len(words)


def _encodes(table, instruction, word):
    try:
        return instruction is not None and table.encode(instruction) == word
    except SassError:
        return False


def test_a_table_of_half_the_corpus_never_gives_wrong_bytes(corpus):
    arch, compiled = corpus
    table = learn(samples_of(words_of(compiled[::2]), arch), arch)
    wrong = []
    for word, instruction in samples_of(words_of(compiled[1::2]), arch):
        try:
            if table.encode(instruction) != word:
                wrong.append(instruction.key)
        except SassError:
            continue
    assert wrong == []


def test_compiled_code_has_no_hazard(corpus):
    arch, compiled = corpus
    table = committed_table(arch)
    for program in disassemble_all([c.cubin for c in compiled if c.scheduled]):
        assert check_hazards(program, table) == [], program.kernel


def test_compiled_code_never_names_the_reserved_registers(corpus):
    arch, compiled = corpus
    table = committed_table(arch)
    for program in disassemble_all([c.cubin for c in compiled if c.scheduled]):
        named = {
            register
            for s in program.statements
            for register in touched(s.instruction, table.forms.get(s.instruction.key))
        }
        highest = max(number for file, number in named if file == "R")
        assert highest == program.registers - 1, (program.kernel, highest, program.registers)


@pytest.mark.parametrize("name", ["copy", "w2_gemm_bf16", "w2_gemm_e4m3"])
def test_a_linked_kernel_passes_the_audit(name, tmp_path):
    import moet_kernels.sass.kernels as folder

    program = kernel_source(name)
    table = committed_table(program.arch)
    program = tuned(program, table)
    twin = tmp_path / "twin.cubin"
    compile_cuda(
        __import__("pathlib").Path(folder.__file__).parent / f"{name}.cu", twin, program.arch.name
    )
    words = assemble(program, table)
    image = link(twin.read_bytes(), program, words)
    assert audit(Cubin(image), name, table, program) == []
    assert Cubin(image).registers(name) == program.registers + RESERVED_REGISTERS


@pytest.mark.parametrize("arch", [SM90A, SM120A], ids=lambda a: a.name)
def test_one_operation_kernels_equal_numpy(arch, tmp_path):
    source, cubin = tmp_path / "one_ops.ptx", tmp_path / "one_ops.cubin"
    source.write_text(ptx_module(arch.name))
    compile_ptx(source, cubin, arch.name, "-O3")
    programs = {program.kernel: program for program in disassemble_all([Cubin.open(cubin)])}
    for op in ONE_OPS:
        words = inputs_of(op.kind, 0)
        buffers = [Buffer.empty(1 << 16, 8 * THREADS), Buffer.of(1 << 20, words)]
        launch = Launch((1, 1, 1), THREADS, struct.pack("<QQ", 1 << 16, 1 << 20))
        emulate(programs[op.name], launch, buffers)
        if op.truth is not None:
            with np.errstate(all="ignore"):
                want = op.truth(words[:THREADS], words[THREADS : 2 * THREADS], words[-THREADS:])
            assert (buffers[0].data.view(np.uint32)[:THREADS] == want).all(), op.name


def test_disassembled_kernels_keep_their_words(tmp_path):
    source, cubin = tmp_path / "one_ops.ptx", tmp_path / "one_ops.cubin"
    source.write_text(ptx_module("sm_90a"))
    compile_ptx(source, cubin, "sm_90a", "-O3")
    compiled = Cubin.open(cubin)
    program = disassemble(compiled, "fma_f32")
    words = assemble(program, committed_table(SM90A))
    assert words == compiled.words("fma_f32")[: len(words)]
