"""One finding: its chain as a tree, each piece of evidence opened in place, and the actions on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, cast, get_args

from textual.binding import Binding, BindingType

from engine.errors import BadInput
from engine.findings import changes
from engine.findings.bundle import LOG, Bundle
from engine.findings.changes import Done
from engine.findings.finding import Kind, Says
from engine.findings.verify import check_bundle
from engine.findings.whys import OUTCOMES
from workbench.findings import FindingFeed, node_of, tested_id
from workbench.linking import PARTS, captured
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.form import Field, FormScreen, Values

NOTES = (
    "Signs of claims: * observed, + supported, x refuted, ? unverified. A cause (hypothesis,",
    "mechanism) is supported by a flip or a reproduction alone; else it is shown as unverified.",
    "> is evidence, shown in full under the cursor. ! was changed since it was captured.",
    "- was withdrawn: it stays, struck through, and supports nothing any more.",
    "",
    "E-WHY-001  observed needs evidence; supported and refuted need evidence that a tool captured",
    "E-WHY-002  a cause needs a flip with its runs, or a reproduction that started a run",
    "E-WHY-003  out of memory needs the record of an exit that says so",
    "E-WHY-004  no root cause while an alternative of less than 30 minutes is untested, or one is",
    "           excluded by anything but the test it names",
    "E-WHY-005  one observation supports one claim once",
    "",
    "Every change is made as by `engine why`, under the lock of the finding.",
)
WHERE = "a run, a flip or a file; ! COMMAND; or : what you say"


class FindingScreen(BrowseScreen[FindingFeed]):
    """The tree of one finding."""

    NOTES = NOTES
    CSS = "FindingScreen.-wide #both RowList, FindingScreen.-wide #both DetailsPane { width: 1fr; }"
    ACTING = frozenset({"add", "link", "alternative", "refute", "withdraw", "close", "export"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding(
            "a", "add", "add why", tooltip="add an answer to why the claim under the cursor is so"
        ),
        Binding(
            "l", "link", "link", tooltip="put evidence under the claim, or answer an alternative"
        ),
        Binding("o", "alternative", "or", tooltip="name another explanation and its cheapest test"),
        Binding("x", "refute", "refute", tooltip="mark the claim as wrong, with a reason"),
        Binding(
            "t", "withdraw", "withdraw", tooltip="withdraw an entry: it is kept, struck through"
        ),
        Binding("v", "verify", "verify", tooltip="hash and evaluate every piece of evidence again"),
        Binding("c", "close", "close", tooltip="close as root cause, or as unresolved"),
        Binding(
            "e", "export", "export", tooltip="enter it into LOG.md, or copy it elsewhere first"
        ),
    )

    def __init__(self, context: Context, path: Path) -> None:
        super().__init__(
            context, f"finding {path.name}", FindingFeed(path, ascii_only=context.ascii_only)
        )
        self.bundle = Bundle(path)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._feed.finding is not None if action in self.ACTING else True

    def _place(self) -> tuple[str, str]:
        """Return the node under the cursor, and the alternative, if it is one."""
        finding = self._feed.finding
        assert finding is not None, "actions are offered once it was read"
        return node_of(finding, self.selected.key if self.selected is not None else "")

    def _ask(
        self, title: str, send: Callable[[Values], Done | str], *fields: Field, note: str = ""
    ) -> None:
        """Open a form; its result is shown, and the cursor goes to the entry that it changed."""

        def sent(values: Values) -> str:
            done = send(values)
            return done if isinstance(done, str) else done.said

        def done(said: str | None) -> None:
            if said is not None:
                self.notify(said, markup=False)
                self.goto(said.partition(":")[0].partition(" ")[0])

        self.app.push_screen(FormScreen(title, fields, sent, note=note), done)

    # Keys.

    def action_add(self) -> None:
        def send(v: Values) -> Done:
            parents, kind = v["of"].replace(",", " ").split(), cast(Kind, v["kind"])
            return changes.add(self.bundle, v["claim"], why_of=parents, kind=kind)

        self._ask(
            "add an answer to a why",
            send,
            Field(name="claim", label="because", hint="the attention ran on the CPU"),
            Field(name="of", label="why of", value=self._place()[0], hint="n1, or several: n1 n3"),
            Field(name="kind", label="kind", value="hypothesis", options=get_args(Kind)),
        )

    def action_link(self) -> None:
        node, alternative = self._place()
        finding = self._feed.finding
        assert finding is not None

        def send(v: Values) -> Done:
            answers = tested_id(finding, v["node"], v["answers"]) if v["says"] == "answers" else ""
            return changes.link(
                self.bundle,
                v["node"],
                lambda: captured(v["where"], v["part"]),
                says=cast(Says, v["says"]),
                answers=answers,
                outcome=v["outcome"],
                result=v["result"],
            )

        said = "answers" if alternative else "supports"
        self._ask(
            "link evidence",
            send,
            Field(name="where", label="evidence", hint=WHERE),
            Field(name="part", label="part", hint=f"of a run: {PARTS}"),
            Field(name="node", label="node", value=node),
            Field(name="says", label="it", value=said, options=get_args(Says)[:3]),
            Field(name="answers", label="alternative", value=alternative, hint="for answers: a1"),
            Field(name="outcome", label="it is", value="excluded", options=OUTCOMES),
            Field(name="result", label="test showed", hint="for answers: what the test showed"),
            note="A command is run now, without a shell; part `exit 0` makes it a reproduction.",
        )

    def action_alternative(self) -> None:
        def send(v: Values) -> Done:
            asked = {name: v[name] for name in ("test", "if_true", "if_false", "minutes")}
            return changes.suspect(self.bundle, v["node"], v["claim"], **asked)

        self._ask(
            "another explanation",
            send,
            Field(name="claim", label="or", hint="the disk was slow"),
            Field(name="test", label="cheapest test", hint="engine flip RUN --set data.workers=0"),
            Field(name="if_true", label="if it is so", hint="what the test shows then"),
            Field(name="if_false", label="if not", hint="what the test shows then"),
            Field(name="minutes", label="minutes", hint="what the test costs"),
            Field(name="node", label="instead of", value=self._place()[0]),
        )

    def action_refute(self) -> None:
        self._ask(
            "mark a claim as wrong",
            lambda v: changes.refute(self.bundle, v["node"], v["reason"]),
            Field(name="reason", label="reason", hint="both arms completed"),
            Field(name="node", label="node", value=self._place()[0]),
        )

    def action_withdraw(self) -> None:
        entry = "" if self.selected is None else self.selected.key.partition("@")[0]
        hint = "a claim, evidence or an alternative: n2, e3, a1"
        self._ask(
            "withdraw an entry",
            lambda v: changes.withdraw(self.bundle, v["entry"], v["reason"]),
            Field(name="reason", label="reason", hint="it is of another run"),
            Field(name="entry", label="entry", value=entry, hint=hint),
            note="It is kept, struck through, and supports nothing any more.",
        )

    def action_verify(self) -> None:
        def verify() -> str:
            verdict = check_bundle(self.bundle).verdict
            return f"{verdict.level.name}: {verdict.reason}"

        self._feed.forget()
        self.command("verify", verify)

    def action_close(self) -> None:
        def send(v: Values) -> Done:
            unresolved = v["outcome"] == "unresolved"
            if unresolved and not v["text"]:
                expected = "why it stays unresolved"
                raise BadInput.expected("finding", self.bundle.path, expected, "no reason")
            reason = v["text"] if unresolved else ""
            return changes.close(self.bundle, unresolved=reason, text=v["text"])

        hint, outcomes = "the root cause, or why there is none", ("root-cause", "unresolved")
        self._ask(
            "close the finding",
            send,
            Field(name="text", label="in a sentence", hint=hint),
            Field(name="outcome", label="as", value="root-cause", options=outcomes),
        )

    def action_export(self) -> None:
        def send(v: Values) -> str:
            done = changes.export(self.bundle, Path(v["to"]) if v["to"] else None)
            return f"exported: {done.path}, entered into {done.path.parent / LOG}"

        self._ask(
            "export",
            send,
            Field(name="to", label="copy to", hint="another evidence folder; empty: here"),
            note="It is entered into LOG.md of its evidence folder.",
        )
