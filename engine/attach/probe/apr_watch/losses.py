"""What a loss is: a cross entropy of which tokens, as the graph behind the tensor of the backward pass has it.

Nothing is hooked and nothing is computed anew: autograd keeps the labels, the ids of the tokens and what was done to
the logits. A graph that cannot be looked into (a compiled loss, a fused kernel other than TRL's, a checkpointed
embedding) says nothing.
"""

# Shapes: B rows, T tokens of a row, N labels, W labels of a row

from __future__ import annotations

from typing import Any

from .coverage import Coverage, Tokenizers
from .distillation import Divergence, divergence_at
from .graph import near, places, saved, source, weight
from .parameters import FACT, PASS, SUSPICION, Line

_IDS = 8
"""Embeddings whose ids are compared with the labels."""
SHIFTS = (0, 1, 2, 3)
"""A label may be the token itself, the next one, ..."""
_FITS, _FITS_NOT = 0.98, 0.9
"""Share of labels that are the tokens so far on; where one fits, another one does not. Tokens repeat themselves."""
_CHUNKS = 4
"""Of a loss in more chunks some may be too far from the backward pass to be found."""
_NONE = -100
"""The label of a place that has none."""
_FUSED = {"ChunkedLogProbFunctionBackward": 3}
"""Losses of other libraries (TRL) that compute the logits too: which of the tensors that they keep are the labels."""
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")


class Loss:
    """A cross entropy, near the tensor on which `backward` is called."""

    def __init__(
        self, torch: Any, node: Any, ids: list[Any], way: list[Any], text: Tokenizers | None = None
    ) -> None:
        """`ids` are the tokens that embeddings have looked up, (B, T) each; `way` are the nodes between the loss and
        the tensor of the backward pass; what labels cover is looked at where `text` is given."""
        self._torch, self.weight = torch, weight(way)
        targets, self._ignored = _targets(node)
        # Labels may be bytes, which cannot be -100.
        targets = targets.long()
        self._count, self._targets = targets.numel(), targets
        self._vocabulary = _whole(node, way)
        for one in way:
            self._leave_out(_left_out(one))
        self._start = 0
        self.double = False
        """Whether a softmax was applied to what a softmax gave."""
        self.rows: tuple[int, int] | None = None
        """Of all rows of tokens, those that have a place in the loss."""
        self._text = text
        self._covers: list[Coverage | None] = []
        found = []
        if self._put_back(self._look_below(node)):
            found = [self._compare(one) for one in ids if one.device == self._targets.device]
        found = [one for one in found if one is not None]
        self._targets = self._text = None
        self.covers: list[Coverage | None] = self._covers
        """Of each of the ids."""
        self.counts: Any = torch.stack(found).double() if found else None
        """On the device, for each of the ids: labels, rows with one, and for each shift the labels that fit, and that
        could."""

    def _look_below(self, node: Any) -> list[Any]:
        """From the labels to the logits, and to where a row of them begins: the nodes that take some of the rows."""
        log_softmax, parts = source(node)
        if type(log_softmax).__name__ not in (*_SOFTMAX, "LogBackward0"):
            # Of a fused loss it is what computed the hidden states.
            log_softmax = None
        below, more = source(log_softmax) if log_softmax is not None else (None, [])
        parts = parts + more
        if type(below).__name__ == "LogBackward0":
            below, more = source(below)
            parts = parts + more
        self.double = type(log_softmax).__name__ in _SOFTMAX and type(below).__name__ in _SOFTMAX
        slices = [one for one in parts if type(one).__name__ == "SliceBackward0"]
        self._start = sum(int(one._saved_start or 0) for one in slices if one._saved_dim == 1)
        return [one for one in parts if one not in slices]

    def _leave_out(self, left_out: Any) -> None:
        """The labels of these places do not count."""
        if left_out is None or left_out.device != self._targets.device:
            return
        if left_out.numel() == self._count:
            self._targets = self._labelled().masked_fill(left_out.reshape(-1), _NONE)

    def _labelled(self) -> Any:
        """The labels one behind the other, and `_NONE` where there is none."""
        targets = self._targets.reshape(-1)
        if self._ignored not in (None, _NONE):
            targets = targets.where(targets != self._ignored, _NONE)
        self._ignored = _NONE
        return targets

    def _put_back(self, parts: list[Any]) -> bool:
        """Put the labels of a loss of some places back to where they are among all; whether it is known where."""
        if not parts:
            return True
        found = places(parts[0]) if len(parts) == 1 else None
        if found is None or found[0].device != self._targets.device or found[2] != self._count:
            return False
        where, self._count, _ = found
        targets = self._labelled()
        none = self._torch.full((self._count,), _NONE, dtype=targets.dtype, device=targets.device)
        if where.dtype == self._torch.bool:
            self._targets = none.masked_scatter_(where, targets)
        else:
            self._targets = none.index_copy_(0, where.long() % self._count, targets)
        return True

    def _compare(self, tokens_BT: Any) -> Any:
        rows, length = tokens_BT.shape
        count = self._count
        width, odd = divmod(count, rows)
        if odd or not length - len(SHIFTS) < width <= length:
            # Fewer rows than there are, whole or without their last tokens.
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
        found = [known_BW.sum(), known_BW.any(1).sum()]
        for shift in SHIFTS:
            begin = self._start + shift
            most = max(0, min(width, length - begin))
            same = targets_BW[:, :most] == tokens_BT[:, begin : begin + most]
            found += [(same & known_BW[:, :most]).sum(), known_BW[:, :most].sum()]
        cover = None
        if self._text is not None and width > 1:
            labels = (targets_BW, known_BW, self._start)
            cover = Coverage(self._torch, tokens_BT, *labels, self._text)
        self._covers.append(cover)
        return self._torch.stack(found)

    def lines(self, counts: list[list[float]], covers: list[list[int] | None]) -> list[Line]:
        """`counts`, and the numbers of `covers`, as numbers."""
        lines: list[Line] = []
        if self.double:
            text = "the cross entropy takes its softmax of numbers that a softmax gave"
            lines.append(("double_softmax", SUSPICION, text, {}))
        else:
            lines.append(("double_softmax", PASS, "the cross entropy takes one softmax", {}))
        if self.rows is not None and self.rows[0] < self.rows[1]:
            text = f"the loss is that of {self.rows[0]} of the {self.rows[1]} rows that the model reads"
            lines.append(
                ("rows_left_out", SUSPICION, text, {"rows": self.rows[0], "of": self.rows[1]})
            )
        if not counts:
            return lines
        # An embedding of places looks up ids too, which the labels do not fit; and an encoder may read the same tokens
        # as those that the decoder is to write.
        at = max(
            range(len(counts)),
            key=lambda at: (_fits(counts[at])[1] >= _FITS, max(_fits(counts[at]))),
        )
        labelled, with_label, *pairs = counts[at]
        if not labelled:
            text = f"none of {self._count} places has a label"
            return [*lines, ("label_coverage", SUSPICION, text, {"labels": 0})]
        numbers: dict[str, float] = {"labels": labelled, "of": self._count}
        if self._vocabulary:
            numbers["vocabulary"] = self._vocabulary
        text = f"{labelled:.0f} of {self._count} places have a label"
        if self.rows is not None and with_label < self.rows[1]:
            text += f", in {with_label:.0f} of {self.rows[1]} rows"
        fits = _fits([labelled, with_label, *pairs])
        best = max(SHIFTS, key=lambda shift: fits[shift])
        cover, found = self.covers[at], covers[at]
        if cover is not None and found is not None and fits[best] >= _FITS:
            lines += cover.lines(found)
            sample = cover.sample(found, best)
            text += f"; the first row, labels in brackets: {sample}" if sample else ""
        lines.append(("label_coverage", FACT, text, numbers))
        numbers = {f"shift_{shift}": fits[shift] for shift in SHIFTS}
        if fits[1] >= _FITS:
            lines.append(("label_shift", PASS, "labels are the tokens that follow", numbers))
        elif fits[best] >= _FITS and fits[1] <= _FITS_NOT:
            what = {
                0: "the labels are the tokens that the model has just read",
                2: "the labels are the tokens after the next: shifted twice",
            }.get(best, f"the labels are the tokens {best} places on")
            text = f"{what} ({fits[best]:.0%} of them; {fits[1]:.0%} are the next ones)"
            lines.append(("label_shift", SUSPICION, text, numbers))
        return lines


def _fits(counts: list[float]) -> list[float]:
    """For each shift, the share of labels that are the tokens so far on."""
    pairs = zip(counts[2::2], counts[3::2], strict=True)
    return [fitting / could if could else 0.0 for fitting, could in pairs]


def combined(found: list[list[Line]]) -> list[Line]:
    """The lines of all losses of a step, the first of each outcome. Where one of them is the loss of the next tokens,
    others may be of later ones."""
    lines: dict[tuple[str, str], Line] = {}
    for line in (line for lines in found for line in lines):
        lines.setdefault(line[:2], line)
    if ("label_shift", PASS) in lines:
        lines.pop(("label_shift", SUSPICION), None)
    return list(lines.values())


def losses_of(
    torch: Any, tensors: list[Any], embeddings: list[Any], text: Tokenizers | None = None
) -> list[Loss | Divergence]:
    """The cross entropies and divergences of a backward pass; `embeddings` are its nodes that look up rows. What labels
    cover is looked at where `text` is given."""
    ids = [ids for node in embeddings if (ids := saved(node, "indices")) is not None]
    ids = [
        one for one in ids if one.dim() == 2 and one.shape[1] > 1 and not one.is_floating_point()
    ]
    found: list[Loss | Divergence] = []
    for node, way in near(tensors):
        if _targets(node)[0] is not None:
            found.append(Loss(torch, node, ids, way, text))
        elif (divergence := divergence_at(torch, node, way)) is not None:
            found.append(divergence)
    _add_rows([one for one in found if isinstance(one, Loss)])
    return found


def _add_rows(losses: list[Loss]) -> None:
    """Of a backward pass whose loss is a sum over chunks, or over rows, each of which is a loss: all rows count."""
    parts = [one for one in losses if one.rows is not None and one.rows[0] < one.rows[1]]
    if (
        sum(one.rows[0] for one in parts if one.rows)
        >= max((one.rows[1] for one in parts if one.rows), default=0)
        or len(parts) > _CHUNKS
    ):
        for one in parts:
            one.rows = None


def _targets(node: Any) -> tuple[Any, int | None]:
    """The labels of a node that takes one logarithm of a softmax for each, and the label that is none."""
    kind = type(node).__name__
    if kind in ("NllLossBackward0", "NllLoss2DBackward0"):
        ignored = int(node._saved_ignore_index)
        return saved(node, "target"), ignored - (1 << 64) * (ignored >= 1 << 63)
    if kind in _FUSED:
        kept = node._raw_saved_tensors
        if any(getattr(one, "unpack_hook", one) is not None for one in kept):
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
    if any(getattr(one, "unpack_hook", one) is not None for one in raw):
        return None, None
    indices = [one for one in node._saved_indices if one is not None]
    # One of the rows, one of the labels.
    return (indices[-1], None) if len(indices) > 1 and indices[-1].dim() else (None, None)


def _whole(node: Any, way: list[Any]) -> int:
    """The vocabulary, where the tensor of the backward pass is this cross entropy, as a mean; else 0."""
    is_mean = type(node).__name__ in ("NllLossBackward0", "NllLoss2DBackward0")
    if way or not is_mean or node._saved_reduction != 1:
        return 0
    log_softmax = source(node)[0]
    result = None if log_softmax is None else saved(log_softmax, "result")
    return 0 if result is None else int(result.shape[1])


def _left_out(node: Any) -> Any:
    """The places that a node behind the loss multiplies by 0, or fills, as a mask; None where it does neither."""
    kind = type(node).__name__
    if kind == "MaskedFillBackward0":
        return saved(node, "mask")
    if kind == "MulBackward0":
        factors = [one for one in (saved(node, "self"), saved(node, "other")) if one is not None]
        if len(factors) == 1 and not factors[0].requires_grad:
            # Of zeros alone it may be what a policy gradient is multiplied with.
            is_0, is_1 = factors[0].detach() == 0, factors[0].detach() == 1
            return is_0 & (is_0 | is_1).all() & is_1.any()
    return None
