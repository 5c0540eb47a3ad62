"""A teacher whose layers are shared out over the ranks answers as a whole one, to the bit, and holds what the
memory plan says. Two processes and gloo, for real.
"""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.errors import BadInput
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.machine.reading import measured
from engine.models.load import save_decoder
from engine.plan.device import ComputeDevice
from engine.plan.inputs import Inputs
from engine.plan.knobs import choose_teacher_shard
from engine.plan.memory import MemoryPlan
from engine.plan.run_plan import RunFacts, plan_memory, without_effect
from engine.runtime.managed import memory_scope
from engine.spec import spec_from_dict
from engine.train import to_events
from engine.units import format_bytes
from evidence.bench.shapes import config_named
from tests.support.budgets import budget_of, spec_of
from tests.support.forked import run_python
from tests.support.packed_models import lively, make_config, write
from tests.support.paths import ROOT
from tests.support.running import environment
from tests.support.sharded_ranks import LAYERS

GIB = 2**30


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw of each kind of teacher."""
    folder = tmp_path_factory.mktemp("sharded")
    for layers in {count for kind, count in LAYERS.items() if kind != "blocks"}:
        decoder = lively(make_config(num_hidden_layers=layers))
        save_decoder(decoder, folder / f"floats-{layers}", torch.float32)
    decoder = lively(make_config(num_hidden_layers=LAYERS["blocks"]))
    write(folder / "blocks.gguf", decoder, "Q4_K", floats="o.weight")
    script = str(ROOT / "tests" / "support" / "sharded_ranks.py")
    done = run_python(script, str(folder), str(_free_port()), environment=environment())
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("kind", LAYERS)
def test_answers_are_those_of_a_whole_teacher_to_the_bit(
    seen: list[dict[str, Any]], kind: str
) -> None:
    for rank in seen:
        assert rank[kind]["same_answers"] == [True] * 3


@pytest.mark.parametrize("kind", LAYERS)
def test_whoever_reads_the_weights_reads_those_of_a_whole_teacher(
    seen: list[dict[str, Any]], kind: str
) -> None:
    for rank in seen:
        found = rank[kind]
        assert found["other_values"] == []
        assert found["hashes"][0] == found["hashes"][1]
        assert found["same_model"]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_rank_holds_what_the_memory_plan_says(seen: list[dict[str, Any]], kind: str) -> None:
    for rank in seen:
        found = rank[kind]
        # Planes of blocks, tensors and shares begin at round addresses.
        assert found["held"] == pytest.approx(found["predicted"], rel=0.015)
        assert found["held"] < 0.97 * found["whole"]


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_is_gathered_once_a_pass_on_every_rank(
    seen: list[dict[str, Any]], kind: str
) -> None:
    layers = LAYERS[kind]
    for rank in seen:
        # Of an even number the next pass begins with the layer that the last one ended with gathering.
        assert rank[kind]["gathered"] == [layers + (layers % 2 == 0), layers, layers]
        assert rank[kind]["entered"]


def _needs(shard: bool, gpus: int = 4, **changes: Any) -> int:
    budget = budget_of(
        spec_of(data__seq_len=1024, compute__gpus=gpus),
        **(
            dict(
                teacher=config_named("qwen2.5-7b"),
                teacher__shard="on" if shard else "off",
                student=config_named("qwen2.5-0.5b"),
                available=measured(200 * GIB, "a test"),
            )
            | changes
        ),
    )
    return budget.total_bytes


def test_four_gpus_save_three_quarters_of_the_layers_less_two() -> None:
    layers = 2 * (7_615_616_512 - 2 * 152064 * 3584 - 3584)
    saved = _needs(False) - _needs(True)
    assert saved == pytest.approx(layers * (3 / 4 - 2 / 28), rel=1e-3)


def test_auto_shares_only_what_does_not_fit_whole_and_says_the_arithmetic() -> None:
    whole, shared = _needs(False), _needs(True)

    def chosen(available_bytes: int | None, wanted: str = "auto", **changes: Any) -> Any:
        return choose_teacher_shard(
            wanted,
            ranks=4,
            whole_bytes=whole,
            shared_bytes=shared,
            available_bytes=available_bytes,
            **changes,
        )

    assert chosen(whole).choice == "off" and chosen(None).choice == "off"
    short = chosen(whole - 1)
    assert short.choice == "on" and "sharded over 4 GPUs" in short.reason
    assert short.rejected[0][0] == "off" and short.override == "--set teacher.shard=off"
    neither = chosen(shared - 1)
    assert neither.choice == "off" and "does not fit either" in neither.reason
    forced = chosen(None, "on")
    assert forced.choice == "on" and forced.overridden
    assert chosen(shared, stored_words="rows").choice == "off"
    with pytest.raises(BadInput, match=r"teacher\.shard"):
        chosen(None, "on", stored_words="rows")


def test_the_budget_of_a_teacher_that_does_not_fit_names_the_setting() -> None:
    budget = budget_of(
        spec_of(compute__gpus=4),
        teacher=config_named("qwen2.5-7b"),
        student=config_named("qwen2.5-0.5b"),
        available=measured(22 * GIB, "a test"),
    )
    with pytest.raises(BadInput, match=r"teacher\.shard=on"):
        budget.refuse_if_too_big()


def _planned(
    folder: Path,
    available_bytes: int,
    wanted: str = "auto",
    context: tuple[int, ...] = (),
) -> tuple[MemoryPlan, RunView]:
    """What a run of two ranks plans, with nothing to give up but the teacher."""
    teacher = make_config(num_hidden_layers=12)
    spec = spec_from_dict(
        {
            "teacher": {"path": "teacher", "shard": wanted, "precision": "fp32"},
            "student": {"config": "student.json", "checkpointing": "off", "precision": "fp32"},
            "data": {"seq_len": 32},
            "loss": {"chunk_rows": 16},
            "compute": {"gpus": 2, "device": "cpu"},
        }
    )
    device = torch.device("cpu")
    inputs = Inputs(
        teacher=teacher,
        teacher_size=None,
        student=make_config(),
        tokenizer=cast(Any, None),
        tokenizers={},
        notes=(),
        context=context,
    )
    compute = ComputeDevice(
        device=device,
        memory=memory_scope("native", device),
        available=measured(available_bytes, "a test"),
    )
    folder.mkdir()
    run = RunFolder(folder)
    with LogWriter(run.events, writer="trainer") as log:
        write = partial(to_events.write, log)
        facts = RunFacts(spec=spec, inputs=inputs, compute=compute, log=write)
        facts.settle(without_effect(facts))
        fitted = plan_memory(facts)
        write(fitted.budget())
    return fitted, Follower(run).read_all()


def test_a_teacher_that_does_not_fit_whole_is_shared_by_itself_and_the_log_says_why(
    tmp_path: Path,
) -> None:
    whole, _ = _planned(tmp_path / "plenty", 1 << 40)
    fitted, _ = _planned(tmp_path / "just", whole.total_bytes)
    assert not fitted.teacher_shard
    fitted, view = _planned(tmp_path / "short", whole.total_bytes - 1)
    assert fitted.teacher_shard and fitted.budget().fits
    said = next(d for d in view.decisions if d.knob == "teacher.shard")
    assert said.choice == "on" and format_bytes(whole.total_bytes) in said.reason
    assert view.memory_plan is not None
    items = {name: size for name, size, _ in view.memory_plan.items}
    assert items["gathered teacher layers"] > 0


def test_a_teacher_with_a_context_stays_whole_and_nothing_is_logged_as_decided(
    tmp_path: Path,
) -> None:
    whole, _ = _planned(tmp_path / "plenty", 1 << 40)
    fitted, view = _planned(tmp_path / "short", whole.total_bytes - 1, context=(1, 2))
    assert not fitted.teacher_shard
    assert "teacher.shard" not in {decision.knob for decision in view.decisions}
