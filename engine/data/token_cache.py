"""The tokens of a corpus as files, made once and mapped into memory by every start and every rank.

    ~/.cache/apr-workbench/tokens/<key>/      or below $XDG_CACHE_HOME
        train.tokens     16- or 32-bit integers, little endian, in the order of the rows
        train.starts     64-bit integers: first position of each document, and the end
        train.labelled   a byte per token: whether it is a label; only with conversations or padding
        train.padding    a byte per document: whether it is padding; only with padding
        heldout.*        the same for the held-out split
        manifest.json    sizes and SHA-256 of these files and of itself, counts, names of documents

The key is a hash of everything that the tokens depend on: the content of the files of the corpus (all are read at
every start to compute the key), the tokenizer, the chat template, the settings of the split and of the rows, and the
versions of the code that makes them. A folder is renamed to its final name once it is complete. Before it is used, the
size and hash of each file are checked; if one differs, for example after a power failure, the folder is rebuilt.

Making a folder needs memory for one batch of text and about 85 bytes per document. Tokens are written to a temporary
file in the order of the files, and copied from there in the order of the split, so the disk holds them twice for a
while.

One process makes a folder while others that need it wait. The most recently used folders are kept, up to
`MOST_BYTES`. If the cache cannot be written or is full, the tokens are made in a temporary folder for this process
only, and the note says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engine import limits
from engine.data.corpus import Corpus, Document, Index, Split, open_corpus
from engine.data.left_out import SKIP_AT_MOST, LeftOut, Skipped, count_left_out
from engine.data.packing import PADDING, STREAM, packed_lengths
from engine.data.sources import list_files
from engine.data.tokens import Encoder, StreamDigest, TokenStream, raise_if_no_tokens, starts_of
from engine.errors import BadInput, CorpusError, write_error
from engine.files import open_regular, read_json_object, user_cache
from engine.signals import partial_output, scratch_folder
from engine.version import VERSION

FORMAT = 6
NAMED = 8
"""Maximum number of names kept of documents that were dropped as copies."""
MOST_BYTES = 64 << 30
"""Size of the cache, in bytes, from which the least recently used folders are removed."""
_READ_AT_ONCE = 1 << 22
"""Bytes read and hashed at a time."""
_WRITTEN_AT_ONCE = 1 << 20
"""Bytes of tokens that are written at a time."""
_ABANDONED_S = 7 * 86400
"""Age, in seconds, from which an unfinished folder is assumed to belong to a killed process."""
_SIDES = ("train", "heldout")
_MANIFEST = "manifest.json"

Progress = Callable[[str, int, int | None], None]
"""Callback of the activity, the bytes done, and the total in bytes (None if unknown)."""


def no_progress(what: str, done: int, total: int | None) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The inputs that the tokens of a run depend on."""

    source: str
    include_tests: bool
    columns: tuple[str, ...]
    heldout_fraction: float
    max_bytes: int | None
    encoder: Encoder
    packing: str
    seq_len: int
    skip_at_most: float = SKIP_AT_MOST

    def key(self, content_sha256: str) -> str:
        tokenizer, template = self.encoder.tokenizer, self.encoder.template
        parts: dict[str, Any] = {
            "format": FORMAT,
            "versions": [VERSION, version("tokenizers"), version("jinja2")],
            "content": content_sha256,
            "columns": self.columns,
            "heldout_fraction": self.heldout_fraction,
            "max_bytes": self.max_bytes,
            "skip_at_most": self.skip_at_most,
            "tokenizer": tokenizer.sha256,
            "turns": self.encoder.turns,
            "packing": self.packing,
        }
        if self.packing != STREAM:
            parts |= {"seq_len": self.seq_len, "padding": tokenizer.padding_id}
        if template is not None:
            parts["template"] = [
                dict(template.texts),
                dict(template.special_tokens),
                template.variables,
                template.now.isoformat() if template.reads_clock else "",
            ]
        # No field may have a repr that contains an address, which would change the key at every start.
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a corpus, in rows, with counts of its documents."""

    train: TokenStream
    heldout: TokenStream
    documents: tuple[int, int]
    """Number of documents in the training and in the held-out split."""
    skipped: int
    """Number of documents that are in neither split, except because of `max_bytes`."""
    faults: tuple[LeftOut, ...]
    """Invalid records among the skipped, counted by reason."""
    beside: Mapping[str, int]
    """Warnings about parts of records that are not read although the user may expect it, each with its record count."""
    dropped: tuple[str, ...]
    """Names of the first documents that were dropped because their text is held out."""
    dropped_count: int
    repeated: int
    """Number of training documents with the same content as an earlier one."""
    note: str
    """Origin of the tokens: read from the cache, or made and why."""
    is_kept: bool
    """Whether the cache keeps them for the next start."""


def remarks_of(tokens: Tokens) -> tuple[LeftOut, ...]:
    """Return the warnings about parts of records that are not read, rendered or labelled, the most frequent first."""
    remarks: dict[str, LeftOut] = {
        reason: LeftOut(reason=reason, count=count, example="")
        for reason, count in tokens.beside.items()
    }
    for remark in (*tokens.train.remarks, *tokens.heldout.remarks):
        previous = remarks.get(remark.reason)
        remarks[remark.reason] = (
            remark if previous is None else replace(previous, count=previous.count + remark.count)
        )
    return tuple(sorted(remarks.values(), key=lambda remark: -remark.count))


def load_tokens(
    recipe: Recipe,
    progress: Progress = no_progress,
    *,
    corpus: Corpus | None = None,
    root: Path | None = None,
) -> Tokens:
    """Return the tokens of a corpus from the cache at `root` (default: the user's cache), making them if they are not
    there. `corpus` is the recipe's corpus, if it is open already.

    Raises CorpusError and TokenizerError. If neither the cache nor the temporary folder can be written, raises DiskFull
    if the disk is full, else RunLogError.
    """
    root = root or user_cache("tokens")
    content = _hash_content(recipe, progress)
    entry = root / recipe.key(content)
    try:
        # Before the lock, because a read-only cache cannot have a lock file.
        if isinstance(cached := _find_cached(entry, progress), Tokens):
            return cached
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root / f"{entry.name}.lock", progress):
            if isinstance(cached := _find_cached(entry, progress), Tokens):
                return cached
            partial = entry.with_name(f".{entry.name}-{secrets.token_hex(4)}")
            with partial_output(partial):
                partial.mkdir(mode=0o700)
                _make_tokens(recipe, corpus, partial, progress)
                if entry.exists():
                    shutil.rmtree(entry)
                partial.rename(entry)
            _remove_old_folders(entry)
            return _open(entry, f"{cached}, and kept in {entry}", progress, is_kept=True)
    except OSError as error:
        why = f"the cache {root} cannot be used ({error.strerror or error})"
    try:
        with scratch_folder("apr-workbench-tokens-") as folder:
            _make_tokens(recipe, corpus, folder, progress)
            # The files stay mapped after the folder is removed.
            note = f"{why}: they are made for this process only"
            return _open(folder, note, progress, is_kept=False)
    except OSError as error:
        raise write_error(
            "tokens of the corpus",
            recipe.source,
            f"a folder to keep them in: {why}, and the temporary folder cannot be written either",
            error,
            when_full="free space, or set XDG_CACHE_HOME or TMPDIR to a folder on a disk with free space",
        ) from error


def _find_cached(entry: Path, progress: Progress) -> Tokens | str:
    """Return the tokens in a folder of the cache, or a note that says why they must be made."""
    if not entry.exists():
        return "made for the first time"
    try:
        tokens = _open(entry, f"read from {entry}", progress, is_kept=True)
    except (BadInput, KeyError, TypeError, ValueError) as error:
        return f"now made because the cached tokens were damaged: {error}"
    with contextlib.suppress(OSError):
        os.utime(entry)  # marks it as the most recently used
    return tokens


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a folder. The system releases it when the process ends, even if it is killed."""
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process to make the tokens", 0, None)
                time.sleep(0.1)
        try:
            yield
        finally:
            # A waiting process finds the finished folder, or makes it again.
            path.unlink(missing_ok=True)


def _remove_old_folders(newest: Path) -> None:
    """Remove the least recently used folders, and those that killed processes left."""
    folders = []
    for path in newest.parent.iterdir():
        with contextlib.suppress(OSError):
            used = path.stat().st_mtime
            if path.name.startswith("."):
                if time.time() - used > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir():
                size = sum(file.stat().st_size for file in path.iterdir())
                folders.append((path == newest, used, size, path))
    kept_bytes = 0
    # A process that has mapped a removed file can still read it.
    for is_newest, _, size, path in sorted(folders, reverse=True):
        kept_bytes += size
        if kept_bytes > MOST_BYTES and not is_newest:
            shutil.rmtree(path, ignore_errors=True)


# The content of a corpus


def _hash_content(recipe: Recipe, progress: Progress) -> str:
    """Return a hash of the names and contents of a corpus."""
    content, done = hashlib.sha256(), 0
    files = list_files(recipe.source, include_tests=recipe.include_tests, columns=recipe.columns)
    for file in files:
        if isinstance(file, Skipped):
            content.update(json.dumps([file.name, file.reason]).encode())
            continue
        sha256 = hashlib.sha256()
        try:
            with open_regular(file.path, "corpus", error=CorpusError) as stream:
                if os.fstat(stream.fileno()).st_size > limits.CORPUS_FILE.most:
                    raise CorpusError.expected("corpus", file.path, str(limits.CORPUS_FILE), "more")
                while chunk := stream.read(_READ_AT_ONCE):
                    sha256.update(chunk)
                    done += len(chunk)
                    progress("reading the corpus", done, None)
        except OSError as error:
            raise CorpusError.expected(
                "corpus", file.path, "a readable file", error.strerror or str(error)
            ) from error
        content.update(json.dumps([file.name, file.kind, sha256.hexdigest()]).encode())
    return content.hexdigest()


# Making


def _make_tokens(
    recipe: Recipe,
    corpus: Corpus | None,
    folder: Path,
    progress: Progress,
) -> None:
    """Write the tokens of a corpus and their manifest into an empty folder."""
    corpus = corpus or open_corpus(
        recipe.source,
        heldout_fraction=recipe.heldout_fraction,
        include_tests=recipe.include_tests,
        max_bytes=recipe.max_bytes,
        columns=recipe.columns,
        skip_at_most=recipe.skip_at_most,
        progress=lambda done: progress("splitting the corpus", done, None),
    )
    with (folder / "tokens").open("w+b") as tokens, (folder / "labelled").open("w+b") as labelled:
        maker = _Maker(recipe=recipe, corpus=corpus, tokens=tokens, labelled=labelled)
        maker.encode(progress)
        streams = {}
        for side in _SIDES:
            streams[side] = maker.arrange(side, folder, progress)
    for name in ("tokens", "labelled"):
        (folder / name).unlink()
    manifest = {
        "format": FORMAT,
        "skipped": len(corpus.skipped) + len(corpus.dropped) + sum(n.count for n in corpus.faults),
        "faults": [asdict(fault) for fault in corpus.faults],
        "beside": dict(corpus.remarks),
        "dropped": _names(corpus.train.index, corpus.dropped[:NAMED]),
        "dropped_count": len(corpus.dropped),
        "repeated": len(corpus.train.numbers) - len(np.unique(corpus.train.contents)),
        "streams": streams,
        "files": {path.name: _size_and_hash(path, progress) for path in sorted(folder.iterdir())},
    }
    manifest["sha256"] = _digest(manifest)
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


class _Maker:
    """Tokenizes a corpus in the order of its files, then writes the tokens in the order of each split. Two temporary
    files in the folder hold the tokens and labels in the order of the corpus."""

    def __init__(
        self, *, recipe: Recipe, corpus: Corpus, tokens: IO[bytes], labelled: IO[bytes]
    ) -> None:
        self._recipe, self._corpus, self._index = recipe, corpus, corpus.train.index
        self._tokens, self._labelled = tokens, labelled
        self._has_chats = corpus.train.chats + corpus.heldout.chats > 0
        self._starts = np.zeros(1, dtype=np.int64)
        self._left_out: dict[str, dict[str, LeftOut]] = {side: {} for side in _SIDES}
        self._remarks: dict[str, dict[str, LeftOut]] = {side: {} for side in _SIDES}
        self._partly_labelled = dict.fromkeys(_SIDES, 0)

    def encode(self, progress: Progress) -> None:
        """Write the tokens of each document into the temporary files."""
        lengths = np.zeros(len(self._index), dtype=np.int64)
        is_heldout = np.zeros(len(self._index), dtype=np.bool_)
        is_heldout[self._corpus.heldout.numbers] = True
        numbers: deque[int] = deque()
        done, total = 0, self._corpus.train.size_bytes + self._corpus.heldout.size_bytes

        def documents() -> Iterator[Document]:
            for number, document in self._corpus.read():
                numbers.append(number)
                yield document

        for encoded in self._recipe.encoder.encode(documents()):
            number = numbers.popleft()
            lengths[number] = len(encoded.ids)
            self._tokens.write(_little_endian(encoded.ids))
            if self._has_chats:
                self._labelled.write(encoded.labels.tobytes())
            side = _SIDES[int(is_heldout[number])]
            self._partly_labelled[side] += encoded.partly_labelled
            for remark in encoded.remarks:
                count_left_out(self._remarks[side], remark)
            if encoded.left_out is not None:
                count_left_out(self._left_out[side], encoded.left_out)
            done += int(self._index.sizes[number])
            progress("tokenizing", done, total)
        self._tokens.flush()
        self._labelled.flush()
        self._starts = starts_of(lengths)

    def arrange(self, side: str, folder: Path, progress: Progress) -> dict[str, Any]:
        """Write the files of one split, and return its entry of the manifest."""
        recipe, encoder = self._recipe, self._recipe.encoder
        split: Split = getattr(self._corpus, side)
        left_out = tuple(self._left_out[side].values())
        begins = self._starts[split.numbers]
        lengths = self._starts[split.numbers + 1] - begins
        raise_if_no_tokens(left_out, int(lengths.sum()))
        is_packed = recipe.packing != STREAM
        has_labels = split.chats > 0 or is_packed
        dtype, width = encoder.dtype, np.dtype(encoder.dtype).itemsize
        digest, placed, fills = StreamDigest(), array("q"), bytearray()
        tokens, labels = bytearray(), bytearray()
        with contextlib.ExitStack() as files:
            token_file = files.enter_context((folder / f"{side}.tokens").open("wb"))
            label_file = None
            if has_labels:
                label_file = files.enter_context((folder / f"{side}.labelled").open("w+b"))

            def write() -> None:
                digest.tokens(np.frombuffer(tokens, dtype=np.dtype(dtype).newbyteorder("<")))
                token_file.write(tokens)
                if label_file is not None:
                    label_file.write(labels)

            for place, length in packed_lengths(lengths, recipe.seq_len, recipe.packing):
                placed.append(length)
                fills.append(place == PADDING)
                if place == PADDING:
                    tokens += _little_endian(np.full(length, encoder.tokenizer.padding_id, dtype))
                    labels += bytes(length)
                else:
                    begin = int(begins[place])
                    document = _read_at(self._tokens, begin * width, length * width)
                    tokens += document
                    if has_labels and self._has_chats:
                        labels += _read_at(self._labelled, begin, length)
                    elif has_labels:
                        labels += b"\x01" * length
                if len(tokens) >= _WRITTEN_AT_ONCE:
                    write()
                    progress("putting the tokens into order", token_file.tell(), None)
                    tokens, labels = bytearray(), bytearray()
            write()
            starts = starts_of(np.frombuffer(placed, dtype=np.int64))
            sha256 = digest.end(starts, () if label_file is None else _labels_in(label_file))
        starts.astype("<i8").tofile(folder / f"{side}.starts")
        if is_packed:
            (folder / f"{side}.padding").write_bytes(fills)
        return {
            "sha256": sha256,
            "dtype": np.dtype(dtype).name,
            "documents": split.document_count,
            "left_out": [asdict(one) for one in left_out],
            "partly_labelled": self._partly_labelled[side],
            "remarks": [asdict(one) for one in self._remarks[side].values()],
        }


def _names(index: Index, numbers: NDArray[np.int64]) -> list[str]:
    # The source is read again only if there are any.
    return [document.name for _, document in index.read(numbers)] if len(numbers) else []


def _little_endian(ids: NDArray[Any]) -> bytes:
    return ids.astype(ids.dtype.newbyteorder("<")).tobytes()


def _read_at(file: IO[bytes], begin: int, size: int) -> bytes:
    raw = os.pread(file.fileno(), size, begin)
    if len(raw) != size:
        raise OSError(errno.EIO, "a temporary file was truncated", str(file.name))
    return raw


def _labels_in(file: IO[bytes]) -> Iterator[NDArray[np.bool_]]:
    file.seek(0)
    while chunk := file.read(_READ_AT_ONCE):
        yield np.frombuffer(chunk, dtype=np.bool_)


# Reading


def _open(folder: Path, note: str, progress: Progress, *, is_kept: bool) -> Tokens:
    """Map the files of a folder after checking each against the manifest. Raises BadInput."""
    path = folder / _MANIFEST
    manifest = read_json_object(
        path, "tokens", limits.MANIFEST, having=("sha256", "files", "streams", "skipped")
    )
    if manifest.pop("sha256") != _digest(manifest):
        raise CorpusError.expected("tokens", path, "what was written", "something else")
    for name, expected in manifest["files"].items():
        if (actual := _size_and_hash(folder / name, progress)) != expected:
            raise CorpusError.expected("tokens", folder / name, str(expected), str(actual))
    streams = manifest["streams"]
    sides = {side: _stream(folder, side, manifest) for side in _SIDES}
    return Tokens(
        train=sides["train"],
        heldout=sides["heldout"],
        documents=(streams["train"]["documents"], streams["heldout"]["documents"]),
        skipped=manifest["skipped"],
        faults=tuple(LeftOut(**entry) for entry in manifest["faults"]),
        beside=manifest["beside"],
        dropped=tuple(manifest["dropped"]),
        dropped_count=manifest["dropped_count"],
        repeated=manifest["repeated"],
        note=note,
        is_kept=is_kept,
    )


def _stream(folder: Path, side: str, manifest: dict[str, Any]) -> TokenStream:
    about = manifest["streams"][side]
    maps: list[mmap.mmap] = []

    def map_file(name: str, dtype: str) -> Any:
        path = folder / f"{side}.{name}"
        if path.name not in manifest["files"]:
            return None
        # An empty file cannot be mapped.
        if not manifest["files"][path.name][0]:
            return np.frombuffer(b"", dtype)
        with open_regular(path, "tokens", error=CorpusError) as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return np.frombuffer(maps[-1], dtype)

    return TokenStream(
        tokens=map_file("tokens", np.dtype(about["dtype"]).newbyteorder("<").str),
        starts=map_file("starts", "<i8"),
        sha256=about["sha256"],
        labelled=map_file("labelled", "bool"),
        padding=map_file("padding", "bool"),
        left_out=tuple(LeftOut(**entry) for entry in about["left_out"]),
        partly_labelled=about["partly_labelled"],
        remarks=tuple(LeftOut(**entry) for entry in about["remarks"]),
        maps=tuple(maps),
    )


def _size_and_hash(path: Path, progress: Progress) -> list[Any]:
    sha256, size = hashlib.sha256(), 0
    with open_regular(path, "tokens", error=CorpusError) as file:
        while chunk := file.read(_READ_AT_ONCE):
            sha256.update(chunk)
            size += len(chunk)
            progress("hashing the tokens", size, None)
    return [size, sha256.hexdigest()]


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
