"""The student's compiled layers against the eager ones, with and without activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import TrainingFailed
from engine.models.activation_checkpointing import configure_layers
from engine.models.decoder import run_layer
from engine.models.load import new_decoder
from engine.train import compile_student as subject
from engine.train.compile_student import CompiledLayers, compile_student
from engine.train.trainer import Trainer
from tests.support.budgets import config
from tests.support.decoders import gradients_of, sample_tokens
from tests.support.kit import Kit
from tests.support.trainers import build

# The compiler looks at .grad of whatever tensor it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
    expected, gradients = gradients_of(decoder)
    before = graphs()
    compiled = CompiledLayers(2, 24, "aot_eager")
    configure_layers(decoder, compiled=compiled, packed=False, checkpointing=again)
    found, again_gradients = gradients_of(decoder)
    assert graphs() == before + 1
    assert list(decoder.state_dict()) == names
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again_gradients, gradients)


def test_only_training_batches_of_the_run_are_compiled() -> None:
    decoder = new_decoder(config(), 0)
    before = graphs()
    compiled = CompiledLayers(2, 24, "eager")
    configure_layers(decoder, compiled=compiled, packed=False, checkpointing=False)
    gradients_of(decoder, rows=3)
    with torch.no_grad():
        decoder.hidden(*sample_tokens())
    with torch.inference_mode():
        decoder.hidden(*sample_tokens())
    assert graphs() == before
    gradients_of(decoder)
    gradients_of(decoder)
    assert graphs() == before + 1


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
    def spoilt(
        self: CompiledLayers, layer: nn.Module, x_BTD: Tensor, attention_inputs: Any
    ) -> Tensor:
        return WRONG[what](run_layer(layer, x_BTD, attention_inputs))

    monkeypatch.setattr(CompiledLayers, "__call__", spoilt)
    with pytest.raises(
        TrainingFailed, match=r"student.compile: the compiled layers' output differs"
    ):
        eager_put(build(kit))
