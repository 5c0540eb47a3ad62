"""Weights that nothing can train: tensors that a module holds as buffers, not as parameters.

`requires_grad_(False)` is a switch, and can be switched back; `parameters()` still hands the weights
to an optimizer. A buffer is neither a parameter nor reached by `requires_grad_()` on the module.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.models.decoder import Decoder


def freeze(decoder: Decoder) -> Decoder:
    """The same decoder, in place: in evaluation mode, and every parameter a buffer of its name."""
    decoder.eval()
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            hold(module, name, parameter.detach())
    return decoder


def hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts `tensor` in the place of the parameter or buffer `name`, as a buffer."""
    delattr(module, name)
    module.register_buffer(name, tensor)
