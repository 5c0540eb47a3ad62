"""A module of transformers, run again in fp32 with the weights before a step: the reference of the audit for models
that its plain decoder does not support.

It detects a step that used other rows, weights, documents or gradients than it should, and excessive rounding. It
cannot detect that the module computes another model than its files describe.
"""

# Shapes: B rows, T tokens, N = B*T, D width

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.audit.reference import Forward
from engine.models.transformers_decoder import TransformersDecoder, perturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass(Forward):
    tokens_BT: Tensor


class _Hidden(nn.Module):
    """A module whose forward pass is the decoder's hidden states."""

    def __init__(self, decoder: TransformersDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.decoder.hidden(tokens_BT, documents_BT)


class SameModule:
    """A forward pass of a decoder's module in fp32, and its backward pass; an `engine.audit.reference.Runs`."""

    def __init__(
        self, decoder: TransformersDecoder, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """`weights` are its parameters and buffers by name; floats are converted to fp32."""
        self._decoder, self._module = decoder, _Hidden(decoder)
        self._weights, self._device = weights, device

    def _widened(self) -> dict[str, Tensor]:
        widened = {}
        for name, tensor in self._weights.items():
            on_device = tensor.to(self._device)
            widened[f"decoder.{name}"] = (
                on_device.float() if on_device.is_floating_point() else on_device
            )
        return widened

    @torch.no_grad()
    def forward(
        self, tokens_BT: Tensor, documents_BT: Tensor, *, keep: bool = False, rounding: float = 0.0
    ) -> Forward:
        """See `Runs.forward`. `rounding` is the relative change of the output of each innermost module."""
        hidden_BTD = self._run(self._widened(), tokens_BT, documents_BT, rounding)
        return _Pass(
            tokens_N=tokens_BT.flatten(),
            documents_BT=documents_BT,
            turns={},
            inputs=[],
            hidden_ND=hidden_BTD.flatten(0, 1),
            rounding=rounding,
            tokens_BT=tokens_BT,
        )

    def backward(
        self, passes: Sequence[Forward], upstream: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """See `Runs.backward`; the forward passes are recomputed."""
        weights = self._widened()
        floats = {n: w.requires_grad_() for n, w in weights.items() if w.is_floating_point()}
        sums: dict[str, Tensor] = {}
        for forward, upstream_ND in zip(passes, upstream, strict=True):
            assert isinstance(forward, _Pass)
            with torch.enable_grad():
                hidden_BTD = self._run(
                    weights, forward.tokens_BT, forward.documents_BT, forward.rounding
                )
                scalar = (hidden_BTD.flatten(0, 1) * upstream_ND).sum()
            gradients = torch.autograd.grad(scalar, list(floats.values()), allow_unused=True)
            for name, gradient in zip(floats, gradients, strict=True):
                if gradient is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        for name, total in sums.items():
            yield name.removeprefix("decoder."), total

    def _run(
        self,
        weights: dict[str, Tensor],
        tokens_BT: Tensor,
        documents_BT: Tensor,
        rounding: float,
    ) -> Tensor:
        perturbation = (
            perturbed(self._decoder.model, rounding) if rounding else contextlib.nullcontext()
        )
        with perturbation, torch.autocast(self._device.type, enabled=False):
            hidden_BTD: Tensor = functional_call(
                self._module, weights, (tokens_BT, documents_BT), tie_weights=True
            )
        return hidden_BTD
