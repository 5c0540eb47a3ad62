"""Documents of the corpus that are read and tokenized again are in the rows of their split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checks.context import Context
from engine.checks.data import documents_in_rows
from engine.data import token_cache
from engine.data import tokens as tokens_module
from engine.data.packing import PACKINGS
from engine.data.token_cache import Recipe, load_tokens
from engine.data.tokens import Encoder, TokenStream, make_stream, read_again
from engine.verdict import Level
from tests.support.checked_runs import World, make_run, make_world
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def with_rows(world: World, source: Path, root: Path, **other: Any) -> Context:
    """The context of a run whose rows are made of this source; tokens are kept in `root`."""
    encoder = Encoder(tokenizer=world.tokenizer)
    recipe = Recipe(
        source=str(source),
        include_tests=False,
        columns=(),
        heldout_fraction=0.2,
        encoder=encoder,
        seq_len=32,
        **({"max_bytes": None, "packing": "stream"} | other),
    )
    tokens = load_tokens(recipe, root=root)
    context = make_run(world).context
    data = dataclasses.replace(
        context.spec.data, corpus=str(source), max_bytes=recipe.max_bytes or 0
    )
    return dataclasses.replace(
        context,
        spec=dataclasses.replace(context.spec, data=data),
        train_stream=tokens.train,
        heldout_stream=tokens.heldout,
        sampled_documents=tokens.sampled_documents,
        read_again=lambda names: read_again(
            names, encoder, str(source), include_tests=False, columns=()
        ),
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("max_bytes", [None, 3000])
def test_rows_hold_the_documents_of_their_corpus(
    world: World, kit: Kit, tmp_path: Path, packing: str, max_bytes: int | None
) -> None:
    context = with_rows(world, kit.corpus, tmp_path, packing=packing, max_bytes=max_bytes)
    found = documents_in_rows(context)
    assert found.verdict.level is Level.PASS, found.verdict
    assert found.numbers["looked_at"] == len(context.sampled_documents) >= 5


def test_what_is_lost_between_corpus_and_rows_is_named(
    world: World, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(*given: Any) -> Iterator[tuple[int, int]]:
        """Every second document is there twice, and its neighbour is left out: the count is right."""
        placed = list(places(*given))
        return (placed[2 * (i // 2)] for i in range(len(placed)))

    places = token_cache.places
    monkeypatch.setattr(token_cache, "places", doubled)
    context = with_rows(world, kit.corpus, tmp_path, max_bytes=6000)
    assert documents_in_rows(context).verdict.level is Level.FAIL


def other_token(held: TokenStream) -> TokenStream:
    tokens = held.tokens.copy()
    tokens[held.starts[1:][held.lengths > 0] - 1] += 1
    return make_stream(tokens, held.starts)


def nothing_at_all(held: TokenStream) -> TokenStream:
    return make_stream(held.tokens[:1], held.starts[:2].clip(max=1))


@pytest.mark.parametrize("change", [other_token, nothing_at_all])
def test_rows_of_another_corpus_are_named(
    world: World, kit: Kit, tmp_path: Path, change: Callable[[TokenStream], TokenStream]
) -> None:
    context = with_rows(world, kit.corpus, tmp_path)
    stale = dataclasses.replace(context, heldout_stream=change(context.heldout_stream))
    found = documents_in_rows(stale).verdict
    assert (
        found.level is Level.FAIL
        and "is expected whole in the held-out rows, found in no rows" in found.reason
    )


def test_a_document_of_both_splits_is_named(world: World, kit: Kit, tmp_path: Path) -> None:
    context = with_rows(world, kit.corpus, tmp_path)
    train, held = context.train_stream, context.heldout_stream
    both = make_stream(
        np.concatenate([train.tokens, held.tokens]),
        np.append(train.starts, held.starts[1:] + len(train)),
    )
    found = documents_in_rows(dataclasses.replace(context, train_stream=both)).verdict
    assert found.level is Level.FAIL and "found in training and held-out rows" in found.reason


def test_a_copy_of_held_out_text_is_not_missed(world: World, tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for n in range(60):
        (source / f"{n}.txt").write_text(f"{n // 2} is there twice\n" * 9)
    context = with_rows(world, source, tmp_path / "tokens")
    found = documents_in_rows(context)
    assert found.verdict.level is Level.PASS and found.numbers["looked_at"] > 16


def test_documents_are_read_again_for_no_longer_than_a_second(
    world: World, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "AGAIN_SECONDS", -1.0)
    context = with_rows(world, kit.corpus, tmp_path)
    assert documents_in_rows(context).numbers["looked_at"] == 1
    nobody = dataclasses.replace(context, read_again=lambda names: iter(()))
    assert documents_in_rows(nobody).verdict.level is Level.UNKNOWN
