"""Requirements of a run other than the GPU: packages, a C compiler, access to the kernel log and stacks.

Versions come from package metadata. Nothing is imported, so that a broken torch can still be named.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.machine.host import Host
from engine.machine.kill_counters import read_kill_counters
from engine.machine.reading import Reading, absent, measured
from engine.machine.versions import installed_version
from engine.version import VERSION

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "msgspec",
    "textual",
    "nvidia-ml-py",
)
_RUN_VARIABLES = frozenset(
    {
        *(
            "NVIDIA_VISIBLE_DEVICES",
            "NVIDIA_TF32_OVERRIDE",
            "CUBLAS_WORKSPACE_CONFIG",
            "MANAGED_MEMORY",
        ),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_PROCID"),
        *(
            "SLURM_LOCALID",
            "SLURM_NTASKS",
            "SLURM_NNODES",
            "SLURM_NODEID",
            "KUBERNETES_SERVICE_HOST",
        ),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED"),
        *("VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("CC", "CXX", "LANG", "LC_ALL", "TZ"),
    }
)
_RUN_PREFIXES = (
    *("APR_DISTILL_", "CUDA_", "CUDNN_", "NCCL_", "GLOO_", "HIP_", "ROCR_", "XLA_"),
    *(
        "PYTORCH_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "ACCELERATE_",
        "FSDP_",
        "DEEPSPEED_",
        "DS_",
    ),
    *("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "MALLOC_"),
)
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
_CAP_SYS_PTRACE = 19
LET_ATTACH = (
    "run it with sudo, or allow it: echo 0 > /proc/sys/kernel/yama/ptrace_scope, in a container docker run --cap-add "
    "SYS_PTRACE"
)
"""Advice if another process may not be read."""


NOT_TRIED = absent("not tried", "engine.runtime.rates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    versions: dict[str, Reading]
    c_compiler: Reading
    kernel_log: Reading
    """`readable`, or why the kernel log is not."""
    attach: Reading
    """Who may read the stack of a trainer from another process, as `py-spy dump` does."""
    py_spy: Reading
    memory_pressure_pct: Reading
    vmstat_oom_kill: Reading
    memcg_oom_kill: Reading
    pci_gpus: Reading
    """NVIDIA display devices on the PCI bus. They are listed even without a driver, and in a container that was
    not given them."""
    matmul_flops_per_s: Reading = NOT_TRIED
    copy_bytes_per_s: Reading = NOT_TRIED


def is_run_variable(name: str) -> bool:
    """Return whether an environment variable of that name affects how a run computes; only such variables are kept. The
    caller must still leave out those that hold a secret."""
    return name in _RUN_VARIABLES or name.startswith(_RUN_PREFIXES)


def read_surroundings(
    kernel_log: Reading,
    compilers: Sequence[str],
    host: Host | None = None,
    sys: Path = Path("/sys"),
    version_of: Callable[[str], str | None] = installed_version,
) -> Surroundings:
    """Read the surroundings. `compilers` are the commands that the engine tries, in its order."""
    host = host or Host()
    counters = read_kill_counters(host)
    return Surroundings(
        versions=_versions(version_of),
        c_compiler=_first_command(compilers),
        kernel_log=kernel_log,
        attach=may_attach(host),
        py_spy=_first_command(("py-spy",)),
        memory_pressure_pct=host.psi_pct("memory")[1],
        vmstat_oom_kill=counters.vmstat_oom_kill,
        memcg_oom_kill=counters.memcg_oom_kill,
        pci_gpus=_pci_gpus(sys / "bus/pci/devices"),
    )


def _versions(version_of: Callable[[str], str | None]) -> dict[str, Reading]:
    versions = {
        "engine": measured(VERSION, "engine.version"),
        "python": measured(platform.python_version(), "the interpreter"),
        "C library": measured(
            " ".join(platform.libc_ver()).strip() or "unknown", "the interpreter"
        ),
    }
    for name in PACKAGES:
        version, source = version_of(name), "package metadata"
        versions[name] = (
            absent("not installed", source) if version is None else measured(version, source)
        )
    return versions


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of Python and of packages, None for one that is not installed."""
    return {"python": platform.python_version()} | {
        name: installed_version(name) for name in packages
    }


def find_command(name: str) -> Reading:
    """Find a program on the PATH or next to the interpreter. The folder of a virtual environment is not on the
    PATH of a process that was started by its full name."""
    if path := shutil.which(name):
        return measured(path, "PATH")
    folder = Path(sys.executable).parent
    if path := shutil.which(name, path=str(folder)):
        return measured(path, "next to the interpreter")
    return absent(f"{name} is not on the PATH", "PATH")


def _first_command(commands: Sequence[str]) -> Reading:
    for command in commands:
        if (program := find_command(command)).value is not None:
            return program
    which = commands[0] if len(commands) == 1 else f"none of {', '.join(commands)}"
    return absent(f"{which} is {'not ' if len(commands) == 1 else ''}on the PATH", "PATH")


def may_attach(host: Host | None = None) -> Reading:
    """Return the kernel's rule (Yama's ptrace_scope, 0 without Yama) together with this process's capability."""
    host = host or Host()
    capabilities = host.status_word("CapEff")
    if capabilities.value is not None and int(str(capabilities.value), 16) >> _CAP_SYS_PTRACE & 1:
        return measured("allowed: this user has CAP_SYS_PTRACE", capabilities.source)
    path = host.proc / "sys/kernel/yama/ptrace_scope"
    try:
        scope = path.read_text().strip()
    except OSError:
        return measured("allowed for processes of the same user", "the kernel's default")
    if scope == "0":
        return measured("allowed for processes of the same user", str(path))
    return absent(f"ptrace_scope is {scope}: only a parent or root may attach", str(path))


def _pci_gpus(folder: Path) -> Reading:
    try:
        devices = list(folder.iterdir())
    except OSError as error:
        return absent(f"not readable: {error.strerror}", str(folder))
    count = 0
    for device in devices:
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue  # the device was removed meanwhile
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS)
    return measured(count, f"{folder}/*/vendor, class")
