"""What can go wrong between a line of SASS and its execution."""

from enum import StrEnum

from moet_core.errors import MoetError

__all__ = ["EmulationError", "Fault", "Flaw", "SassError", "SourceError", "ToolError"]


class SassError(MoetError):
    """Base of every error of the toolchain."""


class ToolError(SassError):
    """A program of the CUDA toolkit is missing or refused its input.

    Args:
        message: what happened, a complete sentence.
        said: everything that the program said.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class Flaw(StrEnum):
    """Why a source line cannot be assembled."""

    SYNTAX = "syntax"
    UNKNOWN_FORM = "unknown form"
    OPERAND = "operand out of reach"
    ALIGNMENT = "register alignment"
    REGISTER_BOUND = "register bound"
    CONTROL = "control field"
    LABEL = "label"
    DIRECTIVE = "directive"


class SourceError(SassError):
    """A flaw in a source file, with its place.

    Args:
        flaw: which kind.
        line: line of the source, from 1.
        column: column of the source, from 1.
        message: what was wanted and what was found, a complete sentence.
    """

    def __init__(self, flaw: Flaw, line: int, column: int, message: str) -> None:
        super().__init__(f"line {line}, column {column}: {flaw}: {message}")
        self.flaw = flaw
        self.line = line
        self.column = column
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return SourceError, (self.flaw, self.line, self.column, self.message)


class Fault(StrEnum):
    """Why an emulated kernel was stopped."""

    OUT_OF_BOUNDS = "out of bounds"
    MISALIGNED = "misaligned"
    UNINITIALISED = "uninitialised read"
    RACE = "race on shared memory"
    IN_FLIGHT = "not waited for"
    DEADLOCK = "deadlock"
    RUNAWAY = "too many steps"
    UNSUPPORTED = "not emulated"


class EmulationError(SassError):
    """A fault of an emulated kernel, with the instruction and the first thread it hit.

    Args:
        fault: which kind.
        address: byte address of the instruction in the kernel.
        instruction: its text.
        thread: (block, thread in the block), both linear; None where no thread is to blame.
        message: what happened, a complete sentence.
    """

    def __init__(
        self,
        fault: Fault,
        address: int,
        instruction: str,
        thread: tuple[int, int] | None,
        message: str,
    ) -> None:
        who = "" if thread is None else f", block {thread[0]}, thread {thread[1]}"
        super().__init__(f"{fault} at {address:#06x} `{instruction}`{who}: {message}")
        self.fault = fault
        self.address = address
        self.instruction = instruction
        self.thread = thread
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.fault, self.address, self.instruction, self.thread, self.message)
        return EmulationError, parts
