"""Write the model card: README.md with front matter for the Hub, in which every figure has its source.

A figure appears in the card only if it is in the run's receipt, or in an evaluation of exactly these weights
whose file is in the same folder. The card states what was not measured. If evidence was missing at publication, the
card begins with a list of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.export.licence import Base, Licence
from engine.export.published import Verification
from engine.export.required_evidence import Evaluation, Metric, Proof
from engine.units import format_count
from engine.verdict import Level
from engine.version import VERSION

_TASK = {"type": "text-generation"}
_DATASETS = {
    "humaneval": {"type": "openai_humaneval", "name": "HumanEval"},
    "mbpp": {"type": "mbpp", "name": "MBPP"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The contents of a card."""

    name: str
    proof: Proof
    bases: Sequence[Base]
    licence: Licence
    config: dict[str, Any]
    parameters: int
    files: Sequence[tuple[str, str]]
    """Each file with its description."""
    evaluation_files: Sequence[str | None]
    """File with the results of each evaluation; None if the results are in the receipt."""
    verification: Verification | None
    base_models: Sequence[str] = ()
    """Names of base models on the Hub, given by the publisher."""


def card_text(card: Card) -> str:
    lines = ["---", *_front_matter(card), "---", "", f"# {card.name}", ""]
    lines += _warning(card)
    lines += _summary(card)
    lines += ["## Metrics", "", *_metrics(card), ""]
    lines += ["## How it was made", "", *_training_lines(card), ""]
    lines += ["## Base models and licence", "", *_bases(card), ""]
    lines += ["## Files", "", *_table(("file", "what it is"), card.files), ""]
    lines += ["## Loading it", "", *_loading(card), ""]
    lines += ["## Verification", "", *_verification(card), ""]
    return "\n".join(lines)


def _front_matter(card: Card) -> list[str]:
    """Return the front matter. Its strings are quoted as JSON, which is valid YAML."""
    names = [*card.base_models, *(base.name for base in card.bases if base.on_hub)]
    tags = ["knowledge-distillation"] + (["unevaluated"] if card.proof.missing else [])
    lines = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"license: {json.dumps(card.licence.identifier)}",
    ]
    if card.licence.identifier == "other":
        lines.append(f"license_name: {json.dumps(card.licence.name or 'see-base-models')}")
    if names:
        lines += ["base_model:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))]
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in tags)]
    results = _model_index(card)
    if results:
        # The Hub rejects an index without results.
        lines.append(f"model-index: {json.dumps([{'name': card.name, 'results': results}])}")
    return lines


def _model_index(card: Card) -> list[dict[str, Any]]:
    results = []
    for evaluation in card.proof.evaluations:
        metrics = [
            {"type": metric.name, "name": metric.name, "value": round(metric.value, 6)}
            for metric in _with_perplexity(evaluation.metrics)
            if metric.subject == "student"
        ]
        if metrics:
            dataset = _DATASETS.get(
                evaluation.benchmark, {"type": evaluation.benchmark, "name": evaluation.title}
            )
            results.append({"task": _TASK, "dataset": dataset, "metrics": metrics})
    return results


def _warning(card: Card) -> list[str]:
    if not card.proof.missing:
        return []
    return [
        "> **Unevaluated.** This model was published without:",
        *(f"> - {missing.what}" for missing in card.proof.missing),
        "",
    ]


def _summary(card: Card) -> list[str]:
    config = card.config
    shape = (
        f"{config['num_hidden_layers']} layers, {config['hidden_size']:,} wide, "
        f"{config['vocab_size']:,} tokens, {config['max_position_embeddings']:,} positions"
    )
    return [
        f"A {config['model_type']} model of {format_count(card.parameters)} parameters ({shape}), "
        "trained by knowledge distillation.",
        "",
    ]


def _metrics(card: Card) -> list[str]:
    rows = []
    for evaluation, source in zip(card.proof.evaluations, card.evaluation_files, strict=True):
        for metric in _with_perplexity(evaluation.metrics):
            source_text = f"`{source}`" if source else "`receipt.json`"
            if source is None and card.proof.receipt is None:
                source_text = "the run's log (it has no receipt)"
            rows.append(
                (evaluation.title, metric.subject, metric.name, _value(metric), source_text)
            )
    if not rows:
        return ["None: nothing was measured."]
    head = ("data", "model", "metric", "value [95 %]", "source")
    return [*_table(head, rows), "", *_details(card.proof.evaluations)]


def _details(evaluations: Sequence[Evaluation]) -> list[str]:
    hashes = (
        f"; data sha256 `{evaluation.data_sha256}`" if evaluation.data_sha256 else ""
        for evaluation in evaluations
    )
    return [
        f"- {evaluation.title}: {evaluation.detail}{sha256}"
        for evaluation, sha256 in zip(evaluations, hashes, strict=True)
    ]


def _with_perplexity(metrics: Iterable[Metric]) -> list[Metric]:
    """Add the perplexity, its exponential, after each loss in nats per token."""
    extended = []
    for metric in metrics:
        extended.append(metric)
        if metric.name == "loss" and metric.value < 700:
            extended.append(
                Metric(
                    name="perplexity",
                    value=math.exp(metric.value),
                    low=None if metric.low is None else math.exp(metric.low),
                    high=None if metric.high is None else math.exp(metric.high),
                    subject=metric.subject,
                )
            )
    return extended


def _value(metric: Metric) -> str:
    percent = metric.name.startswith(("pass@", "top-1"))
    form = "{:.1%}" if percent else "{:.4f}" if abs(metric.value) < 100 else "{:,.1f}"
    text = form.format(metric.value)
    if metric.low is None or metric.high is None:
        return text
    return f"{text} [{form.format(metric.low)}, {form.format(metric.high)}]"


def _training_lines(card: Card) -> list[str]:
    proof = card.proof
    receipt = proof.receipt or {}
    spec = receipt.get("spec") or {}
    loss, train = spec.get("loss") or {}, spec.get("train") or {}
    lines = []
    if train:
        lines.append(
            f"- {receipt.get('steps'):,} steps, {receipt.get('tokens_trained'):,} tokens; AdamW, peak "
            f"learning rate {train.get('lr'):g}, seed {train.get('seed')}"
        )
        lines.append(
            f"- loss: {loss.get('alpha'):g} cross entropy + {1 - loss.get('alpha', 0):g} T² "
            f"{loss.get('divergence')} at T = {loss.get('temperature'):g}"
        )
    data = receipt.get("data") or {}
    if data:
        lines.append(
            f"- data: {data.get('train_tokens'):,} tokens of {data.get('train_files'):,} documents of "
            f"`{Path(str((spec.get('data') or {}).get('corpus'))).name}`, sha256 "
            f"`{data.get('train_sha256')}`; order of rows `{data.get('order_sha256')}` (`data_receipt.json`)"
        )
    hashes = receipt.get("model_sha256") or {}
    lines += [f"- {name.replace('_', ' ')}: tensors sha256 `{hashes[name]}`" for name in hashes]
    unknown = [
        verdict.reason for verdict in proof.verdicts.values() if verdict.level == Level.UNKNOWN
    ]
    passed = sum(verdict.level == Level.PASS for verdict in proof.verdicts.values())
    if proof.verdicts:
        lines.append(
            f"- {passed} lines of the receipt were compared with the run's folder and agree with it"
        )
    lines += [f"- not verified: {reason}" for reason in unknown]
    lines.append(f"- replay of the run (`engine verify`): {proof.replay}")
    lines.append(f"- made and published by apr-workbench {VERSION}")
    return lines


def _bases(card: Card) -> list[str]:
    lines = []
    for base in card.bases:
        sha256 = f", tensors sha256 `{base.sha256}`" if base.sha256 else ""
        licence = base.licence_name or base.licence or "unknown"
        lines.append(f"- {base.words}: licence {licence} ({base.why}){sha256}")
    if not card.bases:
        lines.append("- none: the weights were freshly initialised")
    identifier = card.licence.name or card.licence.identifier
    lines += ["", f"Licence of this model: **{identifier}** ({card.licence.why})."]
    if card.licence.identifier == "unknown":
        lines.append("The terms of use are unknown: ask before you use it.")
    elif not any(name.startswith("LICENSE") for name, _ in card.files):
        lines.append(
            "The licence's text is not in this folder: no base model has it in its folder."
        )
    return lines


def _loading(card: Card) -> list[str]:
    gguf = [name for name, _ in card.files if name.endswith(".gguf")]
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
        "```",
        "",
        "```",
        'engine generate THIS_FOLDER --prompt "def "',
        *(f"llama-cli -m THIS_FOLDER/{name}" for name in gguf),
        "```",
    ]
    return lines


def _verification(card: Card) -> list[str]:
    verification = card.verification
    if verification is None:
        return ["**Not verified**: it was published with --unverified."]
    rows = [(outcome.id, outcome.level, outcome.reason) for outcome in verification.outcomes]
    return [
        *_table(("check", "verdict", "result"), rows),
        "",
        f"Greedy continuation of `{verification.prompt!r}`:",
        "",
        "```",
        *verification.text.replace("```", "'''").splitlines(),
        "```",
        "",
        "To verify it again: `engine publish --verify THIS_FOLDER`.",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return [*lines, *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
