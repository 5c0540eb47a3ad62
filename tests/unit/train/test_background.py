"""Work in background threads: its results and errors arrive where they are read, and a run that ends does
not wait for a hash."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from engine.formats import writing
from engine.formats.safetensors import tensors_sha256
from engine.log.events import ModelReady
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Tensors
from engine.models.load import new_decoder
from engine.train import background
from engine.train.background import Background, ModelHash
from tests.support.kit import tiny_config
from tests.support.run_events import example_of


def decoder() -> Decoder:
    return new_decoder(ModelConfig.from_dict(tiny_config(), "a student"), seed=3)


def ready(sha256: str) -> ModelReady:
    found: ModelReady = example_of(ModelReady, role="student", sha256=sha256)
    return found


def test_an_answer_and_an_error_arrive_where_they_are_asked_for() -> None:
    assert Background(lambda: 7, "seven").result() == 7

    def broken() -> int:
        raise ValueError("no such thing")

    work = Background(broken, "broken")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such thing"):
            work.result()


def test_the_hash_of_a_model_is_logged_once_it_is_known() -> None:
    student, lines = decoder(), list[object]()
    found = ModelHash(Tensors(student), ready, lines.append).result()
    assert found == tensors_sha256(dict(student.named_parameters()))
    assert [line.sha256 for line in lines if isinstance(line, ModelReady)] == [found]


def test_a_run_that_ends_waits_for_no_further_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, lines = threading.Event(), threading.Event(), list[object]()
    tensors = tensors_sha256

    def slow(found: dict[str, torch.Tensor]) -> str:
        begun.set()
        assert ended.wait(60)
        return tensors(found)

    monkeypatch.setattr(background, "tensors_sha256", slow)
    found = ModelHash(Tensors(decoder()), ready, lines.append)
    assert begun.wait(60)
    stopping = threading.Thread(target=found.cancel)
    stopping.start()
    while not found._stop.is_set():
        pass
    ended.set()
    stopping.join(60)
    assert not stopping.is_alive() and lines == []


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1 << 20])
def test_a_hash_does_not_depend_on_the_parts_in_which_it_is_computed(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(40.0).view(5, 8).T, "b": torch.tensor(3), "c": torch.empty(0, 4)}
    whole = tensors_sha256(tensors)
    monkeypatch.setattr(writing, "PART_BYTES", part_bytes)
    assert tensors_sha256(tensors) == whole


@pytest.mark.gpu
@pytest.mark.parametrize("move", [lambda x: x, lambda x: x.T], ids=["whole", "turned"])
def test_a_hash_of_tensors_on_a_gpu_is_that_on_the_host(
    move: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PART_BYTES", 1000)
    on_host = {"a": torch.arange(3333.0).view(3, 1111), "b": torch.empty(0)}
    there = {name: move(x.cuda()) for name, x in on_host.items() if x.dim() == 2}
    wanted = tensors_sha256({name: move(on_host[name]) for name in there})
    assert tensors_sha256(there) == wanted


def test_a_hash_that_is_computed_already_is_logged_when_its_model_is_there() -> None:
    lines = list[object]()
    assert ModelHash(Background(lambda: "af", "hash"), ready, lines.append).result() == "af"
    assert [line.sha256 for line in lines if isinstance(line, ModelReady)] == ["af"]
