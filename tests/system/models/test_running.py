"""How the student's layers are run: compiled and made again against the layers as written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import TrainingFailed
from engine.models import running
from engine.models.decoder import Decoder, run_layer
from engine.models.load import new_decoder
from engine.models.running import CompiledLayers, checkpointed, has_compiler, set_running
from engine.train import compile_student as subject
from engine.train.compile_student import compile_student
from engine.train.trainer import Trainer
from tests.support.budgets import config
from tests.support.kit import Kit
from tests.support.trainers import build

# The compiler looks at .grad of whatever tensor it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(rows: int = 2, length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 60, (rows, length), generator=generator)
    return tokens_BT, torch.arange(length).expand(rows, -1) // 7


def answers(decoder: Decoder, rows: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    decoder.zero_grad()
    hidden_BTD = decoder.hidden(*tokens(rows))
    torch.autograd.backward(hidden_BTD.square().sum())
    return hidden_BTD.detach(), {
        n: p.grad for n, p in decoder.named_parameters() if p.grad is not None
    }


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("family", "again"),
    [
        ("qwen2", True),
        *(
            pytest.param(family, again, marks=pytest.mark.soak)
            for family in ("qwen2", "qwen3", "llama")
            for again in (False, True)
            if (family, again) != ("qwen2", True)
        ),
    ],
)
def test_one_compilation_serves_all_layers_and_answers_as_they_do(family: str, again: bool) -> None:
    decoder = new_decoder(config(layers=3, family=family), 0)
    names = list(decoder.state_dict())
    expected, gradients = answers(decoder)
    before = graphs()
    compiled = CompiledLayers(2, 24, "aot_eager")
    set_running(decoder, compiled=compiled, packed=False, checkpointing=again)
    found, again_gradients = answers(decoder)
    assert graphs() == before + 1
    assert list(decoder.state_dict()) == names
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again_gradients, gradients)


def test_only_training_batches_of_the_run_are_compiled() -> None:
    decoder = new_decoder(config(), 0)
    before = graphs()
    compiled = CompiledLayers(2, 24, "eager")
    set_running(decoder, compiled=compiled, packed=False, checkpointing=False)
    answers(decoder, rows=3)
    with torch.no_grad():
        decoder.hidden(*tokens())
    with torch.inference_mode():
        decoder.hidden(*tokens())
    assert graphs() == before
    answers(decoder)
    answers(decoder)
    assert graphs() == before + 1


def kept_bytes(decoder: Decoder) -> int:
    """Of the storages that the graph of one forward pass holds, the weights' own left out."""
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.hidden(*tokens(4))
    return sum(kept.values())


def test_made_again_keeps_less_and_gives_the_same_bits() -> None:
    decoder = new_decoder(config(layers=4), 0)
    expected, gradients = answers(decoder)
    whole = kept_bytes(decoder)
    decoder.run_layer = checkpointed(run_layer)
    found, again_gradients = answers(decoder)
    assert torch.equal(found, expected)
    assert all(torch.equal(again_gradients[n], g) for n, g in gradients.items())
    assert kept_bytes(decoder) < 0.5 * whole


def eager_put(trainer: Trainer, **settings: Any) -> subject.Agreement | None:
    chosen = dict(compiled=True, packed=False, checkpointing=False, backend="aot_eager") | settings
    return compile_student(trainer, length=32, **chosen)  # type: ignore[arg-type]


def test_a_run_is_compared_and_left_as_it_was(kit: Kit) -> None:
    trainer = build(kit)
    state = torch.get_rng_state()
    agreement = eager_put(trainer)
    assert agreement is not None and agreement.worst < 1e-4
    assert all(p.grad is None for p in trainer.parameters)
    assert torch.equal(torch.get_rng_state(), state) and trainer.position == 0
    assert [s.loss for s in trainer.steps()] == [s.loss for s in build(kit).steps()]
    assert eager_put(build(kit), compiled=False) is None


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": lambda x: x * 1.01,
    "nan": lambda x: x * float("nan"),
    "a gradient that is lost": lambda x: x.detach() + 0.9 * (x - x.detach()),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_planted_miscompilation_is_refused(
    what: str, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(self: CompiledLayers, layer: nn.Module, x_BTD: Tensor, sight: Any) -> Tensor:
        return WRONG[what](run_layer(layer, x_BTD, sight))

    monkeypatch.setattr(running.CompiledLayers, "__call__", spoilt)
    with pytest.raises(TrainingFailed, match=r"student.compile: compiled layers answer otherwise"):
        eager_put(build(kit))


def test_a_gpu_without_triton_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: None)
    assert has_compiler("cpu") and not has_compiler("cuda")
    monkeypatch.setattr(running.shutil, "which", lambda name: None)
    assert not has_compiler("cpu")
