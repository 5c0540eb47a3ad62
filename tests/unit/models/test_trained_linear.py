"""Dense layers that are trained in few passes have the outputs of torch's, and gradients with less rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.models.decoder import project
from engine.models.trained_linear import TrainedLinear, train_in_few_passes


def layers(biases: tuple[bool, ...]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(24, 8 * (at + 1), bias=bias) for at, bias in enumerate(biases))


def run(group: nn.ModuleList, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = list(project(x, list(group)))
    upstream = [torch.ones_like(each) * (1 + torch.arange(each.shape[-1])) for each in outputs]
    torch.autograd.backward(outputs, upstream)
    assert x.grad is not None
    return outputs, [x.grad, *(p.grad for p in group.parameters() if p.grad is not None)]


@pytest.mark.parametrize("biases", [(False,), (True, True, True), (True, False)])
def test_outputs_have_the_same_bits_and_gradients_are_nearer_to_fp32(
    biases: tuple[bool, ...],
) -> None:
    exact = run(layers(biases), torch.float32)
    torchs = run(layers(biases), torch.bfloat16)
    group = layers(biases)
    train_in_few_passes(group)
    assert all(isinstance(each, TrainedLinear) for each in group)
    ours = run(group, torch.bfloat16)
    assert all(map(torch.equal, ours[0], torchs[0]))
    assert [each.dtype for each in ours[1]] == [torch.float32] * len(exact[1])
    far = [
        sum(float((a - b).square().sum()) for a, b in zip(arm[1], exact[1], strict=True))
        for arm in (torchs, ours)
    ]
    assert far[1] <= far[0]
    again = layers(biases)
    train_in_few_passes(again)
    for found, wanted in zip(run(again, torch.float32)[1], exact[1], strict=True):
        torch.testing.assert_close(found, wanted)


def test_frozen_weights_get_no_gradient_and_other_layers_stay_as_they_are() -> None:
    group = layers((True, True))
    train_in_few_passes(group)
    group[0].weight.requires_grad = False  # type: ignore[union-attr]
    run(group, torch.float32)
    assert group[0].weight.grad is None and group[1].weight.grad is not None  # type: ignore[union-attr]

    class Other(nn.Linear):
        pass

    other = nn.ModuleList([Other(3, 3)])
    train_in_few_passes(other)
    assert type(other[0]) is Other
