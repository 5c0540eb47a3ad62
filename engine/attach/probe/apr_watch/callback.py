"""What the callbacks of all frameworks share: whatever fails in one ends that one alone, and a text that the model
itself goes on with.
"""

# Shapes: T tokens of one row, V tokens of the vocabulary

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import apr_watch

from .causality import Untouched, logits_of

_VALUE = 200
"""Characters of a setting that are kept."""


class Ours:
    """Calls what a callback does. Whatever that raises is said in the log, and is the last that it does; the script
    does not notice, and its steps are recorded as before."""

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
    """A text that the model is asked to go on with at each evaluation: the most likely tokens, one by one."""

    def __init__(self, text: str | None, tokens: int, tokenizer: Any) -> None:
        """Without a `text` it is never asked. `tokenizer`: one of transformers; None: that of the framework."""
        self._text, self._tokens, self._tokenizer = text, tokens, tokenizer

    def of(self, model: Any, tokenizer: Any = None) -> dict[str, str]:
        """What `apr_watch.log` records of it. Raises nothing: a model that cannot be asked is not asked again."""
        if self._text is None or not apr_watch.is_watching():
            return {}
        try:
            asked = self._tokenizer or tokenizer
            asked = getattr(asked, "tokenizer", asked)  # of a processor of several kinds of input
            return {
                "prompt": self._text,
                "sample": continued(model, asked, self._text, self._tokens),
            }
        except Exception as error:  # noqa: BLE001
            self._text = None
            text = f"the prompt is not asked again: {type(error).__name__}: {error}"
            apr_watch.note(text, "warning")
            return {}


def continued(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The most likely continuation of `prompt`, as text. Modes, buffers and random numbers of the run are what they
    were; nothing is compiled. Raises ValueError for what cannot be asked, and what the model raises."""
    torch: Any = sys.modules["torch"]
    if tokenizer is None:
        raise ValueError("expected a tokenizer beside the prompt, found none")
    if any(map(_is_shard, model.parameters())):
        raise ValueError("a pass of one rank alone would hang: the parameters are sharded")
    device = next(model.parameters()).device
    ids_1T = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    begin = ids_1T.shape[1]
    with Untouched(torch, model):
        for _ in range(tokens):
            given = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
            logits_1TV = logits_of(torch, given, ids_1T)
            if logits_1TV is None:
                raise ValueError(
                    "what the model gives has no logits of shape (rows, tokens, vocabulary)"
                )
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
    """Record what a framework logs; its value `held_out` is the held-out loss."""
    said = {"held_out" if name == held_out else name: one for name, one in values.items()}
    if said:
        apr_watch.log(**said)


def settings(of: str, values: Mapping[str, Any]) -> None:
    """Record settings of a framework in one line of the log."""
    if not values:
        return
    words = ", ".join(f"{name}={str(value)[:_VALUE]}" for name, value in values.items())
    apr_watch.note(f"settings of {of}: {words}")
