"""What a patch is, and how it is checked and applied."""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from vllm.logger import init_logger

from moet_core.errors import ConfigError

__all__ = ["Patch", "Target", "apply_patches", "check_target", "find_target"]

logger = init_logger("vllm.moet")


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """The replacement of one upstream function.

    Attributes:
        name: What it is called in log and reports.
        target: The function it replaces, as `module:name`.
        reason: What is wrong with that function, in one sentence.
        upstream: Where upstream tracks the fault.
        sha256: SHA-256 of the function's source, the only one that the patch fits.
        applies: Tells from vLLM's VllmConfig whether this engine needs the patch.
        apply: Puts the replacement in place. It gets the VllmConfig and may refuse it with a
            ConfigError.
    """

    name: str
    target: str
    reason: str
    upstream: str
    sha256: str
    applies: Callable[[Any], bool]
    apply: Callable[[Any], None]


class Target(msgspec.Struct, frozen=True):
    """The source that a patch would replace, as it is installed.

    Attributes:
        file: The file it is in.
        sha256: SHA-256 of the function's source.
    """

    file: str
    sha256: str


_applied: set[str] = set()


def find_target(patch: Patch) -> Target:
    """Find what a patch replaces.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, name = patch.target.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The patch {patch.name} replaces {name} of {module_name}, and that is not there "
            f"({error}). {_advice(patch)}"
        ) from error
    digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    return Target(inspect.getfile(function), digest)


def check_target(patch: Patch) -> None:
    """Refuse to patch any source other than the one that the patch was written against.

    Raises:
        ConfigError: Another source, or none.
    """
    found = find_target(patch)
    if found.sha256 != patch.sha256:
        raise ConfigError(
            f"The patch {patch.name} replaces {patch.target} in {found.file}: wanted source of "
            f"sha256 {patch.sha256}, found {found.sha256}. {_advice(patch)}"
        )


def apply_patches(patches: Iterable[Patch], vllm_config: Any) -> None:
    """Apply the patches that an engine needs, each once in a process, and say so in the log.

    Raises:
        ConfigError: A patch that is needed does not fit the installed vLLM, or refuses the config.
    """
    for patch in patches:
        if patch.name in _applied or not patch.applies(vllm_config):
            continue
        check_target(patch)
        patch.apply(vllm_config)
        _applied.add(patch.name)
        logger.info("moet: patch %s applied: %s (%s)", patch.name, patch.reason, patch.upstream)


def _advice(patch: Patch) -> str:
    return (
        f"It mends this: {patch.reason} ({patch.upstream}). Install the vLLM that this moet names, "
        "unmodified, or leave out the option that needs the patch."
    )
