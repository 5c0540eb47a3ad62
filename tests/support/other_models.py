"""Small models of families that only transformers has: each way in which one may differ from our own decoder."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers

LIBRARY: Any = transformers
SHAPE = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
FEED_FORWARD = dict(SHAPE, intermediate_size=64)
GROUPED = dict(FEED_FORWARD, num_key_value_heads=2)

OTHERS: dict[str, dict[str, Any]] = {
    # A rotation of a part of each head, attention and feed-forward side by side.
    "gpt_neox": dict(FEED_FORWARD, max_position_embeddings=256),
    # One key/value head for all.
    "falcon": SHAPE,
    # Positions that are learnt, tied head.
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    # Positions as a slope of the scores, which no mask of documents can carry.
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4),
    # No attention at all: what a document leaves behind in the state reaches the next.
    "mamba": dict(hidden_size=32, num_hidden_layers=2),
    # A scale of the logits.
    "cohere": GROUPED,
    "granite": dict(GROUPED, logits_scaling=4.0),
    # A cap of the logits.
    "gemma2": dict(GROUPED, head_dim=8),
    # A bias of the logits.
    "phi": FEED_FORWARD,
}
OWN_LOGITS = {"cohere", "granite", "gemma2", "phi"}
ALONE = {"bloom", "mamba"}


def make_other(family: str, *, vocab_size: int = 120, **changes: Any) -> Any:
    """Return a model with weights that are far from its initial ones, so that every part shows in the logits."""
    config = LIBRARY.AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
        **(OTHERS.get(family, {}) | changes),
    )
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LIBRARY.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def save_other(folder: Path, family: str, **changes: Any) -> Any:
    """Save such a model as transformers does, and return it."""
    model = make_other(family, **changes)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    return model
