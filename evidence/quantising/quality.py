"""Compare the error of the engine's quantiser with that of llama.cpp's, on the same tensors.

    .venv/bin/python evidence/quantising/quality.py --library PATH/libggml.so >
    evidence/quantising/quality.json

`libggml.so` is built from llama.cpp's sources (the packages named llama-cpp-python carry them).
Each figure is the engine's relative RMS error over llama.cpp's, so below 1 is better; `best` takes the lower of
llama.cpp's two ways, without and with an importance matrix of ones.
"""

import argparse
import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from engine.quant.blocks import BLOCK_TYPES, row_bytes
from engine.quant.quantize import quantize

TEACHER = Path(__file__).resolve().parents[2] / "engine/demo/teacher/model.safetensors"
TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q5_0")


class InitParameters(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.ggml_init.restype = ctypes.c_void_p
    library.ggml_init(InitParameters(1 << 20, None, False))  # fills the table of 16-bit floats
    call = library.ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
    return library


def theirs(library: ctypes.CDLL, values: torch.Tensor, name: str, ones: bool) -> torch.Tensor:
    type_ = BLOCK_TYPES[name]
    x = np.ascontiguousarray(values.numpy(), dtype=np.float32)
    rows, columns = x.shape
    out = np.zeros((rows, row_bytes(type_, columns)), np.uint8)
    matrix = np.ones(columns, np.float32).ctypes.data if ones else None
    library.ggml_quantize_init(type_.ggml_id)
    written = library.ggml_quantize_chunk(
        type_.ggml_id, x.ctypes.data, out.ctypes.data, 0, rows, columns, matrix
    )
    assert written == out.size
    kind = getattr(gguf.GGMLQuantizationType, name)
    return torch.from_numpy(gguf.quants.dequantize(out, kind))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(512, 1024, generator=generator) * 0.02
    chi = torch.randn(512, 1024, 4, generator=generator).square().sum(-1) / 4
    heavy = torch.randn(512, 1024, generator=generator) / chi.sqrt() * 0.02
    weights = [w.float() for w in load_file(TEACHER).values() if w.ndim == 2]
    real = torch.cat([w.reshape(-1, 256) for w in weights if w.shape[1] % 256 == 0])
    return {"gaussian": gauss, "student-t(4)": heavy, "demo teacher": real}


def error(values: torch.Tensor, approximation: torch.Tensor) -> float:
    return float((values - approximation).double().norm() / values.double().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    library = open_library(parser.parse_args().library)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name in TYPES:
        for what, values in tensors().items():
            plain = error(values, theirs(library, values, name, ones=False))
            ones = error(values, theirs(library, values, name, ones=True))
            ours = error(values, quantize(values, BLOCK_TYPES[name]).dequantize())
            table.setdefault(name, {})[what] = {
                "ours": round(ours, 6),
                "theirs": round(plain, 6),
                "ours_over_theirs": round(ours / plain, 4),
                "ours_over_best": round(ours / min(plain, ones), 4),
            }
    worst = max(r["ours_over_best"] for rows in table.values() for r in rows.values())
    print(json.dumps({"worst_ours_over_best": worst, "types": table}, indent=1))
    raise SystemExit(worst > 1.02)


main()
