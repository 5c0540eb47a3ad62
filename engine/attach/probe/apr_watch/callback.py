"""Shared parts of the callbacks of all frameworks: error isolation, and a prompt that the model continues."""

# Shapes: T tokens of one row, V vocabulary

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import apr_watch

from .questions import logits_of
from .untouched import Untouched

_VALUE = 200
"""Maximum length of a logged setting, in characters."""


class Guard:
    """Calls functions of a callback. The first exception is logged and disables the callback; it does not reach the
    script, whose steps are still recorded."""

    def __init__(self, name: str) -> None:
        self._name, self._on = name, True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self._on:
            return
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001
            self._on = False
            text = f"{self._name} removed itself, the run goes on: {type(error).__name__}: {error}"
            apr_watch.note(text, "warning")


class Prompt:
    """A text that the model continues at each evaluation by greedy decoding."""

    def __init__(self, text: str | None, tokens: int, tokenizer: Any) -> None:
        """Set the prompt; without a `text` there is none. `tokenizer`: one of transformers; None: the framework's."""
        self._text, self._tokens, self._tokenizer = text, tokens, tokenizer

    def of(self, model: Any, tokenizer: Any = None) -> dict[str, str]:
        """Return the values for `apr_watch.log`. Raises nothing; after a failure the prompt is disabled."""
        if self._text is None or not apr_watch.is_watching():
            return {}
        try:
            chosen = self._tokenizer or tokenizer
            chosen = getattr(chosen, "tokenizer", chosen)  # a multimodal processor holds one
            return {
                "prompt": self._text,
                "sample": continued(model, chosen, self._text, self._tokens),
            }
        except Exception as error:  # noqa: BLE001
            self._text = None
            text = f"the prompt was disabled: {type(error).__name__}: {error}"
            apr_watch.note(text, "warning")
            return {}


def continued(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return the greedy continuation of `prompt`, as text. Restores modes, buffers and random states; compiles nothing.
    Raises ValueError for a model that cannot be run, and whatever the model raises."""
    torch: Any = sys.modules["torch"]
    if tokenizer is None:
        raise ValueError("expected a tokenizer for the prompt, found none")
    if any(map(_is_shard, model.parameters())):
        raise ValueError("a forward pass on one rank would hang: the parameters are sharded")
    device = next(model.parameters()).device
    ids_1T = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    begin = ids_1T.shape[1]
    with Untouched(torch, model):
        for _ in range(tokens):
            output = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
            logits_1TV = logits_of(torch, output, ids_1T)
            if logits_1TV is None:
                raise ValueError("the model returns no logits of shape (rows, tokens, vocabulary)")
            ids_1T = torch.cat([ids_1T, logits_1TV[:, -1:].argmax(-1)], 1)
            if int(ids_1T[0, -1]) == tokenizer.eos_token_id:
                break
    text: str = tokenizer.decode(ids_1T[0, begin:].tolist())
    return text


def _is_shard(parameter: Any) -> bool:
    # FSDP2's DTensor, DeepSpeed's ZeRO-3, FSDP1's flat parameter.
    marks = ("device_mesh", "ds_id", "_is_flat_param")
    return any(hasattr(parameter, mark) for mark in marks)


def logged(values: Mapping[str, Any], held_out: str) -> None:
    """Record values that a framework logs; the one named `held_out` is the held-out loss."""
    renamed = {"held_out" if name == held_out else name: value for name, value in values.items()}
    if renamed:
        apr_watch.log(**renamed)


def settings(owner: str, values: Mapping[str, Any]) -> None:
    """Record settings of a framework in one line of the log."""
    if not values:
        return
    words = ", ".join(f"{name}={str(value)[:_VALUE]}" for name, value in values.items())
    apr_watch.note(f"settings of {owner}: {words}")
