"""Training state through a checkpoint and back: bit-exact continuation, and refusal of everything
that does not fit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import CheckpointError
from engine.train.checkpoint.manifest import newest
from engine.train.checkpoint.state import (
    OPTIMIZER_FILE,
    RNG_FILE,
    STATE_FILE,
    STUDENT_FILE,
    TensorWriter,
    TrainingState,
    capture,
    pack,
    restore,
    unpack,
)
from engine.train.checkpoint.write import save


class TinyModel(nn.Module):
    """An embedding tied to the head, a buffer, a frozen parameter and dropout, which draws from the
    generator at every step.
    """

    def __init__(self, width: int = 6, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.numel()
        hidden: Tensor = F.dropout(self.inner(self.embed(ids)), 0.3, self.training) * self.frozen
        return torch.tanh(hidden) @ self.head.weight.t()


def build(
    seed: int, width: int = 6, tied: bool = True, device: str = "cpu", fused: bool = False
) -> tuple[TinyModel, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = TinyModel(width, tied).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def train(model: TinyModel, optimizer: torch.optim.AdamW, steps: int) -> None:
    device = model.frozen.device
    for _ in range(steps):
        ids = torch.randint(0, 11, (7,)).to(device)  # the data, too, comes from the generator
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(ids), ids.roll(-1)))
        optimizer.step()


def state_of(model: TinyModel, optimizer: torch.optim.AdamW, step: int = 5) -> TrainingState:
    return capture(
        model,
        optimizer,
        step=step,
        seed=17,
        spec_sha256="ab" * 32,
        position={"epoch": 1, "row": 40},
        best_held_out_loss=0.1 + 0.2,
    )


def saved_and_read(folder: Path, state: TrainingState) -> TrainingState:
    save(folder, state.step, pack(state))
    found = newest(folder)
    assert found is not None
    return unpack(found)


def assert_same_bits(
    model: TinyModel,
    optimizer: torch.optim.AdamW,
    other: TinyModel,
    other_optimizer: torch.optim.AdamW,
) -> None:
    mine, theirs = state_of(model, optimizer), state_of(other, other_optimizer)
    for ours, others in (
        (mine.student, theirs.student),
        (mine.optimizer, theirs.optimizer),
        (mine.rng, theirs.rng),
    ):
        assert ours.keys() == others.keys()
        for name in ours:
            assert torch.equal(ours[name], others[name]), name


@pytest.mark.parametrize("fused", [False, True])
def test_a_restored_run_takes_the_same_steps_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    model, optimizer = build(0, fused=fused)
    train(model, optimizer, 5)
    save(tmp_path, 5, pack(state_of(model, optimizer)))
    train(model, optimizer, 5)

    found = newest(tmp_path)
    assert found is not None
    resumed, resumed_optimizer = build(99, fused=fused)
    train(resumed, resumed_optimizer, 2)  # whatever was there is replaced
    restore(unpack(found), resumed, resumed_optimizer)
    # `seen` counts tokens in a buffer: restored, not accumulated
    assert int(resumed.seen) == 35
    train(resumed, resumed_optimizer, 5)
    assert_same_bits(model, optimizer, resumed, resumed_optimizer)


def test_scalars_come_back_exactly(tmp_path: Path) -> None:
    state = saved_and_read(tmp_path, state_of(*build(0)))
    assert (state.step, state.seed, state.spec_sha256) == (5, 17, "ab" * 32)
    assert state.position == {"epoch": 1, "row": 40}
    assert state.best_held_out_loss == 0.1 + 0.2


def test_a_tied_tensor_is_saved_once_and_must_be_tied_again(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, 1)
    state = saved_and_read(tmp_path, state_of(model, optimizer))
    assert "embed.weight" in state.student and "head.weight" not in state.student
    assert state.tied == {"head.weight": "embed.weight"}
    assert (
        "exp_avg/embed.weight" in state.optimizer and "exp_avg/head.weight" not in state.optimizer
    )
    with pytest.raises(
        CheckpointError, match=r"student tensor head\.weight: missing from the checkpoint"
    ):
        restore(state, *build(0, tied=False))


def test_state_before_the_first_step_is_saved_and_restored(tmp_path: Path) -> None:
    model, optimizer = build(0)
    state = saved_and_read(tmp_path, state_of(model, optimizer, step=0))
    assert state.optimizer == {} and "embed.weight" in state.unmoved
    train(model, optimizer, 3)
    resumed, resumed_optimizer = build(1)
    train(resumed, resumed_optimizer, 1)
    restore(state, resumed, resumed_optimizer)
    train(resumed, resumed_optimizer, 3)
    assert_same_bits(model, optimizer, resumed, resumed_optimizer)


def test_every_problem_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, 2)
    state = state_of(model, optimizer)
    student, moments = dict(state.student), dict(state.optimizer)
    student["stray"] = student.pop("inner.bias")
    student["seen"] = torch.zeros((), dtype=torch.int32)
    moments["exp_avg/inner.weight"] = torch.zeros(6, 5)
    del moments["step/embed.weight"]
    broken = TrainingState(
        step=state.step,
        seed=state.seed,
        spec_sha256=state.spec_sha256,
        position=state.position,
        best_held_out_loss=None,
        student=student,
        tied=state.tied,
        optimizer=moments,
        unmoved=(*state.unmoved, "ghost"),
        rng={"cpu": state.rng["cpu"], "cuda/0": state.rng["cpu"]},
    )
    live, live_optimizer = build(3)
    train(live, live_optimizer, 1)
    before = pack(state_of(live, live_optimizer))
    with pytest.raises(CheckpointError) as caught:
        restore(broken, live, live_optimizer)
    for line in (
        "student tensor inner.bias: missing from the checkpoint",
        "student tensor stray: not in this run",
        "student tensor seen: expected [] torch.int64, found [] torch.int32",
        "optimizer tensor exp_avg/inner.weight: expected [6, 6] torch.float32, found [6, 5]",
        "optimizer tensor step/embed.weight: missing from the checkpoint",
        "optimizer parameter ghost: expected no state",
        "random generators: expected ['cpu'], found ['cpu', 'cuda/0']",
    ):
        assert line in caught.value.message
    after = pack(state_of(live, live_optimizer))
    for name in (STUDENT_FILE, OPTIMIZER_FILE, RNG_FILE):
        assert written(after[name]) == written(before[name])


def written(content: object) -> bytes:
    assert isinstance(content, TensorWriter)
    sink = Collect()
    content.write_to(sink)
    assert len(sink.data) == content.size_bytes
    return bytes(sink.data)


class Collect:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview, /) -> int:
        self.data += data
        return len(data)


def test_a_model_of_another_width_is_refused(tmp_path: Path) -> None:
    state = saved_and_read(tmp_path, state_of(*build(0)))
    with pytest.raises(
        CheckpointError, match=r"embed\.weight: expected \[11, 5\] .* found \[11, 6\]"
    ):
        restore(state, *build(0, width=5))


def test_tensor_files_are_what_the_safetensors_library_reads() -> None:
    tensors = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "turned": torch.randn(4, 7).t(),
        "narrow": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
    }
    found = load(written(TensorWriter(tensors)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert load(written(TensorWriter({}))) == {}


def test_files_hold_no_pickle_and_json_holds_no_nan(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, 1)
    saved = save(tmp_path, 5, pack(state_of(model, optimizer)))
    for name in (STUDENT_FILE, OPTIMIZER_FILE, RNG_FILE):
        assert load_file(saved.path / name)
    json.loads((saved.path / STATE_FILE).read_text())


def test_a_checkpoint_with_other_files_or_another_step_is_not_a_training_state(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a", 1, {"notes.txt": b""})
    found = newest(tmp_path / "a")
    assert found is not None
    with pytest.raises(CheckpointError, match=r"found \['notes.txt'\]"):
        unpack(found)
    save(tmp_path / "b", 6, pack(state_of(*build(0), step=5)))
    found = newest(tmp_path / "b")
    assert found is not None
    with pytest.raises(CheckpointError, match="expected step 6, as in the folder's name, found 5"):
        unpack(found)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_run_on_a_gpu_is_restored_bit_for_bit(tmp_path: Path, fused: bool) -> None:
    model, optimizer = build(0, device="cuda", fused=fused)
    train(model, optimizer, 5)
    save(tmp_path, 5, pack(state_of(model, optimizer)))
    train(model, optimizer, 5)
    found = newest(tmp_path)
    assert found is not None
    state = unpack(found)
    assert "cuda/0" in state.rng
    resumed, resumed_optimizer = build(1, device="cuda", fused=fused)
    restore(state, resumed, resumed_optimizer)
    train(resumed, resumed_optimizer, 5)
    assert_same_bits(model, optimizer, resumed, resumed_optimizer)
