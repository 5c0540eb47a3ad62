"""Replay the rows that the model of a run wrote: take their texts from the record, and measure how far they are from
what the model draws now.

A draw uses a uniform number u, which depends on the row's key alone. It takes the first token, in the order of ids,
at which the cumulative probability exceeds u. So a token was drawn from the model's probabilities exactly if u lies in
the interval of that token. Rounding moves the ends of an interval a little; another model, temperature, key or text
puts most of the u elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.data.batches import Batch, Int64Array
from engine.errors import BadInput
from engine.generation.sampling import row_key, truncate, uniform
from engine.log.folder import RunFolder
from engine.log.written import WrittenRow, path_of, read_written
from engine.models.head import operand_dtype, project, sum_dtype
from engine.models.packed import head_of
from engine.plan.memory import EVAL_CHUNK_ROWS
from engine.train.rollout import Rollout, RowKey, Text, Written

# Shapes: B rows, T tokens of a row, N tokens, V vocabulary, E hidden size


class GivenRows(Rollout):
    """Gives the rows that the run in the folder `recorded` wrote, to the prompts of the corpus."""

    recorded: Path
    _left: Iterator[WrittenRow] | None = None

    def prepare(self) -> None:
        """Do nothing: no text is generated."""

    def _texts(self, keys: Sequence[RowKey], prompts: Sequence[list[int]]) -> list[Text]:
        """Return the recorded text of each row. Raises RunLogError, and BadInput where the record lacks a row."""
        if self._left is None:
            self._left = read_written(path_of(RunFolder(self.recorded), self._rank))
        step = keys[0][0]
        later = itertools.dropwhile(lambda row: row.step < step, self._left)
        rows = {row.key: row for row in itertools.islice(later, len(keys))}
        if missing := [key for key in keys if key not in rows]:
            raise BadInput(
                f"written rows: {self.recorded} — expected row {missing[0][2] + 1} of the written micro-batch "
                f"{missing[0][1] + 1} of step {step}, found none"
            )
        return [
            Text(rows[key].text[: self._seq_len - len(prompt)], ended=rows[key].ended)
            for key, prompt in zip(keys, prompts, strict=True)
        ]

    def _finish(self, written: Written, row_ids: Int64Array) -> tuple[Batch, Written]:
        batch, written = super()._finish(written, row_ids)
        log_p, distance = self._compare_draws(batch, written)
        return batch, written._replace(log_p=log_p, drawn_apart=distance)

    @torch.no_grad()
    def _compare_draws(self, batch: Batch, written: Written) -> tuple[list[float], float]:
        """Return the log-probability of each text, and the mean distance of u from the interval of the token."""
        device = next(self._decoder.parameters()).device
        tokens_BT, documents_BT, labels_BT = batch.to_torch(device)
        casts = self._dtype != self._decoder.dtype and not self._decoder.packed
        with torch.autocast(device.type, self._dtype) if casts else contextlib.nullcontext():
            hidden_BTE = self._decoder.hidden(tokens_BT, documents_BT)
        positions_N = (labels_BT.flatten() >= 0).nonzero().squeeze(1)
        dtype = operand_dtype(hidden_BTE)
        hidden_NE = hidden_BTE.flatten(0, 1)[positions_N].to(dtype)
        token_N = labels_BT.flatten()[positions_N]
        names = [row_key(self._seed, key) for key in written.keys]
        u_N = torch.tensor(
            [
                uniform(name, count)
                for name, text in zip(names, written.texts, strict=True)
                for count in range(len(text))
            ],
            dtype=torch.float64,
            device=device,
        )
        head = head_of(self._decoder)
        slices = head.slices(head.vocab_size, dtype)
        parts = []
        for start in range(0, len(positions_N), EVAL_CHUNK_ROWS):
            part = slice(start, start + EVAL_CHUNK_ROWS)
            logits_NV = hidden_NE.new_empty(
                len(hidden_NE[part]), head.vocab_size, dtype=sum_dtype(dtype)
            )
            project(logits_NV, hidden_NE[part], slices)
            parts.append(self._distances(logits_NV, token_N[part], u_N[part]))
        log_p_N, distance_N = (torch.cat(values) for values in zip(*parts, strict=True))
        sizes = [len(text) for text in written.texts]
        return [float(row_log_p.sum()) for row_log_p in torch.split(log_p_N, sizes)], float(
            distance_N.mean()
        )

    def _distances(self, logits_NV: Tensor, token_N: Tensor, u_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token, and the distance of u from the token's interval; for greedy
        decoding, by how much the token is less probable than the most probable one."""
        sampling, token_N1 = self._sampling, token_N[:, None]
        if sampling.greedy:
            log_p_NV = logits_NV.log_softmax(-1)
            log_p_N = log_p_NV.gather(1, token_N1)[:, 0].double()
            return log_p_N, log_p_NV.amax(-1).double().exp() - log_p_N.exp()
        scores_NV = logits_NV / sampling.temperature
        log_p_N = (scores_NV.gather(1, token_N1)[:, 0] - scores_NV.logsumexp(-1)).double()
        kept_NV = truncate(scores_NV, sampling).softmax(-1)
        end_N = kept_NV.cumsum(-1).gather(1, token_N1)[:, 0].double()
        begin_N = end_N - kept_NV.gather(1, token_N1)[:, 0].double()
        return log_p_N, torch.maximum(begin_N - u_N, u_N - end_N).clamp(min=0.0)
