"""A teacher out of its store: the same training as with the teacher itself, and every miss is seen."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.data.batches import Batch, Batches
from engine.data.corpus import open_corpus
from engine.errors import TrainingFailed
from engine.formats.tokenizer import open_tokenizer
from engine.log.events import Note
from engine.log.fold import Follower
from engine.log.folder import open_run
from engine.log.view import RunView
from engine.loss.kd_loss import distillation_loss
from engine.models.head import DenseHead, project
from engine.models.load import load_decoder, new_decoder
from engine.models.read_config import read_config
from engine.spec import RunSpec, load_spec
from engine.teachers.frozen import DequantizedTeacher
from engine.teachers.protocol import NoHiddenStates, Teacher
from engine.teachers.store import write
from engine.teachers.store.fidelity import MIN_COMPARED
from engine.teachers.store.folder import open_store, shard_path
from engine.teachers.store.keys import CacheError, Identity
from engine.teachers.store.outputs import as_targets, sparse_parts
from engine.teachers.store.teacher import CachedTeacher, Reader
from engine.train import build
from engine.train.trainer import Trainer
from tests.support.finished_runs import carry_out
from tests.support.kit import Kit
from tests.support.paths import DEMO
from tests.support.preparing import make_store
from tests.support.streams import documents_of, tokenize

CPU = torch.device("cpu")
# Shapes: N tokens, V vocabulary, D student width, E teacher width, K ids of a token


@pytest.fixture(scope="module")
def spec_file(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.spec(tmp_path_factory.mktemp("cached"), train__steps=8)


@pytest.fixture(scope="module")
def hidden_store(spec_file: Path) -> Path:
    out = spec_file.parent / "hidden"
    make_store(spec_file, out, shard_bytes=96 << 10)
    return out


@pytest.fixture(scope="module")
def top_k_store(spec_file: Path) -> Path:
    out = spec_file.parent / "top_k"
    make_store(spec_file, out, form="top_k", count=64)
    return out


def batches_of(spec: RunSpec) -> Batches:
    corpus = open_corpus(
        spec.data.corpus,
        heldout_fraction=spec.data.heldout_fraction,
        max_bytes=spec.data.max_bytes or None,
    )
    tokens = tokenize(documents_of(corpus.train), open_tokenizer(spec.teacher.path))
    return Batches(
        tokens, seq_len=spec.data.seq_len, rows_per_batch=spec.train.rows, seed=spec.train.seed
    )


def online(spec: RunSpec) -> Teacher:
    return DequantizedTeacher(load_decoder(spec.teacher.path))


def cached(
    store: Path,
    spec: RunSpec,
    load: Callable[[], Teacher] | None = None,
    say: Callable[[str], None] = lambda text: None,
    *,
    device: torch.device = CPU,
) -> CachedTeacher:
    opened = open_store(store)
    hidden = opened.identity.form == "hidden"
    return CachedTeacher(
        opened,
        device=device,
        vocab_size=300,
        head=online(spec).head() if hidden else None,
        online=load,
        say=say,
    )


def train(spec: RunSpec, teacher: Teacher) -> tuple[list[float], list[Tensor]]:
    student = new_decoder(read_config(Path(spec.student.config)), seed=3)
    trainer = Trainer(
        student=student,
        teacher=teacher,
        batches=batches_of(spec),
        train=spec.train,
        loss=spec.loss,
        device=CPU,
        precision="fp32",
    )
    losses = [step.loss for step in trainer.steps()]
    return losses, [p.detach().clone() for p in student.parameters()]


def test_training_from_stored_hidden_states_is_training_with_the_teacher_bit_for_bit(
    spec_file: Path, hidden_store: Path
) -> None:
    spec, _ = load_spec(spec_file)
    teacher = cached(hidden_store, spec)  # no teacher to ask: a miss would end it
    losses, weights = train(spec, teacher)
    wanted, wanted_weights = train(spec, online(spec))
    assert losses == wanted
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted_weights, strict=True))
    assert (teacher.hits, teacher.misses) == (8 * 4, 0)
    assert "32 of 32 rows" in teacher.summary


def test_stored_hidden_states_give_no_targets(spec_file: Path, hidden_store: Path) -> None:
    teacher = cached(hidden_store, load_spec(spec_file)[0])
    assert teacher.targets(torch.zeros(1, 32).long(), torch.zeros(1, 32).long()) is None


def test_a_miss_asks_the_teacher_is_counted_and_said_once(
    spec_file: Path, hidden_store: Path
) -> None:
    spec, _ = load_spec(spec_file, ["train.steps=30"])  # past the 8 steps that are stored
    said: list[str] = []
    loaded: list[Teacher] = []

    def load() -> Teacher:
        loaded.append(online(spec))
        return loaded[-1]

    teacher = cached(hidden_store, spec, load, said.append)
    losses, _ = train(spec, teacher)
    wanted, _ = train(spec, online(spec))
    assert losses == wanted
    assert teacher.hits == 8 * 4 and teacher.misses == 22 * 4
    assert len(loaded) == 1 and len(said) == 1 and "lacks a row of a batch" in said[0]
    assert "88 from the teacher" in teacher.summary


def test_a_miss_is_refused_where_there_is_no_teacher_to_ask(
    spec_file: Path, hidden_store: Path
) -> None:
    spec, _ = load_spec(spec_file, ["train.steps=30"])
    with pytest.raises(TrainingFailed, match="missing or damaged") as caught:
        train(spec, cached(hidden_store, spec))
    assert "engine prepare" in str(caught.value.hint)


def test_a_damaged_shard_is_named_and_its_rows_come_from_the_teacher(
    spec_file: Path, hidden_store: Path, tmp_path: Path
) -> None:
    spec, _ = load_spec(spec_file)
    store = tmp_path / "store"
    shutil.copytree(hidden_store, store)
    raw = bytearray(shard_path(store, 1).read_bytes())
    raw[-5] ^= 1  # one bit of one hidden state
    shard_path(store, 1).write_bytes(raw)
    said: list[str] = []
    teacher = cached(store, spec, lambda: online(spec), said.append)
    losses, _ = train(spec, teacher)
    assert losses == train(spec, online(spec))[0]
    assert teacher.misses >= 4 and teacher.hits + teacher.misses == 32
    assert any("shard-000001" in text and "not used" in text for text in said)


def test_what_was_noted_is_read_from_the_host_and_found_by_the_tensors_themselves(
    spec_file: Path, hidden_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = load_spec(spec_file)
    teacher, batch = cached(hidden_store, spec, lambda: online(spec)), batches_of(spec).batch_at(2)
    tokens_BT, documents_BT, _ = batch.to_torch(CPU)
    wanted = teacher.hidden(tokens_BT, documents_BT)  # not noted: read back
    with monkeypatch.context() as patch:
        patch.setattr("engine.teachers.store.teacher._copy_to_host", None)
        teacher.note(batch, tokens_BT, documents_BT)
        assert torch.equal(teacher.hidden(tokens_BT, documents_BT), wanted)
    tokens_BT = tokens_BT.clone()
    tokens_BT[0, 0] += 1
    assert teacher.misses == 0
    changed = teacher.hidden(tokens_BT, documents_BT)
    assert teacher.misses == 4 and not torch.equal(changed, wanted)


def test_notes_that_nobody_asks_about_are_forgotten(spec_file: Path, hidden_store: Path) -> None:
    spec, _ = load_spec(spec_file)
    teacher, batches = cached(hidden_store, spec), batches_of(spec)
    given = []
    for index in range(8):
        batch = batches.batch_at(index)
        tokens_BT, documents_BT, _ = batch.to_torch(CPU)
        teacher.note(batch, tokens_BT, documents_BT)
        given.append((tokens_BT, documents_BT))
    for index in (0, 7, 3):
        assert torch.equal(
            teacher.hidden(*given[index]),
            online(spec).hidden(*batches.batch_at(index).to_torch(CPU)[:2]),
        )


@pytest.mark.alone
@pytest.mark.gpu
def test_rows_that_are_copied_beside_a_busy_gpu_are_those_that_are_stored(
    spec_file: Path, hidden_store: Path
) -> None:
    """Asked for while the device still works through what came before, as a step does; their memory is
    given away again while it does."""
    spec, _ = load_spec(spec_file)
    device = torch.device("cuda")
    teacher, batches = cached(hidden_store, spec, device=device), batches_of(spec)
    work = torch.randn(4096, 4096, device=device)
    found = []
    for index in range(8):
        batch = batches.batch_at(index)
        tokens_BT, documents_BT, _ = batch.to_torch(device)
        teacher.note(batch, tokens_BT, documents_BT)
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        hidden_BTE = teacher.hidden(tokens_BT, documents_BT)
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        found.append(hidden_BTE + 0)
        del hidden_BTE
    on_host = cached(hidden_store, spec)
    for index, copy_BTE in enumerate(found):
        wanted_BTE = on_host.hidden(*batches.batch_at(index).to_torch(CPU)[:2])
        assert torch.equal(copy_BTE.cpu(), wanted_BTE), index


def test_rows_are_found_in_other_batches_and_orders(spec_file: Path, hidden_store: Path) -> None:
    spec, _ = load_spec(spec_file)
    teacher, batches = cached(hidden_store, spec), batches_of(spec)
    one, other = batches.batch_at(1), batches.batch_at(5)
    mixed = Batch(
        tokens_BT=np.concatenate([other.tokens_BT[2:], one.tokens_BT[:1]]),
        documents_BT=np.concatenate([other.documents_BT[2:], one.documents_BT[:1]]),
        labels_BT=np.concatenate([other.labels_BT[2:], one.labels_BT[:1]]),
        row_ids=np.concatenate([other.row_ids[2:], one.row_ids[:1]]),
    )
    found = teacher.hidden(*mixed.to_torch(CPU)[:2])
    torch.testing.assert_close(found, online(spec).hidden(*mixed.to_torch(CPU)[:2]))
    assert teacher.misses == 0


def _logits(teacher: Teacher, batch: Batch, temperature: float) -> Tensor:
    hidden_NE = teacher.hidden(*batch.to_torch(CPU)[:2]).flatten(0, 1)
    logits_NV = torch.empty(len(hidden_NE), 300)
    project(logits_NV, hidden_NE, teacher.head().slices(300, torch.float32), scale=1 / temperature)
    return logits_NV


def test_stored_top_k_is_what_the_teacher_says(spec_file: Path, top_k_store: Path) -> None:
    spec, _ = load_spec(spec_file)
    batch, teacher = batches_of(spec).batch_at(3), cached(top_k_store, spec)
    found = teacher.targets(*batch.to_torch(CPU)[:2])
    assert found is not None and found.log_probs_NK is not None
    log_p_NV = _logits(online(spec), batch, spec.loss.temperature).double().log_softmax(1)
    assert torch.equal(found.ids_NK.long(), log_p_NV.topk(64, dim=1).indices)
    wanted = log_p_NV.gather(1, found.ids_NK.long())
    torch.testing.assert_close(found.log_probs_NK.double(), wanted, rtol=1e-6, atol=1e-6)
    assert float((1 - found.log_probs_NK.double().exp().sum(1)).min()) > -1e-6  # the tail's
    for ask in (teacher.hidden, lambda *_: teacher.head()):
        with pytest.raises(NoHiddenStates, match="top 64 of 300 ids"):
            ask(*batch.to_torch(CPU)[:2])


def test_a_miss_of_targets_is_made_of_the_teacher_as_the_store_was(
    spec_file: Path, top_k_store: Path
) -> None:
    spec, _ = load_spec(spec_file)
    batches, teacher = batches_of(spec), cached(top_k_store, spec, lambda: online(spec))
    inside = teacher.targets(*batches.batch_at(7).to_torch(CPU)[:2])
    assert teacher.misses == 0
    beyond = batches.batch_at(8)  # the store has 8 steps
    found = teacher.targets(*beyond.to_torch(CPU)[:2])
    assert teacher.misses == 4 and inside is not None and found is not None
    assert found.ids_NK.dtype == inside.ids_NK.dtype and found.log_probs_NK is not None
    log_p_NV = _logits(online(spec), beyond, spec.loss.temperature).log_softmax(1)
    assert torch.equal(found.ids_NK.long(), log_p_NV.topk(64, dim=1).indices)


def _gradients(
    teacher: Teacher, identity: Identity, batch: Batch, student: torch.nn.Module, spec: RunSpec
) -> tuple[Tensor, Tensor]:
    """dL/dH of one batch against the teacher itself and against what would be stored."""
    tokens_BT, documents_BT, labels_BT = batch.to_torch(CPU)
    hidden_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
    with torch.no_grad():
        start_ND = student.hidden(tokens_BT, documents_BT).flatten(0, 1)  # type: ignore[operator]
    keys = identity.keys(batch)
    targets = as_targets(identity, sparse_parts(identity, hidden_NE, teacher.head(), keys))
    found = []
    for sparse in (None, targets):
        hidden_ND = start_ND.clone().requires_grad_()
        terms = distillation_loss(
            hidden_ND,
            student.head_weight,  # type: ignore[arg-type]
            hidden_NE if sparse is None else None,
            teacher.head() if sparse is None else None,
            labels_BT.flatten(),
            alpha=spec.loss.alpha,
            temperature=spec.loss.temperature,
            denominator=float(batch.labelled),
            targets=sparse,
        )
        torch.autograd.backward(terms.loss)
        assert hidden_ND.grad is not None
        found.append(hidden_ND.grad)
    return found[0], found[1]


def _top_64_of_the_demo(count: int) -> list[float]:
    """Cosines of dL/dH, over whole batches, for the demo's teacher and a fresh student."""
    spec, _ = load_spec(DEMO / "demo.toml", ["data.max_bytes=400000", "train.rows=2"])
    teacher = online(spec)
    student = new_decoder(read_config(DEMO / "student.json"), seed=0)
    identity = Identity(
        form="top_k",
        teacher_sha256="",
        backend="dequantized",
        precision="fp32",
        dtype="F32",
        width=256,
        seq_len=128,
        vocabulary=student.config.vocab_size,
        temperature=spec.loss.temperature,
        count=64,
    )
    batches = batches_of(spec)
    cosines = []
    for index in range(count):
        ours, theirs = _gradients(teacher, identity, batches.batch_at(index), student, spec)
        cosines.append(float(torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)))
    return cosines


def test_gradients_of_top_64_with_tail_are_those_of_the_whole_distribution() -> None:
    cosines = _top_64_of_the_demo(4)
    assert min(cosines) >= 0.999, cosines


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_gradients_of_top_64_with_tail_over_100_batches() -> None:
    cosines = _top_64_of_the_demo(100)
    assert min(cosines) >= 0.999, (min(cosines), np.mean(cosines))


def test_draws_are_unbiased_and_the_same_for_a_row_in_any_batch(spec_file: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(8, 16, generator=generator)
    head = DenseHead(3 * torch.randn(40, 16, generator=generator))
    identity = Identity(
        form="sampled",
        teacher_sha256="",
        backend="",
        precision="fp32",
        dtype="F32",
        width=16,
        seq_len=4,
        vocabulary=30,
        temperature=2.0,
        count=5000,
        seed=0,
    )
    keys = [b"a" * 32, b"b" * 32]
    (ids_NK,) = sparse_parts(identity, hidden_NE, head, keys)
    (alone_NK,) = sparse_parts(identity, hidden_NE[4:], head, keys[1:])
    assert torch.equal(ids_NK[4:], alone_NK)
    logits_NV = hidden_NE @ torch.cat([w for _, w in head.slices(30, torch.float32)]).T
    p_NV = (logits_NV.double() / 2).softmax(1)
    counts_NV = torch.zeros(8, 30).scatter_add_(1, ids_NK.long(), torch.ones(8, 5000)).double()
    deviation = (counts_NV - 5000 * p_NV) / (5000 * p_NV * (1 - p_NV)).sqrt().clamp(min=1)
    assert float(deviation.abs().max()) < 5
    # And over seeds, of few draws each: the mean approaches p.
    total_NV = torch.zeros(8, 30, dtype=torch.float64)
    for seed in range(200):
        few = Identity(**{**_fields(identity), "count": 8, "seed": seed})
        (ids_NK,) = sparse_parts(few, hidden_NE, head, keys)
        total_NV.scatter_add_(1, ids_NK.long(), torch.full(ids_NK.shape, 1 / 1600).double())
    assert float((total_NV - p_NV).abs().sum(1).max()) < 0.25


def _fields(identity: Identity) -> dict[str, object]:
    return {name: getattr(identity, name) for name in identity.__dataclass_fields__}


def _run(spec: Path, out: Path, *sets: str) -> RunView:
    _, code = carry_out(spec, out, *sets)
    assert code == 0
    return Follower(open_run(out)).read_all()


def test_a_whole_run_reads_its_teacher_out_of_a_store_and_never_loads_it(
    spec_file: Path, hidden_store: Path, tmp_path: Path
) -> None:
    view = _run(
        spec_file,
        tmp_path / "run",
        f"teacher.cache={hidden_store}",
        "teacher.cache_miss=refuse",
        "checkpoint.every=0",
    )
    decision = next(d for d in view.decisions if d.knob == "teacher.backend")
    assert decision.choice == "cached" and "192 bytes per token" in decision.reason
    assert "32 of 32 sampled rows of the run are stored" in decision.reason
    assert view.eval_of("teacher") is not None
    items = {name for name, _, _ in view.memory_plan.items} if view.memory_plan else set()
    assert "teacher head" in items and "teacher weights" not in items
    levels = {c.id: (c.level, c.text) for c in view.checks.values()}
    for name in ("teacher_knows_text", "teacher_not_student", "step_gradients", "step_teacher"):
        assert levels[name][0] == "pass", levels[name]
    assert not [reason for level, reason in levels.values() if "broke" in reason]
    notes = [line.event for line in view.lines if isinstance(line.event, Note)]
    assert [note.text for note in notes if note.level == "warning"] == []
    assert any("came from" in note.text for note in notes)


def test_a_whole_run_trains_on_stored_targets_and_says_what_it_cannot_check(
    spec_file: Path, top_k_store: Path, tmp_path: Path
) -> None:
    sets = [f"teacher.cache={top_k_store}", "teacher.cache_miss=refuse", "checkpoint.every=0"]
    view = _run(spec_file, tmp_path / "run", *sets)
    levels = {c.id: (c.level, c.text) for c in view.checks.values()}
    assert levels["teacher_knows_text"][0] == "unknown"
    assert "expected a store of hidden states" in levels["teacher_knows_text"][1]
    assert levels["step_gradients"][0] == "pass", levels["step_gradients"]
    assert not [reason for _, reason in levels.values() if "broke" in reason]
    teacher = view.eval_of("teacher")
    assert teacher is not None and teacher.loss == pytest.approx(
        open_store(top_k_store).manifest.measured.loss
    )


def test_a_store_that_does_not_fit_the_run_is_refused_before_it_starts(
    spec_file: Path, top_k_store: Path, hidden_store: Path
) -> None:
    from engine.plan.inputs import check_inputs

    def check(store: Path, *sets: str) -> None:
        check_inputs(load_spec(spec_file, [f"teacher.cache={store}", *sets])[0], Path("run"))

    check(top_k_store)
    check(hidden_store, "loss.temperature=1.0")  # hidden states are of any temperature
    with pytest.raises(CacheError, match=r"expected loss.temperature 1.0, found 2.0"):
        check(top_k_store, "loss.temperature=1.0")
    with pytest.raises(CacheError, match=r"expected data.seq_len 16, found 32"):
        check(hidden_store, "data.seq_len=16")
    with pytest.raises(CacheError, match="no folder"):
        check(hidden_store / "none")
    check(hidden_store / "none", "teacher.backend=dequantized")  # not to be read


@pytest.mark.parametrize("form", ["hidden", "top_k", "sampled"])
def test_a_run_compares_its_stored_outputs_with_the_teacher_before_it_uses_them(
    form: str, kit: Kit, tmp_path: Path
) -> None:
    spec = kit.spec(tmp_path, teacher__cache=str(tmp_path / "store"), train__steps=2)
    counts = {"hidden": 0, "top_k": 16, "sampled": 8}
    make_store(spec, tmp_path / "store", form=form, count=counts[form])
    run, code = carry_out(spec, tmp_path / "run", "checkpoint.at_end=false")
    checks = Follower(run).read_all().checks
    check = checks["stored_outputs"]
    assert code == 0 and check.level == "pass", check
    assert check.numbers["rows"] > MIN_COMPARED
    assert checks["step_teacher"].level == "pass", checks["step_teacher"]
    assert [one for one in checks.values() if one.level == "fail"] == []


def _of_temperature_one(identity: Identity, *given: Any) -> Any:
    return sparse_parts(dataclasses.replace(identity, temperature=1.0), *given)


def _of_the_kept_alone(identity: Identity, *given: Any) -> Any:
    ids_NK, log_probs_NK = sparse_parts(identity, *given)
    return ids_NK, log_probs_NK.log_softmax(1)


@pytest.mark.parametrize(
    ("form", "filled"),
    [("top_k", _of_temperature_one), ("top_k", _of_the_kept_alone)],
)
def test_a_store_that_is_filled_by_other_code_than_set_is_named_before_it_is_used(
    form: str, filled: Any, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kit.spec(tmp_path, teacher__cache=str(tmp_path / "store"), train__steps=2)
    monkeypatch.setattr(write, "sparse_parts", filled)
    make_store(spec, tmp_path / "store", form=form, count=8)
    run, code = carry_out(spec, tmp_path / "run")
    assert code == 1
    found = Follower(run).read_all()
    assert found.checks["stored_outputs"].level == "fail" and found.last_step == 0


def test_stored_hidden_states_that_are_read_half_as_large_are_named(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a cosine of 1."""
    spec = kit.spec(tmp_path, teacher__cache=str(tmp_path / "store"), train__steps=2)
    make_store(spec, tmp_path / "store", form="hidden")
    on_device = CachedTeacher._on_device
    monkeypatch.setattr(
        CachedTeacher,
        "_on_device",
        lambda self, *given: tuple(0.5 * field for field in on_device(self, *given)),
    )
    run, code = carry_out(spec, tmp_path / "run")
    assert code == 1 and Follower(run).read_all().checks["stored_outputs"].level == "fail"


@pytest.mark.parametrize(
    "form", ["hidden", pytest.param("top_k", marks=pytest.mark.soak), "sampled"]
)
def test_stored_outputs_of_other_rows_are_named_before_they_are_used(
    form: str, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kit.spec(tmp_path, teacher__cache=str(tmp_path / "store"), train__steps=4)
    make_store(spec, tmp_path / "store", form=form, count={"top_k": 16, "sampled": 8}.get(form, 0))
    begin = Reader.begin
    monkeypatch.setattr(Reader, "begin", lambda self, keys: begin(self, [*keys[-1:], *keys[:-1]]))
    run, code = carry_out(spec, tmp_path / "run")
    found = Follower(run).read_all()
    assert code == 1
    assert found.checks["stored_outputs"].level == "fail" and found.last_step == 0


def test_a_teacher_that_does_not_fit_is_not_loaded_to_be_compared(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FREE_SHARE", 1e12)
    spec = kit.spec(tmp_path, teacher__cache=str(tmp_path / "store"), train__steps=2)
    make_store(spec, tmp_path / "store", form="hidden")
    run, code = carry_out(spec, tmp_path / "run", "checkpoint.at_end=false")
    view = Follower(run).read_all()
    assert code == 0 and view.checks["stored_outputs"].level == "unknown"
    assert "not compared" in view.checks["stored_outputs"].text
    assert "comparing stored outputs" not in run.events.read_text()
