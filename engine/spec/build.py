"""Build a RunSpec from TOML and `--set` arguments, and write one as TOML. All problems of a spec are reported
together, each with the file and line, or the `--set`, that has the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine import limits
from engine.errors import BadInput, SpecError
from engine.files import read_text
from engine.spec import hub_cache
from engine.spec.other_names import OTHER_NAMES
from engine.spec.sections import KEYS, RunSpec, options, section_type
from engine.spec.values import check_value, parse_set, refusal_of_toml, shown

# Adjacent parts never match the same character, so a line of spaces cannot cause backtracking.
_HEADER = re.compile(r"\s*\[([A-Za-z0-9_.\-\s]+)\]\s*(?:#.*)?$")
_FROM_HUB: dict[str, hub_cache.Wanted] = {
    "teacher.path": "model",
    "student.path": "model",
    "student.config": "config",
    "data.tokenizer": "tokenizer",
}
"""Settings whose value may be a model's name on the hub, and the part of the model that each of them reads."""
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


class Gone(NamedTuple):
    """A removed setting."""

    accepted: tuple[str | float, ...]
    """Values that ask for what every run does now. They are accepted and have no effect."""
    why: str
    """Reason for the removal, for the error message."""

    def refusal(self, value: Any) -> str:
        found = shown(json.dumps(value, ensure_ascii=False, default=str))
        return f"expected no such setting, found {found}: it was removed, because {self.why}"


GONE = {
    "teacher.prefetch": Gone(
        ("auto", "on", "off"),
        "starting on the next batch during the optimizer step gained 0.5 % of a step",
    ),
    "teacher.kernel": Gone(
        ("auto", "by_shape", "dequantize"),
        "a training step has too many rows for the fused kernel, so the weights of a quantized teacher are always "
        "dequantized before a matmul",
    ),
    **dict.fromkeys(
        ("teacher.compile", "student.compile"),
        Gone(
            ("auto", "on", "off"),
            "layers on a GPU run our kernels between their matmuls, as fast as compiled layers (kernels.layers)",
        ),
    ),
    **dict.fromkeys(
        ("gate.teacher_reference", "gate.teacher_kl"),
        Gone(("", 0.0), "`engine eval ppl TEACHER --against REFERENCE` measures the KL"),
    ),
    "gate.cache_rows": Gone(
        (16,), "every run compares stored outputs with its teacher's before it uses them"
    ),
}
"""Removed settings, which specs, runs and checkpoints of earlier versions may have."""


def key_lines(text: str) -> dict[str, int]:
    """Return the line number of each dotted key and section of a TOML text, which `tomllib` does not report."""
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


class Problems:
    """Collects every problem, with the file and line, or the `--set`, that has the key."""

    def __init__(self, file: str, lines: dict[str, int], from_sets: set[str]) -> None:
        self.file, self.lines, self.from_sets = file, lines, from_sets
        self.found: list[tuple[int, str]] = []
        self._named: set[str] = set()

    def add(self, key: str, text: str) -> None:
        if key in self._named:
            return  # only the first problem of a key is reported
        self._named.add(key)
        if key in self.from_sets:
            self.found.append((10**9, f"--set {shown(key)}: {text}"))
            return
        line = self.lines.get(key) or self.lines.get(key.split(".")[0])
        place = f"{self.file}:{line}" if line else self.file
        self.found.append((line or 0, f"{place}: {shown(key)}: {text}"))

    def raise_if_any(self) -> None:
        if self.found:
            self.found.sort(key=lambda item: item[0])
            raise SpecError([text for _, text in self.found])


def nearest(key: str) -> str:
    """Return what to write instead of an unknown key, as the end of a message."""
    name = key.rsplit(".", 1)[-1]
    if setting := OTHER_NAMES.get(key) or OTHER_NAMES.get(name):
        return f"; did you mean {setting}?"
    # The same name in another section, if only one section has it.
    close = [k for k in KEYS if k.rsplit(".", 1)[-1] == name]
    if len(close) != 1:
        close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5) or close
    return (
        f"; did you mean {close[0]}?" if close else f"; known sections are {', '.join(sections())}"
    )


def sections() -> list[str]:
    return [f.name for f in dataclasses.fields(RunSpec)]


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix == "":
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _cross_checks(
    spec: RunSpec, written: Mapping[str, Any], add: Callable[[str, str], None]
) -> None:
    """Check the constraints between fields. A message names a value only where the user has `written` it."""
    if spec.teacher.backend in ("dequantized", "quantized") and not spec.teacher.path:
        add("teacher.backend", "expected teacher.path as well, found none")
    if spec.teacher.backend == "cached" and not (spec.teacher.path and spec.teacher.cache):
        lacking = "teacher.cache" if spec.teacher.path else "teacher.path"
        add("teacher.backend", f"expected {lacking} as well, found none")
    # A section written as a value is refused elsewhere, with its line.
    if spec.has_teacher or spec.loss.alpha == 1.0 or "teacher" in written:
        pass
    elif "loss.alpha" not in written and spec.teacher.backend == "none":
        add("teacher.backend", 'expected loss.alpha = 1 with "none", found no loss.alpha')
    elif "loss.alpha" not in written:
        add(
            "teacher.path",
            'expected a teacher, found none; write [teacher] path = "FOLDER or FILE", '
            "or loss.alpha = 1 to train the student on the text alone",
        )
    else:
        add(
            "loss.alpha",
            f"expected 1 when there is no teacher (cross entropy alone), found {spec.loss.alpha:g}",
        )
    if bool(spec.student.path) == bool(spec.student.config) and "student" not in written:
        found = (
            "both"
            if spec.student.path
            else 'neither; write [student] path = "FOLDER or FILE" to continue from a model, '
            'or config = "config.json" for fresh weights'
        )
        add(
            "student.path",
            f"expected exactly one of student.path and student.config, found {found}",
        )
    if spec.student.adapter != "none" and not spec.student.path:
        add("student.adapter", "expected student.path, the base of an adapter, found none")
    if spec.teacher.context:
        refused = {
            "a teacher that reads it (teacher.path), found none": not spec.has_teacher,
            "a teacher that is run, found stored outputs": spec.teacher.backend == "cached"
            or bool(spec.teacher.cache),
            'rollout.by = "student", found "teacher", which generates rows without the context': (
                spec.rollout.share > 0 and spec.rollout.by == "teacher"
            ),
            'teacher.shard = "off", found "on"': spec.teacher.shard == "on",
        }
        for text, holds in refused.items():
            if holds:
                add("teacher.context", f"expected {text}")
    if spec.rollout.share > 0:
        if not spec.has_teacher:
            add("rollout.share", "expected a teacher for generated rows, found none")
        if spec.teacher.cache or spec.teacher.backend == "cached":
            add(
                "rollout.share",
                "expected a teacher that is run, found stored outputs, which generated rows do not have",
            )
        if spec.compute.gpus > 1 and spec.rollout.by == "teacher" and spec.teacher.shard == "on":
            add(
                "rollout.by",
                'expected "student" with a sharded teacher (teacher.shard = "on"), found "teacher"',
            )
    if spec.train.warmup > spec.train.steps:
        add(
            "train.warmup_steps",
            f"expected at most train.steps ({spec.train.steps}), found {spec.train.warmup_steps}",
        )
    if (tokens := spec.train.rows * spec.data.seq_len) > limits.BATCH_TOKENS.most:
        add(
            "train.rows",
            f"expected train.rows x data.seq_len to be {limits.BATCH_TOKENS}, found {tokens:,}",
        )
    # The message does not show the value: a URL may contain a secret.
    if not re.fullmatch(r"[\w\s$,-]*", spec.notify.to):
        add(
            "notify.to", "expected names of receivers, all, none or $VARIABLE, found something else"
        )
    if "/" in spec.run.name or spec.run.name in (".", ".."):
        add("run.name", f"expected a name without '/', found {json.dumps(spec.run.name)}")


def _path_checks(
    spec: RunSpec, written: Mapping[str, Any], add: Callable[[str, str], None]
) -> None:
    for option in options():
        value = spec.value(option.key)
        # `engine prepare` creates the cache; a run checks its content with the other inputs.
        if option.path and value and option.key != "teacher.cache" and not os.path.exists(value):
            add(option.key, f"expected a file or folder at {value}, found nothing there")
    corpus = spec.data.corpus
    if corpus != "python-stdlib" and not glob.has_magic(corpus) and not os.path.exists(corpus):
        hint = _download(written.get("data.corpus"), corpus)
        add(
            "data.corpus",
            f"expected python-stdlib or a path, found nothing at {shown(corpus)}{hint}",
        )


def _download(written: Any, resolved: str) -> str:
    """Return how to fetch a data set that a user gave by its name on the hub; empty if the name may be a path."""
    if (
        not isinstance(written, str)
        or hub_cache.hub_name(written) is None
        or Path(resolved).parent.exists()
    ):
        return ""
    fetched = f"`hf download {written} --repo-type dataset --local-dir {written}` fetches it"
    return f"; a data set is not downloaded by its name: {fetched}"


def build_spec(
    tree: dict[str, Any],
    *,
    file: str = "spec",
    base: Path = Path(),
    lines: dict[str, int] | None = None,
    sets: list[str] | None = None,
    check_paths: bool = True,
) -> RunSpec:
    """Build a RunSpec from a parsed tree and `--set` arguments. Raises SpecError with every problem."""
    if not isinstance(tree, dict):
        raise SpecError([f"{file}: expected sections of settings, found {type(tree).__name__}"])
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
        origin[key] = Path.cwd()  # a path on the command line is relative to the working directory
    problems = Problems(file, lines or {}, from_sets)
    problems.found += [(10**9, text) for text in set_problems]
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    by_key = {option.key: option for option in options()}
    for key, value in pairs.items():
        if key in GONE:
            if value not in GONE[key].accepted:
                problems.add(key, GONE[key].refusal(value))
            continue
        if key not in by_key:
            if key in values and not isinstance(value, dict) and key not in OTHER_NAMES:
                problems.add(key, f"expected a section{_as_section(key, value)}")
            else:
                problems.add(key, f"unknown key{nearest(key)}")
            continue
        checked, problem = check_value(by_key[key], value)
        if problem:
            problems.add(key, problem)
            continue
        is_path = by_key[key].path or (key == "data.corpus" and checked != "python-stdlib")
        if is_path and checked:
            named = checked
            checked, problem = _resolved(origin[key], checked)
            if problem:
                problems.add(key, problem)
                continue
            checked = _with_ending(checked, origin[key], named)
            if key in _FROM_HUB and not os.path.lexists(checked):
                checked, problem = _from_hub(key, named, checked)
                if problem and check_paths:
                    problems.add(key, problem)
        section, name = key.split(".")
        values[section][name] = checked
    spec = RunSpec(**{name: section_type(name)(**fields) for name, fields in values.items()})
    _cross_checks(spec, pairs, problems.add)
    if check_paths:
        _path_checks(spec, pairs, problems.add)
    problems.raise_if_any()
    return spec


def _from_hub(key: str, named: str, path: str) -> tuple[str, str | None]:
    """Return the path in the hub's cache if `named` is a model's name on the hub, otherwise `path`; and the problem if
    the model cannot be read."""
    model = hub_cache.hub_name(named)
    if model is None:
        return path, None
    part = _FROM_HUB[key]
    try:
        folder = hub_cache.find_snapshot(model, part).folder
    except BadInput as error:
        return path, error.message.removeprefix("model: ")
    return str(folder / hub_cache.CONFIG_FILE if part == "config" else folder), None


def models_of_hub(spec: RunSpec) -> dict[str, hub_cache.Snapshot]:
    """Return the snapshots of the hub's cache that a spec reads, by setting. Raises BadInput if one is missing or
    incomplete."""
    snapshots: dict[str, hub_cache.Snapshot] = {}
    for key, part in _FROM_HUB.items():
        if (snapshot := hub_cache.snapshot_of(str(spec.value(key)))) is not None:
            snapshot.check(part)
            snapshots[key] = snapshot
    return snapshots


def _as_section(key: str, value: Any) -> str:
    """Return the end of the message for a value in place of a section: how to write the section."""
    main = {"teacher": "path", "student": "path", "data": "corpus", "run": "name"}.get(key)
    if main is None or not isinstance(value, str):
        return f" [{key}], found a value"
    return f", [{key}] with {main} = {shown(json.dumps(value, ensure_ascii=False))}, found a string"


def _resolved(base: Path, text: str) -> tuple[str, str | None]:
    """Resolve a path, or report why it cannot be resolved: an unknown home folder, a loop of links."""
    try:
        resolved = str((base / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return text, f"expected a path, found {shown(text)}: {shown(reason)}"
    return resolved, None


def _with_ending(resolved: str, base: Path, named: str) -> str:
    """Return `resolved`. If that file has no extension and `named` has one, return the path of the link `named`
    instead: in a download cache only the link's extension tells the file's format."""
    path = base / Path(named).expanduser()
    if path.suffix and not Path(resolved).suffix and os.path.isfile(resolved):
        return str(path.parent.resolve() / path.name)
    return resolved


def read_spec(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a TOML file, unchecked, and its text. Raises BadInput."""
    text = read_text(path, "spec", limits.SPEC_FILE)
    return _parse_toml(text, path), text


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError([f"{path}: not TOML: {shown(str(error))}"]) from None
    except (RecursionError, ValueError) as error:
        raise SpecError([f"{path}: {refusal_of_toml(error)}"]) from None


def load_spec(path: Path, sets: list[str] | None = None) -> tuple[RunSpec, str]:
    """Load the spec in a TOML file, with `--set` arguments applied over it; also returns the file's text."""
    text = read_text(path, "spec", limits.SPEC_FILE)
    return spec_of_text(text, path, sets), text


def spec_of_text(text: str, path: Path, sets: list[str] | None = None) -> RunSpec:
    """Return the spec in `text`, the present or future content of the file `path`. Raises SpecError."""
    return build_spec(
        _parse_toml(text, path),
        file=str(path),
        base=path.resolve().parent,
        lines=key_lines(text),
        sets=sets,
    )


def spec_from_dict(tree: dict[str, Any]) -> RunSpec:
    """Build the spec from a run folder's effective.json, as strictly as from TOML. Its paths are absolute already, and
    need not exist."""
    return build_spec(tree, file="effective.json", base=Path("/"), check_paths=False)


def spec_to_toml(spec: RunSpec) -> str:
    """Return the spec as TOML with every setting and its documentation, as `engine spec` prints it."""
    lines: list[str] = []
    section = ""
    for option in options():
        name, field = option.key.split(".")
        if name != section:
            lines += ([""] if lines else []) + [f"[{name}]"]
            section = name
        choices = f" One of: {', '.join(option.allowed)}." if option.allowed else ""
        lines += [
            f"# {option.doc}{choices}",
            f"{field} = {_toml_value(spec.value(option.key))}",
        ]
    return "\n".join(lines) + "\n"


def _toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
