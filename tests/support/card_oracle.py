"""Check a card of `engine publish`: its figures against the evidence, and its statements about its files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from engine.export.required_evidence import HELDOUT, Proof
from engine.formats.open import open_weights
from engine.log.folder import RunFolder
from engine.receipts.context import view_of
from engine.units import format_count

LARGEST_TABLES = 64 << 20
"""Maximum bytes of a weight file that are not weights."""


def contradicts_the_evidence(card: str, proof: Proof) -> str:
    """Return the first figure of a card, in its table or in the index of its front matter, that its evidence does not
    have, or that the index lacks for the student. Held-out losses and their number of tokens are those of the log, and
    a perplexity is the exponential of its loss. Empty for none."""
    evals = [one for one in view_of(proof.run).evals if one.loss is not None]
    labelled = {one.labelled for one in evals if one.labelled}
    # By title, subject and name; two evaluations of a kind have one title.
    figures: dict[tuple[str, str, str], list[float]] = {}
    for evaluation in proof.evaluations:
        for metric in evaluation.metrics:
            key = evaluation.title, metric.subject, metric.name
            figures.setdefault(key, []).append(metric.value)
    for one in evals:
        if (HELDOUT, one.subject, "loss") in figures and (one.subject != "student" or one.saved):
            figures[HELDOUT, one.subject, "loss"] = [float(one.loss or 0)]
    for (title, subject, name), values in list(figures.items()):
        if name == "loss" and min(values) < 700:
            exponentials = [math.exp(value) for value in values if value < 700]
            figures[title, subject, "perplexity"] = exponentials

    def wrong(key: tuple[str, str, str], said: str, value: float, apart: float) -> str:
        known = figures.get(key, [])
        if any(abs(value - found) <= 1e-3 * abs(found) + apart for found in known):
            return ""
        right = f"where it is {known[0]:.6g}" if known else "which nothing measured"
        return f"a {key[2]} of {said} for the {key[1]}, {right}"

    titles = {title for title, _, _ in figures}
    for line in card.splitlines():
        cells = [
            cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|"))
        ]
        if len(cells) == 5 and cells[0] in titles:
            said = cells[3].split()[0].replace(",", "")
            share = said.endswith("%")
            value = float(said.rstrip("%")) / (100 if share else 1)
            key = cells[0], cells[1], cells[2]
            if found := wrong(key, cells[3], value, 6e-4 if share else 1e-4):
                return found
        elif labelled and line.startswith(f"- {HELDOUT}: "):
            count = int(line.removeprefix(f"- {HELDOUT}: ").split()[0].replace(",", ""))
            if count not in labelled:
                return f"{count:,} held-out tokens, where {max(labelled):,} were evaluated"
    return _wrong_index(card, figures, wrong) or _wrong_training_facts(card, proof.run)


def contradicts_the_files(card: str, folder: Path, run: RunFolder) -> str:
    """Return the first false statement of a card about the files beside it, or its base models; empty for none."""
    with open_weights(folder) as weights:
        parameters = sum(math.prod(one.shape) for one in weights.tensors.values())
    found = re.search(r"model of (\S+) parameters", card)
    if found is not None and found[1] != format_count(parameters):
        return f"{found[1]} parameters, where its files have {parameters:,}"
    for name, bits in re.findall(r"^\| (\S+) \| .*; (\S+) bits per weight", card, re.MULTILINE):
        size, said = (folder / name).stat().st_size, float(bits) * parameters / 8
        # The rest of a file is its vocabulary.
        if not size - LARGEST_TABLES - 0.05 * size <= said <= 1.02 * size:
            return f"{bits} bits per weight in {name}, which has {size:,} bytes for {parameters:,}"
    models = view_of(run).models
    for role, sha256 in re.findall(r"^- `.*` \((.*?)\): .*tensors sha256 `(\w+)`", card, re.M):
        model = models.get("teacher" if role == "teacher" else "student")
        if model is not None and model.sha256 != sha256:
            return f"the {role} has the hash {sha256[:12]}, where it is {model.sha256[:12]}"
    # A licence that was given may have another text than those of the bases.
    if "(inherited: " in card and "no base model has it in its folder" in card:
        spec = run.read_effective().get("spec", {})
        bases = [spec.get(role, {}).get("path") for role in ("teacher", "student")]
        for text in (text for base in bases if base for text in Path(base).glob("LICEN[CS]E*")):
            return f"no text of a licence, where {text} is one"
    return ""


def _wrong_training_facts(card: str, run: RunFolder) -> str:
    """Return the first statement of a card about its training that the log or the settings contradict; empty for
    none."""
    view = view_of(run)
    started, data, last = view.started, view.data, view.student
    if started is None or data is None or last is None:
        return ""
    settings = run.read_effective().get("spec", {})
    tokens = sum(int(claim or 0) for claim in view.steps.values("tokens"))
    loss, train = settings.get("loss", {}), settings.get("train", {})
    claims = {
        r"(\S+) steps, \S+ tokens;": f"{view.last_step:,}",
        r"\S+ steps, (\S+) tokens;": f"{tokens:,}",
        r".*; AdamW, peak learning rate (\S+),": f"{started.peak_lr:g}",
        r".*; AdamW, .* seed (\d+)$": str(train.get("seed")),
        r"loss: (\S+) cross entropy": f"{started.alpha:g}",
        r"loss: .* \+ (\S+) T²": f"{1 - started.alpha:g}",
        r"loss: .* T² (\S+) at T": str(loss.get("divergence")),
        r"loss: .* at T = (\S+)$": f"{started.temperature:g}",
        r"data: (\S+) tokens of": f"{data.train_tokens:,}",
        r"data: .* of (\S+) documents": f"{data.train_files:,}",
        r"data: .*, sha256 `(.*?)`;": data.train_sha256,
        r"student: tensors sha256 `(.*)`": last.sha256,
    }
    for role, name in {"student start": "student", "teacher": "teacher"}.items():
        if name in view.models:
            claims[f"{role}: tensors sha256 `(.*)`"] = view.models[name].sha256
    for pattern, expected in claims.items():
        claim = re.search(f"^- {pattern}", card, re.MULTILINE)
        if claim is not None and claim[1] != expected:
            return f"{claim[0].removeprefix('- ')!r}, where it is {expected}"
    return ""


def _wrong_index(
    card: str,
    figures: Mapping[tuple[str, str, str], Sequence[float]],
    wrong: Callable[[tuple[str, str, str], str, float, float], str],
) -> str:
    index = yaml.safe_load(card.split("---\n")[1]).get("model-index") or []
    in_index: list[tuple[str, str, str]] = []
    for model in index:
        for result in model["results"]:
            for metric in result["metrics"]:
                key = result["dataset"]["name"], "student", metric["type"]
                in_index.append(key)
                if found := wrong(key, f"{metric['value']}", metric["value"], 1e-6):
                    return f"in its model-index {found}"
    for key, values in figures.items():
        if key[1] == "student" and in_index.count(key) != len(values):
            return (
                f"in its model-index {in_index.count(key)} times the {key[2]} of the student on "
                f"{key[0]}, where there are {len(values)}"
            )
    return ""
