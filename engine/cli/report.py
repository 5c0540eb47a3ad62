"""Write a run, several runs compared, a flip or a finding as one HTML file that opens offline.

engine report runs/kd-1                  report-kd-1.html here; its path on stdout
engine report runs/a runs/b              report-a-b.html: two to six runs compared
engine report flips/x --out flip.html    another name; an existing file is kept unless --force
engine report evidence/2026-01-01-hang   a finding: its tree, its evidence, whether it verifies
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.answers import answer
from engine.cli.arguments import add_json

HELP = "write a run, a comparison, a flip or a finding as one HTML file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        metavar="RUN|FLIP|FINDING",
        help="its folder; several runs are compared",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write (report-NAME.html)"
    )
    parser.add_argument(
        "--home", action="store_true", help="keep the paths of home folders, which are ~ otherwise"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.errors import BadInput
    from engine.log.folder import write_whole
    from engine.report.page import report

    text = report(*arguments.source, with_home=arguments.home)
    names = "-".join(path.resolve().name for path in arguments.source)
    out = arguments.out or Path(f"report-{names[:200]}.html")
    if out.exists() and not arguments.force:
        raise BadInput.expected(
            "report",
            out,
            "no file of that name",
            "one",
            hint="--force replaces it, --out names another",
        )
    write_whole(out, text)
    return answer(arguments, "report", {"path": out}, [out])
