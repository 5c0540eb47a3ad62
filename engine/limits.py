"""Define the limit of every input, as one table.

Code that reads a file or a reply from outside uses a row of this table, so that a file of zeros, a number of a
million digits or ten thousand nested lists give an error message and cannot exhaust the machine. A limit is far above
what real inputs need and far below what does harm. A limit that blocks real work is wrong and should be raised here.

`docs/limits.md` shows the table; it is written by `python -c "import engine.limits as l; l.write_page()"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest accepted amount of something."""

    what: str
    """Name of the limited input, as the user knows it."""
    most: int
    """Largest accepted amount, in `unit`."""
    unit: str
    beyond: str = "refused, exit 65"
    """Treatment of a larger amount."""

    def __str__(self) -> str:
        return f"at most {self.most:,} {self.unit}"


_USAGE = "refused, exit 64"

PRINTED_LINE = Limit(
    what="a line of text on a terminal or in a pipe",
    most=4096,
    unit="characters",
    beyond="cut, with its length",
)
JSON_DEPTH = Limit(what="nesting of lists and tables in JSON", most=64, unit="levels")
RUN_FILE = Limit(
    what="a small file of a run: effective.json, receipt.json", most=4 * MIB, unit="bytes"
)
NOTES_FILE = Limit(what="the tags and the note of a run", most=64 * KIB, unit="bytes")
NOTIFY_FILE = Limit(what="the receivers of messages: notify.toml", most=32 * KIB, unit="bytes")
TOKEN_FILE = Limit(what="the token of `engine serve`", most=1024, unit="bytes")
TAGS = Limit(what="tags of a run", most=16, unit="words")
TAG = Limit(what="a tag of a run", most=32, unit="characters")
NOTE = Limit(what="the note of a run", most=1000, unit="characters")

# Specs and --set.
SPEC_FILE = Limit(what="a spec", most=256 * KIB, unit="bytes")
SPEC_DIGITS = Limit(what="an integer in a spec or a --set", most=19, unit="digits")
SPEC_TEXT = Limit(what="a text or path in a spec or a --set", most=4000, unit="bytes")
SPEC_PROMPT = Limit(what="teacher.context in a spec", most=32 * KIB, unit="bytes")
BATCH_TOKENS = Limit(
    what="tokens of one forward pass: train.rows x data.seq_len", most=1 << 32, unit="tokens"
)

# Models. The counts in a config.json are bounded before any list of that length is built.
MODEL_CONFIG = Limit(
    what="a model's config.json, tokenizer_config.json", most=4 * MIB, unit="bytes"
)
HUB_NAME = Limit(
    what="a model's name on the Hugging Face hub",
    most=96,
    unit="characters",
    beyond="read as a path",
)
HUB_REVISION = Limit(what="the commit of a revision in the hub's cache", most=4096, unit="bytes")
VOCABULARY = Limit(what="vocab_size of a model", most=1 << 24, unit="ids")
MODEL_WIDTH = Limit(what="hidden_size of a model", most=1 << 18, unit="numbers")
FEED_FORWARD = Limit(what="intermediate_size of a model", most=1 << 20, unit="numbers")
LAYERS = Limit(what="num_hidden_layers of a model", most=4096, unit="layers")
HEADS = Limit(
    what="num_attention_heads and num_key_value_heads of a model", most=1 << 16, unit="heads"
)
HEAD_WIDTH = Limit(what="head_dim of a model", most=1 << 16, unit="numbers")
POSITIONS = Limit(what="max_position_embeddings of a model", most=1 << 30, unit="positions")
PARAMETERS = Limit(what="weights of a model", most=1 << 44, unit="weights")
WEIGHTS_HEADER = Limit(
    what="the header of a safetensors file, and the index of a sharded one",
    most=100_000_000,
    unit="bytes",
)
TENSORS = Limit(what="tensors of a weight file", most=65_536, unit="tensors")
APR_METADATA = Limit(what="the metadata of an .apr file", most=16 * MIB, unit="bytes")
TOKENIZER_FILE = Limit(what="a tokenizer.json, alone or in a model", most=128 * MIB, unit="bytes")
UNCUT_TEXT = Limit(
    what="a run of letters, digits, spaces or punctuation without a position at which it can be cut for the tokenizer; "
    "if the tokenizer has components that those of GPT-2, Qwen2, Qwen3 and Llama 3 lack, a whole document",
    most=MIB,
    unit="bytes",
)
MODEL_TEXT = Limit(what="a chat template or licence of a model", most=16 * MIB, unit="bytes")
CHAT_TEMPLATE = Limit(
    what="a chat template that conversations are rendered with", most=256 * KIB, unit="characters"
)

# Training and evaluation text. Files are read in chunks, one of which is in memory at a time.
CORPUS_FILE = Limit(what="one file of a corpus", most=64 * GIB, unit="bytes")
CORPUS_TEXT = Limit(what="all text of a corpus, decompressed", most=256 * GIB, unit="bytes")
CORPUS_DOCUMENT = Limit(
    what="one document: a file of a folder of text, a line of a file, or a record",
    most=256 * MIB,
    unit="bytes",
)
CORPUS_PIECES = Limit(what="documents and passages of a corpus", most=1 << 26, unit="pieces")
JUDGED_TEXT = Limit(what="the text of `engine eval ppl --data`", most=GIB, unit="bytes")
PROMPT = Limit(what="a file with a prompt", most=16 * MIB, unit="bytes")
PROBLEM_FILE = Limit(what="a file of programming problems", most=128 * MIB, unit="bytes")
PROBLEM_TEXT = Limit(
    what="a file of programming problems, decompressed", most=256 * MIB, unit="bytes"
)
PROBLEMS = Limit(what="problems of a file", most=100_000, unit="problems")
RESULTS = Limit(what="results of `engine eval`", most=GIB, unit="bytes")
# Run logs: `engine.log.events` builds its record types from these.
_BROKEN_LINE = "a broken line: named, and the log read up to it"
LOG_LINE = Limit(what="a line of a log", most=MIB, unit="bytes", beyond=_BROKEN_LINE)
LOG_FILE = Limit(
    what="a log of a run",
    most=16 * GIB,
    unit="bytes",
    beyond="refused, exit 65; viewers say so",
)
LOG_TEXT = Limit(
    what="one text of a line that a run writes into its log",
    most=64 * KIB,
    unit="characters",
    beyond="cut, with its length",
)
LOG_ELAPSED = Limit(
    what="a time in a log, since the log was opened",
    most=10**10,
    unit="seconds",
    beyond=_BROKEN_LINE,
)
LOG_UNIX = Limit(
    what="a time of day in a log, since 1970",
    most=2 * 10**11,
    unit="seconds",
    beyond=_BROKEN_LINE,
)
LOG_COUNT = Limit(
    what="steps, tokens, bytes and other counts in a log",
    most=2**53,
    unit="",
    beyond=_BROKEN_LINE,
)
LOG_NUMBER = Limit(
    what="any other number in a log, without its sign",
    most=10**100,
    unit="",
    beyond=_BROKEN_LINE,
)
LOG_PID = Limit(what="the number of a process in a log", most=1 << 22, unit="", beyond=_BROKEN_LINE)
LOG_GPU = Limit(what="the number of a GPU in a log", most=255, unit="", beyond=_BROKEN_LINE)
# What `engine import` reads.
IMPORT_FILE = Limit(what="a file of `engine import`", most=16 * GIB, unit="bytes")
IMPORT_FILES = Limit(what="event files of `engine import`", most=1000, unit="files")
IMPORT_VALUES = Limit(what="values of `engine import`: 24 bytes each", most=1 << 26, unit="values")
IMPORT_NAME = Limit(what="a name in `engine import`", most=500, unit="characters")
IMPORT_SETTINGS = Limit(
    what="settings of `engine import`", most=2000, unit="settings", beyond="counted"
)
TRAINER_STATE = Limit(what="`trainer_state.json`", most=256 * MIB, unit="bytes")
# Findings
FINDING = Limit(what="`finding.json`", most=16 * MIB, unit="bytes")
ARTIFACT = Limit(what="an artifact of a finding", most=64 * MIB, unit="bytes")
FINDINGS_LOG = Limit(what="`LOG.md` of findings", most=16 * MIB, unit="bytes")

# Small files that the commands write and read again.
MANIFEST = Limit(
    what="a manifest: of a checkpoint, a store, a published folder", most=64 * MIB, unit="bytes"
)
CHECKPOINT_STATE = Limit(what="state.json of a checkpoint", most=64 * MIB, unit="bytes")
STORE_ROWS = Limit(what="the list of rows of a stored teacher output", most=256 * MIB, unit="bytes")
FLIP_FILE = Limit(
    what="a file of a flip: plan, pairs, verdict, controls", most=64 * MIB, unit="bytes"
)
SCRIPT = Limit(what="a script, a line of which a flip changes", most=4 * MIB, unit="bytes")
SCRIPT_FILES = Limit(what="the list of a script's files", most=8 * MIB, unit="bytes")
STUDENT_FILE = Limit(
    what="a file of a student whose hash is compared",
    most=256 * GIB,
    unit="bytes",
    beyond="reported as not equal",
)
EVALUATION = Limit(what="an evaluation given to gate or publish", most=GIB, unit="bytes")
CONTRACT_RECEIPTS = Limit(what="receipts of a contract", most=64 * MIB, unit="bytes")
BEAT = Limit(what="what a rank says of itself", most=4 * KIB, unit="bytes")

# Numbers on command lines.
STEPS = Limit(what="--steps, --smoke and --rows of a run", most=10**9, unit="steps", beyond=_USAGE)
PAIRS = Limit(what="--pairs of a flip", most=10_000, unit="pairs", beyond=_USAGE)
JOBS = Limit(what="--jobs and --gpus", most=1024, unit="processes", beyond=_USAGE)
SAMPLES = Limit(what="--samples of an evaluation", most=10**6, unit="samples", beyond=_USAGE)
SHOWN_DOCUMENTS = Limit(
    what="--samples of `engine data`", most=1000, unit="documents", beyond=_USAGE
)
LINES = Limit(what="--lines of `engine tail`", most=10**6, unit="lines", beyond=_USAGE)
SEED = Limit(what="--seed", most=(1 << 63) - 1, unit="as a number", beyond=_USAGE)
WAIT = Limit(what="--timeout", most=30 * 86400, unit="seconds", beyond=_USAGE)
EXIT_STATUS = Limit(what="--expect-exit", most=1 << 16, unit="as a status", beyond=_USAGE)


def table() -> tuple[Limit, ...]:
    """Return every limit, in the order of this file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))


def markdown() -> str:
    """Return the documentation page."""
    lines = [
        "# Limits of inputs",
        "",
        "Every input has a limit. What lies beyond it is refused before it is read, with one line that says",
        "what was found; nothing is half-read. The table is `engine/limits.py`.",
        "",
        "| input | limit | beyond it |",
        "|---|---|---|",
        *(f"| {one.what} | {one.most:,} {one.unit} | {one.beyond} |" for one in table()),
        "",
        "A document is tokenized in pieces. Besides its text, that takes at most 8 bytes for each of its tokens, and a",
        "byte of normalized text is at most one token of byte-level BPE; and 512 MiB.",
    ]
    return "\n".join(lines) + "\n"


def write_page(path: Path = Path("docs/limits.md")) -> None:
    """Write the documentation page."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(markdown(), encoding="utf-8")
