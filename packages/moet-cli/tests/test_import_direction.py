"""Imports point one way: cli -> vllm -> {kernels, store} -> core."""

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2]
MAY_IMPORT = {
    "moet_core": set(),
    "moet_kernels": {"moet_core"},
    "moet_store": {"moet_core"},
    "moet_vllm": {"moet_core", "moet_kernels", "moet_store"},
    "moet_cli": {"moet_core", "moet_kernels", "moet_store", "moet_vllm"},
}
FORBIDDEN = {
    "moet_core": {"torch", "vllm"},
    "moet_kernels": {"vllm"},
    "moet_store": {"torch", "vllm"},
    "moet_vllm": set(),
    "moet_cli": {"vllm"},
}


def imported(source: Path) -> set[str]:
    """Top-level names of every module that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    folder = PACKAGES / package.replace("_", "-") / "src" / package
    files = sorted(folder.rglob("*.py"))
    assert files, f"no sources of {package} in {folder}"
    above = set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
    wrong = {
        str(file.relative_to(PACKAGES)): sorted(found)
        for file in files
        if (found := imported(file) & (above | FORBIDDEN[package]))
    }
    assert not wrong, f"imports against the direction: {wrong}"
