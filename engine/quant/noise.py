"""How far the answers of a quantized model are from those of the model it was made from, as published.

    KL       mean over tokens of sum_v p_v (ln p_v - ln q_v)     p in 16 bits, q in blocks
    top-1    share of tokens where both rank the same id first

The figures are those of llama.cpp for 7B and 8B models on Wikitext-2 (tools/perplexity/README.md); of
several models the smallest KL: Q4_K_M has 0.0127 for Llama-2-7B and 0.0313 for Llama-3-8B. They are no
property of the format: small models have more noise than large ones, and the text matters too. So they
are a limit to hold a model to, with its own number beside.

No torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Floor(NamedTuple):
    kl: float
    """Nats."""
    agreement: float


NOISE_FLOORS = {
    "q4_k_m": Floor(1.27e-2, 0.9467),
    "q6_k": Floor(2.10e-3, 0.9752),
    "q8_0": Floor(3.7e-4, 0.9885),
}
"""By the name that `engine convert --quant` has for it."""
