"""The stages of a training step, in the order in which data flows through them: what each asks, what a failure
means, what to do. No torch. `engine.audit.judge` has a function for each.

    rows -> labels -> teacher -> student -> loss parts -> loss -> gradients -> clipping -> moments -> weights
"""

from __future__ import annotations

from functools import partial

from engine.checks.check import About, When

_stage = partial(About, when=When.AT_STEP)

STAGES: tuple[About, ...] = (
    _stage(
        id="step_rows",
        question="Did the step train on the rows of the corpus whose turn it was, each once?",
        means="Rows are met twice, left out or altered between the corpus and the models.",
        remedy="`engine data RUN --step N` shows the rows of the step; see that nothing writes to the corpus, and "
        "empty the cache of tokens (`apr-workbench/tokens` of the user's cache).",
    ),
    _stage(
        id="step_labels",
        question="Is every label of the step the next token of its document, and every such token a label?",
        means="The student learns to repeat or skip tokens, is trained on what is not to be predicted, or misses "
        "a part.",
        remedy="`engine data RUN --step N` shows which tokens have labels; compare them with the chat template and "
        "data.turns.",
    ),
    _stage(
        id="step_teacher",
        question="Are the teacher's hidden states in the step those of a plain forward pass over its tokens?",
        means="The teacher computes another model, or sees other tokens, neighbours or positions than it should.",
        remedy="Flip teacher.backend, teacher.kernel or teacher.precision to see which part it is; of stored outputs "
        "(teacher.cache), run without them, and `engine prepare` a new store at the temperature of the loss.",
    ),
    _stage(
        id="step_student",
        question="Are the student's hidden states in the step those of a plain forward pass with its weights?",
        means="The forward pass that trains is not the model that is saved.",
        remedy="Flip student.compile or student.precision to see which part it is.",
    ),
    _stage(
        id="step_loss_parts",
        question="Are the logged cross entropy, divergence and agreement those of the step's hidden states and labels?",
        means="Tokens or rows are left out of the loss, counted twice, or compared at other settings than the spec's.",
        remedy="Flip loss.kernel and loss.chunk_rows to see whether a kernel or a compiler is wrong.",
    ),
    _stage(
        id="step_loss",
        question="Is the logged loss the sum of its parts with the weights that the spec gives?",
        means="The run trains with another weight of the teacher than it records.",
        remedy="Compare loss.alpha and loss.temperature in `resolved.json` with the spec.",
    ),
    _stage(
        id="step_gradients",
        question="Are the gradients those of the logged loss, over all rows and passes of the step?",
        means="The run descends another objective than the one it logs: rows or passes are left out or weighted "
        "wrongly.",
        remedy="The numbers say where the difference begins: at the hidden states, in the loss, else in the "
        "tensor named. Flip loss.kernel, student.compile, student.checkpointing or student.graphs.",
    ),
    _stage(
        id="step_clipping",
        question="Is the logged gradient norm that of the gradients?",
        means="Gradients are clipped by another norm than theirs, and the chart shows that one.",
        remedy="Flip train.update: its fused kernel sums the squares otherwise.",
    ),
    _stage(
        id="step_moments",
        question="Are the optimizer's moments those that AdamW makes of the clipped gradients?",
        means="The optimizer sees other gradients than the loss gave, clips them otherwise, or has other betas.",
        remedy="Flip train.update, and compare train.clip_norm, beta1 and beta2 in `resolved.json` with the spec.",
    ),
    _stage(
        id="step_weights",
        question="Did every weight move as AdamW says, at the rate, decay and epsilon of the spec?",
        means="The rate or decay that trains is not the one that is recorded, or a part of the student is not trained.",
        remedy="Flip train.update; see in `engine tail RUN` whether steps were skipped.",
    ),
)
