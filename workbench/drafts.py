"""A run that is not started yet: a spec file, and the changes to it. It begins from a template (any spec file), from a
past run, or from nothing.

Everything about a setting (its default, its meaning, its allowed values, whether a value is valid)
comes from `engine.spec`, which `engine distill` uses too, so both refuse the same values with the same
messages.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput, SpecError
from engine.files import read_text
from engine.log.folder import RunFolder, find_runs, is_run, write_whole
from engine.spec import (
    KEYS,
    Option,
    RunSpec,
    build_spec,
    key_lines,
    options,
    parse_set,
    read_spec,
    spec_from_dict,
    spec_to_toml,
)
from engine.spec.environment import sets_from_environment
from engine.spec.sections import section_type
from workbench.engine_commands import command_text, distill_arguments
from workbench.paths import path_text

EXAMPLES = Path(str(importlib.resources.files("engine.demo")))

OPTIONS = {option.key: option for option in options()}
SECTIONS = tuple(dict.fromkeys(key.split(".")[0] for key in KEYS))
SPECS_FOUND = 200
"""Maximum number of spec files to begin from."""
RUNS_OFFERED = 50
"""Past runs to begin from, the newest."""
ESSENTIALS = (
    "teacher.path",
    "student.path",
    "student.config",
    "data.corpus",
    "train.steps",
    "train.rows",
    "train.lr",
    "loss.alpha",
    "loss.temperature",
)
"""Essential settings, which a form shows first."""


def allowed_text(option: Option) -> str:
    """Describe the values that a setting may have."""
    if option.allowed:
        return f"one of {', '.join(option.allowed)}"
    if option.type_name == "bool":
        return "true or false"
    section, name = option.key.split(".")
    limits = next(f for f in dataclasses.fields(section_type(section)) if f.name == name).metadata
    if option.type_name == "str":
        return "a path" if limits["path"] else "a text"
    bounds = [
        words.format(limits[bound])
        for bound, words in (
            ("low", "at least {:g}"),
            ("above", "above {:g}"),
            ("high", "at most {:g}"),
        )
        if limits[bound] is not None
    ]
    kind = "an integer" if option.type_name == "int" else "a number"
    return " ".join([kind, ", ".join(bounds)]).strip()


def value_text(value: Any) -> str:
    """Return a value as it is typed after `--set KEY=`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def assignment(option: Option, text: str) -> str:
    """Return `KEY=VALUE` for `--set`. A text is quoted where it would otherwise be read as a number or a
    boolean."""
    _, value = parse_set(f"{option.key}={text}")
    if option.type_name == "str" and not isinstance(value, str):
        text = json.dumps(text)
    return f"{option.key}={text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the form."""

    option: Option
    value: str
    source: str
    """Origin of the value: `default`, `line 12` of the file, `environment` or `typed`."""
    problems: tuple[str, ...]

    @property
    def is_default(self) -> bool:
        return self.value == value_text(self.option.default)

    @property
    def is_shown_first(self) -> bool:
        """Whether a form shows it without being asked: the essentials, and what is not as usual."""
        return self.option.key in ESSENTIALS or not self.is_default or bool(self.problems)


def shown_first(settings: Sequence[Setting]) -> list[Setting]:
    """Return the essentials in their order, then the other settings that differ from the default or are wrong."""
    known = {setting.option.key: setting for setting in settings}
    rest = [s for s in settings if s.is_shown_first and s.option.key not in ESSENTIALS]
    return [*(known[key] for key in ESSENTIALS), *rest]


def matching(settings: Sequence[Setting], pattern: str) -> list[Setting]:
    """Return the settings with all words of `pattern` in name or description, those with the words in the name first;
    all settings for an empty pattern."""
    words = pattern.casefold().split()
    by_name = [s for s in settings if all(w in s.option.key.casefold() for w in words)]
    texts = ((s, f"{s.option.key} {s.option.doc}".casefold()) for s in settings)
    others = [s for s, text in texts if s not in by_name and all(w in text for w in words)]
    return [*by_name, *others]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A spec file with changes over it."""

    file: Path
    text: str = ""
    tree: Mapping[str, Any] = field(default_factory=dict)
    environment: tuple[str, ...] = ()
    """Settings from the environment, as `KEY=VALUE`; the engine reads them by itself."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """Typed values by key."""
    written: bool = True
    """Whether the file is on disk; one that begins from nothing is written when the run starts."""

    def edited(self, key: str, text: str | None) -> Draft:
        """Return the draft with another value of a setting; None undoes what was typed."""
        edits = {name: value for name, value in self.edits.items() if name != key}
        if text is not None:
            edits[key] = text
        return replace(self, edits={name: edits[name] for name in KEYS if name in edits})

    @property
    def sets(self) -> list[str]:
        """Return the arguments of `--set`."""
        return [assignment(OPTIONS[key], text) for key, text in self.edits.items()]

    @property
    def command(self) -> str:
        """Return the command that starts the run; of a file that is not written yet, without what it will hold."""
        sets = self.sets if self.written else []
        return command_text([*distill_arguments(self.file, sets, None), "--detach"])

    def build(self, *, check_paths: bool = True) -> tuple[RunSpec | None, tuple[str, ...]]:
        """Return the run's settings, or every problem in them as the engine's messages. With `check_paths`, a
        path that does not exist is a problem."""
        try:
            spec = build_spec(
                dict(self.tree),
                file=str(self.file),
                base=self.file.resolve().parent,
                lines=key_lines(self.text),
                sets=[*self.environment, *self.sets],
                check_paths=check_paths,
            )
        except SpecError as error:
            return None, error.problems
        return spec, ()

    def settings(self, problems: Sequence[str] = ()) -> list[Setting]:
        """Return every setting with its value and the value's source."""
        given = dict(parse_set(argument) for argument in self.environment)
        lines = key_lines(self.text)
        settings = []
        for key, option in OPTIONS.items():
            section, name = key.split(".")
            part = self.tree.get(section)
            if key in self.edits:
                value, source = self.edits[key], "typed"
            elif key in given:
                value, source = value_text(given[key]), "environment"
            elif isinstance(part, dict) and name in part:
                value, source = value_text(part[name]), f"line {lines.get(key, '?')}"
            else:
                value, source = value_text(option.default), "default"
            wrong = tuple(p for p in problems if f"{key}: " in p)
            settings.append(Setting(option=option, value=value, source=source, problems=wrong))
        return settings

    def save_as(self, path: Path) -> Draft:
        """Write all settings as a new spec file, and return the draft of that file. Raises BadInput when it
        exists, or when a setting has a problem."""
        spec, problems = self.build()
        if spec is None:
            raise SpecError(problems)
        if path.exists():
            raise BadInput.expected("spec", path, "a new file", "one that exists")
        if not path.parent.is_dir():
            raise BadInput.expected("spec", path, "a folder to write it in", "none")
        write_whole(path, spec_to_toml(spec))
        return open_draft(path)


def open_draft(file: Path, environ: Mapping[str, str] = os.environ) -> Draft:
    """Open the draft of a spec file. Raises BadInput when the file is not TOML."""
    tree, text = read_spec(file)
    return Draft(file=file, text=text, tree=tree, environment=tuple(sets_from_environment(environ)))


def draft_of_nothing(folder: Path, environ: Mapping[str, str] = os.environ) -> Draft:
    """Make a draft with every setting at its default, whose file will be run.toml, or run-2.toml, ... in `folder`."""
    names = ("run.toml", *(f"run-{n}.toml" for n in range(2, 1_000_000)))
    file = next(path for name in names if not (path := folder / name).exists())
    return Draft(file=file, environment=tuple(sets_from_environment(environ)), written=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Something that a new run can begin from."""

    kind: str
    """`nothing`, `template` or `run`."""
    name: str
    make: Callable[[], Draft]
    """Makes the draft; raises BadInput where a file cannot be read."""


def beginnings(folders: Sequence[Path]) -> list[Beginning]:
    """Return what a new run can begin from: the templates, then past runs, the newest first, and nothing."""
    runs = [run for folder in folders for run in find_runs(folder)][:RUNS_OFFERED]
    return [
        *(begin_from(path) for path in find_specs(folders)),
        *(Beginning(kind="run", name=run.name, make=partial(draft_like, run)) for run in runs),
        Beginning(
            kind="nothing",
            name="all settings at their defaults",
            make=partial(draft_of_nothing, Path()),
        ),
    ]


def begin_from(path: Path) -> Beginning:
    """Return a spec file, or a run folder, to begin from."""
    if is_run(path):
        run = RunFolder(path)
        return Beginning(kind="run", name=run.name, make=partial(draft_like, run))
    own = path.is_relative_to(EXAMPLES)
    name = f"{path.name}, an example of the package" if own else path_text(path)
    return Beginning(kind="template", name=name, make=partial(open_draft, path))


def draft_like(run: RunFolder, environ: Mapping[str, str] = os.environ) -> Draft:
    """Make a draft with the settings of a run, under a new name in the same folder.

    It is the run's spec file with its settings applied, or the copy in the run folder if that file was moved
    or changed. Raises BadInput when the settings of the run cannot be read.
    """
    try:
        effective = run.read_effective()
        wanted = spec_from_dict(effective["spec"])
    except BadInput as problem:
        raise BadInput.expected(
            "run folder", run.effective, "the settings of the run", f"{problem}"
        ) from problem
    file = Path(str(effective.get("spec_file", "")))
    try:
        draft = open_draft(file, environ)
        same = draft.text == read_text(run.spec, "spec", limits.SPEC_FILE)
    except BadInput:
        same = False
    if not same:
        draft = open_draft(run.spec, environ)
    base, _ = draft.build(check_paths=False)
    for key in KEYS:
        value, base_value = _value_of(wanted, key), None if base is None else _value_of(base, key)
        if key not in ("run.name", "run.out") and value != base_value:
            draft = draft.edited(key, value_text(value))
    parent = run.path.resolve().parent
    draft = draft.edited("run.out", str(parent))
    return draft.edited("run.name", free_name(parent, run.path.resolve().name))


def _value_of(spec: RunSpec, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(spec, section), name)


def free_name(folder: Path, name: str) -> str:
    """Return `name-2`, or the first number that no folder has yet."""
    stem, _, number = name.rpartition("-")
    # A date in a name is not a counter.
    stem, first = (
        (stem, int(number)) if stem and number.isdigit() and len(number) < 4 else (name, 1)
    )
    numbers = iter(range(first + 1, 1_000_000))
    return next(f"{stem}-{n}" for n in numbers if not (folder / f"{stem}-{n}").exists())


def find_specs(folders: Sequence[Path]) -> list[Path]:
    """Return the spec files in some folders and in the working folder, newest first, and the demo's last."""
    by_real_path: dict[str, Path] = {}
    for folder in (Path(), *folders):
        for path in _tomls(folder):
            if len(by_real_path) < SPECS_FOUND and _is_spec(path):
                by_real_path.setdefault(os.path.realpath(path), path)
    specs = sorted(by_real_path.values(), key=lambda path: path.stat().st_mtime, reverse=True)
    demo = EXAMPLES / "demo.toml"
    return [*specs, *([demo] if demo.is_file() else [])]


def _tomls(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.glob("*.toml"))
    except OSError:
        return


def _is_spec(path: Path) -> bool:
    try:
        tree, _ = read_spec(path)
    except BadInput:
        return False
    # A spec with a misspelt section is still listed, so that the form can show what is wrong.
    return not set(SECTIONS).isdisjoint(tree)
