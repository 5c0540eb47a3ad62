"""A RunSpec out of TOML and `--set` arguments, and back into TOML."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import BadInput, SpecError
from engine.spec.problems import Problems, key_lines, nearest, sections
from engine.spec.sections import RunSpec, options, section_type
from engine.spec.values import check_value, parse_set


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix == "":
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _cross_checks(spec: RunSpec, add: Callable[[str, str], None]) -> None:
    """What no single field can see."""
    if spec.teacher.backend in ("dequantized", "quantized") and not spec.teacher.path:
        add("teacher.backend", "expected teacher.path beside it, found none")
    if spec.teacher.backend == "cached" and not (spec.teacher.path and spec.teacher.cache):
        lacking = "teacher.cache" if spec.teacher.path else "teacher.path"
        add("teacher.backend", f"expected {lacking} beside it, found none")
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
    if spec.checks.every > 0 and spec.compute.gpus > 1:
        add(
            "checks.every",
            f"expected 0 or -1 with {spec.compute.gpus} GPUs, which share the student out, "
            f"found {spec.checks.every}",
        )
    if "/" in spec.run.name or spec.run.name in (".", ".."):
        add("run.name", f"expected a name without '/', found {json.dumps(spec.run.name)}")


def _path_checks(spec: RunSpec, add: Callable[[str, str], None]) -> None:
    for option in options():
        section, name = option.key.split(".")
        value = getattr(getattr(spec, section), name)
        is_path = next(
            f for f in dataclasses.fields(section_type(section)) if f.name == name
        ).metadata["path"]
        # `engine prepare` makes the cache; a run finds out what is in it when it checks its inputs.
        if is_path and value and option.key != "teacher.cache" and not Path(value).exists():
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
    problems = Problems(file, lines or {}, from_sets)
    problems.found += [(10**9, text) for text in set_problems]
    metadata = {
        f"{s.name}.{f.name}": f.metadata
        for s in dataclasses.fields(RunSpec)
        for f in dataclasses.fields(section_type(s.name))
    }
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    by_key = {option.key: option for option in options()}
    for key, value in pairs.items():
        if key not in by_key:
            if key in values and not isinstance(value, dict):
                problems.add(key, f"expected a section [{key}], found a value")
            else:
                problems.add(key, f"unknown key{nearest(key)}")
            continue
        checked, problem = check_value(by_key[key], metadata[key], value)
        if problem:
            problems.add(key, problem)
            continue
        is_path = metadata[key]["path"] or (key == "data.corpus" and checked != "python-stdlib")
        if is_path and checked:
            checked = str((origin[key] / Path(checked).expanduser()).resolve())
        section, name = key.split(".")
        values[section][name] = checked
    spec = RunSpec(**{name: section_type(name)(**fields) for name, fields in values.items()})
    _cross_checks(spec, problems.add)
    if check_paths:
        _path_checks(spec, problems.add)
    problems.raise_if_any()
    return spec


def read_spec(path: Path) -> tuple[dict[str, Any], str]:
    """What a TOML file says, and its text; nothing in it is checked yet. Raises BadInput."""
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
    return tree, text


def load_spec(path: Path, sets: list[str] | None = None) -> tuple[RunSpec, str]:
    """The spec in a TOML file, with `--set` arguments over it, and the file's text."""
    tree, text = read_spec(path)
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
