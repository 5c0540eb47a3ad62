"""The stages of a training step, in the order in which data flows through them: what each asks, what a failure
means, what to do. No torch. `engine.audit.judge` has a function for each.

    rows -> labels -> teacher -> student -> loss parts -> loss -> gradients -> clipping -> moments -> weights

and, beside them, how much arithmetic all of it took.
"""

from __future__ import annotations

from engine.checks.check import About, When


def _stage(id: str, question: str, means: str, remedy: str, *, stops: bool = True) -> About:
    return About(
        id=id, question=question, means=means, remedy=remedy, when=When.AT_STEP, stops=stops
    )


STAGES: tuple[About, ...] = (
    _stage(
        "step_rows",
        "Did the step train on the rows of the corpus whose turn it was, each once?",
        "Rows are met twice, left out or altered between the corpus and the models.",
        "Look at the loader: what stands at the row and token that are named.",
    ),
    _stage(
        "step_labels",
        "Is every label of the step the next token of its document, and every such token a label?",
        "The student learns to repeat or skip tokens, is trained on what is not to be predicted, or misses a part.",
        "Shift labels exactly once, where the rows are made (engine.data.batches).",
    ),
    _stage(
        "step_teacher",
        "Are the teacher's hidden states in the step those of a plain forward pass over its tokens?",
        "The teacher computes another model, or sees other tokens, neighbours or positions than it should.",
        "Flip teacher.backend, teacher.kernel or teacher.precision to see which part it is; of stored outputs "
        "(teacher.cache), run without them, and `engine prepare` a new store at the temperature of the loss.",
    ),
    _stage(
        "step_student",
        "Are the student's hidden states in the step those of a plain forward pass with its weights?",
        "The forward pass that trains is not the model that is saved.",
        "Flip compute.compile or student.precision to see which part it is.",
    ),
    _stage(
        "step_loss_parts",
        "Are the logged cross entropy, divergence and agreement those of the step's hidden states and labels?",
        "Tokens or rows are left out of the loss, counted twice, or compared at other settings than the spec's.",
        "Flip loss.kernel to see whether a kernel is wrong; compare the arguments of the loss with the spec.",
    ),
    _stage(
        "step_loss",
        "Is the logged loss the sum of its parts with the weights that the spec gives?",
        "The run trains with another weight of the teacher than it records.",
        "Look at loss.alpha and loss.temperature where the loss is called.",
    ),
    _stage(
        "step_gradients",
        "Are the gradients those of the logged loss, over all rows and passes of the step?",
        "The run descends another objective than the one it logs: rows or passes are left out or weighted wrongly.",
        "The numbers say where the difference begins: at the hidden states, in the loss, else in the tensor named.",
    ),
    _stage(
        "step_clipping",
        "Is the logged gradient norm that of the gradients?",
        "Gradients are clipped by another norm than theirs, and the chart shows that one.",
        "Take the norm after the last micro-batch and before the update, over every parameter.",
    ),
    _stage(
        "step_moments",
        "Are the optimizer's moments those that AdamW makes of the clipped gradients?",
        "The optimizer sees other gradients than the loss gave, clips them otherwise, or has other betas.",
        "Compare clip_norm, beta1 and beta2 in the optimizer's groups with the spec; flip train.update.",
    ),
    _stage(
        "step_weights",
        "Did every weight move as AdamW says, at the rate, decay and epsilon of the spec?",
        "The rate or decay that trains is not the one that is recorded, or a part of the student is not trained.",
        "Give the optimizer every parameter; set the rate on its own groups at every step.",
    ),
    _stage(
        "step_work",
        "Does each part of the step do the arithmetic that its models need, and not more?",
        "A model runs twice, rows are computed that nobody needs, or a part is measured under another's name.",
        "Look at what the part that is named calls, and at the mark where its time begins.",
        stops=False,
    ),
)
