"""Read from CUDA's driver library which GPUs a program started here would see.

NVML cannot tell whether a GPU is integrated, and lists GPUs that CUDA is configured to hide. The driver API
(libcuda.so.1, called through ctypes, so that neither torch nor a CUDA toolkit is needed) can:

    cuInit -> cuDeviceGetCount -> name, uuid, PCI address, memory total, attributes of each

Cost: `cuInit` opens every visible GPU, which takes 0.1 s to some seconds (longest where no process holds the
driver open), and about 100 MiB of address space. No context is made: a context would take hundreds of MiB on the
GPU. Free memory can only be read with a context, so it is not read here.

After `cuInit` a process must not fork and use CUDA in the child: CUDA fails there. A driver can also hang forever. So
`ask_in_child` queries the driver in a process of its own, with a time limit, and the caller never initialises CUDA;
every part of the engine without torch uses that. `ask_here` is for a process that will use CUDA anyway. `python -m
engine.machine.cuda_driver` prints what it found as one JSON line.

CUDA numbers its GPUs by `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`, NVML by PCI address. The two are
matched by uuid and PCI address (`memory_class.match_gpus`), never by number. A MIG instance has its own uuid
and the PCI address of the whole GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine import child
from engine.machine.cuda_facts import NO, YES, CudaDevice, CudaFacts, CudaState, from_json, to_json
from engine.machine.reading import Reading, absent, measured

LIBRARY = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
TIME_LIMIT_S = 20.0
"""Seconds that the driver may take; eight GPUs without a persistence daemon take about ten."""
_KILL_LIMIT_S = 1.0

# CUdevice_attribute of cuda.h: part of the driver's ABI.
ATTRIBUTES = {
    "multiprocessors": 16,
    "integrated": 18,
    "l2_bytes": 38,
    "unified_addressing": 41,
    "managed_memory": 83,
    "host_native_atomics": 86,
    "pageable_memory_access": 88,
    "concurrent_managed_access": 89,
    "uses_host_page_tables": 100,
}
_COUNTS = ("multiprocessors", "l2_bytes")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NO_DEVICE = 100
_HINTS = {
    34: "the library is a stub for linking, not a driver: it comes first in the library path",
    46: "the GPU is in use by a process that allows no other (compute mode)",
    802: "the system is not ready: on a machine with NVSwitch the fabric manager has to run",
    803: "the NVIDIA driver in the kernel and its library differ in version: reboot after an update",
    804: "the compatibility libraries in use do not support this GPU",
    805: "the MPS server does not answer",
    999: "the driver gives no reason: often its device files are missing or it needs a reboot",
}


class CudaError(Exception):
    """A driver API call that failed; its text is the reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Driver:
    """The functions of the library, with every return code checked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(500, f"the driver has no function {name}") from None
        code = function(*arguments)
        if code:
            raise CudaError(code, self._reason(code))

    def _reason(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        name = known.decode("ascii", "replace") if known else f"CUDA error {code}"
        return f"{name}: {_HINTS[code]}" if code in _HINTS else name

    def number(self, name: str, kind: type[Any], *arguments: Any) -> int:
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return int(value.value)

    def text(self, name: str, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.call(name, buffer, len(buffer), device)
        return buffer.value.decode("utf-8", "replace")

    def uuid(self, device: int) -> str:
        """Return the uuid. The _v2 call gives a MIG instance its own."""
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", raw, device)
        return str(uuid.UUID(bytes=bytes(raw)))

    def attribute(self, number: int, device: int) -> int:
        return self.number("cuDeviceGetAttribute", ctypes.c_int, number, device)


def ask_here(environ: Mapping[str, str] = os.environ) -> CudaFacts:
    """Query the driver in this process, which must not fork and use CUDA in the child afterwards."""
    visible = environ.get(VISIBLE)
    try:
        driver = _Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        none = absent(f"no CUDA driver library on this machine: {error}", LIBRARY)
        return CudaFacts(state=CudaState.NO_LIBRARY, count=none, driver=none, visible=visible)
    version = _read(
        "cuDriverGetVersion",
        lambda: _version(driver.number("cuDriverGetVersion", ctypes.c_int)),
    )
    call = "cuInit"
    try:
        driver.call(call, 0)
        call = "cuDeviceGetCount"
        count = driver.number(call, ctypes.c_int)
        if count == 0:
            raise CudaError(_NO_DEVICE, "CUDA lists no GPU")
    except CudaError as error:
        state, reason = CudaState.BROKEN, str(error)
        if error.code == _NO_DEVICE:
            hidden = visible is not None
            state = CudaState.NONE_VISIBLE if hidden else CudaState.NO_DEVICE
            reason += f": {VISIBLE} is {visible!r}" if hidden else ""
        return CudaFacts(state=state, count=absent(reason, call), driver=version, visible=visible)
    return CudaFacts(
        state=CudaState.WORKS,
        count=measured(count, "cuDeviceGetCount"),
        driver=version,
        visible=visible,
        devices=tuple(_read_device(driver, index) for index in range(count)),
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _read(source: str, ask: Any) -> Reading:
    try:
        return measured(ask(), source)
    except CudaError as error:
        return absent(str(error), source)


def _read_device(driver: _Driver, index: int) -> CudaDevice:
    try:
        device = driver.number("cuDeviceGet", ctypes.c_int, index)
    except CudaError as error:
        gone = absent(str(error), "cuDeviceGet")
        return CudaDevice(index=index, **{f.name: gone for f in fields(CudaDevice)[1:]})

    def attribute(name: str) -> Reading:
        def ask() -> int | str:
            value = driver.attribute(ATTRIBUTES[name], device)
            return value if name in _COUNTS else YES if value else NO

        return _read(f"cuDeviceGetAttribute {name}", ask)

    def capability() -> str:
        major, minor = (driver.attribute(n, device) for n in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
        return f"{major}.{minor}"

    return CudaDevice(
        index=index,
        name=_read("cuDeviceGetName", lambda: driver.text("cuDeviceGetName", device)),
        uuid=_read("cuDeviceGetUuid", lambda: driver.uuid(device)),
        pci_address=_read(
            "cuDeviceGetPCIBusId",
            lambda: normal_pci_address(_pci_text(driver, device)),
        ),
        total_bytes=_read(
            "cuDeviceTotalMem",
            lambda: driver.number("cuDeviceTotalMem_v2", ctypes.c_size_t, device),
        ),
        compute_capability=_read("cuDeviceGetAttribute compute_capability", capability),
        **{name: attribute(name) for name in ATTRIBUTES},
    )


def _pci_text(driver: _Driver, device: int) -> str:
    return driver.text("cuDeviceGetPCIBusId", device)


def normal_pci_address(text: str) -> str:
    """Normalise NVML's `00000000:3B:00.0` and CUDA's `0000:3b:00.0` to one form; other texts become lower case."""
    domain, colon, rest = text.lower().partition(":")
    return f"{domain:0>8}{colon}{rest}"


def ask_in_child(
    environ: Mapping[str, str] = os.environ, limit_s: float = TIME_LIMIT_S
) -> CudaFacts:
    """Query the driver in a child process, which is ended after `limit_s` seconds; the timeout is then the reason."""
    visible = environ.get(VISIBLE)
    command = child.command("engine.machine.cuda_driver")

    def broken(reason: str) -> CudaFacts:
        none = absent(reason, "a process that asks the CUDA driver")
        return CudaFacts(state=CudaState.BROKEN, count=none, driver=none, visible=visible)

    process = subprocess.Popen(
        command,
        env=child.environment(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process inside a hanging driver cannot be ended; it is abandoned and not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_LIMIT_S)
        return broken(f"the driver did not answer within {limit_s:g} s")
    if process.returncode < 0:
        return broken(f"it was ended by {signal.Signals(-process.returncode).name}")
    try:
        return from_json(out.decode("utf-8", "replace").splitlines()[-1])
    except (ValueError, KeyError, IndexError, TypeError):
        lines = err.decode("utf-8", "replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return broken(f"it printed no facts and exited with {process.returncode}{last}")


if __name__ == "__main__":
    print(to_json(ask_here()))
