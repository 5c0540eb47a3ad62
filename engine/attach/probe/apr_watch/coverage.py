"""Check whether labels of a language model cover padding and the end-of-text token; decode one row of them.

The tokenizer is searched once among the objects of the process. Without a tokenizer nothing is decoded.
"""

# Shapes: B rows, T tokens of a row, W labels of a row

from __future__ import annotations

import gc
import sys
from typing import Any

from .parameters import PASS, SUSPICION, Line

_SAMPLED_TOKENS = 256
"""Maximum number of tokens of a row that are decoded."""
_MIN_RUN = 4
"""Minimum number of equal labels at the end of a row that may count as padding."""
_COUNTS = 7
"""Number of counts in `Coverage.numbers`; the tokens and labels of the decoded sample follow them."""
_MAX_CHARACTERS, _END_CHARACTERS = 160, 24
"""Maximum length of a decoded sample, and length of each end of a shortened passage, in characters."""


class Tokenizers:
    """Tokenizer of transformers that the script uses, if any."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._has_searched = False

    def find(self) -> Any:
        if not self._has_searched and "transformers" in sys.modules:
            self._has_searched = True
            # Not isinstance: it would call code of the script's proxy objects.
            self._tokenizer = next(
                (
                    candidate
                    for candidate in gc.get_objects()
                    if any(
                        kind.__name__ == "PreTrainedTokenizerBase"
                        for kind in type(candidate).__mro__
                    )
                ),
                None,
            )
        return self._tokenizer

    def end_of_text(self) -> int | None:
        end = getattr(self.find(), "eos_token_id", None)
        return end if type(end) is int else None

    def text(self, tokens: list[int]) -> str | None:
        try:
            return str(self._tokenizer.decode(tokens))
        except Exception:  # noqa: BLE001  the tokens may belong to another tokenizer
            return None


class Coverage:
    """Label coverage of one batch, computed on its device."""

    def __init__(
        self,
        torch: Any,
        tokens_BT: Any,
        targets_BW: Any,
        known_BW: Any,
        begin: int,
        tokenizers: Tokenizers,
    ) -> None:
        """Count on the device. `targets_BW[:, w]` are the labels of position `begin + w`."""
        self._tokenizers, self._begin, self._end = tokenizers, begin, tokenizers.end_of_text()
        unlabelled = torch.full((), -1, device=targets_BW.device, dtype=torch.int64)
        labels_BW = targets_BW.where(known_BW, unlabelled)
        ends = unlabelled if self._end is None else (tokens_BT[:, 1:] == self._end).sum()
        labelled = unlabelled if self._end is None else (labels_BW == self._end).sum()
        counts = [ends, labelled, *runs_at_end(torch, labels_BW)]
        self.numbers = torch.cat(
            [
                torch.stack([count.to(torch.int64) for count in counts]),
                tokens_BT[0, :_SAMPLED_TOKENS].to(torch.int64),
                labels_BW[0, :_SAMPLED_TOKENS].to(torch.int64),
            ]
        )
        self._tokens, self._rows = int(tokens_BT[0, :_SAMPLED_TOKENS].numel()), len(labels_BW)

    def lines(self, numbers: list[int]) -> list[Line]:
        """Return the verdicts. `numbers`: `self.numbers` on the host."""
        ends, labelled, *runs = numbers[:_COUNTS]
        lines: list[Line] = []
        if ends > 0:
            about = {"tokens": ends, "labels": labelled}
            if labelled:
                text = f"the end of a text is a label, {labelled} times"
                lines.append(("end_of_text", PASS, text, about))
            else:
                text = f"the token that ends a text ({self._end}) is read {ends} times and never a label"
                lines.append(("end_of_text", SUSPICION, text, about))
        if is_padding(runs, self._rows):
            padded_rows, _, longest, _, token = runs
            text = (
                f"{padded_rows} of {self._rows} rows end in up to {longest} labels that are all token {token}: padding "
                "seems to have labels"
            )
            lines.append(
                ("padding_labels", SUSPICION, text, {"rows": padded_rows, "of": self._rows})
            )
        return lines

    def sample(self, numbers: list[int], shift: int) -> str:
        """Return the first row decoded, with labelled tokens in brackets; empty if no tokenizer was found."""
        tokens, labels = numbers[_COUNTS:][: self._tokens], numbers[_COUNTS:][self._tokens :]
        begin = self._begin + shift
        known = [
            0 <= position - begin < len(labels) and labels[position - begin] >= 0
            for position in range(len(tokens))
        ]
        pieces: list[str] = []
        position = 0
        while position < len(tokens):
            end = position
            while end < len(tokens) and known[end] == known[position]:
                end += 1
            text = (
                self._tokenizers.text(tokens[position:end])
                if self._tokenizers.find() is not None
                else None
            )
            if text is None:
                return ""
            if len(text) > 2 * _END_CHARACTERS:
                text = f"{text[:_END_CHARACTERS]}...{text[-_END_CHARACTERS:]}"
            pieces.append(f"[{text}]" if known[position] else text)
            position = end
        decoded = "".join(pieces)
        return decoded if len(decoded) <= _MAX_CHARACTERS else f"{decoded[:_MAX_CHARACTERS]}..."


def runs_at_end(torch: Any, tokens_BW: Any) -> list[Any]:
    """Return on the device: number of rows that end in a long run of one token, lengths of the shortest and the longest
    run of all rows, whether all long runs have the same token, and that token. Negative ids are ignored."""
    runs_B, tokens_B = _last_run(torch, tokens_BW)
    long_B = (runs_B >= _MIN_RUN) & (tokens_B >= 0)
    # Indexing by a scalar tensor on a GPU would synchronise.
    token = tokens_B.index_select(0, runs_B.argmax().reshape(1))
    alike = (tokens_B == token) | ~long_B
    return [long_B.sum(), runs_B.amin(), runs_B.amax(), alike.all(), token[0]]


def is_padding(runs: list[int], rows: int) -> bool:
    """Return whether runs, as returned by `runs_at_end` for this number of rows, are padding."""
    long_rows, shortest, longest, alike, _ = runs
    return bool(rows > 1 and 2 * long_rows >= rows and shortest < longest and alike)


def _last_run(torch: Any, labels_BW: Any) -> tuple[Any, Any]:
    """Return the length of the run of equal labels at the end of each row, and the label. If the last position has no
    label, the run ends one position earlier."""
    has_last_B = labels_BW[:, -1] >= 0
    at_end = torch.zeros_like(labels_BW, dtype=torch.bool)
    at_end[:, -1] = ~has_last_B
    tokens_B = labels_BW[:, -1].where(has_last_B, labels_BW[:, -2])
    matches = (labels_BW == tokens_B[:, None]) | at_end
    runs_B = matches.flip(1).to(torch.int64).cumprod(1).sum(1) - (~has_last_B).to(torch.int64)
    return runs_B, tokens_B
