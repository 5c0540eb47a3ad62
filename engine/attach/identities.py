"""What has to hold in every healthy training, and what it means where it does not: the identities that the probe of
`engine watch` looks at on a few steps (`apr_watch/identities.py`). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

DEGREES = PASS, UNKNOWN, FACT, SUSPICION, CONTRADICTION = (
    "pass",
    "unknown",
    "fact",
    "suspicion",
    "contradiction",
)
"""From good to bad. A contradiction is an identity that fails, and the only alarm; a suspicion holds, and may be a
mistake."""

PLAIN = ""
TRANSFORMERS = "transformers"
LIGHTNING = "lightning"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One outcome that is looked for."""

    id: str
    identity: str
    """`update` or `gradient`."""
    degree: str
    """The worst that it can be."""
    question: str
    means: str
    plain: str
    """What to do in a loop of one's own."""
    transformers: str = ""
    lightning: str = ""
    """The same where it differs with the Trainer of transformers or of Lightning."""

    def remedy(self, framework: str) -> str:
        found = {TRANSFORMERS: self.transformers, LIGHTNING: self.lightning}.get(framework)
        return found or self.plain


IDENTITIES: tuple[Row, ...] = (
    Row(
        id="update",
        identity="update",
        degree=CONTRADICTION,
        question="Are the new weights what AdamW, Adam or SGD by the textbook makes of the old, from gradient, state, "
        "rate and decay?",
        means="Something else moves the weights too, or the optimizer does not do what its settings say.",
        plain="compare the step with foreach=False and fused=False; look for code that writes weights, states or "
        "gradients while optimizer.step() runs",
        transformers='set optim="adamw_torch" and look at callbacks that write weights or gradients',
    ),
)
BY_ID = {row.id: row for row in IDENTITIES}
