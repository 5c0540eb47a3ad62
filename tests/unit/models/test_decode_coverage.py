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
        ({"num_attention_heads": 32}, None),
        ({"num_attention_heads": 34}, "17 query heads share one key head, more than 16"),
    ],
)
def test_heads_of_other_shapes_are_left_to_the_decoder_in_words(
    changes: dict[str, object], why: str | None
) -> None:
    assert _why_not_heads(make_config(**changes)) == why
