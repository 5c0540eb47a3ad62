"""What the rows are made of, against a second reader of the corpus (`tests.support.corpus_oracle`)."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.data import chat_labels, conversations, corpus, sources
from engine.data.batches import Batches, gather_rows, labelled_rows
from engine.data.chat_template import Unrenderable
from engine.data.corpus import Document
from engine.data.left_out import Skipped
from engine.data.packing import PACKINGS
from engine.data.token_cache import Recipe, load_tokens
from engine.data.tokens import Encoded, Encoder, TokenStream
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, STYLES, Style, make_tokenizer
from tests.support.chats import conversations as odd_conversations
from tests.support.corpus_oracle import Answers, Made, _wrong_split, read_records, what_is_wrong
from tests.support.prescribed_rows import PrescribedRows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations and texts, some twice, and some that the template cannot write."""
    turns = [
        [("user", f"what is {n}?"), ("assistant", f"{n} is a number of the {n % 7}th kind")]
        for n in range(60)
    ]
    turns += [[("user", f"{n}: nobody answers")] for n in range(9)]
    records: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": text} for role, text in each]} for each in turns
    ]
    records += [{"text": f"record {n % 20} " + "words of it " * (n % 20)} for n in range(25)]
    path = tmp_path_factory.mktemp("chats") / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def read_each(
    encoder: Encoder, source: str, columns: Sequence[str]
) -> Iterator[tuple[str, Encoded]]:
    """Read the documents of a source and tokenize each by itself."""
    for piece in sources.list_pieces(source, include_tests=False, columns=columns):
        if isinstance(piece, Skipped):
            continue
        if piece.is_chat:
            document = Document(name=piece.name, text=piece.text, is_chat=True)
            yield from ((piece.name, encoded) for encoded in encoder.encode([document]))
        else:
            ids = encoder.tokenizer.encode_whole(piece.text)
            whole = np.append(ids, encoder.tokenizer.end_of_text_id)
            yield piece.name, Encoded(ids=whole.astype(encoder.dtype))


def made_of(source: Path, tokenizer: Tokenizer, root: Path | None = None, **other: Any) -> Made:
    """The rows of this source; tokens are kept in `root`."""
    encoder = Encoder(tokenizer=tokenizer, template=CHATML.template())
    recipe = Recipe(
        source=str(source),
        include_tests=False,
        heldout_fraction=0.2,
        encoder=encoder,
        seq_len=32,
        **({"max_bytes": None, "packing": "stream", "columns": ()} | other),
    )
    tokens = load_tokens(recipe, root=root)
    return Made(
        source=str(source),
        streams={"training": tokens.train, "held-out": tokens.heldout},
        documents=tokens.documents,
        left_out=tokens.skipped,
        copies=tokens.dropped_count,
        again=dict(read_each(encoder, str(source), recipe.columns)),
        tokenizer=tokenizer,
        fraction=0.2,
        max_bytes=recipe.max_bytes or 0,
        columns=recipe.columns,
    )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("max_bytes", [None, 4000])
def test_rows_of_conversations_and_texts_hold_their_documents(
    chats: Path, tokenizer: Tokenizer, packing: str, max_bytes: int | None
) -> None:
    made = made_of(chats, tokenizer, packing=packing, max_bytes=max_bytes)
    assert what_is_wrong(made) == [] and len(made.again) >= 10


def every_third_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of = sources.read_records

    def some_of(file: Any) -> Iterator[Any]:
        return (one for number, one in enumerate(all_of(file)) if number % 3)

    monkeypatch.setattr(sources, "read_records", some_of)


def first_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_join_parts", lambda parts, where: parts[0]["text"])


def label_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = np.searchsorted
    monkeypatch.setattr(
        chat_labels,
        "np",
        SimpleNamespace(**vars(np) | {"searchsorted": partial(exact, side="right")}),
    )


def labels_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = chat_labels._label

    def all_behind(*arguments: Any) -> Any:
        found = exact(*arguments)
        if isinstance(found, chat_labels.Chat):
            found.labelled[int(found.labelled.argmax()) :] = True
        return found

    monkeypatch.setattr(chat_labels, "_label", all_behind)


def system_prompts_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = conversations._messages

    def without(*arguments: Any) -> Any:
        return tuple(one for one in exact(*arguments) if one["role"] != "system")

    monkeypatch.setattr(conversations, "_messages", without)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text, some of it in folders and not in ASCII, with what is left out of such a one."""
    root = tmp_path_factory.mktemp("texts")
    for n in range(40):
        folder = root / ("a" if n % 2 else "b/c")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.txt").write_text(f"übung {n} – größer\r\n" + f"words of {n} " * (n % 9 + 1))
    (root / "README.md").write_text("what is here")
    (root / "empty.txt").write_text("")
    (root / "same.txt").write_text((root / "a" / "1.txt").read_text())
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.txt").write_text("hidden")
    (root / "link").symlink_to(root / "a")
    (root / "records.jsonl").write_text('{"text": "one"}\n')
    return root


def folders_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sources._walk

    def flat(root: Path, *parts: Any) -> Iterator[Any]:
        return (one for one in exact(root, *parts) if getattr(one, "parent", root) != root / "a")

    monkeypatch.setattr(sources, "_walk", flat)


def split_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = corpus.hash_of
    monkeypatch.setattr(
        corpus, "hash_of", lambda name: exact(name) ^ (0x80 << 56 if len(name) < 12 else 0)
    )


def another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "decoded", lambda raw, where, start: raw.decode("latin-1"))


@pytest.mark.parametrize(
    ("planted_in", "said"),
    [
        (folders_not_entered, "42 files of text; "),
        (split_turned, "and belongs into the"),
        (another_encoding, "in the rows is not the text of that file of"),
    ],
)
def test_a_folder_of_text_is_read_a_second_time(
    texts: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted_in: Callable[[pytest.MonkeyPatch], None],
    said: str,
) -> None:
    assert what_is_wrong(made_of(texts, tokenizer, tmp_path / "healthy")) == []
    planted_in(monkeypatch)
    found = what_is_wrong(made_of(texts, tokenizer, tmp_path / "planted"))
    assert any(said in one for one in found), found


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of text, one of which is tokenized in three pieces, and one is not in ASCII, nor in its normal form."""
    path = tmp_path_factory.mktemp("long") / "a.jsonl"
    long = "".join(f"line {n} of many\n" for n in range(12_000))
    records = [long, "gro\u0308ßer – und kleiner", *(f"text {n} " * (n + 1) for n in range(30))]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in records))
    return path


def tails_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Tokenizer._chunks

    def first_piece(self: Tokenizer, texts: Any) -> Iterator[tuple[int, str]]:
        seen: set[int] = set()
        return ((n, s) for n, s in exact(self, texts) if n not in seen and not seen.add(n))  # type: ignore[func-returns-value]

    monkeypatch.setattr(Tokenizer, "_chunks", first_piece)


def only_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sources.read_records
    monkeypatch.setattr(
        sources,
        "read_records",
        lambda file: (
            dataclasses.replace(one, text=one.text.encode("ascii", "ignore").decode())
            for one in exact(file)
        ),
    )


def cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(self: Tokenizer, texts: Any) -> Iterator[tuple[int, str]]:
        for number, text in enumerate(texts):
            for first in range(0, len(text), 50_003):
                yield number, text[first : first + 50_003]

    monkeypatch.setattr(Tokenizer, "_chunks", pieces)


def test_a_long_document_that_is_cut_within_a_token_is_named(
    long_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(tmp_path)
    cut_anywhere(monkeypatch)
    found = what_is_wrong(made_of(long_texts, tokenizer, tmp_path / "planted"))
    assert any("is whole in no rows" in one for one in found), found


@pytest.mark.parametrize(
    ("planted_in", "packing", "composes"),
    [
        # What is counted does not depend on the packing.
        (tails_lost, "stream", True),
        (only_ascii, "documents", False),
        *(
            pytest.param(planted, packing, False, marks=pytest.mark.soak)
            for planted in (tails_lost, only_ascii)
            for packing in PACKINGS
        ),
    ],
)
def test_a_document_of_which_something_is_lost_is_named_though_it_is_not_read_again(
    long_texts: Path,
    composes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted_in: Callable[[pytest.MonkeyPatch], None],
    packing: str,
) -> None:
    tokenizer = make_tokenizer(tmp_path, nfc=composes)
    healthy = made_of(long_texts, tokenizer, tmp_path / "healthy", packing=packing)
    assert what_is_wrong(healthy) == []
    planted_in(monkeypatch)
    found = what_is_wrong(made_of(long_texts, tokenizer, tmp_path / "planted", packing=packing))
    assert any(f"1 of 32 documents are as long as no text of {long_texts}" in one for one in found)


def test_a_text_beside_records_whose_columns_are_named_is_no_document(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = tmp_path / "records"
    source.mkdir()
    (source / "notes.txt").write_text("what these are")
    records = [{"body": f"record {n} " * (n % 7 + 1)} for n in range(40)]
    (source / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert what_is_wrong(made_of(source, tokenizer, tmp_path / "tokens", columns=("body",))) == []


@pytest.mark.parametrize("kind", ["texts", "talks", "chats", "long_texts"])
def test_more_than_max_bytes_and_less_than_fit_are_named(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, kind: str
) -> None:
    source: Path = request.getfixturevalue(kind)
    made = made_of(source, tokenizer, max_bytes=3000)
    assert what_is_wrong(made) == []
    more = what_is_wrong(dataclasses.replace(made, max_bytes=500))
    assert any("max_bytes allows 500" in one for one in more)
    # Of a folder, what is known to be left out may be no text.
    if kind != "texts":
        less = what_is_wrong(dataclasses.replace(made, max_bytes=10_000_000))
        assert any("are in a split or known to be left out" in one for one in less)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_prescribed_rows_with_labels_are_those_of_the_loader(
    talks: Path, chats: Path, tokenizer: Tokenizer, packing: str
) -> None:
    for source in (talks, chats):
        stream = made_of(source, tokenizer, packing=packing).streams["training"]
        for length in (3, 8, 32):
            prescribed = PrescribedRows(stream, length, 0)
            wanted = labelled_rows(stream, length, "train")
            assert sorted(prescribed.ids_at(0, prescribed.per_epoch)) == wanted.tolist()
            batches = Batches(stream, seq_len=length, rows_per_batch=4, seed=0)
            ids = prescribed.ids_at(0, 2 * prescribed.per_epoch + 1)
            assert ids.tolist() == batches.row_ids_at(0, len(ids)).tolist()
            found, rows = batches.rows(ids), prescribed.rows(ids)
            wanted_BT = (rows.tokens_BT, rows.documents_BT, rows.labels_BT)
            for one, other in zip(found.to_torch("cpu"), wanted_BT, strict=True):
                assert torch.equal(one, other)


def test_the_prescribed_rows_number_documents_without_a_token_as_the_loader_does() -> None:
    starts = np.array([0, 3, 3, 3, 9, 9, 16], dtype=np.int64)
    stream = TokenStream(tokens=np.arange(16, dtype=np.uint16), starts=starts, sha256="")
    rows = np.array([0, 1], dtype=np.int64)
    found = PrescribedRows(stream, 8, 0).rows(rows)
    assert found.documents_BT.tolist() == gather_rows(stream, 8, rows).documents_BT.tolist()
    assert found.documents_BT.tolist() == [[0] * 3 + [3] * 5, [3] + [5] * 7]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns, some with contents in parts."""
    path = tmp_path_factory.mktemp("talks") / "a.jsonl.gz"
    records = []
    for n in range(80):
        said = [f"what is {n}?", f"{n} is a number", "what kind of one?", f"the {n % 7}th kind"]
        parts: list[Any] = [{"type": "text", "text": f"{n} and"}, {"type": "text", "text": " one"}]
        contents: list[Any] = [*said[:3], parts] if n % 2 else said
        roles = ("user", "assistant") * 2
        records.append(
            {
                "messages": [
                    {"role": "system", "content": "you count"},
                    *[
                        {"role": role, "content": content}
                        for role, content in zip(roles, contents, strict=True)
                    ],
                ]
            }
        )
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)
    return path


@pytest.mark.parametrize(
    ("planted_in", "said"),
    [
        (every_third_lost, "80 records, read by another library; 53 are in a split"),
        (first_part_alone, "has labels on '"),
        (label_moved, "has labels on '"),
        (labels_to_the_end, "has labels on '"),
        (system_prompts_lost, "in front of an answer: 'youcount'"),
    ],
)
def test_what_is_lost_or_mislabelled_between_file_and_documents_is_named(
    talks: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted_in: Callable[[pytest.MonkeyPatch], None],
    said: str,
) -> None:
    assert what_is_wrong(made_of(talks, tokenizer, tmp_path / "healthy")) == []
    planted_in(monkeypatch)
    # Where only a part is taken, nothing says how many records there are to be.
    for most in (None, 100_000) if "records, read" not in said else (None,):
        made = made_of(talks, tokenizer, tmp_path / f"planted-{most}", max_bytes=most)
        found = what_is_wrong(made)
        assert any(said in one for one in found), found


def _writes_system(style: Style) -> bool:
    """Whether the content of a system message is in the rendered text."""
    contents = [(role, f"{role} says") for role in ("system", "user", "assistant")]
    messages = [{"role": role, "content": text} for role, text in contents]
    try:
        return all(text in style.template().render(messages).text for _, text in contents)
    except Unrenderable:
        return False


@pytest.mark.parametrize(
    ("style", "turns"),
    [
        # The last turn alone is taken in the same way, whatever the style.
        pytest.param(style, turns, marks=[pytest.mark.soak] * (turns == "last" and place > 0))
        for place, style in enumerate(STYLES.values())
        for turns in ("all", "last")
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_labels_of_every_style_are_the_answers_of_the_file(
    tokenizer: Tokenizer, tmp_path: Path, style: Style, turns: str
) -> None:
    records = [
        one
        for one in odd_conversations()
        if all(message.keys() == {"role", "content"} for message in one["messages"])
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    made = dataclasses.replace(
        made_of(path, tokenizer, tmp_path / "tokens"),
        turns=turns,
        writes_system=_writes_system(style),
    )
    answers = Answers.of(made, read_records(str(path), ()))
    assert answers is not None
    encoder = Encoder(tokenizer=tokenizer, template=style.template(), turns=cast(Any, turns))
    found = [
        encoder.encode([Document(name="x", text=json.dumps(one), is_chat=True)]) for one in records
    ]
    encoded = [one for each in found for one in each]
    labelled = [one for one in encoded if len(one.ids)]
    assert len(labelled) > 40
    assert [said for one in labelled if (said := answers.not_said(one)) is not None] == []
    assert [text for one in labelled if (text := answers.not_asked(one))] == []


@pytest.fixture(scope="module")
def sources_of(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> dict[str, Path]:
    """A folder of records in several files, one file of text, a folder of text in two encodings, and 400 chats."""
    root = tmp_path_factory.mktemp("sources")
    (root / "records").mkdir()
    for part in range(3):
        lines = [json.dumps({"text": f"{part} text {n} " * 20}) for n in range(40)]
        with gzip.open(root / "records" / f"{part}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))
    text = "".join(f"line {n} of one file\n" + "\n" * (n % 50 == 0) for n in range(3000))
    (root / "one.txt").write_text(text)
    (root / "latin").mkdir()
    for n in range(30):
        encoding = "latin-1" if n == 3 else "utf-8"
        (root / "latin" / f"{n:02}.txt").write_text(f"größer als {n}\n" * 30, encoding=encoding)
    (root / "texts").mkdir()
    for n in range(60):
        (root / "texts" / f"{n:02}.txt").write_text(f"{n} is a number\n" * (30 + n))
    (root / "mixed").mkdir()
    for n in range(80):
        (root / "mixed" / f"{n:02}.txt").write_text(f"{n} is a number\n" * (9 if n % 4 else 2000))
    (root / "tree" / "below").mkdir(parents=True)
    for n in range(60):
        folder = root / "tree" / "below" if n % 2 else root / "tree"
        line = {"text": f"{n} is in a tree of folders " * 9}
        (folder / f"{n:02}.jsonl").write_text(json.dumps(line))
    (root / "twice").mkdir()
    for n in range(60):
        (root / "twice" / f"{n:02}.txt").write_text(f"{n // 3} is there three times\n" * 30)
    records = [json.loads(line) for line in chats.read_text().splitlines() if "messages" in line]
    for record in records * 7:
        record["messages"][0]["content"] += "?"
        with (root / "chats.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    return {path.stem: path for path in root.iterdir()}


def member_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sources.read_records
    monkeypatch.setattr(sources, "read_records", lambda file: itertools.islice(exact(file), 30))


def last_passage_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sources._passages
    monkeypatch.setattr(sources, "_passages", lambda file: iter([*exact(file)][:-1]))


def undecodable_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "decoded", lambda raw, *_: raw.decode(errors="ignore"))


def boundary_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = SimpleNamespace(ceil=lambda found: math.ceil(found / 2), inf=math.inf)
    monkeypatch.setattr(corpus, "math", halved)


def ends_at_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = corpus.Index.take

    def first_that_fit(self: Any, numbers: Any, max_bytes: Any, heldout: Any = None) -> Any:
        if max_bytes is not None:
            large = np.flatnonzero(self.sizes[numbers] > max_bytes)
            numbers = numbers[: large[0]] if len(large) else numbers
        return exact(self, numbers, max_bytes, heldout)

    monkeypatch.setattr(corpus.Index, "take", first_that_fit)


def only_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_matches", lambda parts, names: len(names) > 1)


def deduplicated(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = corpus.Index.take

    def first_of_each(self: Any, numbers: Any, max_bytes: Any, heldout: Any = None) -> Any:
        taken, copies = exact(self, numbers, max_bytes, heldout)
        first = taken[np.sort(np.unique(self.digests[taken], return_index=True)[1])]
        if heldout is None:
            return taken, copies
        return first, np.concatenate([copies, np.setdiff1d(taken, first)])

    monkeypatch.setattr(corpus.Index, "take", first_of_each)


def first_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = corpus.Index.take
    monkeypatch.setattr(
        corpus.Index, "take", lambda self, numbers, *more: exact(self, np.sort(numbers), *more)
    )


@pytest.mark.parametrize(
    ("plant", "source", "max_bytes", "said"),
    [
        (
            member_lost,
            "records",
            None,
            "has 120 records, read by another library; 90 are in a split",
        ),
        (last_passage_lost, "one", None, "bytes long in all, the file"),
        (undecodable_dropped, "latin", None, "1 of 30 documents are as long as no text"),
        (boundary_halved, "texts", None, "and belongs into the"),
        (only_below, "tree/**/*.jsonl", None, "has 60 records, read by another library; 30 are in"),
        (deduplicated, "twice", None, "training documents are left out as copies of held-out"),
        (ends_at_a_large_one, "mixed", 20_000, "fit into a data.max_bytes of 20,000"),
        (first_by_name, "texts", 8_000, "that fit into a data.max_bytes of 8,000"),
    ],
)
def test_what_is_read_split_or_taken_otherwise_than_the_source_says_is_named(
    plant: Callable[[pytest.MonkeyPatch], None],
    source: str,
    max_bytes: int | None,
    said: str,
    sources_of: dict[str, Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, *pattern = source.split("/")
    path = sources_of[name].joinpath(*pattern)
    if source != "latin":  # which the engine refuses
        healthy = made_of(path, tokenizer, tmp_path / "healthy", max_bytes=max_bytes)
        assert what_is_wrong(healthy) == []
    plant(monkeypatch)
    found = what_is_wrong(made_of(path, tokenizer, tmp_path / "planted", max_bytes=max_bytes))
    assert any(said in one for one in found), found


def test_a_split_of_conversations_is_as_large_as_chance_makes_it(
    sources_of: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = sources_of["chats"]
    made = made_of(source, tokenizer, tmp_path)
    records = read_records(str(source), ())
    assert records is not None and not records.names
    train, held = made.documents

    def said(documents: int) -> str:
        other = dataclasses.replace(made, documents=(train, documents))
        return _wrong_split(other, {}, (), records.sizes, records)

    assert said(held) == ""
    assert "a data.heldout_fraction of 0.2 gives some 97" in said(28)
