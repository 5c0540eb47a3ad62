"""Which tests prove each row of the fault matrix: every fault that a run on one machine may meet, by the
row's number. A row without a test that exists fails here, so the table cannot say more than is so.

Rows of what is not built (sandboxed evaluation, several ranks, XID events) are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.named_tests import marks_of


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    tests: tuple[str, ...]
    """`package/file::function`, without `test_` and `.py`."""


KILLS = "train/fault_files::runs_killed_at_random_moments_come_to_the_same_end"
NTH = "train/fault_files::every_operation_may_fail_in_every_way"
RUN_NTH = "train/fault_files::a_run_that_meets_an_error_of_the_disk_says_so_and_is_resumed_to_the_same_end"
POWER = (
    "train/fault_files::a_power_loss_at_any_operation_of_a_run_loses_nothing_that_was_acknowledged"
)

ROWS = (
    Row(
        1,
        "SIGKILL of the trainer",
        (
            "train/run_lifecycle::twenty_steps_equal_ten_then_sigkill_then_the_rest_bit_for_bit",
            KILLS,
            "watch/exit_cause::a_child_that_kills_itself_is_killed_from_outside_by_the_real_counters",
        ),
    ),
    Row(
        2,
        "OOM kill within a control group",
        (
            "train/fault_rows::a_child_beyond_the_limit_of_a_real_control_group_is_oom_memcg",
            "watch/exit_cause::each_row_of_the_table",
            "watch/exit_cause::the_kernels_own_words_decide_which_limit_it_was",
        ),
    ),
    Row(
        3,
        "OOM kill of the whole machine",
        (
            "watch/exit_cause::each_row_of_the_table",
            "watch/exit_cause::a_global_kill_without_a_kernel_line_says_that_the_victim_may_be_another",
            "watch/exit_cause::memory_before_the_end_is_the_least_and_the_worst_of_the_last_minute",
        ),
    ),
    Row(
        4,
        "userspace killer, time limit",
        (
            "watch/exit_cause::an_outside_sigkill_is_said_not_to_be_the_kernels_oom_killer",
            "watch/exit_cause::a_child_ended_by_sigterm_was_terminated",
            "watch/exit_cause::oom_is_never_said_without_a_counter_that_proves_it",
        ),
    ),
    Row(
        5,
        "CUDA out of memory",
        (
            "train/fault_rows::an_exception_in_a_step_is_told_and_keeps_the_checkpoint",
            "train/fault_rows::a_gpu_without_room_is_an_allocation_that_failed",
            "watch/exit_cause::an_allocation_that_failed_is_told_from_a_kill",
        ),
    ),
    Row(
        6,
        "unified memory is exhausted, the host thrashes",
        (
            "train/fault_rows::a_machine_about_to_hang_has_its_run_stopped_and_then_ended",
            "train/fault_rows::little_memory_or_pressure_alone_stops_nothing",
            "train/fault_rows::the_supervisor_does_what_the_guard_finds_and_says_why",
        ),
    ),
    Row(
        7,
        "the machine hangs, restarts or loses power",
        (
            POWER,
            "train/fault_rows::a_run_that_ended_with_its_machine_is_host_lost_and_says_how_to_go_on",
            "train/fault_rows::a_hole_that_a_power_loss_left_in_a_log_is_named_and_cut_off",
            "watch/exit_cause::another_boot_id_means_that_the_host_was_lost",
        ),
    ),
    Row(
        8,
        "Python exception",
        ("train/fault_rows::an_exception_in_a_step_is_told_and_keeps_the_checkpoint",),
    ),
    Row(
        9,
        "segmentation fault, bus error, abort",
        (
            "watch/watched_run::a_crashed_trainer_is_told_by_its_signal_with_its_stack_on_stderr",
            "watch/exit_cause::a_child_that_reads_address_zero_crashed",
        ),
    ),
    Row(
        13,
        "NVML absent, not supported, mismatched",
        (
            "machine/nvml::nvml_that_does_not_start_is_absent_with_the_reason",
            "machine/nvml::no_reading_is_zero_because_a_call_failed",
            "machine/nvml::memory_of_a_unified_gpu_is_absent_with_the_reason_and_its_status_says_so",
        ),
    ),
    Row(
        15,
        "hang at step 0, CPU-bound",
        (
            "watch/watched_run::a_step_that_never_ends_is_named_with_its_line_goes_on_and_is_ended_by_a_second_signal",
            "watch/stacks::a_spinning_process_computes_and_its_line_is_named",
            "watch/stall::before_the_first_step_the_phase_is_named",
        ),
    ),
    Row(
        19,
        "data loader worker killed, shared memory full",
        (
            "train/fault_rows::a_trainer_has_no_worker_to_lose_and_no_shared_memory_to_fill",
            "train/state::a_restored_run_takes_the_same_steps_bit_for_bit",
        ),
    ),
    Row(
        20,
        "no room for a checkpoint",
        (
            NTH,
            RUN_NTH,
            "plan/inputs::a_disk_that_fills_up_while_training_ends_the_run_with_its_last_checkpoint_whole",
            "train/checkpoint::too_little_free_space_is_refused_before_anything_is_written",
        ),
    ),
    Row(
        21,
        "I/O error, file system turned read-only",
        (
            NTH,
            RUN_NTH,
            "train/checkpoint::prune_that_fails_at_any_operation_leaves_the_newest_and_whole_folders_only",
        ),
    ),
    Row(
        22,
        "kill while a checkpoint is written",
        (
            "train/checkpoint::a_process_killed_at_any_operation_leaves_the_earlier_checkpoint_loadable",
            "train/checkpoint::a_writer_killed_from_outside_in_the_middle_of_a_file_is_never_read",
            KILLS,
        ),
    ),
    Row(
        23,
        "kill while old checkpoints are deleted",
        (
            "train/checkpoint::prune_never_deletes_the_last_checkpoint_that_verifies",
            "train/checkpoint::prune_that_fails_at_any_operation_leaves_the_newest_and_whole_folders_only",
            KILLS,
        ),
    ),
    Row(
        24,
        "bit rot, truncated checkpoint",
        (
            "train/checkpoint::every_flipped_bit_of_every_file_is_refused_by_name",
            "train/run_lifecycle::a_damaged_newest_checkpoint_is_refused_by_name_and_passed_over_only_on_request",
        ),
    ),
    Row(
        25,
        "two writers of one run",
        (
            "train/fault_rows::a_running_run_cannot_be_started_twice",
            "log/write::a_second_writer_is_refused_with_words_and_the_first_goes_on",
            "log/write::a_writer_that_is_killed_leaves_the_log_free",
            "train/fault_rows::a_folder_left_by_a_dead_process_is_swept_though_its_pid_lives_again",
        ),
    ),
    Row(
        26,
        "error while saving is not lost (saving is not asynchronous)",
        (RUN_NTH, NTH),
    ),
    Row(
        27,
        "Ctrl-C, SIGTERM, the second signal",
        (
            "train/run_lifecycle::sigterm_finishes_the_step_saves_and_exits_143_and_resume_is_exact",
            "train/fault_rows::ctrl_c_exits_130",
            "watch/watched_run::a_step_that_never_ends_is_named_with_its_line_goes_on_and_is_ended_by_a_second_signal",
        ),
    ),
    Row(
        28,
        "terminal closed, connection dropped",
        ("train/fault_rows::a_lost_terminal_leaves_the_run_going_and_the_log_says_which_it_was",),
    ),
    Row(
        29,
        "crash of the screen",
        (
            "train/fault_rows::a_screen_that_is_killed_leaves_the_run_alone_and_the_next_shows_all_of_it",
            "train/fault_rows::a_lost_terminal_leaves_the_run_going_and_the_log_says_which_it_was",
        ),
    ),
    Row(
        30,
        "slow or absent reader",
        ("train/fault_rows::a_reader_that_stands_still_never_holds_up_a_step_or_costs_a_line",),
    ),
    Row(
        31,
        "NaN or infinite loss or gradient",
        (
            "train/run_lifecycle::a_nan_is_seen_stops_the_run_and_reaches_no_checkpoint",
            "train/trainer::a_non_finite_gradient_never_reaches_the_weights",
            "log/read::a_diverged_run_keeps_every_non_finite_number",
        ),
    ),
    Row(
        35,
        "clock set, NTP, suspended machine",
        (
            "train/fault_rows::a_suspended_machine_and_a_set_clock_are_told_apart",
            "train/fault_rows::a_pair_in_which_the_machine_slept_proves_nothing",
            "train/fault_rows::a_clock_that_is_set_back_changes_no_duration_in_a_log",
            "log/view::a_step_of_the_wall_clock_does_not_undo_the_end_of_a_run",
        ),
    ),
    Row(
        36,
        "settings or environment changed on resume",
        (
            "train/fault_rows::a_setting_changed_on_resume_is_refused_with_both_values",
            "train/fault_rows::a_change_that_is_allowed_is_made_and_written_down_and_so_are_other_versions",
            "train/fault_rows::changed_text_is_refused_on_resume",
        ),
    ),
    Row(
        37,
        "code, torch or driver changed on resume",
        (
            "train/fault_rows::a_change_that_is_allowed_is_made_and_written_down_and_so_are_other_versions",
            "train/fault_rows::versions_that_are_the_same_are_not_worth_a_word",
        ),
    ),
    Row(
        40,
        "model file replaced or emptied while a run goes on",
        (
            "train/fault_rows::a_model_file_that_is_emptied_while_a_run_goes_on_changes_nothing",
            "train/fault_rows::a_teacher_in_blocks_keeps_no_mapping_of_its_file",
            "train/fault_rows::a_teacher_replaced_between_two_sessions_is_refused",
        ),
    ),
    Row(
        41,
        "locale, NO_COLOR, small terminal",
        (
            "workbench/tui/characters::ascii_screens_hold_nothing_but_ascii",
            "workbench/tui/characters::no_colour_means_no_colour",
            "workbench/terminal::a_resized_terminal_is_drawn_again_and_ctrl_c_quits_from_under_a_question",
            "workbench/terminal::without_utf8_a_list_opens_shows_its_run_and_quits_in_ascii",
            "workbench/tui/run_screen::extreme_sizes_do_not_crash",
        ),
    ),
    Row(
        42,
        "no room for the log",
        (
            NTH,
            "log/write::a_full_disk_leaves_only_whole_lines_and_the_log_goes_on",
            "plan/inputs::a_disk_that_fills_up_while_training_ends_the_run_with_its_last_checkpoint_whole",
        ),
    ),
)

REQUIRED = {*range(1, 10), 13, 15, *range(19, 32), 35, 36, 37, 40, 41, 42}


def test_every_required_row_is_in_the_table_once() -> None:
    numbers = [row.number for row in ROWS]
    assert sorted(numbers) == sorted(REQUIRED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}-{row.fault}")
def test_the_tests_of_a_row_exist(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        assert marks_of(test) is not None, test


def test_every_row_is_proved_by_a_test_that_runs_in_the_suite_without_a_gpu() -> None:
    for row in ROWS:
        kept = [test for test in row.tests if not is_apart(test)]
        assert kept, f"row {row.number} is proved by soak or GPU tests alone"


def is_apart(test: str) -> bool:
    """Whether every case of a test waits for `make soak` or a GPU."""
    marks = marks_of(test)
    assert marks is not None, test
    return bool(marks & {"pytest.mark.soak", "pytest.mark.gpu"})
