"""A GPU that copies: the driver's calls that the run needs, with faults as FAKE_GPU says.

FAKE_GPU is JSON: `illegal`: words (hexadecimal, control field cleared) that crash when they are
executed; `least_count`: register counts below it crash a kernel of more than one instruction;
`spoilt`: nothing is written. After a crash every call fails.
"""
# ruff: noqa: N802

import ctypes
import enum
import json
import os
import time

from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.cubin import Cubin

FAKE = json.loads(os.environ.get("FAKE_GPU", "{}"))
EXIT = 0x794D  # an EXIT whose guard is PT


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715


OK = (CUresult.CUDA_SUCCESS,)
memory: dict[int, ctypes.Array] = {}
modules: dict[int, bytes] = {}
lost: list[CUresult] = []


def number(name):
    return {int(word, 16) for word in FAKE.get(name, ())}


def done(*values):
    return (lost[0],) if lost else (*OK, *values)


def cuInit(_flags):
    return OK


def cuDeviceGet(index):
    return (*OK, index)


def cuDevicePrimaryCtxRetain(_device):
    return (*OK, 1)


def cuCtxSetCurrent(_context):
    return OK


def cuDeviceGetName(_size, _device):
    return (*OK, b"Fake GPU\0\0")


def cuDriverGetVersion():
    return (*OK, 13000)


def cuModuleLoadData(image):
    modules[len(modules) + 1] = bytes(image)
    return done(len(modules))


def cuModuleUnload(module):
    modules[module] = b""
    return done()


def cuModuleGetFunction(module, kernel):
    return done((modules[module], kernel.decode()))


def cuMemAlloc(size):
    buffer = ctypes.create_string_buffer(size)
    memory[ctypes.addressof(buffer)] = buffer
    return done(ctypes.addressof(buffer))


def cuMemFree(address):
    del memory[int(address)]
    return done()


def cuMemcpyHtoD(target, source, size):
    ctypes.memmove(target, source, size)
    return done()


def cuMemcpyDtoH(target, source, size):
    ctypes.memmove(target, source, size)
    return done()


def cuMemcpyDtoDAsync(target, source, size, _stream):
    ctypes.memmove(target, source, size)
    return done()


def cuMemsetD8Async(address, value, size, _stream):
    ctypes.memset(address, value, size)
    return done()


def cuLaunchKernel(function, *rest):
    if lost:
        return done()
    image, kernel = function
    parameters = ctypes.cast(ctypes.c_void_p.from_address(rest[-1] + 8).value, ctypes.c_void_p)
    execute(Cubin(image), kernel, parameters.value)
    return done()


def execute(cubin, kernel, parameters):
    executed = []
    for word in cubin.words(kernel):
        executed.append(word & ~CONTROL_MASK)
        if word & 0xFFFF == EXIT:
            break
    few = cubin.registers(kernel) < FAKE.get("least_count", 0) and len(executed) > 1
    if few or number("illegal") & set(executed):
        lost.append(CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION)
        return
    if len(executed) > 1 and not FAKE.get("spoilt"):
        target, source = (ctypes.c_uint64.from_address(parameters + at).value for at in (0, 8))
        vectors = ctypes.c_uint32.from_address(parameters + 16).value
        ctypes.memmove(target, source, 16 * vectors)


def cuCtxSynchronize():
    return done()


def cuEventCreate(_flags):
    return done([])


def cuEventRecord(event, _stream):
    event[:] = [time.perf_counter()]
    return done()


def cuEventElapsedTime(first, second):
    return done(1000 * (second[0] - first[0]))
