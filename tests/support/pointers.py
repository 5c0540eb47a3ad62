"""Query the driver about a tensor's memory: proof, independent of torch, of where it is."""

from __future__ import annotations

import ctypes

from torch import Tensor

from engine.machine.reading import Reading, absent, measured
from engine.runtime.managed import DRIVER

_IS_MANAGED = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED of cuda.h


def is_managed(tensor: Tensor) -> Reading:
    """Return 1 for managed memory, 0 for other CUDA memory; absent when it is not CUDA memory."""
    source = "cuPointerGetAttribute IS_MANAGED"
    if not tensor.is_cuda:
        return absent(f"the tensor is on {tensor.device.type}", source)
    if tensor.numel() == 0:
        return absent("the tensor is empty and has no memory", source)
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        return absent(str(error), source)
    answer = ctypes.c_uint(0)
    code = driver.cuPointerGetAttribute(
        ctypes.byref(answer), ctypes.c_int(_IS_MANAGED), ctypes.c_uint64(tensor.data_ptr())
    )
    if code != 0:
        return absent(f"the driver answered with error {code}", source)
    return measured(int(answer.value != 0), source)
