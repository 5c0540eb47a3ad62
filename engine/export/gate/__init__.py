"""Judge the gates between the phases of a distillation: conditions that must hold before the next phase is worth its
cost.

    smoke     on one batch that can be learnt, the loss at the end is below that at the start
    heldout   the finished student's held-out loss reaches its target
    eval      the lower end of the interval of pass@1 reaches its threshold

`smoke` is measured when the gate runs; `heldout` and `eval` are read from a finished run and its evaluations.
A gate with nothing to judge does not apply, with the reason. A gate that was not measured is unknown and never
passed.
"""

IDS = ("smoke", "heldout", "eval")
"""Ids of the gates in the order in which they run."""
