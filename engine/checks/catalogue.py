"""Every check in words: its question, what a failure means, what to do. No torch, so that `checks.skip`
is validated before a run exists and `engine checks --list` is instant.
"""

from __future__ import annotations

import difflib

from engine.audit.stages import STAGES
from engine.checks.check import About, When
from engine.errors import SpecError

CATALOGUE: tuple[About, ...] = (
    About(
        id="vocabulary_by_bytes",
        question="Is every id the same token to the teacher, to the student and in the training text, and every text "
        "the same ids?",
        means="Probabilities are compared id by id, so the student is taught another word than the teacher meant, or "
        "a model reads its text cut in places where it was not trained to.",
        remedy="Take teacher and student of one family, and the tokenizer that belongs to them.",
        when=When.BEFORE,
    ),
    About(
        id="batch_not_degenerate",
        question="Does a step hold different rows of varied text?",
        means="There is nothing to learn from the batch, however well its loss falls.",
        remedy="`engine data SPEC` shows the rows: point data.corpus at varied text, and leave copies out.",
        when=When.BEFORE,
    ),
    About(
        id="documents_in_rows",
        question="Are documents that are read and tokenized again in the rows of their split, whole?",
        means="The rows are not of this corpus and tokenizer: text is lost, cut, altered, or in both splits.",
        remedy="Empty the cache of tokens (`apr-workbench/tokens` of the user's cache); see that nothing writes to the "
        "corpus, and that tokenizer.json truncates nothing.",
        when=When.BEFORE,
    ),
    About(
        id="padding_not_trained",
        question="Are rows free of labels on padding?",
        means="Part of the loss is the easy prediction of padding, and the student learns to answer with it.",
        remedy="Give padding the label -100, or pack documents instead of padding them.",
        when=When.BEFORE,
    ),
    About(
        id="end_is_learnt",
        question="Is any of the special tokens that end a text or a turn a label?",
        means="The student is never taught to stop: what it generates goes on until it is cut off.",
        remedy="Give the end of each text or answer a label; if padding is the same token, mask by place, not by id.",
        when=When.BEFORE,
        stops=False,
    ),
    About(
        id="resume_continues",
        question="Is all that a resumed run goes on from, bit for bit, what its checkpoint's files hold?",
        means="It goes on as another run: old weights, cold or mixed moments, rows that are met twice. Each rank "
        "compares its part of tensors and moments, counters, generators, step and row.",
        remedy="The reason names what differs. The checkpoint stays as it is: resume again, with the versions of torch "
        "and the engine that wrote it if they have changed.",
        when=When.GOING_ON,
    ),
    About(
        id="weights_alive",
        question="Are the tensors of both models finite, and no matrix constant?",
        means="A model was left as it was allocated or initialised; its file was not read into it.",
        remedy="Load the file again and compare with `engine inspect --values`.",
        when=When.AT_START,
    ),
    About(
        id="no_token_leaks",
        question="Does a token move only later ones of its document, in a model that transformers runs?",
        means="It sees the tokens that it is to predict, or other documents of its row: its losses mean nothing.",
        remedy="Take another version of transformers, `model.engine=native` where the family allows it, or "
        "`data.packing=documents`.",
        when=When.AT_START,
    ),
    About(
        id="teacher_knows_text",
        question="Does the teacher predict held-out text better than token frequencies do?",
        means="It guesses: its weights are random, or its tokenizer or forward pass is wrong. It teaches noise.",
        remedy="Check the file, the tokenizer and the family; a good teacher is far below ln V.",
        when=When.AT_START,
    ),
    About(
        id="eval_baseline",
        question="Does the evaluation give a model that knows nothing no better than token frequencies?",
        means="The evaluation praises anything, so no held-out loss of this run means something.",
        remedy="`engine data SPEC` shows the held-out rows and which tokens have labels; take more with eval.rows.",
        when=When.AT_START,
        stops=False,
    ),
    About(
        id="teacher_fp8_within_noise_floor",
        question="Is a teacher in 8-bit floats as near to its exact self as one with 4-bit weights would be?",
        means="The student learns from answers that rounding has moved by more than people accept of 4-bit files.",
        remedy="Take teacher.precision=bf16, which rounds less and takes longer.",
        when=When.AT_START,
    ),
    About(
        id="stored_outputs",
        question="Are the stored teacher outputs of some rows of the run those that the teacher computes?",
        means="The student learns from outputs of another model, of other rows, or altered ones.",
        remedy="Make the store again with `engine prepare`, from the teacher that the spec names.",
        when=When.AT_START,
    ),
    About(
        id="teacher_not_student",
        question="Are teacher and student different models, with a KL above zero at the start?",
        means="The student has nothing to learn: the KL is zero from the first step on and stays there.",
        remedy="Give student.path other weights.",
        when=When.AT_START,
    ),
    *STAGES,
    About(
        id="split_disjoint",
        question="Is held-out text absent from the text that is trained on?",
        means="The held-out loss measures memory of the training text and says nothing about new text.",
        remedy="Remove copies from the corpus, or split by document; `engine data SPEC` names them.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    About(
        id="memory_as_planned",
        question="Is the measured peak of memory near the one that was planned?",
        means="The plan cannot be trusted to refuse a run that does not fit.",
        remedy="See what else uses the device (`engine doctor`); memory.limit_gib plans for less, memory.budget=report "
        "goes on.",
        when=When.FIRST_STEPS,
        stops=False,
    ),
    About(
        id="no_late_compile",
        question="Was every kernel compiled before the steps that are timed?",
        means="A step waited for a compiler; a key may change with every step.",
        remedy="`engine tail RUN` names the kernel and what changed: kernels.prewarm=true compiles it before, or "
        "student.compile=off does without.",
        when=When.ALWAYS,
        stops=False,
    ),
    About(
        id="checkpoint_reloads",
        question="Is a checkpoint, read back, byte for byte as it was written, and would a resume take it?",
        means="The disk gives back something else than was written; the run could not be resumed from there.",
        remedy="Look at the disk (`dmesg`, `df`), or take another one, and resume: the checkpoint before is kept.",
        when=When.AT_CHECKPOINT,
    ),
    About(
        id="artefact",
        question="Is the saved student, read back from its files, the trained one in student.save_as, bit for bit?",
        means="What is evaluated, published and used is another model than the one that was trained.",
        remedy="The last checkpoint has the trained weights: look at the disk (`dmesg`, `df`) and at the version of "
        "transformers, and resume, to save it again.",
        when=When.AT_END,
    ),
)

ABOUT = {about.id: about for about in CATALOGUE}

RETIRED = {
    "causal_mask": "no_token_leaks",
    "documents_isolated": "no_token_leaks",
    "forward_is_the_model": "no_token_leaks",
    "positions_matter": "step_student",
    "shift_proof": "step_labels",
    "student_shift": "step_labels",
    "labels_are_next_tokens": "step_labels",
    "nan_not_masked": "",
    "effective_settings": "step_weights",
    "ignored_rows_have_no_part": "step_gradients",
    "loss_invariants": "step_loss_parts",
    "loss_gradient": "step_gradients",
    "gradient_above_rounding": "step_gradients",
    "rows_in_update": "step_gradients",
    "tensors_moved": "step_weights",
    "effective_learning_rate": "step_weights",
    "step_work": "",
    "reported_loss": "",
    "receipt_agrees": "",
}
"""Checks that runs of earlier versions have results of, each with the check that asks its question now, if any."""


def skipped_ids(text: str) -> frozenset[str]:
    """Return the ids in a `checks.skip` setting. Raises SpecError for one that names no check, and for one whose
    question another check asks; one whose question is asked no more is skipped already."""
    ids = [part.strip() for part in text.split(",") if part.strip()]
    problems = []
    for name in ids:
        if name in RETIRED:
            if now := RETIRED[name]:
                problems.append(
                    f"checks.skip: expected ids of checks, found {name!r}, which is now {now}"
                )
        elif name not in ABOUT:
            near = difflib.get_close_matches(name, ABOUT, n=1)
            did_you_mean = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"checks.skip: expected ids of checks, found {name!r}{did_you_mean}")
    if problems:
        raise SpecError(problems, hint="`engine checks --list` has the ids")
    return frozenset(ids)
