"""A teacher's layers compiled: the same answers, one compilation, and no other batch compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import BadInput, InternalError, TrainingFailed
from engine.kernels.inductor import CompileWatch
from engine.models.attention import remember
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.fp8 import round_layer
from engine.models.frozen import JoinedLinear, freeze, join
from engine.models.load import load_packed_decoder
from engine.plan.knobs import choose_teacher_compile
from engine.teachers.compiled import (
    ROUNDING,
    CompiledForward,
    OpaqueLinear,
    compile_layers,
    make_opaque,
    warm_up,
)
from engine.teachers.frozen import FrozenDecoder
from tests.support.packed_models import lively, make_batch, make_config, random_tokens, write

# torch's own code generator, at its first import under some versions.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
LENGTH = 16
CONFIG = make_config(num_hidden_layers=3, hidden_size=128, intermediate_size=256, head_dim=16)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fast(decoder: Decoder, single: bool = False, backend: str = "eager") -> None:
    """`compile_layers` as far as the graph: what is generated for a GPU is another's business here."""
    compile_layers(decoder, LENGTH, single=single)
    decoder.run_layer = CompiledForward(LENGTH, single=single, backend=backend)


def frozen(kind: str, folder: Path) -> FrozenDecoder:
    if kind == "blocks":
        decoder = load_packed_decoder(write(folder / "m.gguf", lively(make_config()), "Q4_K"))
    else:
        decoder = freeze(lively(CONFIG))
    if kind == "fp8":
        for layer in decoder.layers:
            round_layer(layer)
    return FrozenDecoder(decoder)


def batch(rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens_BT = random_tokens(rows, length)
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, length // 3 :] = 1
    return tokens_BT, documents_BT


@pytest.mark.parametrize(
    "kind", ["dense", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("blocks", "fp8"))]
)
def test_one_compilation_serves_all_layers_and_any_number_of_rows(
    kind: str, tmp_path: Path
) -> None:
    teacher = frozen(kind, tmp_path)
    rows = (4, 3, 2, 9, 1)
    written = [teacher.hidden(*batch(n)) for n in rows]
    fast(teacher.decoder, backend="aot_eager")
    with CompileWatch() as watch:
        for n, wanted_BTE in zip(rows, written, strict=True):
            found_BTE = teacher.hidden(*batch(n))
            # In fp8 a value half-way between two codes goes either way.
            limit = 0.05 if kind == "fp8" else 1e-5
            assert (found_BTE - wanted_BTE).norm() <= limit * wanted_BTE.norm(), n
        assert (watch.counts().graphs, watch.counts().graph_breaks) == (1, 0)


def test_other_batches_never_compile(tmp_path: Path) -> None:
    teacher = frozen("dense", tmp_path)
    fast(teacher.decoder)
    teacher.hidden(*batch(3))
    with CompileWatch() as watch:
        for rows, length in ((2, LENGTH + 1), (2, 4), (1, LENGTH)):
            teacher.hidden(*batch(rows, length))
        assert watch.counts().graphs == 0


def test_a_run_of_single_rows_has_them_compiled(tmp_path: Path) -> None:
    teacher = frozen("dense", tmp_path)
    fast(teacher.decoder, single=True)
    with CompileWatch() as watch:
        for rows in (1, 2, 1, 5):
            teacher.hidden(*batch(rows))
        assert watch.counts().graphs == 2


def test_the_warm_up_compares_and_refuses_another_answer(tmp_path: Path) -> None:
    teacher = frozen("dense", tmp_path)
    fast(teacher.decoder)
    found = warm_up(teacher, teacher.decoder, make_batch(2, LENGTH), 4, "fp32")
    assert found.relative_rms < 1e-5 < found.allowed
    right: Any = teacher.decoder.run_layer

    class Wrong(CompiledForward):
        def __call__(self, layer: Any, x_BTD: Tensor, attention_inputs: Any) -> Tensor:
            return right(layer, x_BTD, attention_inputs) * (1.01 if self.enabled else 1)

    teacher.decoder.run_layer = Wrong(LENGTH, backend="eager")
    with pytest.raises(TrainingFailed, match="compiled output differs from eager"):
        warm_up(teacher, teacher.decoder, make_batch(2, LENGTH), 4, "fp32")


def test_a_teacher_that_carries_a_rounding_far_is_compared_by_how_far() -> None:
    """Its scores are so large that their rounding chooses the tokens that are attended to."""
    decoder = lively(CONFIG)
    with torch.no_grad():
        for layer in decoder.layers:
            layer.attention.q.weight.mul_(300)
    teacher = FrozenDecoder(freeze(decoder))
    fast(teacher.decoder)
    right: Any = teacher.decoder.run_layer

    class Rounded(CompiledForward):
        def __call__(self, layer: Any, x_BTD: Tensor, attention_inputs: Any) -> Tensor:
            share_D = 2e-4 * (1 - 2 * (torch.arange(x_BTD.shape[2]) % 2))
            return right(layer, x_BTD * (1 + self.enabled * share_D), attention_inputs)

    teacher.decoder.run_layer = Rounded(LENGTH, backend="eager")
    found = warm_up(teacher, teacher.decoder, make_batch(2, LENGTH), 4, "tf32")
    assert 4 * ROUNDING["tf32"] * 6**0.5 < found.relative_rms <= found.allowed


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_joining_dense_layers_moves_no_value_and_no_name(family: str) -> None:
    config = make_config(family)
    before, joined = freeze(lively(config)), join(freeze(lively(config)))
    assert {n for n, _ in joined.named_buffers()} == {n for n, _ in before.named_buffers()}
    for name, buffer in before.named_buffers():
        assert torch.equal(joined.get_buffer(name), buffer), name
    with torch.no_grad():
        wanted_BTE = before.hidden(random_tokens(2, 20))
        assert torch.allclose(joined.hidden(random_tokens(2, 20)), wanted_BTE, atol=1e-5)
    first = joined.layers[0].mlp.gate
    assert isinstance(first, JoinedLinear)
    up = joined.layers[0].mlp.up.weight
    assert up.untyped_storage().data_ptr() == first.weight_NK.untyped_storage().data_ptr()


@pytest.mark.parametrize("bits", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_layers_in_blocks_as_operations_have_the_same_bits(
    family: str, bits: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config(family)), bits)
    wanted, found = (freeze(load_packed_decoder(path)) for _ in range(2))
    make_opaque(found)
    assert any(isinstance(part, OpaqueLinear) for part in found.modules())
    assert {n for n, _ in found.named_buffers()} == {n for n, _ in wanted.named_buffers()}
    with torch.inference_mode():
        tokens_BT = random_tokens(2, 20)
        assert torch.equal(found.hidden(tokens_BT), wanted.hidden(tokens_BT))


def test_an_operation_still_refuses_an_input_that_wants_a_gradient(tmp_path: Path) -> None:
    decoder = load_packed_decoder(write(tmp_path / "m.gguf", lively(make_config()), "Q4_K"))
    make_opaque(decoder)
    with pytest.raises((InternalError, RuntimeError), match=r"gradient|autograd"):
        out = decoder.layers[0].attention.o(torch.ones(3, 256, requires_grad=True))
        torch.autograd.backward(out.sum())


SEVEN_B = ModelConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)


def choose(wanted: str = "auto", **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        config=SEVEN_B,
        device="cuda",
        precision="bf16",
        has_compiler=True,
        steps=2000,
        tokens_per_step=8192,
    )
    return choose_teacher_compile(wanted, **(values | changes))


def test_auto_compiles_where_the_run_is_long_enough() -> None:
    long, short = choose(), choose(steps=100)
    assert long.choice == "on" and "2.0k steps of 8.2k tokens save about 43.0 s" in long.reason
    assert short.choice == "off" and "save about 2.1 s" in short.reason
    assert short.override == "--set teacher.compile=on"
    assert choose("on", steps=100).choice == "on" and choose("on", steps=100).overridden
    assert choose("off").choice == "off"


def test_auto_compiles_fp8_always_and_never_on_a_cpu_or_without_a_compiler() -> None:
    assert choose(precision="fp8", steps=5).choice == "on"
    assert choose(device="cpu").choice == "off"
    assert choose(has_compiler=False).choice == "off"
    with pytest.raises(BadInput, match="finds no compiler"):
        choose("on", has_compiler=False)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["dense", "blocks", "fp8"])
def test_on_a_gpu_any_batch_of_the_length_is_served_by_one_compilation(
    kind: str, packed: bool, tmp_path: Path
) -> None:
    config = make_config(num_hidden_layers=3)
    if kind == "blocks":
        path = write(tmp_path / "m.gguf", lively(config), "Q4_K")
        decoder = freeze(load_packed_decoder(path, torch.bfloat16, "cuda"))
    else:
        decoder = freeze(lively(config).to("cuda", torch.bfloat16))
    if kind == "fp8":
        for layer in decoder.layers:
            round_layer(layer)
    teacher = FrozenDecoder(decoder, "fp8" if kind == "fp8" else "bf16")
    decoder.packed = packed
    compile_layers(decoder, 128)
    found = warm_up(teacher, decoder, make_batch(2, 128), 8, teacher.precision)
    assert found.relative_rms < found.allowed
    with CompileWatch() as watch:
        for rows, cut in ((8, 5), (2, 100), (16, 64), (3, 127)):
            tokens_BT = random_tokens(rows, 128).cuda()
            documents_BT = torch.zeros_like(tokens_BT)
            documents_BT[:, cut:] = 1
            documents_BT[:, cut + 1 :: 7] += 1
            documents_BT = documents_BT.cummax(1).values
            with torch.inference_mode():  # as an evaluation asks
                teacher.hidden(tokens_BT, documents_BT)
            remember(documents_BT, documents_BT.cpu().numpy())
            teacher.hidden(tokens_BT, documents_BT)
        assert watch.counts().graphs == 0
