"""RunSpec: strict, complete in its complaints, and the same after a round trip."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadInput, SpecError
from engine.spec import (
    RunSpec,
    build_spec,
    key_lines,
    load_spec,
    options,
    parse_set,
    spec_from_dict,
    spec_to_toml,
)
from engine.spec.build import read_spec

NO_TEACHER = {"loss": {"alpha": 1.0}, "student": {"config": "c.json"}}


def write(folder: Path, text: str) -> Path:
    (folder / "c.json").write_text("{}")
    path = folder / "kd.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, sets: list[str] | None = None) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(write(folder, text), sets)
    return [line.removeprefix(f"{folder}/") for line in caught.value.problems]


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
[student]
config = "c.json"
[loss]
aplha = 0.3
temperature = 0.0

[train]
steps = "many"
lr = -1
warmup_steps = 1.5
"""
    found = problems(tmp_path, text, ["loss.alpha=1.5", "nonsense"])
    assert found == [
        "kd.toml:4: loss.aplha: unknown key; did you mean loss.alpha?",
        "kd.toml:5: loss.temperature: expected a number above 0, found 0.0",
        'kd.toml:8: train.steps: expected a number, found "many"',
        "kd.toml:9: train.lr: expected a number above 0, found -1",
        "kd.toml:10: train.warmup_steps: expected an integer, found 1.5",
        "--set nonsense: expected key=value, found no key or no =",
        "--set loss.alpha: expected a number in [0, 1], found 1.5",
    ]


@pytest.mark.parametrize("alpha", ["-0.01", "1.01", "nan", "inf", "true", '"x"'])
def test_alpha_outside_zero_to_one_is_refused(tmp_path: Path, alpha: str) -> None:
    found = problems(tmp_path, f'[student]\nconfig="c.json"\n[loss]\nalpha = {alpha}\n')
    assert len(found) == 1 and found[0].startswith("kd.toml:4: loss.alpha: expected a")


def test_unknown_value_of_a_knob_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    found = problems(tmp_path, '[teacher]\nbackend = "realizar"\n[student]\nconfig="c.json"')
    assert (
        "kd.toml:2: teacher.backend: expected one of auto, dequantized, quantized, cached, none, "
        'found "realizar"' in found
    )


@pytest.mark.parametrize("value", ["auto", "by_shape", "dequantize"])
def test_a_setting_that_is_gone_may_name_what_every_run_does_now(
    tmp_path: Path, value: str
) -> None:
    text = '[student]\nconfig = "c.json"\n[loss]\nalpha = 1\n'
    plain, _ = load_spec(write(tmp_path, text))
    assert load_spec(write(tmp_path, f'{text}[teacher]\nkernel = "{value}"\n'))[0] == plain
    assert load_spec(write(tmp_path, text), [f"teacher.kernel={value}"])[0] == plain
    old = plain.to_dict()
    old["teacher"]["kernel"] = value
    assert spec_from_dict(old) == plain


@pytest.mark.parametrize("value", ['"fused"', '"other"', "3", "[1]"])
def test_a_setting_that_is_gone_says_why_it_cannot_have_another_value(
    tmp_path: Path, value: str
) -> None:
    text = f'[student]\nconfig = "c.json"\n[loss]\nalpha = 1\n[teacher]\nkernel = {value}\n'
    (found,) = problems(tmp_path, text)
    expected = f"kd.toml:6: teacher.kernel: expected no such setting, found {value}: it was removed, because "
    assert found.startswith(f"{expected}a training step has too many rows for the fused kernel")


def test_alpha_below_one_needs_a_teacher(tmp_path: Path) -> None:
    found = problems(tmp_path, '[student]\nconfig = "c.json"\n[loss]\nalpha = 0.5\n')
    assert found == [
        "kd.toml:4: loss.alpha: expected 1 when there is no teacher (cross entropy alone), found 0.5"
    ]


def test_missing_file_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    found = problems(tmp_path, '[teacher]\npath = "nowhere"\n[student]\nconfig = "c.json"')
    assert found == [
        f"kd.toml:2: teacher.path: expected a file or folder at {tmp_path}/nowhere, found nothing there"
    ]


def test_paths_are_relative_to_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, '[student]\nconfig = "c.json"\n[loss]\nalpha = 1.0\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "d.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    assert load_spec(path)[0].student.config == str(tmp_path / "c.json")
    assert load_spec(path, ["student.config=d.json"])[0].student.config == str(elsewhere / "d.json")


def test_not_toml_not_utf8_and_missing_give_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not TOML: .*line 1"):
        load_spec(write(tmp_path, "[train\nsteps = 1"))
    bad = tmp_path / "latin.toml"
    bad.write_bytes(b"# caf\xe9\n")
    with pytest.raises(BadInput, match="expected UTF-8, found byte 5"):
        load_spec(bad)
    with pytest.raises(BadInput, match="expected a file, found nothing there"):
        load_spec(tmp_path / "absent.toml")


def test_a_section_given_as_a_value_is_refused(tmp_path: Path) -> None:
    assert any("expected a section [train]" in p for p in problems(tmp_path, "train = 3\n"))


def test_the_printed_spec_reads_back_equal() -> None:
    spec = build_spec(NO_TEACHER, check_paths=False)
    assert build_spec(tomllib.loads(spec_to_toml(spec)), check_paths=False) == spec
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_every_setting_is_documented_and_frozen() -> None:
    for option in options():
        assert option.doc.endswith(".") and len(option.doc) > 10, option.key
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunSpec().train.steps = 3  # type: ignore[misc]


def test_hash_ignores_where_the_run_is_kept_its_gates_and_who_hears_of_it_and_nothing_else() -> (
    None
):
    base = build_spec(NO_TEACHER, check_paths=False)
    moved = build_spec({**NO_TEACHER, "run": {"out": "/elsewhere", "name": "x"}}, check_paths=False)
    assert base.sha256 == moved.sha256
    for option in options():
        section, name = option.key.split(".")
        if section in ("run", "gate", "notify"):
            continue
        value = getattr(getattr(base, section), name)
        other = (
            (not value)
            if isinstance(value, bool)
            else f"{value}x"
            if isinstance(value, str)
            else value + 1
        )
        changed = dataclasses.replace(
            base, **{section: dataclasses.replace(getattr(base, section), **{name: other})}
        )
        assert changed.sha256 != base.sha256, option.key


def test_key_lines_are_not_fooled_by_multi_line_strings() -> None:
    text = '[a]\nx = """\ny = 3\n[b]\n"""\ny = 4\n[b]\nx = 1\n'
    assert key_lines(text) == {"a": 1, "a.x": 2, "a.y": 6, "b": 7, "b.x": 8}


@given(st.one_of(st.integers(-1000, 1000), st.booleans(), st.text("abcxyz/._", min_size=1)))
def test_set_reads_toml_values_and_plain_words(value: int | bool | str) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    key, read = parse_set(f"a.b={text}")
    assert key == "a.b"
    assert read == value or isinstance(read, float)  # "1.5" typed as a word is a number in TOML


def test_list_of_settings_is_frozen() -> None:
    """A new setting is a deliberate change: add it here, in the README and in the changelog."""
    assert [option.key for option in options()] == [
        "run.name", "run.out",
        "model.engine", "model.remote_code",
        "teacher.path", "teacher.backend", "teacher.precision",
        "teacher.shard",
        "teacher.cache", "teacher.cache_miss", "teacher.attention", "teacher.context", "teacher.allow_identical",
        "student.path", "student.config", "student.precision", "student.graphs", "student.attention",
        "student.checkpointing", "student.reshard",
        "student.adapter", "student.adapter_rank", "student.adapter_alpha", "student.adapter_rslora",
        "student.adapter_base", "student.adapter_targets", "student.save_as",
        "vocab.align",
        "data.corpus", "data.tokenizer", "data.seq_len", "data.heldout_fraction",
        "data.include_tests", "data.max_bytes", "data.packing", "data.columns", "data.turns", "data.skip_at_most",
        "loss.alpha", "loss.temperature", "loss.divergence", "loss.beta", "loss.kernel",
        "loss.chunk_rows",
        "rollout.share", "rollout.by", "rollout.divergence", "rollout.prompt_tokens", "rollout.max_new_tokens",
        "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p",
        "train.steps", "train.stop_after", "train.rows", "train.accumulation", "train.lr", "train.warmup_steps",
        "train.schedule", "train.final_lr_ratio", "train.weight_decay", "train.beta1", "train.beta2",
        "train.eps", "train.clip_norm", "train.update", "train.seed", "train.on_non_finite",
        "eval.every", "eval.rows", "eval.sample_tokens",
        "checkpoint.every", "checkpoint.keep_last", "checkpoint.at_end", "checkpoint.sharded",
        "compute.device", "compute.gpus", "compute.collective_timeout_s", "compute.threads",
        "compute.thread_wait", "compute.slow_by",
        "compute.deterministic",
        "memory.allocator", "memory.budget", "memory.limit_gib", "kernels.prewarm", "kernels.layers",
        "kernels.attention",
        "checks.enabled", "checks.skip", "checks.on_fail", "checks.every", "checks.record",
        "watch.stall_seconds", "watch.on_stall", "watch.on_thrash", "watch.sample_seconds",
        "notify.to",
        "gate.smoke_steps", "gate.cache_cosine",
        "gate.heldout_loss", "gate.heldout_share", "gate.pass_at_1",
    ]  # fmt: skip


CHANGES_RESULTS = """
    student.adapter student.adapter_rank student.adapter_alpha student.adapter_rslora student.adapter_base
    student.adapter_targets
    teacher.path teacher.context student.path student.config
    data.corpus data.tokenizer data.seq_len data.heldout_fraction data.include_tests data.max_bytes
    data.packing data.columns data.turns
    loss.alpha loss.temperature loss.divergence loss.beta
    rollout.share rollout.by rollout.divergence rollout.prompt_tokens rollout.max_new_tokens
    rollout.temperature rollout.top_p rollout.top_k rollout.min_p
    train.steps train.rows train.accumulation train.lr train.warmup_steps train.schedule
    train.final_lr_ratio train.weight_decay train.beta1 train.beta2 train.eps train.clip_norm
    train.seed train.on_non_finite
    eval.rows compute.gpus
"""
"""Of compute.gpus: train.rows is per GPU, so a step has more rows. Of eval.rows: the held-out loss is of them."""
KEEPS_RESULTS = """
    run.name run.out model.engine model.remote_code data.skip_at_most
    teacher.backend teacher.precision teacher.shard
    teacher.cache teacher.cache_miss teacher.attention teacher.allow_identical
    student.precision student.graphs student.attention student.checkpointing
    student.reshard student.save_as
    vocab.align loss.kernel loss.chunk_rows train.stop_after train.update
    eval.every eval.sample_tokens checkpoint.every checkpoint.keep_last checkpoint.at_end checkpoint.sharded
    compute.device compute.collective_timeout_s compute.threads compute.thread_wait compute.slow_by
    compute.deterministic memory.allocator memory.budget memory.limit_gib kernels.prewarm kernels.layers
    kernels.attention
    watch.stall_seconds watch.on_stall watch.on_thrash watch.sample_seconds notify.to
    checks.enabled checks.skip checks.on_fail checks.every checks.record
    gate.smoke_steps gate.cache_cosine
    gate.heldout_loss gate.heldout_share gate.pass_at_1
"""
"""Guards (teacher.allow_identical, vocab.align) decide whether a run goes on, never what it computes."""


def test_every_setting_says_whether_it_changes_results_as_a_person_decided() -> None:
    """A new setting fails here until somebody decides; the flip of a wrong one has a wrong verdict."""
    decided = dict.fromkeys(CHANGES_RESULTS.split(), True)
    decided |= dict.fromkeys(KEEPS_RESULTS.split(), False)
    assert {option.key: option.changes_results for option in options()} == decided


def test_a_prompt_that_the_teacher_reads_may_be_longer_than_other_texts(tmp_path: Path) -> None:
    prompt, student = 'line "one"\\\n' * 2000, {"student": {"config": "student.json"}}
    spec = spec_from_dict({**student, "teacher": {"path": "t", "context": prompt}})
    file = tmp_path / "spec.toml"
    file.write_text(spec_to_toml(spec))
    assert read_spec(file)[0]["teacher"]["context"] == prompt
    for key, text in (("context", "x" * 33_000), ("path", "x" * 4001)):
        with pytest.raises(SpecError, match=rf"teacher.{key}: expected a string of at most"):
            spec_from_dict({**student, "teacher": {"path": "t", key: text}})
