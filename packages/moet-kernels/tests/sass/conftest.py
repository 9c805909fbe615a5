import pytest

from moet_kernels.sass.arch import ARCHITECTURES, SM90A
from moet_kernels.sass.table import committed_table

HEADER = """\
.arch sm_90a
.kernel k
.registers 32
.shared 1024
.parameters 8
"""


@pytest.fixture(params=sorted(ARCHITECTURES))
def arch(request):
    return ARCHITECTURES[request.param]


@pytest.fixture
def table():
    return committed_table(SM90A)


@pytest.fixture
def header():
    return HEADER
