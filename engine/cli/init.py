"""Write a first spec from a teacher, a student and data, checked as `engine distill SPEC --check-inputs` does.

    engine init                                     asks for what it needs
    engine init --teacher Qwen2.5-7B --student Qwen2.5-0.5B --data corpus.jsonl
    engine init --teacher T.gguf --student student.json --data texts/ --name small
    engine init --teacher T --student runs/first/student --data texts/ --on-policy
    engine init --teacher T --student Qwen2.5-7B --data chats.jsonl --adapter

The spec is NAME.toml in this folder; it prints what was found in the files. Nothing is written where an input
cannot be used, and a file that exists stays as it is without --force. Without a terminal nothing is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.cli.answers import answer
from engine.cli.arguments import add_flag, add_json
from engine.errors import BadInput, CorpusError, UsageError
from engine.spec.hub_cache import local_path
from engine.terminal import ask, can_ask, say

if TYPE_CHECKING:
    from engine.models.config import ModelConfig
    from engine.plan.data_size import DataSize
    from engine.plan.inputs import Inputs
    from engine.spec import RunSpec

T = TypeVar("T")
HELP = "write a first spec from a teacher, a student and data"
LONGEST_ROW, SHORTEST_ROW = 1024, 32
"""Maximum and minimum length of a row, in tokens."""
HELD_OUT = (0.08, 0.2, 0.5)
"""Shares of the documents to hold out, the first that leaves a row of text on both sides."""
LR_FRESH, LR_TRAINED, LR_ON_POLICY, LR_ADAPTER = 3e-4, 5e-5, 1e-5, 2e-4
"""Learning rate of a student with fresh weights, with trained ones, on its own text, and of adapters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--teacher",
        metavar="PATH",
        help="model to learn from: a folder, .gguf or .apr file, or ORG/NAME of the hub",
    )
    parser.add_argument(
        "--student",
        metavar="PATH",
        help="model to train, or a config.json for fresh weights of that shape",
    )
    parser.add_argument(
        "--data", metavar="PATH", help="text, records or conversations, or python-stdlib"
    )
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        default="",
        help="field names in the records: prompt,completion or one name, where they are not recognised",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the spec: NAME.toml (kd)")
    add_flag(parser, "--on-policy", "the student learns on text that it writes itself")
    add_flag(parser, "--adapter", "train low-rank adapters of the student, which stays frozen")
    add_flag(parser, "--force", "replace NAME.toml where it exists")
    add_json(parser, "print the path and what was found as one JSON value on stdout")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and its configuration, as read from its file."""

    path: str
    config: ModelConfig
    fresh: bool
    """Whether it is a shape without weights."""

    @property
    def about(self) -> str:
        from engine.models.config import count_parameters
        from engine.units import format_count

        size = f"{self.config.kind.title}, {format_count(count_parameters(self.config))} parameters"
        return f"{size}, fresh weights" if self.fresh else size

    def to_dict(self) -> dict[str, Any]:
        from engine.models.config import count_parameters

        fields = {"path": self.path, "family": self.config.family, "fresh": self.fresh}
        return fields | {"parameters": count_parameters(self.config)}


def run(arguments: argparse.Namespace) -> int:
    name = _answer("--name", arguments.name, "name of the spec", _as_name, default="kd")
    path = Path(f"{name}.toml")
    if os.path.lexists(path) and not arguments.force:
        raise BadInput.expected(
            "spec",
            path,
            "a new file",
            "one that exists",
            hint="choose another --name; --force replaces it",
        )
    teacher = _answer("--teacher", arguments.teacher, "teacher (folder, .gguf, .apr)", _as_teacher)
    student = _answer(
        "--student", arguments.student, "student (folder, file, or config.json)", _as_student
    )
    if arguments.on_policy and student.fresh:
        raise BadInput.expected(
            "--on-policy",
            student.path,
            "a student that can write",
            "a shape without weights",
            hint="train one on the corpus first, and go on from its folder: --student RUN/student",
        )
    if arguments.adapter and student.fresh:
        raise BadInput.expected(
            "--adapter", student.path, "a trained student to adapt", "a shape without weights"
        )
    data = _answer(
        "--data",
        arguments.data,
        "data (folder, file, glob, or python-stdlib)",
        lambda given: _as_data(given, arguments.columns),
    )
    text, inputs, size, spec = _find_fitting_spec(arguments, path, teacher, student, data)

    from engine.log.folder import write_whole

    write_whole(path, text)
    tokenizer = inputs.tokenizer
    for line in (
        f"teacher: {teacher.about}",
        f"student: {student.about}",
        f"tokenizer: {tokenizer.vocab_size:,} tokens, {tokenizer.path}",
        *size.lines(spec.train.steps),
        *inputs.models,
        *inputs.notes,
        f"start it: engine distill {path}",
    ):
        say(line)
    value = {
        "path": path.absolute(),
        "teacher": teacher.to_dict(),
        "student": student.to_dict(),
        "tokenizer": {"path": tokenizer.path, "vocabulary": tokenizer.vocab_size},
        "data": {"path": data} | dataclasses.asdict(size),
        "models": inputs.models,
        "notes": inputs.notes,
    }
    return answer(arguments, "init", value, [path])


def _answer(
    flag: str, given: str | None, question: str, check: Callable[[str], T], default: str = ""
) -> T:
    """Return the checked value of a flag, or of an answer on the terminal, which is asked for until it can be used.

    Raises UsageError where the flag is missing, has no default, and no answer comes from a terminal; UsageError or
    BadInput where its value is wrong.
    """
    if given is not None:
        return check(given)
    if not can_ask():
        if default:
            return check(default)
        raise UsageError(f"expected {flag}, found none", hint="without a terminal nothing is asked")
    while True:
        typed = ask(f"{question}{f' [{default}]' if default else ''}: ")
        if typed is None:
            raise UsageError(f"expected {flag}, found no answer")
        try:
            if typed.strip() or default:
                return check(typed.strip() or default)
        except (BadInput, UsageError) as error:
            say(str(error))


def _as_name(name: str) -> str:
    if not name or "/" in name or name.startswith(".") or not name.isprintable():
        raise UsageError(f"--name: expected a name without '/', found {name!r}")
    return name.removesuffix(".toml") or name


def _as_teacher(path: str) -> Model:
    if _is_shape(_existing_path("--teacher", path)):
        raise BadInput.expected(
            "--teacher", path, "weights", "a JSON file", hint="give the folder that it is in"
        )
    return Model(path=path, config=_weights("--teacher", path), fresh=False)


def _as_student(path: str) -> Model:
    """Take weights, or the shape in a config.json."""
    from engine.models.config import CONFIG_FILE
    from engine.models.read_config import read_config

    existing = _existing_path("--student", path)
    if existing.is_dir() and os.listdir(existing) == [CONFIG_FILE]:
        existing, path = existing / CONFIG_FILE, os.path.join(path, CONFIG_FILE)
    if _is_shape(existing):
        return Model(path=path, config=read_config(existing), fresh=True)
    return Model(path=path, config=_weights("--student", path), fresh=False)


def _as_data(path: str, columns: str) -> str:
    from engine.data.corpus import check_corpus
    from engine.data.sources import STDLIB, column_names

    if path != STDLIB:
        check_corpus(str(_existing_path("--data", path)), columns=column_names(columns))
    return path


def _weights(flag: str, path: str) -> ModelConfig:
    from engine.formats.open import open_weights
    from engine.models.names import check_fits
    from engine.models.read_config import config_of

    existing = _existing_path(flag, path)
    with open_weights(existing) as weights:
        config = config_of(weights)
        check_fits(config, weights, existing, weights.convention)
        return config


def _existing_path(flag: str, path: str) -> Path:
    """Return the path of what a flag names, that of a model by its name on the hub included. Raises BadInput where
    nothing has this path, or where no TOML file can hold it."""
    try:
        path.encode()
        existing = Path(path).expanduser()
        exists = existing.exists() or (flag == "--data" and glob.has_magic(path))
    except (ValueError, RuntimeError, OSError) as error:
        raise BadInput(f"{flag}: expected a path, found {path!r}: {error}") from None
    if path and not exists and flag != "--data":
        # The spec keeps the name; it is looked up again where the spec is read.
        existing = local_path(path)
        exists = existing.exists()
    if not path or not exists:
        raise BadInput(f"{flag}: expected a file or folder, found nothing at {path!r}")
    return existing


def _is_shape(path: Path) -> bool:
    """Return whether a file is JSON, and not the index of a sharded model."""
    from engine.files import open_regular
    from engine.formats.kinds import START_BYTES, Kind, kind_of

    if not path.is_file() or path.name.endswith(".index.json"):
        return False
    with open_regular(path, "model") as file:
        return kind_of(file.read(START_BYTES)) is Kind.JSON


def _find_fitting_spec(
    arguments: argparse.Namespace, path: Path, teacher: Model, student: Model, data: str
) -> tuple[str, Inputs, DataSize, RunSpec]:
    """Return the text of a spec that is sound, with what its check found. Of a small corpus the longest rows are
    taken that leave one on each side of the split.

    Raises the BadInput that `engine distill --check-inputs` would.
    """
    from engine.data.corpus import check_corpus
    from engine.data.sources import column_names
    from engine.plan.data_size import measure_data
    from engine.plan.inputs import check_inputs
    from engine.spec import spec_of_text

    longest = min(
        LONGEST_ROW,
        teacher.config.max_position_embeddings,
        student.config.max_position_embeddings,
    )
    lengths = [longest]
    while lengths[-1] // 2 >= SHORTEST_ROW:
        lengths.append(lengths[-1] // 2)
    inputs, problem = None, None
    has_chats = check_corpus(data, columns=column_names(arguments.columns))
    for held_out in HELD_OUT:
        for seq_len in lengths:
            text = _text(arguments, path, teacher, student, data, seq_len, held_out, has_chats)
            spec = spec_of_text(text, path)
            if inputs is None:
                inputs = check_inputs(spec, Path(spec.run.out, path.stem))
            try:
                size = measure_data(spec, inputs)
            except CorpusError as error:
                problem = problem or error
                continue
            passes = "" if size.passes is None else f"; {size.passes:.3g} epochs"
            return text.replace("{passes}", passes), inputs, size, spec
    assert problem is not None
    raise problem


def _text(
    arguments: argparse.Namespace,
    path: Path,
    teacher: Model,
    student: Model,
    data: str,
    seq_len: int,
    held_out: float,
    has_chats: bool,
) -> str:
    columns, on_policy = arguments.columns, arguments.on_policy
    columns_line = f"columns = {_quoted(columns)}\n" if columns else ""
    heldout_line = (
        "" if held_out == HELD_OUT[0] else f"heldout_fraction = {held_out}  # of few documents\n"
    )
    packing_line = (
        'packing = "documents"  # no conversation is cut that fits\n' if has_chats else ""
    )
    lr = LR_FRESH if student.fresh else LR_ON_POLICY if on_policy else LR_TRAINED
    adapter_lines = ""
    if arguments.adapter:
        lr = LR_ADAPTER
        adapter_lines = (
            'adapter = "lora"  # of a frozen student; saved as peft saves it\nadapter_rank = 16\n'
        )
    objective = """\
[loss]
alpha = 0.3  # weight of the cross entropy; the teacher's is 1 - alpha
temperature = 2.0  # softens both models' probabilities
"""
    if on_policy:
        objective = f"""\
[loss]
temperature = 1.0

[rollout]
share = 1.0  # of the rows, written by the student in each step
max_new_tokens = {seq_len // 2}
divergence = "reverse_kl"
"""
    return f"""\
# Every setting with its meaning: engine spec {path}
[teacher]
path = {_quoted(teacher.path)}  # {teacher.about}

[student]
{"config" if student.fresh else "path"} = {_quoted(student.path)}  # {student.about}
{adapter_lines}
[data]
corpus = {_quoted(data)}
{columns_line}seq_len = {seq_len}  # tokens in a row
{packing_line}{heldout_line}
{objective}
[train]
steps = 1000  # optimizer steps{{passes}}
rows = 8  # rows in a step, the batch size
lr = {lr:g}  # peak, after a warm-up of 20 steps
"""


def _quoted(text: str) -> str:
    # JSON escapes as TOML does, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
