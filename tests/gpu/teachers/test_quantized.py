"""The quantized teacher on a GPU: the numbers of the fp32-dequantised reference, in the memory of its
blocks.

The published noise floors are those of a quantized model against the one it was made of. Two ways of
computing one quantized model must be far closer to each other than that. What bf16 arithmetic itself
costs depends on the model: dense weights in bf16 say it, and blocks must not cost more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.export.convert import convert
from engine.formats.gguf_write import write_gguf
from engine.formats.tokenizer import open_tokenizer
from engine.kernels.linear import Scratch
from engine.loss.kd_loss import distillation_loss
from engine.models.config import ModelConfig
from engine.models.head import PackedHead, multiply, project
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.names import expected_tensors, names_for
from engine.models.packed import PackedLinear
from engine.quant.blocks import BLOCK_TYPES, NOISE_FLOORS
from engine.quant.planes import pack
from engine.quant.quantize import quantize
from engine.quant.tensor import QuantTensor
from engine.teachers.frozen import DequantizedTeacher, QuantizedTeacher
from engine.teachers.same_model import same_values
from tests.support.packed_models import lively, make_config, write
from tests.support.paths import DEMO, SUPPORT

# Shapes: B rows, T tokens, W teacher vocabulary, E teacher width, C tokens of a chunk

pytestmark = pytest.mark.gpu
POSITIONS = 256
# Mean in nats, against the same values in fp32 (bf16: in bf16).
SAME_MODEL_KL = {"fp32": 1e-6, "tf32": 1e-5, "bf16": 1e-4}
LINEAR_RELATIVE_RMS = 3e-3


def text_tokens() -> Tensor:
    """Eight rows of Python source: text that the demo's teacher can predict, and that never changes."""
    text = (SUPPORT / "python_source.txt").read_text()
    (ids,) = open_tokenizer(DEMO / "teacher").encode_documents([text])
    return torch.from_numpy(ids[: 8 * POSITIONS].astype("int64")).view(8, POSITIONS)


def demo_file(folder: Path, quant: str) -> Path:
    path = folder / f"{quant}.gguf"
    convert(DEMO / "teacher", path, quant, device="cuda")
    return path


def logits_of(teacher: DequantizedTeacher | QuantizedTeacher, tokens_BT: Tensor) -> Tensor:
    """As the loss makes them: fp32 sums of operands in the teacher's dtype."""
    hidden_NE = teacher.hidden(tokens_BT, torch.zeros_like(tokens_BT)).flatten(0, 1)
    out_NW = torch.empty(len(hidden_NE), teacher.vocab_size, device="cuda")
    project(out_NW, hidden_NE, teacher.head().slices(teacher.vocab_size, hidden_NE.dtype))
    return out_NW.view(*tokens_BT.shape, -1)


def divergence(expected_BTW: Tensor, found_BTW: Tensor) -> tuple[Tensor, float]:
    """KL of each position (B, T) in nats, and the share of the same top token."""
    p, q = expected_BTW.double().log_softmax(-1), found_BTW.double().log_softmax(-1)
    same_BT = expected_BTW.argmax(-1) == found_BTW.argmax(-1)
    return (p.exp() * (p - q)).sum(-1), float(same_BT.double().mean())


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16", "fp32", "tf32"])
@pytest.mark.parametrize("quant", list(NOISE_FLOORS))
def test_logits_are_those_of_the_reference_at_every_position(
    tmp_path: Path, quant: str, precision: str
) -> None:
    path = demo_file(tmp_path, quant)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    teacher = QuantizedTeacher(load_packed_decoder(path, dtype, "cuda"), precision)
    dense = DequantizedTeacher(load_decoder(path, dtype, "cuda"), precision)
    exact = DequantizedTeacher(load_decoder(path, device="cuda"))
    tokens_BT = text_tokens().cuda()
    found, own, expected = (logits_of(t, tokens_BT) for t in (teacher, dense, exact))
    kl_BT, same = divergence(expected, found)
    own_kl_BT, own_same = divergence(expected, own)
    floor, agreement = NOISE_FLOORS[quant]
    assert kl_BT.shape == (8, POSITIONS)
    measured = (
        f"{quant} {precision}: KL mean {float(kl_BT.mean()):.2e} (dense weights "
        f"{float(own_kl_BT.mean()):.2e}), largest {float(kl_BT.max()):.2e}, same top token {same:.4f}"
    )
    print(measured)
    reference = own if precision == "bf16" else expected
    assert float(divergence(reference, found)[0].mean()) <= SAME_MODEL_KL[precision], measured
    assert float(kl_BT.mean()) <= 1.1 * float(own_kl_BT.mean()) + 1e-6, measured
    # Every position by itself: an error of positions or of the mask grows along the row.
    assert float(kl_BT.mean(0).max()) <= 4 * floor and float(kl_BT.mean()) <= floor, measured
    # The dtype's own rounding decides between two tokens that are nearly as likely.
    assert same >= min(agreement, own_same), measured


@torch.no_grad()
@pytest.mark.parametrize("blocks", ["Q4_K", "Q6_K", "Q8_0"])
def test_every_linear_is_close_to_its_reference(tmp_path: Path, blocks: str) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), blocks)
    packed = load_packed_decoder(path, torch.bfloat16, "cuda")
    dense = load_decoder(path, torch.float32, "cuda")
    for name, linear in packed.named_modules():
        if not isinstance(linear, PackedLinear):
            continue
        reference = dense.get_submodule(name)
        assert isinstance(reference, torch.nn.Linear)
        for rows in (1, 512):
            # Of one row many, each by itself: 64 outputs alone have errors up to 1.4 times the mean.
            x = torch.randn(max(rows, 16), reference.in_features, device="cuda").bfloat16()
            expected = F.linear(x.float(), reference.weight, reference.bias)
            found = torch.cat([linear(part) for part in x.split(rows)])
            error = (found.float() - expected).square().mean().sqrt()
            assert error <= LINEAR_RELATIVE_RMS * expected.square().mean().sqrt(), (name, rows)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    """A GGUF of 32 layers, 0.6 G weights in Q4_K: 0.34 GB where bf16 would be 1.2 GB."""
    config = make_config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32768,
    )
    made: dict[tuple[int, ...], Tensor | QuantTensor] = {}
    shapes = expected_tensors(config, "gguf")
    for shape in set(shapes.values()):
        values = torch.randn(shape) * 0.02 if len(shape) == 2 else torch.ones(shape)
        made[shape] = values
        if len(shape) == 2:
            made[shape] = quantize(values.cuda(), BLOCK_TYPES["Q4_K"]).to("cpu")
    path = tmp_path_factory.mktemp("large") / "m.gguf"
    names = names_for("gguf", config).values()
    write_gguf(path, config=config.to_hf_dict(), tensors=((n, made[shapes[n]]) for n in names))
    return path, config


def test_resident_bytes_are_the_packed_ones_and_a_scratch(large: tuple[Path, ModelConfig]) -> None:
    path, _ = large
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    begun = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    teacher = QuantizedTeacher(load_packed_decoder(path, torch.bfloat16, "cuda"), "bf16")
    loading = torch.cuda.max_memory_allocated() - begun
    tokens_BT = torch.randint(32768, (1, 64), device="cuda")
    for _ in range(2):
        hidden_BTE = teacher.hidden(tokens_BT, torch.zeros_like(tokens_BT))
        for _ in teacher.head().slices(32768, torch.bfloat16):
            pass
    del hidden_BTE
    resident = torch.cuda.memory_allocated() - begun
    packed = path.stat().st_size
    scratch = 4096 * 1024 * 2
    print(
        f"packed {packed / 1e6:.1f} MB, resident {resident / 1e6:.1f} MB, "
        f"peak while loading {loading / 1e6:.1f} MB"
    )
    assert resident <= packed + 0.3e9
    # And what it says it is: blocks, one scratch, cuBLAS's workspace, and torch's rounding.
    assert resident <= packed + scratch + 64 * 2**20
    # One tensor in blocks and packed at once; the embedding is the largest.
    assert loading <= packed + scratch + 2 * 32768 * 1024 * 0.57


@torch.no_grad()
def test_a_product_into_some_columns_makes_no_copy() -> None:
    out_CW = torch.empty(1024, 32768, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(1024, 256, device="cuda", dtype=dtype)
        right = torch.randn(8192, 256, device="cuda", dtype=dtype)
        multiply(out_CW[:, 8192:16384], left, right.t(), scale=0.5)  # cuBLAS takes its workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        multiply(out_CW[:, 8192:16384], left, right.t(), scale=0.5)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - begun < 2**20
        expected = 0.5 * left.float() @ right.float().t()
        torch.testing.assert_close(out_CW[:, 8192:16384], expected, rtol=1e-3, atol=1e-3)


def test_the_loss_of_a_head_in_blocks_is_that_of_its_values() -> None:
    weight = pack(quantize(torch.randn(5000, 512, device="cuda") * 0.05, BLOCK_TYPES["Q6_K"]))
    scratch = Scratch(torch.device("cuda"), torch.bfloat16)
    scratch.reserve(1024, 512)
    head = PackedHead(weight, scratch)
    dense_WE = torch.cat([s.clone() for _, s in head.slices(5000, torch.bfloat16)])
    hidden_ND = torch.randn(600, 128, device="cuda", requires_grad=True)
    head_VD = (torch.randn(4900, 128, device="cuda") * 0.1).requires_grad_()
    labels_N = torch.randint(4900, (600,))
    teacher_NE = torch.randn(600, 512, device="cuda").bfloat16()
    results = []
    for teacher_head in (head, dense_WE):
        terms = distillation_loss(
            hidden_ND,
            head_VD,
            teacher_NE,
            teacher_head,
            labels_N,
            alpha=0.3,
            temperature=2.0,
            denominator=600.0,
            chunk_rows=256,
        )
        results.append(
            (terms.loss.detach(), *torch.autograd.grad(terms.loss, (hidden_ND, head_VD)))
        )
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_one_file_as_packed_teacher_and_dense_student_is_found_on_the_device(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q4_K")
    teacher = QuantizedTeacher(load_packed_decoder(path, torch.bfloat16, "cuda"), "bf16")
    assert same_values(teacher.decoder, load_decoder(path, device="cuda"))


def test_tf32_stays_with_the_teacher() -> None:
    decoder = lively(make_config()).cuda()
    tokens_BT = torch.randint(101, (2, 64), device="cuda")
    documents_BT = torch.zeros_like(tokens_BT)
    exact = DequantizedTeacher(decoder, "fp32").hidden(tokens_BT, documents_BT)
    rounded = DequantizedTeacher(decoder, "tf32").hidden(tokens_BT, documents_BT)
    error = float((rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    # 10 bits of mantissa; with tf32 left off the error is exactly 0
    assert 1e-5 < error < 1e-2
    with torch.no_grad():
        assert torch.equal(decoder.hidden(tokens_BT, documents_BT), exact)
