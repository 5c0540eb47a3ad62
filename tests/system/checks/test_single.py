"""Checks one by one: what each must see that no planted defect of a whole run shows, and what it must
not take for a defect."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.audit.reference import PlainDecoder
from engine.catalogue import BY_ID
from engine.checks.checkpoint import (
    checkpoint_reloads,
)
from engine.checks.context import Context, Memory
from engine.checks.data import end_is_learnt, split_disjoint
from engine.checks.runner import FUNCTIONS
from engine.checks.weights import shape_of, weights_of
from engine.data.batches import IGNORED, Batch
from engine.data.overlap import predicted, shared_windows
from engine.data.tokens import TokenStream, starts_of
from engine.formats.tokenizer import open_tokenizer
from engine.log.folder import RunFolder
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import new_decoder
from engine.teachers.frozen import DequantizedTeacher
from engine.train.checkpoint.keeper import Keeper
from engine.train.checkpoint.manifest import MANIFEST, digest_of
from engine.train.trainer import Trainer
from engine.verdict import Answer, Level
from tests.support.checked_runs import World, make_run, make_world
from tests.support.defects import DEFECTS
from tests.support.kit import Kit, tiny_config
from tests.support.streams import make_stream


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def answer(name: str, looked_at: Context) -> Answer:
    assert name in BY_ID["check"]
    found = FUNCTIONS[name](looked_at)
    assert found is not None
    return found


def level(name: str, looked_at: Context) -> Level:
    return answer(name, looked_at).verdict.level


def spoilt_rows(looked_at: Context, spoil: Callable[[Batch], Batch]) -> Context:
    class Spoilt:
        def take(self, position: int, rows: int) -> Batch:
            return spoil(looked_at.batches.take(position, rows))

    return dataclasses.replace(looked_at, batches=Spoilt())


# Data


def stream_of(documents: list[list[int]]) -> TokenStream:
    tokens = np.concatenate([np.array([*d, 0], dtype=np.uint16) for d in documents])
    return make_stream(tokens, starts_of([len(d) + 1 for d in documents]))


def test_a_held_out_document_that_is_trained_on_is_found(world: World) -> None:
    looked_at = make_run(world).context
    assert split_disjoint(looked_at).verdict.level is Level.PASS
    held = world.heldout
    first = held.tokens[: held.starts[1]]
    tokens = np.concatenate([world.train.tokens, first])
    starts = np.append(world.train.starts, len(tokens))
    leaked = dataclasses.replace(looked_at, train_stream=make_stream(tokens, starts))
    found = split_disjoint(leaked)
    assert found.verdict.level is Level.FAIL and found.numbers["copied_documents"] == 1


def test_held_out_text_inside_another_document_is_found(world: World) -> None:
    looked_at = make_run(world).context
    tokens = np.concatenate([world.train.tokens, world.heldout.tokens[1:]])
    stream = make_stream(tokens, starts_of([len(tokens)]))
    leaked = dataclasses.replace(looked_at, train_stream=stream)
    found = split_disjoint(leaked)
    assert found.verdict.level is Level.FAIL and found.numbers["copied_documents"] == 0
    assert found.numbers["shared_windows"] >= found.numbers["windows"] - 4


def test_held_out_documents_that_are_trained_on_with_few_changes_are_found(world: World) -> None:
    looked_at = make_run(world).context
    held = world.heldout
    copies = held.tokens.copy()
    # Every document: the first tokens are others, and one in 400.
    copies[held.starts[:-1]] += 1
    copies[::400] += 1
    for share, level in ((1.0, Level.FAIL), (0.1, Level.PASS)):
        end = int(held.starts[int(share * (len(held.starts) - 1))])
        tokens = np.concatenate([world.train.tokens, copies[:end]])
        train = make_stream(tokens, np.append(world.train.starts, len(tokens)))
        # Much other text, so that most of what is held out is not in the training text.
        found = split_disjoint(dataclasses.replace(looked_at, train_stream=train))
        assert found.verdict.level is level, found
        assert found.numbers["copied_documents"] == 0


def test_a_prompt_that_all_conversations_begin_with_is_no_leak() -> None:
    def chats(first: int) -> TokenStream:
        tokens = np.arange(first, first + 8 * 300).reshape(8, 300) ** 2 % 50_021
        tokens[:, :220] = np.arange(220)
        labelled = np.zeros((8, 300), dtype=np.bool_)
        labelled[:, 220:] = True
        starts = starts_of([300] * 8)
        return make_stream(tokens.flatten().astype(np.uint16), starts, labelled=labelled.flatten())

    train, held = chats(0), chats(10_000)
    assert not shared_windows(predicted(train), predicted(held)).any()


@given(
    train=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    held=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    window=st.sampled_from([4, 5, 8]),
)
def test_shared_windows_are_those_that_a_plain_search_finds(
    train: list[int], held: list[int], window: int
) -> None:
    everywhere = {tuple(train[i : i + window]) for i in range(len(train) - window + 1)}
    starts = range(0, len(held) - window + 1, window // 4)
    expected = [tuple(held[i : i + window]) in everywhere for i in starts]
    arrays = (np.array(train, dtype=np.uint16), np.array(held, dtype=np.uint16))
    assert shared_windows(*arrays, window).tolist() == expected


def test_ends_that_are_never_a_label_are_named(world: World) -> None:
    looked_at = make_run(world).context
    found = end_is_learnt(looked_at)
    assert found.verdict.level is Level.PASS and found.numbers["labelled"] > 4
    with DEFECTS["ends_masked"].plant():
        masked = end_is_learnt(make_run(world).context)
    assert masked.verdict.level is Level.FAIL and "never a label" in str(masked.verdict)
    nobody = dataclasses.replace(looked_at, tokenizers={"teacher": None})
    assert end_is_learnt(nobody).verdict.level is Level.UNKNOWN


def test_padding_without_labels_is_no_defect(world: World) -> None:
    def pad(batch: Batch) -> Batch:
        tokens_BT, labels_BT = batch.tokens_BT.copy(), batch.labels_BT.copy()
        tokens_BT[:, 20:], labels_BT[:, 19:] = 0, IGNORED
        return dataclasses.replace(batch, tokens_BT=tokens_BT, labels_BT=labels_BT)

    assert level("padding_not_trained", spoilt_rows(make_run(world).context, pad)) is Level.PASS


def test_a_loader_that_is_stuck_is_found(world: World) -> None:
    def stuck(batch: Batch) -> Batch:
        first = [0] * len(batch.row_ids)
        return dataclasses.replace(
            batch, tokens_BT=batch.tokens_BT[first], labels_BT=batch.labels_BT[first]
        )

    found = answer("batch_not_degenerate", spoilt_rows(make_run(world).context, stuck))
    assert found.verdict.level is Level.FAIL and "rows repeat other rows" in found.verdict.reason


def test_a_small_corpus_that_comes_round_is_not_called_degenerate(world: World) -> None:
    few = stream_of([list(range(1, 60)) * 2])
    run = make_run(dataclasses.replace(world, train=few))
    found = answer("batch_not_degenerate", run.context)
    assert found.numbers["repeated"] == 0 and found.verdict.level is Level.PASS


# Vocabulary and settings


def test_other_tokens_at_the_same_width_are_found(world: World, tmp_path: Path) -> None:
    import json

    record = json.loads(world.tokenizer.raw)
    vocabulary = record["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    vocabulary[names[100]], vocabulary[names[101]] = vocabulary[names[101]], vocabulary[names[100]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(record))
    looked_at = make_run(world).context
    both = {"teacher": world.tokenizer, "student": open_tokenizer(path)}
    found = answer("vocabulary_by_bytes", dataclasses.replace(looked_at, tokenizers=both))
    assert found.verdict.level is Level.FAIL and found.numbers["differing"] == 2


def test_a_tokenizer_that_is_not_known_is_never_a_pass(world: World) -> None:
    looked_at = make_run(world).context
    for known in ({"teacher": None}, {"teacher": world.tokenizer, "student": None}, {}):
        found = dataclasses.replace(looked_at, tokenizers=known)
        assert level("vocabulary_by_bytes", found) is Level.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "stage", "text"),
    [
        ({"train__beta2": 0.999}, "step_weights", "the mean square of"),
        ({"train__eps": 1e-6}, "step_weights", "the update of"),
        ({"train__weight_decay": 0.5}, "step_weights", "the update of"),
    ],
)
def test_settings_that_are_not_the_spec_are_found(
    world: World, changes: dict[str, object], stage: str, text: str
) -> None:
    run = make_run(world)
    run.spec = make_run(world, **changes).spec
    run.step(1)
    assert text in run.failures()[stage]


# The forward pass


def plain_hidden(decoder: Decoder, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
    plain = PlainDecoder(shape_of(decoder.config), weights_of(decoder))
    return plain.forward(tokens_BT, documents_BT).hidden_ND


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 1},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ],
    ids=["qwen2", "untied", "qwen3", "llama3.1"],
)
def test_the_plain_forward_pass_is_the_decoder(changes: dict[str, object]) -> None:
    decoder = new_decoder(ModelConfig.from_dict(tiny_config(**changes), "test"), seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            # norms and biases that matter, and attention that is not flat
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens_BT = torch.randint(0, 300, (2, 40), generator=generator)
    documents_BT = (torch.arange(40) >= 17).long()[None].repeat(2, 1)
    with torch.no_grad():
        wanted_ND = decoder.hidden(tokens_BT, documents_BT).flatten(0, 1)
    found_ND = plain_hidden(decoder, tokens_BT, documents_BT)
    torch.testing.assert_close(found_ND, wanted_ND, rtol=1e-4, atol=1e-4)


def test_weights_that_are_nan_or_constant_are_found(world: World) -> None:
    for value in (math.nan, 0.25):
        run = make_run(world)
        with torch.no_grad():
            run.trainer.student.get_parameter("layers.0.mlp.up.weight").fill_(value)
        found = answer("weights_alive", run.context)
        assert (
            found.verdict.level is Level.FAIL and "layers.0.mlp.up.weight" in found.verdict.reason
        )


# The loss


# Teacher and evaluation


@pytest.mark.parametrize("allowed", [False, True])
def test_identical_models_are_a_failure_unless_they_are_allowed(
    world: World, allowed: bool
) -> None:
    def become_the_teacher(trainer: Trainer) -> None:
        assert isinstance(trainer.teacher, DequantizedTeacher)
        trainer.student.load_state_dict(trainer.teacher.decoder.state_dict())

    run = make_run(
        world,
        student={"hidden_size": 48},
        change=become_the_teacher,
        teacher__allow_identical=allowed,
    )
    found = answer("teacher_not_student", run.context).verdict
    assert found.level is (Level.UNKNOWN if allowed else Level.FAIL)
    assert not allowed or "allow_identical" in found.reason


def test_text_that_a_teacher_does_not_know_ends_no_run_and_a_teacher_that_guesses_does(
    world: World,
) -> None:
    run = make_run(world)
    decoder = run.context.teacher_decoder
    assert decoder is not None
    scale_D = decoder.norm.weight
    with torch.no_grad():
        scale_D *= 0.1
    found = answer("teacher_knows_text", run.context)
    assert found.numbers["frequencies"] < found.numbers["ce"] < found.numbers["ln_vocabulary"] - 0.1
    assert (
        found.verdict.level is Level.UNKNOWN
        and "does not predict this kind of text" in found.verdict.reason
    )
    with torch.no_grad():
        scale_D *= 0.0
    found = answer("teacher_knows_text", run.context)
    assert found.verdict.level is Level.FAIL and "guessing at random" in found.verdict.reason


def test_a_run_without_a_teacher_asks_none(world: World) -> None:
    looked_at = make_run(world, loss__alpha=1.0).context
    for name in ("teacher_knows_text", "teacher_not_student"):
        assert level(name, looked_at) is Level.UNKNOWN


# First steps and checkpoints


def test_a_frozen_tensor_is_found(world: World) -> None:
    run = make_run(world)
    run.trainer.student.get_parameter("layers.0.mlp_norm.weight").requires_grad_(False)
    run.step(1)
    assert "layers.0.mlp_norm.weight has no gradient" in run.failures()["step_gradients"]


def test_a_rate_below_the_last_bit_is_unknown_and_not_frozen(world: World) -> None:
    run = make_run(world, train__lr=1e-36, train__weight_decay=0.0)
    run.step(1)
    assert run.failures() == {}
    assert "smaller than the last bit" in run.unknowns()["step_weights"]


def test_memory_and_compiles_are_held_against_their_plans(world: World) -> None:
    late: list[str] = []
    gib = float(1 << 30)
    for measured, does_all_work, expected in (
        (10.5, True, Level.PASS),
        (12.0, False, Level.FAIL),
        (4.0, True, Level.FAIL),
        # Of a rank that audits no step.
        (4.0, False, Level.PASS),
    ):
        run = make_run(world)
        peak = Memory(
            predicted_bytes=10 * gib,
            measured_bytes=measured * gib,
            source="test",
            does_all_work=does_all_work,
        )
        run.context = dataclasses.replace(
            run.context, memory=lambda peak=peak: peak, late_compiles=lambda: late
        )
        run.begin()
        run.step(3)
        assert run.results["memory_as_planned"].verdict.level is expected
        assert run.results["no_late_compile"].verdict.level is Level.PASS
    late.append("q4k_linear[rows=7]")
    run.step(1)
    assert "q4k_linear" in run.failures()["no_late_compile"]
    assert not run.checks.ends_run(run.results["no_late_compile"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: said | {"schema": 2}, "expected schema 1"),
        (lambda said: said | {"more": 1}, "expected schema 1"),
        (lambda said: said | {"spec_sha256": "0" * 64}, "found 000000000000"),
        (lambda said: said | {"tied": {"head.weight": "norm.weight"}}, "tied names"),
        (lambda said: said | {"unmoved": ["norm.weight"]}, "not in this run"),
    ],
)
def test_a_checkpoint_that_a_resume_would_refuse_is_found_when_it_is_saved(
    change: Callable[[dict[str, Any]], dict[str, Any]], words: str, world: World, tmp_path: Path
) -> None:
    run = make_run(world).begin()
    run.step(1)
    folder = RunFolder(tmp_path)
    folder.effective.write_text(json.dumps({"spec": run.spec.to_dict()}))
    keeper = Keeper(folder, run.spec, log=lambda _: None, sync_log=lambda: None)
    path = keeper.save(run.trainer, 1.0)
    resumable = partial(keeper.check_resumable, trainer=run.trainer)
    assert checkpoint_reloads(run.context, path, 1, resumable).verdict.level is Level.PASS
    manifest = json.loads((path / MANIFEST).read_text())
    said = change(json.loads((path / "state.json").read_text()))
    (path / "state.json").write_text(json.dumps(said))
    verdict = checkpoint_reloads(run.context, path, 1, resumable).verdict
    assert verdict.level is Level.FAIL and "bytes, found" in verdict.reason
    size, digest = digest_of(path / "state.json")
    manifest["files"]["state.json"] = {"size": size, "sha256": digest}
    (path / MANIFEST).write_text(json.dumps(manifest))
    verdict = checkpoint_reloads(run.context, path, 1, resumable).verdict
    assert verdict.level is Level.FAIL and words in verdict.reason, verdict


@torch.no_grad()
def test_the_plain_forward_pass_stays_finite_where_a_hidden_token_has_by_far_the_largest_score() -> (
    None
):
    decoder = new_decoder(ModelConfig.from_dict(tiny_config(), "a test"), seed=0)
    for layer in decoder.layers:
        layer.attention.q.weight.mul_(300)
        layer.attention.k.weight.mul_(300)
    tokens_BT = torch.randint(0, decoder.config.vocab_size, (2, 16), generator=torch.manual_seed(0))
    documents_BT = torch.zeros_like(tokens_BT)
    wanted = decoder.hidden(tokens_BT, documents_BT).flatten(0, 1)
    found = plain_hidden(decoder, tokens_BT, documents_BT)
    assert found.isfinite().all()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2
