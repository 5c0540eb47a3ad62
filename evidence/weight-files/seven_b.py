"""What a 7B file costs to look at and to open: `.venv/bin/python evidence/weight-files/seven_b.py
FOLDER`.

Writes a GGUF of Qwen2.5-7B's shapes and vocabulary size in Q4_K and Q6_K with random blocks (about
4.7 GB) into FOLDER, times `engine inspect`, opens the file, takes every tensor, and reports the
private memory of the process before and after. Removes it.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.formats.gguf_write import write_gguf
from engine.formats.open import open_weights
from engine.models.config import ModelConfig
from engine.models.names import expected_tensors
from engine.quant.blocks import BLOCK_TYPES, row_bytes
from engine.quant.tensor import QuantTensor

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, object]]:
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield name, torch.ones(shape)
            continue
        type_ = BLOCK_TYPES[
            "Q6_K" if "output" in name or "embd" in name or "attn_v" in name else "Q4_K"
        ]
        rows, columns = shape
        blocks = torch.randint(0, 120, (rows, row_bytes(type_, columns)), dtype=torch.uint8)
        yield name, QuantTensor(blocks, type_, shape)


def main(folder: Path) -> None:
    path = folder / "seven_b.gguf"
    shapes = expected_tensors(ModelConfig.from_dict(CONFIG, "here"), "gguf")
    write_gguf(path, config=CONFIG, tensors=random_tensors(shapes))
    try:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "engine", "inspect", str(path), "--json"]
        inspected = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        inspect_s = time.perf_counter() - begun
        before = private_bytes()
        begun = time.perf_counter()
        with open_weights(path) as weights:
            open_s = time.perf_counter() - begun
            kept = [weights.get(name) for name in weights.tensors]
            touched = sum(int(t.blocks[0, 0]) if isinstance(t, QuantTensor) else 0 for t in kept)
            after = private_bytes()
        assert touched >= 0
        print(
            json.dumps(
                {
                    "file_bytes": path.stat().st_size,
                    "inspect_s": round(inspect_s, 3),
                    "open_s": round(open_s, 4),
                    "tensors": len(kept),
                    "private_bytes_more_with_every_tensor_taken": after - before,
                    "inspect_says": {
                        k: v for k, v in inspected.items() if not isinstance(v, list | dict)
                    },
                },
                indent=1,
            )
        )
    finally:
        path.unlink()


main(Path(sys.argv[1]))
