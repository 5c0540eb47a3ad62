"""A tokenizer of unknown parts, tried in a process of its own before this one opens it.

The library is compiled code that obeys a file: an expression that it cannot compile ends the process, one
that backtracks never ends, a chain of replacements makes gigabytes out of a letter. So a file goes first to
a child that may have so much memory and so much time on a processor, which opens it and takes it through
texts of many scripts, long runs, and the texts that the file itself names. Whatever ends the child is what
is wrong with the file.

A tokenizer of the parts that everyone uses, byte-level BPE with an expression of a known family, needs no
trial and gets none. Others cost a third of a second, once for each content and process.

Not covered: a text, other than those tried, that a hostile file waits for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import TokenizerError

_CLOCK_S = 120.0
"""For a child that waits; one that computes is ended by its time on a processor."""
_KNOWN_PARTS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Sequence", "Split", "ByteLevel", "TemplateProcessing"}
)
_NAMED_TEXTS = 200
_tried: set[str] = set()
"""SHA-256 of the files that this process has tried."""


def check(raw: bytes, record: Mapping[str, Any], sha256: str, path: Path) -> None:
    """Raises TokenizerError for a file that does not survive its trial."""
    if sha256 in _tried or is_of_known_parts(record):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD, json.dumps(_orders(record, len(raw)))],
            input=raw,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_CLOCK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(path, f"one that has not ended after {_CLOCK_S:.0f} s") from None
    except OSError as error:
        found = f"no process to try it in: {error.strerror}"
        raise TokenizerError.expected("tokenizer", path, "to be tried first", found) from None
    said = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode < 0:
        raise _refusal(path, f"one that signal {-done.returncode} ended")
    if done.returncode or said != "sound":
        raise _refusal(path, " ".join(said.split())[:200] or f"exit {done.returncode}")
    _tried.add(sha256)


def is_of_known_parts(record: Mapping[str, Any]) -> bool:
    """Whether nothing in the file can surprise: byte-level BPE, and expressions of a known family."""
    from engine.formats.gguf_tokenizer import PRE_TOKENIZERS

    known = {split for row in PRE_TOKENIZERS.values() for split in row.splits}
    model = record.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return False
    for part in _tables([record.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
        # The library guesses the kind of a part that has no type.
        expression = part.get("Regex") if part.keys() == {"Regex"} else None
        if part.get("type") not in _KNOWN_PARTS and expression not in known:
            return False
        if isinstance(part.get("pattern"), str):
            return False
    return True


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _orders(record: Mapping[str, Any], size: int) -> dict[str, Any]:
    named = [
        text[: limits.TOKENIZER_PROBE.most]
        for part in _tables([record.get(name) for name in ("normalizer", "pre_tokenizer")])
        for text in part.values()
        if isinstance(text, str)
    ]
    return {
        # What the library makes of a file is some ten times its size.
        "bytes": limits.TOKENIZER_MEMORY.most + 32 * size,
        "cpu_s": limits.TOKENIZER_CPU.most,
        "growth": limits.TOKENIZER_GROWTH.most,
        "named": [ascii(text) for text in named[:_NAMED_TEXTS]],
    }


def _refusal(path: Path, found: str) -> TokenizerError:
    memory = limits.TOKENIZER_MEMORY.most >> 20
    seconds = limits.TOKENIZER_CPU.most
    return TokenizerError.expected(
        "tokenizer",
        path,
        f"one that can be opened and used in {memory:,} MiB and {seconds} s",
        found,
    )


_CHILD = """
import ast, json, os, resource, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
orders = json.loads(sys.argv[1])
for name, most in (("AS", orders["bytes"]), ("CPU", orders["cpu_s"]), ("CORE", 0), ("FSIZE", 0)):
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (most, most))
letters = "aA0 .,'-_\\n\\t\\xe9\\u4e2d\\ud55c\\u0301\\u2581\\xa0\\ufdfa\\u0130\\U0001f600"
texts = ["".join(map(chr, range(1, 1024))), "def f(x):\\n    return x + 1\\n" * 20, letters * 10]
texts += [letter * count for letter in letters for count in (1, 2, 30, 400)]
texts += [letter * 40 + "!" for letter in letters]
for text in map(ast.literal_eval, orders["named"]):
    texts += [text, text * 2, "a" + text + "a", " " + text * 20]
try:
    from tokenizers import Tokenizer
    inner = Tokenizer.from_buffer(sys.stdin.buffer.read())
    inner.no_truncation()
    inner.no_padding()
    for text in texts:
        most = orders["growth"] * (len(text) + 16)
        made = inner.normalizer.normalize_str(text) if inner.normalizer else text
        ids = inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        back = inner.decode(ids, skip_special_tokens=False)
        if max(len(made), len(ids), len(back)) > most:
            sys.exit(print("one that makes %d characters of %d" % (max(len(made), len(back)), len(text))))
except BaseException as error:
    if isinstance(error, SystemExit):
        raise
    print(type(error).__name__ + ": " + str(error)[:200].encode("ascii", "backslashreplace").decode())
else:
    print("sound")
"""
