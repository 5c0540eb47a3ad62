"""Print a script that completes commands, options, their choices and runs in a shell, generated from the current
commands.

engine completion bash > ~/.local/share/bash-completion/completions/engine
engine completion zsh > ~/.zfunc/_engine                 a folder of $fpath
engine completion fish > ~/.config/fish/completions/engine.fish

Runs are those in ./runs.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from engine.terminal import put

HELP = "print a completion script for a shell"
SHELLS = ("bash", "zsh", "fish")
_TABLE = """\
  local at= one; local -a found
  for one in "${before[@]}"; do
    case "$at$one " in
    %(places)s) at="$at$one " ;;
    esac
  done
  case "$at$last" in
%(choices)s
  *) case "$at" in
%(words)s
    esac
    case "$at" in
    %(with_runs)s)
      for one in runs/*/effective.json; do
        if [ -f "$one" ]; then found+=("${one%%/effective.json}"); fi
      done ;;
    esac ;;
  esac
"""
_BASH = """\
_engine() {
  local word="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}"
  local -a before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
%s
  COMPREPLY=()
  for one in "${found[@]}"; do
    if [[ $one == "$word"* ]]; then printf -v one %%q "$one"; COMPREPLY+=("$one"); fi
  done
}
complete -o default -F _engine engine
"""
_ZSH = """\
#compdef engine
_engine() {
  setopt localoptions nullglob
  local last="${words[CURRENT-1]}"
  local -a before=("${words[@]:1:$((CURRENT-2))}")
%s
  compadd -a found
  _files
}
if [ "$funcstack[1]" = _engine ]; then _engine "$@"; else compdef _engine engine; fi
"""


class Place(NamedTuple):
    """A command, or an action of one."""

    at: tuple[str, ...]
    parser: argparse.ArgumentParser

    @property
    def commands(self) -> dict[str, str]:
        """The commands, actions or words that follow, with their help."""
        names: dict[str, str] = {}
        for action in self.parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                names |= {choice.dest: choice.help or "" for choice in action._choices_actions}
            elif not action.option_strings:
                names |= dict.fromkeys(map(str, action.choices or ()), "")
        return names

    @property
    def options(self) -> list[argparse.Action]:
        return [action for action in self.parser._actions if action.option_strings]

    @property
    def takes_run(self) -> bool:
        taken = (str(action.metavar).split("|") for action in self.parser._actions)
        return any("RUN" in words or "PATH" in words for words in taken)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    places = list(_places(arguments.root, ()))
    if arguments.shell == "fish":
        script = "\n".join(_fish(places)) + "\n"
    else:
        script = {"bash": _BASH, "zsh": _ZSH}[arguments.shell] % _table(places)
    put(script, end="", exact=True)
    return 0


def _places(parser: argparse.ArgumentParser, at: tuple[str, ...]) -> Iterator[Place]:
    yield Place(at, parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from _places(subparser, (*at, name))


def _table(places: list[Place]) -> str:
    def either(subset: list[Place]) -> str:
        return "|".join(shlex.quote(f"{' '.join(place.at)} ") for place in subset)

    choices, words = [], []
    for place in places:
        at = "".join(f"{name} " for name in place.at)
        names = [name for option in place.options for name in option.option_strings]
        words.append(f"    {shlex.quote(at)}) found=({shlex.join([*place.commands, *names])}) ;;")
        for option in place.options:
            if option.choices is not None:
                either_name = "|".join(shlex.quote(f"{at}{name}") for name in option.option_strings)
                choices.append(
                    f"  {either_name}) found=({shlex.join(map(str, option.choices))}) ;;"
                )
    return _TABLE % {
        "places": either(places[1:]),
        "choices": "\n".join(choices),
        "words": "\n".join(words),
        "with_runs": either([place for place in places if place.takes_run]),
    }


def _fish(places: list[Place]) -> Iterator[str]:
    for place in places:
        conditions = [f"__fish_seen_subcommand_from {name}" for name in place.at]
        if following := place.commands:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(following)}")
        start = f"complete -c engine -n {_quoted('; and '.join(conditions) or 'true')}"
        for name, help in following.items():
            yield f"{start} -f -a {name} -d {_quoted(help)}"
        for option in place.options:
            names = [
                f"{'-l' if n.startswith('--') else '-s'} {n.lstrip('-')}"
                for n in option.option_strings
            ]
            value = "" if option.nargs == 0 else " -r"
            if option.choices is not None:
                value = f" -x -a {_quoted(' '.join(map(str, option.choices)))}"
            yield f"{start} {' '.join(names)}{value} -d {_quoted(option.help or '')}"
        if place.takes_run:
            runs = (
                "(for one in runs/*/effective.json; string replace -- /effective.json '' $one; end)"
            )
            yield f"{start} -a {_quoted(runs)}"


def _quoted(text: str) -> str:
    """Quote for fish, where a backslash escapes inside quotes."""
    escaped = text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
