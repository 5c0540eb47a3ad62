"""The gates between the phases of a distillation: conditions to meet before the next phase is worth its cost.

    smoke     on one batch that can be learnt, the loss at the end is below that at the start
    teacher   a quantized teacher's outputs agree with its reference's, within the noise of its type
    cache     the outputs stored in teacher.cache are those that the teacher computes
    heldout   the finished student's held-out loss reaches its target
    eval      the lower end of the interval of pass@1 reaches its threshold

`smoke`, `teacher` and `cache` are measured when the gate runs; `heldout` and `eval` are read from a finished
run and its evaluations. A gate with nothing to judge does not apply, with the reason. A gate that was not
measured is unknown and never passed.
"""

IDS = ("smoke", "teacher", "cache", "heldout", "eval")
"""Ids of the gates in the order in which they run."""
