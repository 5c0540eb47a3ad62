"""List the receivers of messages about runs, or send them a test message.

    engine notify                       those of notify.toml, without secrets
    engine notify --test                a message to each of them
    engine notify --test phone          to one; also $VARIABLE, or a URL

Exit 0 where every receiver took the test message, 1 where one did not; 65 for a notify.toml that cannot be used or has
no receiver.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import add_flag, add_json
from engine.errors import EXIT_FAIL, BadInput

if TYPE_CHECKING:
    from engine.notify.receivers import Receiver
    from engine.notify.send import Outcome

HELP = "list who gets messages about runs, or send a test message"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "names in notify.toml, $VARIABLE or URL (all of notify.toml)"
    parser.add_argument("receivers", nargs="*", metavar="RECEIVER", help=what)
    add_flag(parser, "--test", "send a test message, and report what came back")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.notify.receivers import ALL, choose_receivers, config_file

    receivers = choose_receivers(",".join(arguments.receivers) or ALL, os.environ)
    if not receivers:
        raise BadInput.expected("receivers", config_file(), "some", "none")
    rows: list[dict[str, object]] = [
        {"name": receiver.name, "where": receiver.where} for receiver in receivers
    ]
    texts = [[receiver.name, receiver.where] for receiver in receivers]
    if arguments.test:
        for row, text, outcome in zip(rows, texts, _send(receivers), strict=True):
            row |= {"sent": outcome.sent, "answer": outcome.text}
            text.append(outcome.text)
    code = 0 if all(row.get("sent", True) for row in rows) else EXIT_FAIL
    return answer(arguments, "notify", {"receivers": rows}, map(": ".join, texts), code)


def _send(receivers: list[Receiver]) -> list[Outcome]:
    from engine.notify.message import TEST, Message
    from engine.notify.send import Delivery

    host = socket.gethostname()
    message = Message(
        event=TEST,
        run="engine notify",
        host=host,
        step=None,
        level="UNKNOWN",
        verdict=f"a test message of engine notify on {host}; no run is concerned",
        do="",
        folder="",
        look="engine runs",
    )
    return Delivery(message, receivers).wait()
