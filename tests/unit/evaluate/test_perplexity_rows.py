"""`engine eval ppl` asks its model once for each row, and every token of a document after its first is predicted."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.evaluate.model import open_model
from engine.evaluate.perplexity import perplexity, read_documents
from tests.support.kit import Kit

LENGTH = 50


def test_every_row_is_asked_for_once_with_the_last_tokens_of_a_document(kit: Kit) -> None:
    model, documents = open_model(kit.teacher), read_documents(str(kit.corpus))[0][:3]
    ids = model.tokenizer.encode_documents([one.text for one in documents])
    asked: list[int] = []
    hidden = model.decoder.hidden

    def counted(tokens_BT: Tensor, *arguments: Tensor) -> Tensor:
        asked.append(tokens_BT.numel())
        return hidden(tokens_BT, *arguments)

    model.decoder.hidden = counted  # type: ignore[assignment, method-assign]
    with torch.inference_mode():
        found = perplexity(model, documents, length=LENGTH)
    # The end of the text is predicted too.
    assert [one.tokens for one in found.documents] == [len(each) for each in ids]
    rows = [min(LENGTH, len(one) - begin) for one in ids for begin in range(0, len(one), LENGTH)]
    assert any(row < LENGTH for row in rows)
    assert asked == rows
