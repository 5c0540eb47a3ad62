"""Settings from environment variables, under names that users of earlier tools know.

    MANAGED_MEMORY=1                             memory.allocator=managed      (0: native)
    APR_DISTILL_TEACHER_BACKEND=cudatrainer      teacher.backend=dequantized   (realizar-q4k: quantized)

Each variable becomes one `--set KEY=VALUE`, so that it is checked, logged and hashed like any other setting. An empty
variable counts as not set. Any value that is not listed is refused with the allowed values: a misspelt setting must
not silently become a default.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import SpecError

ALIASES: dict[str, tuple[str, dict[str, str]]] = {
    "MANAGED_MEMORY": ("memory.allocator", {"1": "managed", "0": "native"}),
    "APR_DISTILL_TEACHER_BACKEND": (
        "teacher.backend",
        {"auto": "auto", "cudatrainer": "dequantized", "realizar-q4k": "quantized"},
    ),
}
"""Variable -> (key of the RunSpec, value of the variable -> value of the key)."""


# contract: cuda-unified-memory-allocator-v1
def sets_from_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the settings in `environ` as `KEY=VALUE`, to be applied before those of the command line.

    Raises SpecError with one line for each variable whose value is not listed.
    """
    sets: list[str] = []
    problems: list[str] = []
    for variable, (key, values) in ALIASES.items():
        value = environ.get(variable, "")
        if not value:
            continue
        if value in values:
            sets.append(f"{key}={values[value]}")
        else:
            allowed = ", ".join(values)
            problems.append(
                f"{variable}: the environment — expected one of {allowed}, found {value!r}"
            )
    if problems:
        raise SpecError(problems, hint="unset it, or choose with --set")
    return sets
