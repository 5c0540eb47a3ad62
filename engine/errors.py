"""Define the errors that a user can meet, as a tree of classes.

    EngineError
    ├── UsageError        64   the command line is wrong
    ├── BadInput          65   a file or a setting is wrong
    │   ├── SpecError          one or more settings of a RunSpec
    │   ├── WeightsError       a weight file, or a tensor in it
    │   ├── TokenizerError     a tokenizer file, or its fit to a model
    │   ├── CorpusError        the text to train on
    │   ├── CheckpointError    a checkpoint that does not verify
    │   ├── RunLogError        a run folder or a log in it
    │   └── DiskFull           no disk space for what has to be written
    ├── TrainingFailed     1   the run cannot continue: NaN, infinity
    ├── NoAnswer           2   the question could not be answered: a model without finite logits
    └── InternalError     70   a bug of the engine

Each message reads "what: where — expected X, found Y", then `hint:` if there is one thing to try. The class
determines the exit code, so a command never chooses it. `assert` is for programmer errors only and is not part of
this tree.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Self

from engine.version import VERSION

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_UNKNOWN = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class EngineError(Exception):
    """An error with an exit code and, if there is one thing to try, a hint."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(EngineError):
    """The command line cannot be understood."""

    exit_code = 64


class BadInput(EngineError):
    """The user's input is wrong: nothing was started and nothing was written."""

    exit_code = 65

    @classmethod
    def expected(
        cls, what: str, where: object, expected: str, found: str, *, hint: str | None = None
    ) -> Self:
        """Return the error with a message in the common form: `what: where — expected X, found Y`."""
        return cls(f"{what}: {where} — expected {expected}, found {found}", hint=hint)


class SpecError(BadInput):
    """Invalid settings of a RunSpec; `problems` has one line for each, all found before anything is loaded."""

    def __init__(self, problems: Iterable[str] | str, *, hint: str | None = None) -> None:
        # A str is one problem, not a sequence of letters.
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems), hint=hint)


class WeightsError(BadInput):
    """A weight file that cannot be read, or whose tensors do not fit the model."""


class TokenizerError(BadInput):
    """A tokenizer that cannot be read, or that does not fit the model."""


class CorpusError(BadInput):
    """Training text that is missing, empty or not UTF-8."""


class CheckpointError(BadInput):
    """A checkpoint that is missing or does not verify."""


class RunLogError(BadInput):
    """A run folder, or a log in it, that cannot be used."""


class DiskFull(BadInput):
    """The disk lacks the space for what has to be written."""


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_error(
    what: str, where: object, expected: str, error: OSError, *, when_full: str | None = None
) -> DiskFull | RunLogError:
    """Return the error to raise when a file of a run could not be written.

    If the disk was full, it is DiskFull with the hint `when_full`.
    """
    found = error.strerror or str(error)
    if error.errno in NO_ROOM:
        return DiskFull.expected(what, where, expected, found, hint=when_full)
    return RunLogError.expected(what, where, expected, found)


def missing_engine() -> BadInput:
    """Return the error of a command that needs the engine, where only `apr-workbench-view` is installed."""
    found = "apr-workbench-view, which only shows runs"
    return BadInput(f"expected the engine, found {found}", hint="pip install apr-workbench")


def missing_module(name: str) -> BadInput:
    """Return the error of an installation that lacks a module. The two distributions share files, so uninstalling one
    of them, or an older version, also deletes files that the other has installed since."""
    both = f"apr-workbench-view=={VERSION} apr-workbench=={VERSION}"
    hint = f"pip install --force-reinstall --no-deps {both}"
    return BadInput(f"installation: expected the module {name}, found none", hint=hint)


class TrainingFailed(EngineError):
    """The run cannot continue, for a reason other than invalid input."""

    exit_code = 1


class NoAnswer(EngineError):
    """The question could not be answered; the result is neither good nor bad."""

    exit_code = EXIT_UNKNOWN


class InternalError(EngineError):
    """A broken invariant of the engine's own code."""

    exit_code = 70
