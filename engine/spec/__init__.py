"""`RunSpec`: every setting of a run, as one frozen tree read from TOML.

Parsing is strict. An unknown key is refused with the nearest known one, a value of the wrong type or out of
range is refused with what was expected, and all problems of a file are reported together with their line
numbers, before anything is loaded. Nothing is read from the environment and nothing changes after loading.

    spec = load_spec(Path("kd.toml"), sets=["loss.alpha=0.3"])

Paths in a spec are relative to the folder of the file that names them. `alpha` is always the weight of the
cross entropy: loss = alpha * CE + (1 - alpha) * T^2 * KL(teacher || student).
"""

from __future__ import annotations

from engine.spec.build import (
    GONE,
    build_spec,
    key_lines,
    load_spec,
    read_spec,
    spec_from_dict,
    spec_of_text,
    spec_to_toml,
)
from engine.spec.sections import (
    CHANGE_RESULTS,
    KEYS,
    LossSection,
    Option,
    RolloutSection,
    RunSpec,
    TrainSection,
    options,
    settings_sha256,
)
from engine.spec.values import parse_set

__all__ = [
    "CHANGE_RESULTS",
    "GONE",
    "KEYS",
    "LossSection",
    "Option",
    "RolloutSection",
    "RunSpec",
    "TrainSection",
    "build_spec",
    "key_lines",
    "load_spec",
    "options",
    "parse_set",
    "read_spec",
    "settings_sha256",
    "spec_from_dict",
    "spec_of_text",
    "spec_to_toml",
]
