"""The screen of a run, at the sizes people use: states, numbers and reasons are there as words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.cli.main import main
from engine.log.folder import RunFolder
from tests.support.run_folders import (
    Scene,
    Unknown,
    checkpoint,
    completed,
    corrupt,
    decision,
    empty,
    gpu,
    killed,
    resumed,
    running,
    torn,
    vanished,
)
from tests.support.screens import at_sizes, on_screen, poll, texts_of, words_of

SIZES = [(40, 12), (80, 24), (120, 40), (160, 45)]


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (completed, "COMPLETED"),
        (killed, "KILLED"),
        (vanished, "VANISHED"),
        (torn, "VANISHED"),
        (resumed, "COMPLETED"),
        (empty, "NOT STARTED"),
        (corrupt, "UNREADABLE"),
    ],
)
def test_name_and_state_are_words_on_every_screen(
    tmp_path: Path, make: Callable[[Path], RunFolder], state: str
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        seen = [words_of(pilot), *(await at_sizes(pilot, others)).values()]
        for text in seen:
            assert "kd-small" in text
            assert state in text

    # Another size for each state.
    opened_in = SIZES[len(make.__name__) % len(SIZES)]
    others = [size for size in SIZES if size != opened_in]
    on_screen([make(tmp_path / "kd-small").path], opened_in, script)


def test_a_running_run_tells_step_loss_and_pace_at_every_size(tmp_path: Path) -> None:
    scene = running(tmp_path / "run")

    async def script(pilot: Pilot[None]) -> None:
        for text in (words_of(pilot), *(await at_sizes(pilot, SIZES[1:])).values()):
            assert "RUNNING" in text
            assert "step 30/60" in text
            assert "loss 2.89" in text
            assert "4.1k tok/s" in text

    on_screen([scene.run.path], SIZES[0], script)
    scene.close()


def test_the_next_action_is_beside_the_verdict_or_below_it(tmp_path: Path) -> None:
    for size in ((120, 40), (80, 24)):
        (text,) = texts_of(killed(tmp_path / f"kd{size[0]}").path, size)
        assert text.startswith(
            "■ ENDED at step 30: killed by SIGKILL, sender not known do: engine diagnose"
        )


def test_the_key_of_the_next_action_stands_in_the_place_of_its_command(tmp_path: Path) -> None:
    (text,) = texts_of(vanished(tmp_path / "kd").path, (120, 40))
    assert "do: press R to resume it" in text
    run = tmp_path / "log.csv"
    run.write_text("step,loss\n" + "".join(f"{n},{4 - n / 60}\n" for n in range(1, 61)))
    assert main(["import", "csv", str(run), "--out", str(tmp_path)]) == 0
    (text,) = texts_of(tmp_path / "log", (120, 40))
    for words in ("elapsed", "F flip", "no reading yet"):
        assert words not in text


def test_a_small_screen_has_the_status_line_alone(tmp_path: Path) -> None:
    (text,) = texts_of(killed(tmp_path / "run").path, (39, 8))
    assert "KILLED" in text
    assert "killed by SIGKILL, sender not known" in text
    assert "pane" not in text


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (200, 60)])
def test_extreme_sizes_do_not_crash(tmp_path: Path, size: tuple[int, int]) -> None:
    texts_of(completed(tmp_path / "run").path, size, "1", "5", "6")


def test_new_steps_appear_at_the_next_look(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=10)

    async def script(pilot: Pilot[None]) -> None:
        assert "step 10/60" in words_of(pilot)
        scene.steps(11, 12)
        await poll(pilot)
        assert "step 12/60" in words_of(pilot)
        scene.close()
        await poll(pilot)
        assert "VANISHED" in words_of(pilot)

    on_screen([scene.run.path], (120, 40), script)


def test_a_corrupt_log_is_explained(tmp_path: Path) -> None:
    (text,) = texts_of(corrupt(tmp_path / "run").path, (120, 40))
    assert "expected line number 20, found 21: a line was lost, repeated or altered" in text


def test_an_event_of_another_version_is_in_the_log(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=3).events(Unknown(cups=2))
    (text,) = texts_of(scene.run.path, (120, 40))
    scene.close()
    assert "sampled_tea (written by another version)" in text


# Panes.


def test_a_wide_screen_shows_every_pane_at_once(tmp_path: Path) -> None:
    (text,) = texts_of(completed(tmp_path / "run").path, (120, 40))
    for title in ("1 loss", "2 throughput", "3 device", "4 decisions", "5 log", "6 result"):
        assert title in text
    assert "over the whole run:" in text and "available 61.0 GiB min" in text

    assert "no NVIDIA driver is loaded" in text
    assert "because 26.1 GiB fit in 119.7 GiB" in text
    assert "not none: a teacher was given" in text
    assert "override: --set teacher.backend=none" in text
    assert "held-out loss of the student at step 60: 2.6290" in text
    assert "perplexity 13.86" in text
    assert "! 1 warning" in text
    for name in (
        "gap closed: 91%",
        "held-out 2.6290",
        "teacher 2.2011",
        "start 6.9500",
        "training loss 2.1",
    ):
        assert name in text


def test_the_curves_on_top_are_chosen_by_a_key(tmp_path: Path) -> None:
    path = completed(tmp_path / "run").path
    seen = texts_of(path, (120, 40), *"ccc")
    start, training, parts, held_out = seen
    assert "per token, held-out" in start and "per token, held-out" in held_out
    for item in ("L ⣤⣤ loss 2.1", "C ⣤⣤ ce 2.6", "K ⣤⣤ kd 1.6"):
        assert item in parts
    assert "per token, training" in training
    assert "teacher 2.2" not in training + parts, "no teacher has a mixed loss"


def test_before_the_first_step_the_readings_are_drawn_over_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().begin(60)
    for _ in range(20):
        scene.now_s += 1.0
        scene.device(gpu(0.0))
    (text,) = texts_of(scene.run.path, (120, 40))
    scene.close()
    assert "no step yet" in text and "GPU 0%" in text and "▁▁▁▁▁" in text


def test_tabs_show_the_plot_and_the_pane_of_the_digit(tmp_path: Path) -> None:
    path = killed(tmp_path / "run").path
    seen = texts_of(path, (80, 24), "4", "3", "6", "5", "2")
    assert "[4 decisions]" in seen[1]
    assert "because 26.1 GiB fit" in seen[1]
    assert "available 61.0 GiB" in seen[2]
    assert "newest checkpoint: checkpoints/step-000030" in seen[3]
    assert all(words.count("killed by SIGKILL, sender not known") == 1 for words in seen[1:4])
    assert "trainer exited" in seen[4]
    assert "4.1k tok/s, 500 ms a step" in seen[5]
    assert all("1 loss, nats per token" in text for text in seen)


def test_the_same_digit_again_zooms_and_escape_comes_back(tmp_path: Path) -> None:
    path = completed(tmp_path / "run").path
    seen = texts_of(path, (120, 40), "4", "4", "escape")
    assert "5 log" in seen[1]
    assert "5 log," not in seen[2]
    assert "4 decisions" in seen[2]
    assert "5 log," in seen[3]


def test_an_overridden_decision_says_so(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=2)
    scene.events(decision("student.precision", "bf16", "asked", overridden=True))
    (text,) = texts_of(scene.run.path, (120, 60))
    scene.close()
    assert "set by the user" in text


def test_a_gpu_reading_has_its_numbers_and_its_gaps(tmp_path: Path) -> None:
    scene = running(tmp_path / "run", done=2).device(gpu(96.0))
    (text,) = texts_of(scene.run.path, (120, 40))
    scene.close()
    assert "GPU util %" in text and " 0 96 unknown 38 unknown" in text, text
    assert "memory GiB unknown: unified memory" in text


def test_faults_are_seen_in_plot_status_log_and_result(tmp_path: Path) -> None:
    seen = texts_of(
        completed(tmp_path / "run", nan={30, 31}).path, (120, 40), "slash", "N", "O", "N"
    )
    assert "× 2 not finite" in seen[0]
    assert "× not finite: 30 and 1 more" in seen[0]
    assert "NON-FINITE: loss is nan at step 30, and 1 more" in seen[0]
    assert "NON-FINITE: loss is nan at step 31" in seen[-1]


def test_log_axis_is_named(tmp_path: Path) -> None:
    seen = texts_of(completed(tmp_path / "run").path, (120, 40), "l", "l")
    assert "nats per token, held-out, log axis" in seen[1]
    assert "log axis" not in seen[2]


def test_a_checkpoint_is_in_the_result_of_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    scene = running(tmp_path / "run")
    scene.events(checkpoint(30))
    (_, text) = texts_of(scene.run.path, (80, 24), "6")
    scene.close()
    assert "newest checkpoint: checkpoints/step-000030 (step 30, 9.4 MiB)" in text
