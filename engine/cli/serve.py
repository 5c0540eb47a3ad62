"""Show runs live in a browser: the list with a verdict each, and the page of each run, flip and finding.

engine serve                        the runs in ./runs; open the printed URL
engine serve runs flips evidence    several folders as one list
engine serve --port 9000            another port than 8765

It listens on 127.0.0.1 alone, reads the given folders, starts nothing and changes nothing in them. From another
machine: ssh -L 8765:127.0.0.1:8765 HOST, then the same URL. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.arguments import add_path, whole
from engine.terminal import put, say

HELP = "show runs live in a browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser,
        "folders",
        "RUNS",
        "folders of runs, flips or findings, or one of these (runs)",
        nargs="*",
    )
    parser.add_argument(
        "--port", type=whole(65_535), metavar="N", help="port (8765, or a free one); 0: a free one"
    )
    add_path(parser, "--token-file", "FILE", "file of the token (in the user's state folder)")


def run(arguments: argparse.Namespace) -> int:
    from engine.errors import BadInput, UsageError
    from engine.files import user_state
    from engine.version import install_extra

    try:
        from engine.serve.access import read_token
        from engine.serve.app import build_app, listen, server_of
    except ModuleNotFoundError as error:
        hint = install_extra("serve")
        name = (error.name or "").partition(".")[0]
        if name not in ("starlette", "uvicorn"):
            raise
        raise BadInput.expected(
            "library", name, "it to be installed for `engine serve`", "it is not", hint=hint
        ) from None
    port: int | None = arguments.port
    if port is not None and port < 0:
        raise UsageError(f"--port: expected 0 to 65535, found {port}")
    token = read_token(arguments.token_file or user_state("serve-token"))
    listener, message = listen(port)
    port = listener.getsockname()[1]
    app = build_app(arguments.folders or [Path("runs")], token, port)
    if message:
        say(message)
    put(f"http://127.0.0.1:{port}/?token={token}", flush=True)
    server_of(app).run([listener])
    return 0
