"""Which part of the workbench would have caught each failure that is known: the seventeen assertions that the
prior system lacked, and the eleven gaps of other trainers. A part that does not exist fails here, so the table
cannot say more than is so.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.catalogue import BY_ID
from engine.drills.catalogue import drill
from engine.export.gate import IDS as GATES
from engine.watch.rules import RULES
from tests.support.defects import BETWEEN_PARTS, DEFECTS
from tests.support.named_tests import marks_of
from tests.support.paths import EVIDENCE


@dataclass(frozen=True)
class Failure:
    id: str
    what: str
    checks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    drills: tuple[str, ...] = ()
    """In which it happens in a real run and must be named."""
    defects: tuple[str, ...] = ()
    """Of `tests.support.defects`, which plants it in the process of a test."""
    tests: tuple[str, ...] = ()
    """`package/file::function`, without `test_` and `.py`."""
    evidence: str = ""


ASSERTIONS = (
    Failure(
        "A1",
        "the teacher is the student",
        checks=("teacher_not_student",),
        drills=("identical_teacher",),
        tests=("teachers/identical::it_is_refused_unless_it_is_asked_for",),
    ),
    Failure(
        "A2",
        "a model that is worse than guessing, or not the published one",
        checks=("teacher_knows_text", "weights_alive"),
        rules=("loss_not_below_guessing",),
        drills=("random_teacher", "zero_teacher", "swapped_tokenizer"),
        tests=(
            "models/decoder::logits_equal_transformers",
            "models/decoder::logits_of_other_families_equal_transformers",
        ),
    ),
    Failure(
        "A3",
        "a forward pass of another model, at positions beyond the first",
        checks=(
            "no_token_leaks",
            "step_student",
            "step_teacher",
        ),
        defects=(
            *("rotary_neighbours", "qkv_bias_missing", "norm_eps_fixed", "causal_mask_missing"),
            "documents_merged_in_step",
        ),
    ),
    Failure(
        "A4",
        "a gradient that is not the logged loss's",
        checks=("step_gradients",),
        defects=("t_squared_missing", "later_chunks_without_gradient"),
    ),
    Failure(
        "A5",
        "rows in the loss that are not in the update",
        checks=("step_gradients", "step_loss", "step_weights"),
        defects=("last_row_only", "denominator_per_pass"),
    ),
    Failure(
        "A6",
        "settings that never reached the run",
        checks=("step_weights",),
        defects=("rate_halved_in_step",),
    ),
    Failure(
        "A7",
        "a tensor that does not move, or a frozen one that does",
        checks=("step_weights",),
        defects=("frozen_embedding",),
    ),
    Failure(
        "A8",
        "a NaN that is masked",
        rules=("non_finite",),
        tests=("loss/kd_loss::a_non_finite_logit_gives_a_non_finite_loss",),
    ),
    Failure(
        "A9",
        "a loss that stays at ln V",
        rules=("loss_not_below_guessing", "loss_stays_at_guessing"),
    ),
    Failure(
        "A10",
        "a compile after warm-up, a cached body of another constant",
        checks=("no_late_compile",),
        rules=("compile_after_warm_up",),
        drills=("stale_body",),
        tests=("kernels/bodies::a_planted_stale_body_is_refused_naming_its_constant",),
    ),
    Failure(
        "A11",
        "a GPU that is idle while a step runs",
        rules=("gpu_idle", "cpu_bound_teacher"),
        drills=("slow_first_step",),
        tests=("watch/watcher::an_idle_gpu_has_the_stacks_taken",),
        evidence="the-story/summary.json",
    ),
    Failure(
        "A12",
        "a plan that cannot fit, a kill that is taken for out of memory",
        checks=("memory_as_planned",),
        drills=("plan_that_cannot_fit", "killed_from_outside", "memory_leak"),
        tests=("watch/exit_cause::each_row_of_the_table",),
    ),
    Failure(
        "A13",
        "a checkpoint that is none",
        checks=("checkpoint_reloads",),
        drills=("altered_checkpoint",),
        defects=("small_checkpoint",),
    ),
    Failure(
        "A14",
        "no held-out loss, and no baseline of the same budget without a teacher",
        rules=("heldout_diverging",),
        gates=("heldout",),
        evidence="demo-kd-vs-ce/summary.json",
    ),
    Failure(
        "A15",
        "an evaluation that passes gibberish",
        gates=("eval",),
        tests=(
            "evaluate/answers::a_random_model_scores_below_one_percent",
            "evaluate/answers::reference_solutions_pass_and_empty_ones_fail",
            "evaluate/answers::a_harness_that_cannot_tell_right_from_wrong_is_refused",
        ),
    ),
    Failure(
        "A16",
        "a student that cannot learn one batch by heart",
        gates=("smoke",),
        tests=("export/gate::every_step_of_the_smoke_gate_has_the_same_rows",),
    ),
    Failure(
        "A17",
        "a contract whose test is absent, or stays green with the bug planted",
        tests=(
            "contracts/rules::every_id_that_is_named_is_there_and_no_id_is_there_twice",
            "contracts/run::what_was_not_run_is_unknown",
            "contracts/run::planted_bugs_of_this_project_are_caught",
        ),
    ),
)

GAPS = (
    Failure(
        "G1",
        "what must be true of any loss, at every step",
        checks=("step_loss",),
        tests=("train/step_invariants::a_broken_invariant_is_an_error_in_the_log",),
    ),
    Failure(
        "G2",
        "the reported loss against the applied gradient, and the batch split otherwise",
        checks=("step_gradients",),
        defects=("t_squared_missing", "denominator_per_pass"),
    ),
    Failure(
        "G3",
        "a teacher that may not teach",
        checks=("teacher_knows_text", "weights_alive", "teacher_fp8_within_noise_floor"),
        drills=("random_teacher", "zero_teacher"),
    ),
    Failure(
        "G4",
        "shift and mask",
        checks=("padding_not_trained", "end_is_learnt", "teacher_knows_text"),
        defects=("padding_trained", "ends_masked"),
        tests=("data/packing::labels_are_the_next_tokens_of_each_document_and_never_padding",),
    ),
    Failure(
        "G5",
        "ids that are other tokens, the mass that a cut drops",
        checks=("vocabulary_by_bytes",),
        tests=("teachers/truncating::the_dropped_mass_is_what_the_softmax_says",),
    ),
    Failure(
        "G6",
        "a divergence below the rounding of its gradient",
        checks=("step_gradients",),
        tests=("audit/step_audit::a_gradient_that_is_mostly_rounding_is_unknown_and_says_so",),
    ),
    Failure(
        "G7",
        "where the time of a step goes, as shares of what the device could do",
        tests=("plan/cost::a_peak_is_of_the_device_that_is_named_and_an_unknown_one_has_none",),
    ),
    Failure(
        "G8",
        "a run that stands still",
        rules=("stalled_at_start", "stalled"),
        drills=("loader_stalls", "deadlock", "cuda_wait"),
        tests=("train/ranks_hang::a_stopped_rank_ends_the_run_with_its_name",),
    ),
    Failure(
        "G9",
        "a checkpoint from which another run would go on",
        checks=("checkpoint_reloads",),
        drills=("altered_checkpoint",),
        tests=(
            "train/state::a_restored_run_takes_the_same_steps_bit_for_bit",
            "checks/single::a_checkpoint_that_a_resume_would_refuse_is_found_when_it_is_saved",
            "train/run_lifecycle::twenty_steps_equal_ten_then_sigkill_then_the_rest_bit_for_bit",
        ),
    ),
    Failure(
        "G10",
        "stored answers of another teacher or row, blocks that may not teach",
        checks=("stored_outputs",),
        drills=("teacher_after_prepare",),
        tests=(
            "teachers/store_teacher::stored_outputs_of_other_rows_are_named_before_they_are_used",
            "teachers/store::one_changed_byte_anywhere_is_found_and_named",
            "teachers/store_teacher::a_miss_asks_the_teacher_is_counted_and_said_once",
        ),
    ),
    Failure(
        "G11",
        "a saved student that is not the trained one, and a loss that is not of its files",
        checks=("artefact",),
        gates=("heldout",),
        tests=(
            "checks/artefact::files_with_other_tensors_are_named",
            "checks/artefact::the_reported_loss_is_that_of_the_saved_student",
        ),
    ),
)

FAILURES = (*ASSERTIONS, *GAPS)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_what_would_have_caught_it_exists(failure: Failure) -> None:
    assert failure.checks or failure.rules or failure.gates or failure.tests
    assert set(failure.checks) <= BY_ID["check"].keys()
    assert set(failure.rules) <= {rule.id for rule in RULES}
    assert set(failure.gates) <= set(GATES)
    for id_ in failure.drills:
        # What names it in a real run is what the table says.
        by = {expected.id for expected in drill(id_).expected}
        told = {*failure.checks, *failure.rules}
        assert by & told or not {*BY_ID["check"], *(rule.id for rule in RULES)} & by, (id_, by)
    planted = DEFECTS | BETWEEN_PARTS
    assert {planted[id_].named_by for id_ in failure.defects} <= set(failure.checks)
    for test in failure.tests:
        assert marks_of(test) is not None, test
    if failure.evidence:
        assert (EVIDENCE / failure.evidence).is_file()


def test_every_failure_is_in_the_table_and_so_is_every_check() -> None:
    assert [one.id for one in ASSERTIONS] == [f"A{n}" for n in range(1, 18)]
    assert [one.id for one in GAPS] == [f"G{n}" for n in range(1, 12)]
    # Checks of the run's own text and of its arithmetic, which no published failure asked for.
    own = {"split_disjoint", "batch_not_degenerate"}
    assert {id_ for one in FAILURES for id_ in one.checks} | own == BY_ID["check"].keys()
