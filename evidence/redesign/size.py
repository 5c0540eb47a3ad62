"""How large the product is at two commits, by package: `python evidence/redesign/size.py BEFORE AFTER [--json]`.

Counted are Python's own tokens without comments, docstrings, line ends and indentation, so neither layout nor
documentation counts. Packages are compared under the names they have after; RENAMED says where each went.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tokenize
from collections import Counter

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RENAMED = {
    "engine/runlog": "engine/log",
    "engine/device": "engine/machine",
    "engine/supervise": "engine/watch",
    "engine/diagnose": "engine/watch",
    "engine/experiments": "engine/flips",
    "engine/evidence": "engine/findings",
    "engine/publish": "engine/export",
    "engine/gate": "engine/export",
    "engine/distill": "engine/train, plan, loss",
    "engine/train": "engine/train, plan, loss",
    "engine/plan": "engine/train, plan, loss",
    "engine/loss": "engine/train, plan, loss",
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def tokens(source: str) -> int:
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type not in LAYOUT and t.start not in docstrings for t in found)


def sizes(commit: str) -> dict[str, Counter[str]]:
    """Tokens, lines and files of each package at a commit."""
    packages: dict[str, Counter[str]] = {}
    for path in git("ls-tree", "-r", "--name-only", commit, "engine", "workbench").splitlines():
        if not path.endswith(".py"):
            continue
        parts = path.split("/")
        name = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        source = git("show", f"{commit}:{path}")
        counted = packages.setdefault(RENAMED.get(name, name), Counter())
        counted.update(tokens=tokens(source), lines=source.count("\n"), files=1)
    return packages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    before, after = sizes(arguments.before), sizes(arguments.after)
    if arguments.json:
        print(json.dumps({"before": before, "after": after}, indent=2))
        return
    print("| package | tokens before | after | lines before | after | files before | after |")
    print("|---|---|---|---|---|---|---|")
    names = sorted(
        before.keys() | after.keys(), key=lambda name: -before.get(name, Counter())["tokens"]
    )
    rows = [(name, before.get(name, Counter()), after.get(name, Counter())) for name in names]
    rows.append(("**all**", sum(before.values(), Counter()), sum(after.values(), Counter())))
    for name, old, new in rows:
        cells = [f"{side[kind]:,}" for kind in ("tokens", "lines", "files") for side in (old, new)]
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()
