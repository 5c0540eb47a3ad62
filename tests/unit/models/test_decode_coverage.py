"""Which decoders the steps of generation cover: what can be told without a GPU."""

from __future__ import annotations

import pytest

from engine.models.decode import WIDTHS, _why_not_heads
from tests.support.packed_models import make_config


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(({"head_dim": width}, None) for width in WIDTHS),
        ({"head_dim": 16}, "heads are 16 wide, not 32, 64 or 128"),
        ({"head_dim": 48}, "heads are 48 wide, not 32, 64 or 128"),
        ({"head_dim": 256}, "heads are 256 wide, not 32, 64 or 128"),
        ({"family": "mistral"}, None),
        (
            {"family": "mistral", "sliding_window": 4096},
            "its attention slides a window of 4,096 tokens",
        ),
        ({"family": "smollm3", "layers_without_rope": (1,)}, "1 of its layers have no RoPE"),
        ({"family": "olmo2"}, "its norms are behind attention and mlp"),
        ({"num_attention_heads": 32}, None),
        ({"num_attention_heads": 34}, "17 query heads share one key head, more than 16"),
    ],
)
def test_other_shapes_and_families_are_left_to_the_decoder_in_words(
    changes: dict[str, object], why: str | None
) -> None:
    assert _why_not_heads(make_config(**changes)) == why
