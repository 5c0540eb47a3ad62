"""The gates between the phases of a distillation: what has to hold before the next one is paid for.

    smoke     on one batch that can be learnt, the loss at the end is below that at the start
    teacher   a quantized teacher answers as its reference does, within the noise of its type
    cache     what teacher.cache holds is what the teacher says
    heldout   the finished student's held-out loss reaches its target
    eval      the lower end of the interval of pass@1 reaches its threshold

`smoke`, `teacher` and `cache` are measured here and now; `heldout` and `eval` are read from a finished run
and its evaluations. A gate that has nothing to judge does not apply, with the reason. One that was not
measured is unknown and never passed.
"""

IDS = ("smoke", "teacher", "cache", "heldout", "eval")
"""In the order in which they are asked."""
