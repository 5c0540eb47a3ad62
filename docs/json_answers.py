"""Every kind of object that `--json` prints: the commands that print it, and what it is."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    commands: str
    """The commands that print it, separated by commas; each may have an option."""
    what: str


ANSWERS = {
    # Runs
    "run": Answer(
        "runs, tail", "a run as far as it has logged; `engine runs` prints a list of them"
    ),
    "log-line": Answer(
        "tail --follow", "a new line of the logs of a run, between two objects `run`"
    ),
    "diagnosis": Answer("diagnose", "the verdict on a run or a log, with its evidence"),
    "diagnoses": Answer("diagnose", "the verdicts on a folder of logs"),
    "rule": Answer("diagnose --list", "an alert rule"),
    "tag": Answer("tag", "the tags and the note of a run"),
    "stop": Answer("stop", "what a run was asked to do"),
    "checks": Answer("checks", "the results of the checks of a run of the engine"),
    "identities": Answer("checks", "the results of the identities of a watched script"),
    "check": Answer("checks --list", "a check"),
    "verify": Answer("verify", "the result of a replay"),
    "report": Answer("report", "where the report is"),
    "import": Answer("import", "the run that was imported"),
    "export": Answer("export", "the file that was written"),
    "notify": Answer("notify", "the receivers, and with --test what they answered"),
    "doctor": Answer("doctor", "what this machine can do"),
    # Experiments and findings
    "proposal": Answer("flip --propose", "a change that would test a suspicion"),
    "plan": Answer("flip --dry-run, why test --dry-run", "the plan of a flip"),
    "flip": Answer("flip, flips", "the verdict of a flip; `engine flips` prints a list of them"),
    "finding": Answer(
        "why new, why cause, why test, why withdraw, why note, why show, why close, why export",
        "a finding, after what the command did to it",
    ),
    "finding-check": Answer("why check", "whether a finding is as it was sealed"),
    "evidence": Answer("evidence list", "a finding in one line"),
    "receipt": Answer("evidence receipt", "the receipt of a run, compared with its files"),
    # Training
    "spec": Answer("spec", "every setting, by section"),
    "init": Answer("init", "the spec that was written, and what was found"),
    "distill": Answer("distill", "the receipt of a run, its speed and its end"),
    "distill-check": Answer("distill --check", "what a run would read and need"),
    "projection": Answer("distill --smoke", "what a whole run would take, from its first steps"),
    "data": Answer("data", "what the data of a spec consists of"),
    "step": Answer("data --step", "the rows of one step"),
    "prepare-plan": Answer("prepare --dry-run", "what a store of teacher outputs would take"),
    "prepare": Answer("prepare", "the store that was written"),
    # Models
    "weights": Answer("inspect", "a weight file"),
    "convert": Answer("convert", "the file that was written"),
    "generate": Answer("generate", "generated text"),
    "perplexity": Answer("eval ppl", "the perplexity of a model on documents"),
    "problems": Answer("eval humaneval, eval mbpp", "the programming problems that a model solves"),
    "gate": Answer("gate", "which gates a distillation passes"),
    "publish": Answer("publish", "the folder that was published"),
    "publish-verify": Answer(
        "publish --verify", "whether a published folder gives the same answers"
    ),
    # The workbench itself
    "drill": Answer("drill --list", "a drill"),
    "drills": Answer("drill", "which incidents were named"),
    "contract-problems": Answer("contracts validate", "what is wrong in contract files"),
    "contracts": Answer("contracts run, contracts status", "the state of every contract"),
    "contract": Answer(
        "contracts list, contracts show", "a contract; `list` prints a list of them"
    ),
}
"""Every kind of object, in the order of the reference page."""
