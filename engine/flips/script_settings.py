"""Settings of a training script that is not ours which the probe of `engine watch` can change without the script's help
(`apr_watch/settings.py` does it), each with its values and with what to write in the script to keep it.

    engine watch --set loader.workers=4 -- python train.py
    engine flip --set loader.workers=4 -- python train.py     B with it, A as the script is
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.errors import UsageError
from engine.terminal import clipped

OWN = "the script's own"
"""The value of a setting that is not changed, in words."""
SWITCH = ("on", "off")
MOST_WORKERS = 256


class ScriptSetting(NamedTuple):
    what: str
    values: tuple[str, ...]
    """Allowed values; if empty, a number of processes."""
    by_hand: str
    """Code that sets it in the script, with `{}` for the value."""


SCRIPT_SETTINGS: dict[str, ScriptSetting] = {
    "loader.workers": ScriptSetting(
        "processes that read and prepare the batches of each DataLoader", (), "num_workers={}"
    ),
    "loader.pin_memory": ScriptSetting(
        "batches in page-locked memory, which a GPU copies faster",
        SWITCH,
        "pin_memory: {} of each DataLoader",
    ),
    "loader.persistent_workers": ScriptSetting(
        "workers that are kept from one epoch to the next",
        SWITCH,
        "persistent_workers: {} of each DataLoader",
    ),
    "attention.backend": ScriptSetting(
        "the kernel of scaled_dot_product_attention; math where it cannot be used",
        ("flash", "efficient", "cudnn", "math"),
        "torch.nn.attention.sdpa_kernel or torch.backends.cuda.enable_*_sdp: {} alone",
    ),
    "matmul.precision": ScriptSetting(
        "precision of float32 matmuls on a GPU: high may use TF32",
        ("highest", "high", "medium"),
        'torch.set_float32_matmul_precision("{}")',
    ),
    "cudnn.benchmark": ScriptSetting(
        "measure convolutions and take the fastest", SWITCH, "torch.backends.cudnn.benchmark: {}"
    ),
    "torch.deterministic": ScriptSetting(
        "algorithms that give the same bits each time",
        SWITCH,
        "torch.use_deterministic_algorithms: {}",
    ),
}


def read_script_settings(texts: Iterable[str]) -> dict[str, str]:
    """Read `NAME=VALUE` of each setting that is to be changed. Raises UsageError with what is allowed."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        setting = SCRIPT_SETTINGS.get(name)
        if setting is None or not equals:
            known = ", ".join(SCRIPT_SETTINGS)
            raise UsageError(
                f"--set {clipped(text, 40)!r}: expected NAME=VALUE with a setting of a script, one of {known}",
                hint="to set an environment variable: engine watch --env NAME=VALUE, or engine flip --env-b NAME=VALUE",
            )
        if setting.values:
            allowed, is_one = ", ".join(setting.values), value in setting.values
        else:
            allowed = f"a number from 0 to {MOST_WORKERS}"
            is_one = value.isascii() and value.isdecimal() and int(value[:9]) <= MOST_WORKERS
        if not is_one:
            raise UsageError(f"--set {name}: expected {allowed}, found {clipped(value, 40)!r}")
        found[name] = value if setting.values else str(int(value))
    return found


def by_hand(name: str, value: str) -> str:
    """Return the code that sets a setting in the script."""
    return SCRIPT_SETTINGS[name].by_hand.format(value)
