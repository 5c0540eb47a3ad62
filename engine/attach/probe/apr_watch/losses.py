"""Find by the autograd graph of a backward pass which tokens are the labels of a cross entropy.

No hook is installed and no computation repeated: autograd saves the labels, the token ids and the operations on the
logits. A graph that cannot be read (a compiled loss, a fused kernel other than TRL's, a checkpointed embedding) gives
no verdict.
"""

# Shapes: B rows, T tokens of a row, N labels, W labels of a row

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .coverage import Coverage, Tokenizers
from .distillation import Divergence, divergence_at
from .graph import CROSS_ENTROPIES, labels_of, places, saved, source, weight
from .parameters import FACT, PASS, SUSPICION, Line
from .sampled import SampledStep

SHIFTS = (0, 1, 2, 3)
"""Offsets from a position to the token that is its label: 0 the same token, 1 the next token."""
_FITS, _FITS_NOT = 0.98, 0.9
"""Limits of the share of labels that equal the tokens at an offset: from the first the offset matches, below the second
it does not. The second is high because tokens repeat."""
_CHUNKS = 4
"""Number of chunks of a loss up to which all are read; of more, some may lie too deep in the graph."""
_NONE = -100
"""Value that marks a missing label."""
_FUSED = {"ChunkedLogProbFunctionBackward": 3}
"""Autograd nodes of TRL's fused losses, which also compute the logits; index of the labels among the saved tensors."""
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_SCORES = {
    "SoftmaxBackward0": "probabilities",
    "LogSoftmaxBackward0": "logarithms that a log_softmax made over another axis than the classes",
    **dict.fromkeys(
        ("AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0"),
        "the outputs of a layer",
    ),
}
"""Description of a node's output, used if the probabilities do not sum to 1 over the classes. Other nodes are not
checked: they may weight log probabilities on purpose, as a focal loss does."""
_SUMMED = 8
"""Maximum number of positions whose probabilities are summed."""
_SUMS_TO_1 = 1e-2
"""Maximum deviation of a sum of probabilities from 1, in addition to the rounding of their logarithms."""


class _Comparison(NamedTuple):
    """Comparison of a loss's labels with the input ids of an embedding."""

    tokens: Any
    labelled: Any
    """Mask of the positions in the first two rows that have a label."""
    numbers: Any
    """Counts on the device: labels; rows with a label; for each shift, matching labels and compared labels."""
    cover: Coverage | None
    """Label coverage; None if it is not checked."""


class Loss:
    """A cross entropy whose node is near the root of the backward pass."""

    def __init__(
        self, torch: Any, node: Any, ids: list[Any], way: list[Any], text: Tokenizers | None = None
    ) -> None:
        """Read a loss. `ids`: input ids of embeddings, (B, T) each; `way`: nodes from the loss to the root of the
        backward pass; `text`: tokenizers for checking which text the labels cover, None not to check."""
        self._torch, self.weight = torch, weight(way)
        targets, self._ignored = targets_of(node)
        # Labels may be bytes, which cannot be -100.
        targets = targets.long()
        self._count, self._targets = targets.numel(), targets
        self._vocabulary = vocabulary_of_mean(node, way)
        for later_node in way:
            self._drop_masked(_mask_of(later_node))
        self._start = 0
        self.double = False
        """Whether a softmax was applied to the output of a softmax."""
        self._scores, self.sums = "", None
        """`_scores`: description of the loss's input. `sums`: maximum deviation from 1 of the input's exponentials,
        summed over the classes, minus rounding, on the device."""
        if type(node).__name__ in CROSS_ENTROPIES:
            self._check_sums(node)
        self.rows: tuple[int, int] | None = None
        """Number of rows in the loss, and number of rows of the tokens."""
        self._text = text
        self.compared: list[_Comparison] = []
        if self._scatter_back(self._read_selections(node)):
            compared = [
                self._compare(ids_BT) for ids_BT in ids if ids_BT.device == self._targets.device
            ]
            self.compared = [comparison for comparison in compared if comparison is not None]
        self._targets = self._text = None

    def tokens_before(self) -> tuple[Any, Any] | None:
        """Return the tokens, (B, T), whose next tokens are the labels, and a mask of the positions with a label in the
        first two rows. None if no tokens match. Synchronises with the device."""
        return next(
            (one[:2] for one in self.compared if _fits(one.numbers.tolist())[1] >= _FITS), None
        )

    def _read_selections(self, node: Any) -> list[Any]:
        """Follow the graph from the loss to the logits; find their first position and return the nodes that select
        rows."""
        log_softmax, selections = source(node)
        if type(log_softmax).__name__ not in (*_SOFTMAX, "LogBackward0"):
            # The node after a fused loss computes hidden states.
            log_softmax = None
        input_node, more = source(log_softmax) if log_softmax is not None else (None, [])
        selections = selections + more
        if type(input_node).__name__ == "LogBackward0":
            input_node, more = source(input_node)
            selections = selections + more
        self.double = (
            type(log_softmax).__name__ in _SOFTMAX and type(input_node).__name__ in _SOFTMAX
        )
        slices = [
            selection for selection in selections if type(selection).__name__ == "SliceBackward0"
        ]
        self._start = sum(
            int(selection._saved_start or 0) for selection in slices if selection._saved_dim == 1
        )
        return [selection for selection in selections if selection not in slices]

    def _check_sums(self, node: Any) -> None:
        """Sum over the classes some probabilities whose logarithms are the loss's input, if the input comes from a
        softmax or a layer."""
        scores, (producer, _) = saved(node, "self"), source(node)
        if scores is None or scores.dim() < 2 or type(producer).__name__ not in _SCORES:
            return
        result = saved(producer, "result")
        # If only some classes were selected, their probabilities need not sum to 1.
        if result is None or scores.shape[1] in result.shape:
            self._scores = _SCORES[type(producer).__name__]
            # Each logarithm is rounded relative to its size, and the mean size is at most log C for C classes.
            rounding = self._torch.finfo(scores.dtype).eps * math.log(scores.shape[1])
            some = scores.detach()[:_SUMMED]
            for axis in range(2, scores.dim()):
                some = some.narrow(axis, 0, 1)
            deviation = (some.double().exp().sum(1) - 1).abs().amax()
            self.sums = deviation - rounding

    def _drop_masked(self, left_out: Any) -> None:
        """Remove the labels of masked positions."""
        if left_out is None or left_out.device != self._targets.device:
            return
        if left_out.numel() == self._count:
            self._targets = self._labelled().masked_fill(left_out.reshape(-1), _NONE)

    def _labelled(self) -> Any:
        """Return the labels flattened, with ignored labels set to `_NONE`."""
        targets = self._targets.reshape(-1)
        if self._ignored not in (None, _NONE):
            targets = targets.where(targets != self._ignored, _NONE)
        self._ignored = _NONE
        return targets

    def _scatter_back(self, selections: list[Any]) -> bool:
        """If the loss selects positions, scatter their labels back to all positions. Return whether the indices are
        known."""
        if not selections:
            return True
        target = places(selections[0]) if len(selections) == 1 else None
        if target is None or target[0].device != self._targets.device or target[2] != self._count:
            return False
        index, self._count, _ = target
        targets = self._labelled()
        unlabelled = self._torch.full(
            (self._count,), _NONE, dtype=targets.dtype, device=targets.device
        )
        if index.dtype == self._torch.bool:
            self._targets = unlabelled.masked_scatter_(index, targets)
        else:
            self._targets = unlabelled.index_copy_(0, index.long() % self._count, targets)
        return True

    def _compare(self, tokens_BT: Any) -> _Comparison | None:
        rows, length = tokens_BT.shape
        count = self._count
        width, remainder = divmod(count, rows)
        if width == 1 and not remainder:
            # A class of each row.
            return None
        if remainder or not length - len(SHIFTS) < width <= length:
            # The loss may have fewer rows, whole or without their last tokens.
            for width in (length, length - 1):
                if width > 1 and count % width == 0 and count // width < rows:
                    self.rows = (count // width, rows)
                    break
            return None
        self.rows = (rows, rows)
        targets_BW = self._targets.reshape(rows, width)
        known_BW = targets_BW == targets_BW
        if self._ignored is not None:
            known_BW = targets_BW != self._ignored
        positions_BT = self._torch.zeros_like(tokens_BT[:2], dtype=self._torch.bool)
        columns = min(width, length - self._start)
        positions_BT[:, self._start : self._start + columns] = known_BW[:2, :columns]
        counts = [known_BW.sum(), known_BW.any(1).sum()]
        for shift in SHIFTS:
            begin = self._start + shift
            columns = max(0, min(width, length - begin))
            matches = targets_BW[:, :columns] == tokens_BT[:, begin : begin + columns]
            counts += [(matches & known_BW[:, :columns]).sum(), known_BW[:, :columns].sum()]
        cover = None
        if self._text is not None and width > 1:
            labels = (targets_BW, known_BW, self._start)
            cover = Coverage(self._torch, tokens_BT, *labels, self._text)
        return _Comparison(tokens_BT, positions_BT, self._torch.stack(counts).double(), cover)

    def lines(
        self, counts: list[list[float]], covers: list[list[int] | None], sums: float | None
    ) -> list[Line]:
        """Return the verdicts. `counts`: `numbers` of each comparison; `covers`: numbers of its `cover`; `sums`:
        `self.sums`; all on the host."""
        lines: list[Line] = []
        if sums is not None and sums > _SUMS_TO_1:
            text = f"the loss takes logarithms of probabilities and gets {self._scores}"
            lines.append(("log_probabilities", SUSPICION, text, {"off": sums}))
        elif sums is not None and sums <= _SUMS_TO_1:
            text = "the loss gets log probabilities that sum to 1 over the classes"
            lines.append(("log_probabilities", PASS, text, {"off": sums}))
        if self.double:
            text = "the cross entropy applies a softmax to the output of a softmax"
            lines.append(("double_softmax", SUSPICION, text, {}))
        else:
            lines.append(("double_softmax", PASS, "the cross entropy takes one softmax", {}))
        if self.rows is not None and self.rows[0] < self.rows[1]:
            text = f"the loss covers {self.rows[0]} of the {self.rows[1]} rows that the model reads"
            lines.append(
                ("rows_left_out", SUSPICION, text, {"rows": self.rows[0], "of": self.rows[1]})
            )
        if not counts:
            return lines
        # Embeddings of positions look up ids too, which the labels do not match; and an encoder may read the tokens
        # that the decoder must predict.
        index = max(
            range(len(counts)),
            key=lambda index: (_fits(counts[index])[1] >= _FITS, max(_fits(counts[index]))),
        )
        labelled, with_label, *pairs = counts[index]
        if not labelled:
            text = f"none of {self._count} positions has a label"
            return [*lines, ("label_coverage", SUSPICION, text, {"labels": 0})]
        numbers: dict[str, float] = {"labels": labelled, "of": self._count}
        if self._vocabulary:
            numbers["vocabulary"] = self._vocabulary
        text = f"{labelled:.0f} of {self._count} positions have a label"
        if self.rows is not None and with_label < self.rows[1]:
            text += f", in {with_label:.0f} of {self.rows[1]} rows"
        shares = _fits([labelled, with_label, *pairs])
        best = max(SHIFTS, key=lambda shift: shares[shift])
        cover, cover_numbers = self.compared[index].cover, covers[index]
        if cover is not None and cover_numbers is not None and shares[best] >= _FITS:
            lines += cover.lines(cover_numbers)
            sample = cover.sample(cover_numbers, best)
            text += f"; the first row, labels in brackets: {sample}" if sample else ""
        lines.append(("label_coverage", FACT, text, numbers))
        numbers = {f"shift_{shift}": shares[shift] for shift in SHIFTS}
        if shares[1] >= _FITS:
            lines.append(("label_shift", PASS, "labels are the next tokens", numbers))
        elif shares[best] >= _FITS and shares[1] <= _FITS_NOT:
            shift_text = {
                0: "the labels are the tokens at the same positions: not shifted",
                2: "the labels are the tokens after the next: shifted twice",
            }.get(best, f"the labels are the tokens {best} positions later")
            text = f"{shift_text} ({shares[best]:.0%} of them; {shares[1]:.0%} are the next ones)"
            lines.append(("label_shift", SUSPICION, text, numbers))
        return lines


def _fits(counts: list[float]) -> list[float]:
    """Return for each shift the share of labels that match the tokens."""
    pairs = zip(counts[2::2], counts[3::2], strict=True)
    return [fitting / could if could else 0.0 for fitting, could in pairs]


def judge_losses(sampled: SampledStep, losses: list[Loss | Divergence]) -> None:
    """Judge the losses of a sampled step."""
    tensors: dict[Any, Any] = {}
    for place, loss in enumerate(losses):
        comparisons: list[Any] = loss.compared if isinstance(loss, Loss) else [loss]
        name, tensor = ("sums", loss.sums) if isinstance(loss, Loss) else ("padding", loss.padding)
        if tensor is not None:
            tensors[place, name] = tensor
        for index, comparison in enumerate(comparisons):
            tensors[place, index] = comparison.numbers
            cover = getattr(comparison, "cover", None)
            if cover is not None:
                tensors[place, index, "cover"] = cover.numbers
    sampled.judge_later(lambda tensors: _judge(losses, sampled.number, tensors), tensors)


def _judge(losses: list[Loss | Divergence], step: int, tensors: dict[Any, Any]) -> list[Line]:
    """Return the verdicts, one for each identity and level. If one loss predicts the next tokens, other losses may
    predict later tokens (multi-token prediction). `tensors`: numbers of the losses and their covers on the host."""
    numbers = {place: tensor.tolist() for place, tensor in tensors.items()}
    weights = [loss.weight for loss in losses if isinstance(loss, Loss)]
    lines_of_losses: list[list[Line]] = []
    for place, loss in enumerate(losses):
        if isinstance(loss, Loss):
            every = range(len(loss.compared))
            covers = [numbers.get((place, index, "cover")) for index in every]
            sums = numbers.get((place, "sums"))
            lines_of_losses.append(
                loss.lines([numbers[place, index] for index in every], covers, sums)
            )
        else:
            padding = numbers.get((place, "padding"), [])
            lines_of_losses.append(loss.lines(numbers[place, 0], weights, step, padding))
    lines: dict[tuple[str, str], Line] = {}
    for line in (line for lines in lines_of_losses for line in lines):
        lines.setdefault(line[:2], line)
    if ("label_shift", PASS) in lines:
        lines.pop(("label_shift", SUSPICION), None)
    return list(lines.values())


def losses_of(
    torch: Any, nodes: list[Any], embeddings: list[Any], text: Tokenizers | None = None
) -> list[Loss | Divergence]:
    """Return the cross entropies and divergences among the nodes near the root of a backward pass. `embeddings`: its
    embedding nodes; `text`: tokenizers for checking which text the labels cover."""
    ids = [ids for node in embeddings if (ids := saved(node, "indices")) is not None]
    ids = [
        ids_BT
        for ids_BT in ids
        if ids_BT.dim() == 2 and ids_BT.shape[1] > 1 and not ids_BT.is_floating_point()
    ]
    losses: list[Loss | Divergence] = []
    for node, way in nodes:
        if targets_of(node)[0] is not None:
            losses.append(Loss(torch, node, ids, way, text))
        elif (divergence := divergence_at(torch, node, way)) is not None:
            divergence.read_padding(ids)
            losses.append(divergence)
    _add_rows([loss for loss in losses if isinstance(loss, Loss)])
    return losses


def _add_rows(losses: list[Loss]) -> None:
    """Do not report missing rows if the losses of chunks or rows cover all rows together."""
    partial = [loss for loss in losses if loss.rows is not None and loss.rows[0] < loss.rows[1]]
    if (
        sum(loss.rows[0] for loss in partial if loss.rows)
        >= max((loss.rows[1] for loss in partial if loss.rows), default=0)
        or len(partial) > _CHUNKS
    ):
        for loss in partial:
            loss.rows = None


def targets_of(node: Any) -> tuple[Any, int | None]:
    """Return the labels and the ignored label of a node that selects one log probability per label; None for other
    nodes."""
    kind = type(node).__name__
    if kind in CROSS_ENTROPIES:
        return labels_of(node)
    if kind in _FUSED:
        saved_tensors = node._raw_saved_tensors
        if any(getattr(tensor, "unpack_hook", tensor) is not None for tensor in saved_tensors):
            return None, None
        return node.saved_tensors[_FUSED[kind]], None
    if kind not in ("GatherBackward0", "IndexBackward0"):
        return None, None
    if type(source(node)[0]).__name__ not in ("LogSoftmaxBackward0", "LogBackward0"):
        return None, None
    if kind == "GatherBackward0":
        index = saved(node, "index")
        return (index, None) if index is not None and index.shape[-1] == 1 else (None, None)
    raw = getattr(node, "_raw_saved_indices", ())
    if any(getattr(tensor, "unpack_hook", tensor) is not None for tensor in raw):
        return None, None
    indices = [tensor for tensor in node._saved_indices if tensor is not None]
    # Advanced indexing with two index tensors: rows, then labels.
    return (indices[-1], None) if len(indices) > 1 and indices[-1].dim() else (None, None)


def vocabulary_of_mean(node: Any, way: list[Any]) -> int:
    """Return the vocabulary size if the root of the backward pass is the mean of this cross entropy; else 0."""
    is_mean = type(node).__name__ in CROSS_ENTROPIES
    if way or not is_mean or node._saved_reduction != 1:
        return 0
    log_softmax = source(node)[0]
    result = None if log_softmax is None else saved(log_softmax, "result")
    return 0 if result is None else int(result.shape[1])


def _mask_of(node: Any) -> Any:
    """Return the mask of positions that a node after the loss multiplies by 0 or fills; None if it masks none."""
    kind = type(node).__name__
    if kind == "MaskedFillBackward0":
        return saved(node, "mask")
    if kind == "MulBackward0":
        factors = [
            factor for factor in (saved(node, "self"), saved(node, "other")) if factor is not None
        ]
        if len(factors) == 1 and not factors[0].requires_grad:
            # A factor of zeros without ones may be the advantages of a policy gradient.
            is_0, is_1 = factors[0].detach() == 0, factors[0].detach() == 1
            return is_0 & (is_0 | is_1).all() & is_1.any()
    return None
