"""`RunSpec`: everything a run can be told, as one frozen tree read from TOML.

Strict by design. An unknown key is refused with the nearest known one, a value of the wrong type or
out of range is refused with what was expected, and all problems of a file are reported together
with their line numbers, before anything is loaded. Nothing is read from the environment and nothing
changes after loading.

    spec = load_spec(Path("kd.toml"), sets=["loss.alpha=0.3"])

Paths in a spec are relative to the folder of the file that names them. `alpha` is the weight of the
cross entropy, everywhere: loss = alpha * CE + (1 - alpha) * T^2 * KL(teacher || student).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput, SpecError


def setting(
    default: Any,
    doc: str,
    *,
    allowed: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    path: bool = False,
) -> Any:
    """A field with its documentation and its range: [low, high], or greater than `above`."""
    metadata = dict(doc=doc, allowed=allowed, low=low, high=high, above=above, path=path)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = setting("", "Name of the run folder; empty means the spec's name and the time.")
    out: str = setting(
        "runs", "Folder that holds the run folders; relative to where the command is given."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    path: str = setting(
        "",
        "Folder of the teacher (config.json, safetensors, tokenizer.json); empty means no teacher.",
        path=True,
    )
    backend: str = setting(
        "auto",
        "How the teacher computes: dense weights (dequantized), or no teacher (none).",
        allowed=("auto", "dequantized", "none"),
    )
    precision: str = setting(
        "auto",
        "Arithmetic of the teacher: auto is bf16 on a GPU that has it, else fp32.",
        allowed=("auto", "fp32", "bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentSection:
    path: str = setting(
        "",
        "Folder of a student to start from; empty means fresh weights of the shape in student.config.",
        path=True,
    )
    config: str = setting("", "A config.json with the shape of a fresh student.", path=True)
    precision: str = setting(
        "auto",
        "Arithmetic of the student; its master weights are fp32 always.",
        allowed=("auto", "fp32", "bf16"),
    )
    save_as: str = setting(
        "fp32",
        "Number format of the saved student; checkpoints are fp32 always.",
        allowed=("fp32", "bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    corpus: str = setting(
        "python-stdlib",
        "python-stdlib (this interpreter's own library), a folder, a text file or a .jsonl with a text field.",
    )
    tokenizer: str = setting(
        "",
        "Folder or file of the tokenizer; empty means the teacher's, else the student's.",
        path=True,
    )
    seq_len: int = setting(
        256,
        "Tokens in a row. Documents are packed into rows and never attend to each other.",
        low=2,
    )
    heldout_fraction: float = setting(
        0.08,
        "Share of the documents, chosen by name, that is never trained on.",
        above=0.0,
        high=0.5,
    )
    include_tests: bool = setting(
        False, "Whether python-stdlib includes the library's own test files."
    )
    max_bytes: int = setting(0, "At most so many bytes of training text; 0 means all.", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    alpha: float = setting(
        0.3,
        "Weight of the cross entropy; 1 - alpha is the weight of T^2 * KL(teacher || student).",
        low=0.0,
        high=1.0,
    )
    temperature: float = setting(
        2.0, "T: both models' logits are divided by it inside the KL.", above=0.0
    )
    chunk_rows: int = setting(0, "Tokens whose logits are held at a time; 0 chooses.", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    steps: int = setting(1000, "Optimizer steps of the whole run.", low=1)
    rows: int = setting(8, "Rows in one forward pass.", low=1)
    accumulation: int = setting(1, "Forward passes in one optimizer step.", low=1)
    lr: float = setting(3e-4, "Peak learning rate.", above=0.0)
    warmup_steps: int = setting(20, "Steps of linear warm-up.", low=0)
    schedule: str = setting(
        "cosine", "Learning rate after warm-up.", allowed=("cosine", "constant")
    )
    final_lr_ratio: float = setting(
        0.1, "Where cosine ends, as a share of the peak.", low=0.0, high=1.0
    )
    weight_decay: float = setting(0.1, "AdamW's decay, of matrices only.", low=0.0)
    beta1: float = setting(0.9, "AdamW's first moment.", low=0.0, high=0.9999)
    beta2: float = setting(0.95, "AdamW's second moment.", low=0.0, high=0.99999)
    eps: float = setting(1e-8, "AdamW's epsilon.", above=0.0)
    clip_norm: float = setting(
        1.0, "Global gradient norm is clipped to this; 0 never clips.", low=0.0
    )
    seed: int = setting(0, "Seeds fresh weights and the order of the rows.", low=0)
    on_non_finite: str = setting(
        "stop",
        "What to do at a NaN or infinite loss or gradient: stop, or skip that update.",
        allowed=("stop", "skip"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    every: int = setting(
        50, "Steps between held-out evaluations; 0 means only before and after.", low=0
    )
    rows: int = setting(64, "Held-out rows in each evaluation.", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    every: int = setting(200, "Steps between checkpoints; 0 means only at the end.", low=0)
    keep_last: int = setting(2, "How many of the newest to keep, beside the best.", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSection:
    device: str = setting(
        "auto",
        "Where to train: auto is the first GPU, else the CPU.",
        allowed=("auto", "cpu", "cuda"),
    )
    threads: int = setting(0, "CPU threads of torch; 0 means the CPUs this process may use.", low=0)
    thread_wait: str = setting(
        "auto",
        "How waiting CPU threads wait: passive sleeps, active spins.",
        allowed=("auto", "passive", "active"),
    )
    deterministic: bool = setting(
        False, "Refuse operations without a deterministic form (always true of the CPU path)."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    run: RunSection = dataclasses.field(default_factory=RunSection)
    teacher: TeacherSection = dataclasses.field(default_factory=TeacherSection)
    student: StudentSection = dataclasses.field(default_factory=StudentSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    eval: EvalSection = dataclasses.field(default_factory=EvalSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    compute: ComputeSection = dataclasses.field(default_factory=ComputeSection)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @property
    def sha256(self) -> str:
        """Hash of every setting except where the run is kept: equal hashes mean the same
        experiment.
        """
        settings = self.to_dict()
        del settings["run"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @property
    def has_teacher(self) -> bool:
        return self.teacher.backend != "none" and bool(self.teacher.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting, for help texts and checks."""

    key: str
    type_name: str
    default: Any
    doc: str
    allowed: tuple[str, ...] | None


def options() -> Iterator[Option]:
    """Every setting of a RunSpec, in the order of the file."""
    for section in dataclasses.fields(RunSpec):
        kind = _section_type(section.name)
        types_by_name = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            yield Option(
                key=f"{section.name}.{item.name}",
                type_name=types_by_name[item.name].__name__,
                default=item.default,
                doc=item.metadata["doc"],
                allowed=item.metadata["allowed"],
            )


def _section_type(name: str) -> Any:
    return typing.get_type_hints(RunSpec)[name]


KEYS = tuple(option.key for option in options())

_HEADER = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


def key_lines(text: str) -> dict[str, int]:
    """Line number of each dotted key and section of a TOML text. (`tomllib` parses but does not
    say where things were.)
    """
    lines: dict[str, int] = {}
    section = ""
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if closing is not None:
            if closing in line:
                closing = None
            continue
        if header := _HEADER.match(line):
            section = re.sub(r"\s", "", header[1])
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            name = re.sub(r"\s", "", key[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
            for quote in ('"""', "'''"):
                if line.count(quote) == 1:
                    closing = quote
    return lines


class _Problems:
    """Collects every problem, each with the place its key was set."""

    def __init__(self, file: str, lines: dict[str, int], from_sets: set[str]) -> None:
        self.file, self.lines, self.from_sets = file, lines, from_sets
        self.found: list[tuple[int, str]] = []
        self._named: set[str] = set()

    def add(self, key: str, text: str) -> None:
        if key in self._named:
            return  # the first thing wrong with a key is the one to mend first
        self._named.add(key)
        if key in self.from_sets:
            self.found.append((10**9, f"--set {key}: {text}"))
            return
        line = self.lines.get(key) or self.lines.get(key.split(".")[0])
        place = f"{self.file}:{line}" if line else self.file
        self.found.append((line or 0, f"{place}: {key}: {text}"))

    def raise_if_any(self) -> None:
        if self.found:
            self.found.sort(key=lambda item: item[0])
            raise SpecError([text for _, text in self.found])


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
    if not close:
        last = key.rsplit(".", 1)[-1]
        close = [k for k in KEYS if k.rsplit(".", 1)[-1] == last][:1]
    return (
        f"; did you mean {close[0]}?" if close else f"; known sections are {', '.join(_sections())}"
    )


def _sections() -> list[str]:
    return [f.name for f in dataclasses.fields(RunSpec)]


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix == "":
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def parse_set(argument: str) -> tuple[str, Any]:
    """`key=value` of `--set`; the value is TOML where it parses as TOML, else the text itself."""
    key, equals, text = argument.partition("=")
    if not equals or not key.strip():
        raise SpecError([f"--set {argument}: expected key=value, found no key or no ="])
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    return key.strip(), value


def _check_value(option: Option, metadata: Any, value: Any) -> tuple[Any, str | None]:
    """The value in its field's type, or what is wrong with it."""
    found = f"found {json.dumps(value, default=str)}"
    match option.type_name:
        case "bool":
            if not isinstance(value, bool):
                return value, f"expected true or false, {found}"
        case "str":
            if not isinstance(value, str):
                return value, f"expected a text in quotes, {found}"
            if option.allowed and value not in option.allowed:
                return value, f"expected one of {', '.join(option.allowed)}, {found}"
        case "int" | "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return value, f"expected a number, {found}"
            if option.type_name == "int" and not (isinstance(value, int)):
                return value, f"expected a whole number, {found}"
            if not math.isfinite(value):
                return value, f"expected a finite number, {found}"
            if (range_text := _range_problem(metadata, value)) is not None:
                return value, f"expected {range_text}, found {value}"
            if option.type_name == "float":
                value = float(value)
    return value, None


def _range_problem(metadata: Any, value: float) -> str | None:
    low, high, above = metadata["low"], metadata["high"], metadata["above"]
    inside = (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if inside:
        return None
    if above is not None:
        return f"a number above {above:g}" + (f", at most {high:g}" if high is not None else "")
    if high is not None:
        return f"a number in [{low:g}, {high:g}]"
    return f"a number of at least {low:g}"


def _cross_checks(spec: RunSpec, add: Callable[[str, str], None]) -> None:
    """What no single field can see."""
    if spec.teacher.backend == "dequantized" and not spec.teacher.path:
        add("teacher.backend", "expected teacher.path beside it, found none")
    if not spec.has_teacher and spec.loss.alpha != 1.0:
        add(
            "loss.alpha",
            f"expected 1 when there is no teacher (cross entropy alone), found {spec.loss.alpha:g}",
        )
    if bool(spec.student.path) == bool(spec.student.config):
        both = "both" if spec.student.path else "neither"
        add(
            "student.path", f"expected exactly one of student.path and student.config, found {both}"
        )
    if spec.train.warmup_steps > spec.train.steps:
        add(
            "train.warmup_steps",
            f"expected at most train.steps ({spec.train.steps}), found {spec.train.warmup_steps}",
        )
    if "/" in spec.run.name or spec.run.name in (".", ".."):
        add("run.name", f"expected a name without '/', found {json.dumps(spec.run.name)}")


def _path_checks(spec: RunSpec, add: Callable[[str, str], None]) -> None:
    for option in options():
        section, name = option.key.split(".")
        value = getattr(getattr(spec, section), name)
        is_path = next(
            f for f in dataclasses.fields(_section_type(section)) if f.name == name
        ).metadata["path"]
        if is_path and value and not Path(value).exists():
            add(option.key, f"expected a file or folder at {value}, found nothing there")
    corpus = spec.data.corpus
    if corpus != "python-stdlib" and not Path(corpus).exists():
        add("data.corpus", f"expected python-stdlib or a path, found nothing at {corpus}")


def build_spec(
    tree: dict[str, Any],
    *,
    file: str = "spec",
    base: Path = Path(),
    lines: dict[str, int] | None = None,
    sets: list[str] | None = None,
    check_paths: bool = True,
) -> RunSpec:
    """A RunSpec from a parsed tree and `--set` arguments. Raises SpecError with every problem."""
    pairs = dict(_flatten(tree))
    origin = dict.fromkeys(pairs, base)
    set_problems: list[str] = []
    from_sets: set[str] = set()
    for argument in sets or []:
        try:
            key, value = parse_set(argument)
        except SpecError as error:
            set_problems += error.problems
            continue
        pairs[key] = value
        from_sets.add(key)
        origin[key] = (
            Path.cwd()
        )  # a path typed on the command line means what it means in the shell
    problems = _Problems(file, lines or {}, from_sets)
    problems.found += [(10**9, text) for text in set_problems]
    metadata = {
        f"{s.name}.{f.name}": f.metadata
        for s in dataclasses.fields(RunSpec)
        for f in dataclasses.fields(_section_type(s.name))
    }
    values: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    by_key = {option.key: option for option in options()}
    for key, value in pairs.items():
        if key not in by_key:
            if key in values and not isinstance(value, dict):
                problems.add(key, f"expected a section [{key}], found a value")
            else:
                problems.add(key, f"unknown key{_nearest(key)}")
            continue
        checked, problem = _check_value(by_key[key], metadata[key], value)
        if problem:
            problems.add(key, problem)
            continue
        is_path = metadata[key]["path"] or (key == "data.corpus" and checked != "python-stdlib")
        if is_path and checked:
            checked = str((origin[key] / Path(checked).expanduser()).resolve())
        section, name = key.split(".")
        values[section][name] = checked
    spec = RunSpec(**{name: _section_type(name)(**fields) for name, fields in values.items()})
    _cross_checks(spec, problems.add)
    if check_paths:
        _path_checks(spec, problems.add)
    problems.raise_if_any()
    return spec


def load_spec(path: Path, sets: list[str] | None = None) -> tuple[RunSpec, str]:
    """The spec in a TOML file, with `--set` arguments over it, and the file's text."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"spec: {path} — expected a TOML file, found nothing there") from None
    except OSError as error:
        raise BadInput(
            f"spec: {path} — expected a readable TOML file, found: {error.strerror}"
        ) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"spec: {path} — expected UTF-8, found byte {error.start} that is not"
        ) from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError([f"{path}: not TOML: {error}"]) from None
    spec = build_spec(
        tree, file=str(path), base=path.resolve().parent, lines=key_lines(text), sets=sets
    )
    return spec, text


def spec_from_dict(tree: dict[str, Any]) -> RunSpec:
    """The spec of a run folder's effective.json: the same strictness, paths as they were
    resolved.
    """
    return build_spec(tree, file="effective.json", base=Path("/"), check_paths=False)


def spec_to_toml(spec: RunSpec) -> str:
    """The spec as TOML with every setting and its documentation: what `engine spec` prints."""
    out: list[str] = []
    section = ""
    for option in options():
        name, field = option.key.split(".")
        if name != section:
            out += ([""] if out else []) + [f"[{name}]"]
            section = name
        choices = f" One of: {', '.join(option.allowed)}." if option.allowed else ""
        out += [
            f"# {option.doc}{choices}",
            f"{field} = {_toml_value(getattr(getattr(spec, name), field))}",
        ]
    return "\n".join(out) + "\n"


def _toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
