"""Tokens a second of generation, beside transformers' `generate` in the same run.

    python -m evidence.generation.speed --shape qwen2.5-0.5b --out evidence/generation/speed.json

Random weights of a real shape; prompts of 256 tokens, 512 new ones, none ends before that; temperature 1 without
cuts; log-probabilities returned; prompts in the time. With 1,024 sequences there are 64 prompts, each 16 times.
The bound of a step is one read of all weights and of the keys and values of all sequences in the middle of the
run, at the rate of a copy in the same run. transformers has an fp32 student under autocast, as a trainer has it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from engine.generation.generate import generate
from engine.generation.sampling import Sampling
from engine.generation.size import token_bytes
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from evidence.bench.shapes import config_named

PROMPTS_OF_MANY = 64


def random_decoder(config: ModelConfig) -> Decoder:
    """Return a model with random weights, made on the GPU."""
    with torch.device("cuda"):
        decoder = Decoder(config).to(torch.bfloat16)
    decoder.init_weights(torch.Generator("cuda").manual_seed(0))
    return decoder.eval()


def copy_rate() -> float:
    """Return the bytes a second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun_s)
    return 2 * source.numel() / best


def prompts_of(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    different = min(rows, PROMPTS_OF_MANY)
    made = torch.randint(config.vocab_size, (different, length), generator=generator).tolist()
    return [made[row * different // rows] for row in range(rows)]


def ours(decoder: Decoder, rows: int, length: int, new: int) -> float:
    """Return the seconds of one generation."""
    prompts = prompts_of(decoder.config, rows, length)
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    count = sum(
        1
        for _ in generate(
            decoder, prompts, max_tokens=new, slots=rows, sampling=Sampling(temperature=1.0)
        )
    )
    assert count == rows * new
    return time.perf_counter() - begun_s


def theirs(config: ModelConfig, rows: int, length: int, new: int) -> float:
    """Return the seconds of transformers' `generate`."""
    import transformers

    library: Any = transformers
    values = {key: each for key, each in config.to_hf_dict().items() if key != "architectures"}
    with torch.device("cuda"):
        model = library.Qwen2ForCausalLM(library.Qwen2Config(**values)).eval()
    ids = torch.tensor(prompts_of(config, rows, length), device="cuda")
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    assert found.shape == (rows, length + new)
    return time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rival", type=int, nargs="*", default=[], help="rows of transformers")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = config_named(given.shape)
    decoder = random_decoder(config)
    rate = copy_rate()
    weights = sum(each.nbytes for each in decoder.parameters())
    found: list[dict[str, Any]] = []
    for rows in given.rows:
        ours(decoder, rows, given.prompt, 8)
        seconds = min(ours(decoder, rows, given.prompt, given.new) for _ in range(2))
        middle = given.prompt + given.new / 2
        step_bytes = weights + rows * middle * token_bytes(config, 2)
        bound = rows * rate / step_bytes
        speed = rows * given.new / seconds
        row = {"arm": "engine", "rows": rows, "seconds": seconds, "tokens_per_s": speed}
        found.append({**row, "of_bound": speed / bound})
        print(json.dumps(found[-1]), flush=True)
    del decoder
    for rows in given.rival:
        seconds = theirs(config, rows, given.prompt, given.new)
        speed = rows * given.new / seconds
        row = {"arm": "transformers", "rows": rows, "seconds": seconds, "tokens_per_s": speed}
        found.append(row)
        print(json.dumps(row), flush=True)
    if given.out is not None:
        device = torch.cuda.get_device_name()
        about = {"shape": given.shape, "prompt": given.prompt, "new": given.new, "device": device}
        about |= {"copy_bytes_per_s": rate}
        given.out.write_text(json.dumps({**about, "arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
