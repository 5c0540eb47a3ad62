"""Watched models are asked by calls of their own: what reaches where it should not is named, and the run stays the same
to the byte.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import FACT, PASS, SUSPICION, UNKNOWN
from tests.support.attached import watched_once
from tests.support.running import engine
from tests.system.attach.test_identities import outcomes

Found = dict[str, list[dict[str, Any]]]
SCRIPT = """
import random
random.seed(3)
from torch import nn
from torch.nn import functional as F
V, B, T = 23, 4, 12
text = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(5))

class Model(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.embed, self.head, self.mix = nn.Embedding(V, 16), nn.Linear(16, V), mix
        self.dropout, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(16)

    def forward(self, tokens, scale=1.0):
        x = self.dropout(self.embed(tokens))
        x = x + self.mix(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return self.head(torch.tanh(x)) * scale

class Attention(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.qkv, self.is_causal = nn.Linear(16, 48), is_causal

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

class Convolution(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.of, self.pad = nn.Conv1d(16, 16, 3), (left, right)

    def forward(self, x):
        return self.of(F.pad(x.transpose(1, 2), self.pad)).transpose(1, 2)

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True)

class Given(nn.Module):
    # As models of transformers are called, and what they give.
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *, labels, input_ids):
        logits = self.model(input_ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}

def fit(net, loss=lambda net: F.cross_entropy(net(text[:, :-1]).reshape(-1, V), text[:, 1:].reshape(-1))):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
    say(drawn=[random.random(), float(torch.rand(()))], training=net.training)
    return net

def attention():
    return fit(Model(Attention(True)))

def attention_to_all():
    return fit(Model(Attention(False)))

def a_convolution():
    return fit(Model(Convolution(2, 0)))

def a_convolution_that_is_centred():
    return fit(Model(Convolution(1, 1)))

def a_mean_over_the_row():
    return fit(Given(Model(Mean())), lambda net: net(input_ids=text, labels=text)["loss"])

def attention_by_keywords():
    return fit(Given(Model(Attention(True))), lambda net: net(labels=text, input_ids=text)["loss"])

def a_model_that_is_never_called():
    return fit(nn.ModuleDict({"embed": nn.Embedding(V, 16), "head": nn.Linear(16, V)}),
               lambda net: F.cross_entropy(net["head"](net["embed"](text[:, :-1])).reshape(-1, V),
                                           text[:, 1:].reshape(-1)))

def a_classifier():
    return fit(nn.Linear(8, 2), lambda net: net(torch.ones(4, 8)).square().mean())

def encoder(mask_padding):
    # Bidirectional, of padded rows, as BERT is trained.
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(V, 16), nn.Linear(16, V)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask == 0 if mask_padding else None
            return self.head(self.layer(self.embed(input_ids), src_key_padding_mask=mask))

    is_text = torch.arange(T)[None] < torch.tensor([12, 9, 7, 5])[:, None]
    rows = text[:, :-1].masked_fill(~is_text, 0)
    hidden = rows.masked_fill(torch.arange(T)[None] == 3, V - 1)
    return fit(Encoder(), lambda net: F.cross_entropy(
        net(input_ids=hidden, attention_mask=is_text.long())[:, 3], rows[:, 3]))

def padding_is_masked():
    return encoder(True)

def padding_is_not_masked():
    return encoder(False)

def packed(by_document, has_names=True):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(V, 16), nn.Linear(16, 48), nn.Linear(16, V)

        def forward(self, input_ids, position_ids):
            document = (position_ids == 0).cumsum(1)
            mask = torch.ones(T, T, dtype=torch.bool).tril()[None].expand(len(input_ids), T, T)
            if by_document:
                mask = mask & (document[:, :, None] == document[:, None])
            q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    places = torch.cat([torch.arange(4), torch.arange(6), torch.arange(2)])[None].expand(B, T)
    def loss(net):
        rows = text[:, :-1]
        made = net(input_ids=rows, position_ids=places) if has_names else net(rows, places)
        return F.cross_entropy(made.reshape(-1, V), text[:, 1:].reshape(-1))
    return fit(Packed(), loss)

def documents_by_place():
    return packed(True, has_names=False)

def documents_by_place_that_see_each_other():
    return packed(False, has_names=False)

def documents_of_their_own():
    return packed(True)

def documents_that_see_each_other():
    return packed(False)

def batches(net, make):
    x = torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(2))
    loader = torch.utils.data.DataLoader(x, batch_size=8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in loader:
        optimizer.zero_grad()
        make(net, batch).square().mean().backward()
        optimizer.step()
    return net

class Mixes(nn.Module):
    # A view where a transpose is meant.
    def __init__(self):
        super().__init__()
        self.of = nn.GRU(8, 8)

    def forward(self, x):
        return self.of(x.view(x.shape[1], x.shape[0], 8))[0].view(x.shape)

class Transposes(Mixes):
    def forward(self, x):
        return self.of(x.transpose(0, 1))[0].transpose(0, 1)

class Similar(nn.Module):
    def __init__(self):
        super().__init__()
        self.of = nn.Linear(48, 8)

    def forward(self, x):
        made = F.normalize(self.of(x.flatten(1)), dim=-1)
        return made @ made.T

def a_view_where_a_transpose_is_meant():
    return batches(Mixes(), lambda net, x: net(x))

def a_transpose():
    return batches(Transposes(), lambda net, x: net(x))

def similarities_of_all_rows_with_all():
    return batches(Similar(), lambda net, x: net(x))

def time_first():
    return batches(nn.Sequential(nn.GRU(8, 8)), lambda net, x: net(x.transpose(0, 1))[0])

class Shares(nn.Module):
    # A softmax over rows in the place of classes.
    def __init__(self, dim):
        super().__init__()
        self.of, self.dim = nn.Linear(48, 8), dim

    def forward(self, x):
        return self.of(x.flatten(1)).softmax(self.dim)

class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.of = nn.Linear(48, 8)

    def forward(self, x):
        scale = x.abs().max() / 127
        return self.of((x / scale).round().flatten(1) * scale)

class Negatives(Similar):
    def forward(self, x):
        made = F.normalize(self.of(x.flatten(1)), dim=-1)
        return made @ torch.cat([made, made.roll(1, 1)]).T

def as_long_as_wide(net, make):
    x = torch.randn(32, 8, 8, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in torch.utils.data.DataLoader(x, batch_size=8):
        optimizer.zero_grad()
        make(net, batch).square().mean().backward()
        optimizer.step()
    return net

def a_softmax_over_rows():
    return batches(Shares(0), lambda net, x: net(x))

def a_softmax_over_classes():
    return batches(Shares(1), lambda net, x: net(x))

def rows_that_share_a_scale():
    return batches(Quantised(), lambda net, x: net(x))

def two_kinds_of_negatives():
    return batches(Negatives(), lambda net, x: net(x))

def time_first_of_as_many_rows():
    return as_long_as_wide(nn.Sequential(nn.GRU(8, 8)), lambda net, x: net(x.transpose(0, 1))[0])

def pooled(pool):
    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(V, 16, padding_idx=0), nn.Linear(16, 3)

        def forward(self, tokens, attention_mask):
            return self.head(pool(torch.tanh(self.embed(tokens) + 1), attention_mask[..., None]))

    mask = (torch.arange(T)[None] < torch.tensor([12, 9, 7, 5])[:, None]).long()
    tokens = (text[:, :-1] % (V - 1) + 1) * mask
    return fit(Pools(), lambda net: F.cross_entropy(net(tokens, mask), tokens[:, 0] % 3))

def a_mean_of_padding_too():
    return pooled(lambda x, mask: x.mean(1))

def a_mean_without_padding():
    return pooled(lambda x, mask: (x * mask).sum(1) / mask.sum(1))

def padded(tokens, side, last):
    rows = torch.where(torch.arange(T) < torch.tensor([5, 12, 9, 7])[:, None], tokens % (V - 1) + 1, 0)
    return rows.flip(1) if side == "left" else rows

def of_rows(net, side="right"):
    rows = padded(text[:, :-1], side, 0)
    return fit(net, lambda net: F.cross_entropy(net(rows), rows[:, 6] % 3))

class Bag(nn.Module):
    # No mask is given: it is read off the tokens, or forgotten.
    def __init__(self, leaves_out):
        super().__init__()
        self.embed, self.head, self.leaves_out = nn.Embedding(V, 16), nn.Linear(16, 3), leaves_out

    def forward(self, tokens):
        is_token = (tokens != 0) | (not self.leaves_out)
        made = torch.tanh(self.embed(tokens)) * is_token[..., None]
        return self.head(made.sum(1) / is_token.sum(1, keepdim=True))

def a_bag_that_leaves_padding_out():
    return of_rows(Bag(True))

def a_bag_with_its_padding():
    return of_rows(Bag(False))

class Places(nn.Module):
    # Positions are counted from the first token of a row, or from its padding.
    def __init__(self, from_token):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(V, 16), nn.Embedding(T, 16), nn.Linear(16, 3)
        self.from_token = from_token

    def forward(self, tokens):
        is_token = tokens != 0
        place = (is_token.cumsum(1) - 1).clamp(min=0) if self.from_token else torch.arange(tokens.shape[1])
        made = torch.tanh(self.embed(tokens) + self.place(place)) * is_token[..., None]
        return self.head(made.sum(1))

def positions_of_tokens():
    return of_rows(Places(True), "left")

def positions_of_columns():
    return of_rows(Places(False), "left")

class Channels(nn.Module):
    # Logits are (B, V, T), as cross_entropy takes them.
    def __init__(self, *pad):
        super().__init__()
        self.embed, self.of, self.pad = nn.Embedding(V, 16), nn.Conv1d(16, V, 3), pad

    def forward(self, tokens):
        return self.of(F.pad(self.embed(tokens).transpose(1, 2), self.pad))

def channels(*pad):
    return fit(Channels(*pad), lambda net: F.cross_entropy(net(text[:, :-1]), text[:, 1:]))

def channels_of_the_past():
    return channels(2, 0)

def channels_of_both_sides():
    return channels(1, 1)

class Drops(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.of, self.always = nn.Linear(8, 8), always

    def forward(self, x):
        return F.dropout(self.of(x), 0.3, training=self.training or self.always)

def dropout_that_never_ends():
    return batches(nn.Sequential(Drops(True)), lambda net, x: net(x))

def dropout_in_training():
    return batches(nn.Sequential(Drops(False)), lambda net, x: net(x))

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.of, self.calls, self.seen = nn.Linear(8, 8), 0, []
        self.last = torch.zeros(2)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        print("called", self.calls)
        self.calls += 1
        self.seen.append(len(x))
        self.total += 1
        self.last[:] = float(self.total)
        made = self.of(x)
        return made + torch.randn_like(made)

def a_model_that_draws_and_counts():
    net = batches(nn.Sequential(Autoencoder()), lambda net, x: net(x))
    say(calls=net[0].calls, seen=net[0].seen, total=float(net[0].total), last=net[0].last.tolist())
    return net

def a_hook_of_the_script():
    net = nn.Sequential(nn.Linear(8, 8))
    net.register_forward_hook(lambda module, given, made: say(called=len(made)))
    return batches(net, lambda net, x: net(x))

"""
FIRST = """
for function in (attention, attention_to_all, a_convolution, a_convolution_that_is_centred, a_mean_over_the_row,
                 attention_by_keywords, a_model_that_is_never_called, a_classifier, padding_is_masked,
                 padding_is_not_masked, documents_of_their_own, documents_that_see_each_other,
                 documents_by_place, documents_by_place_that_see_each_other,
                 a_view_where_a_transpose_is_meant, a_transpose, similarities_of_all_rows_with_all, time_first,
                 a_softmax_over_rows, a_softmax_over_classes, rows_that_share_a_scale, two_kinds_of_negatives,
                 time_first_of_as_many_rows, a_mean_of_padding_too,
                 a_mean_without_padding, dropout_that_never_ends, dropout_in_training,
                 a_model_that_draws_and_counts, a_hook_of_the_script):
    print(json.dumps({"name": function.__name__}))
    save(function())
"""
SECOND = """
for function in (a_bag_that_leaves_padding_out, a_bag_with_its_padding, positions_of_tokens, positions_of_columns,
                 channels_of_the_past, channels_of_both_sides):
    print(json.dumps({"name": function.__name__}))
    save(function())
"""
DISTILLED = """
import random
random.seed(3)
from torch import nn
from torch.nn import functional as F
V, B, T = 23, 4, 12
text = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))

def fit(net, loss):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
    return net

class Reads(nn.Module):
    def __init__(self, vocabulary, drop=0.0):
        super().__init__()
        self.embed, self.head, self.drop = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary), drop

    def forward(self, input_ids):
        x = self.embed(input_ids).cumsum(1)
        return {"logits": self.head(F.dropout(torch.tanh(x), self.drop, self.training))}

def taught(part=lambda s, t: (s, t), loss=None, **teacher):
    torch.manual_seed(1)
    student, taught_by = Reads(V), Reads(V + 4, **teacher).requires_grad_(False)
    loss = loss or (lambda s, t: F.kl_div(s, t.exp(), reduction="batchmean"))

    def divergence(net):
        with torch.no_grad():
            wanted = taught_by(input_ids=text)["logits"]
        given, wanted = part(net(input_ids=text)["logits"], wanted[..., :V])
        return loss(F.log_softmax(given, -1), F.log_softmax(wanted, -1))

    return fit(student, divergence)

def a_teacher():
    return taught()

def a_teacher_without_the_last_position():
    return taught(lambda s, t: (s[:, :-1], t[:, :-1]))

def a_teacher_one_position_ahead():
    return taught(lambda s, t: (s[:, :-1], t[:, 1:]))

def a_teacher_one_position_behind():
    return taught(lambda s, t: (s[:, 1:], t[:, :-1]))

def a_teacher_that_drops():
    return taught(drop=0.2)

def written_out(part):
    def loss(s, t):
        s, t = part(s, t)
        return (t.exp() * (t - s)).sum(-1).mean()
    return taught(loss=loss)

def a_divergence_written_out():
    return written_out(lambda s, t: (s[:, :-1], t[:, :-1]))

def a_divergence_written_out_one_position_behind():
    return written_out(lambda s, t: (s[:, 1:], t[:, :-1]))

def with_special_tokens(first):
    torch.manual_seed(1)
    student, teacher = Reads(V), Reads(V + 4).requires_grad_(False)
    return fit(student, lambda net: F.kl_div(
        F.log_softmax(net(input_ids=text)["logits"], -1),
        F.softmax(teacher(input_ids=text + 4)["logits"][..., first:first + V], -1), reduction="batchmean"))

def special_tokens_are_cut_off():
    return with_special_tokens(4)

def special_tokens_are_left():
    return with_special_tokens(0)

def both(detach):
    torch.manual_seed(1)
    pair = nn.ModuleList([Reads(V), Reads(V)])
    def loss(pair):
        s, t = (net(input_ids=text)["logits"] for net in pair)
        t = t.detach() if detach else t
        return F.kl_div(F.log_softmax(s, -1), F.log_softmax(t, -1), reduction="batchmean", log_target=True)
    return fit(pair, loss)

def a_teacher_that_learns():
    return both(False)

def a_teacher_that_is_held_by_the_optimizer():
    return both(True)

def two_passes_of_one_model():
    # R-Drop: both sides of the divergence are one model's.
    net = Reads(V, drop=0.3)
    def loss(net):
        one, two = (F.log_softmax(net(input_ids=text)["logits"], -1) for _ in range(2))
        return F.kl_div(one, two, reduction="batchmean", log_target=True) + F.nll_loss(
            one.flatten(0, 1), text.flatten())
    return fit(net, loss)

def a_divergence_of_two_logarithms():
    return taught(loss=lambda s, t: F.kl_div(s, t, reduction="batchmean"))

def a_divergence_of_logits():
    torch.manual_seed(1)
    student, teacher = Reads(V), Reads(V).requires_grad_(False)
    return fit(student, lambda net: F.kl_div(
        F.log_softmax(net(input_ids=text)["logits"], -1), teacher(input_ids=text)["logits"], reduction="batchmean"))

def a_reverse_divergence():
    return taught(loss=lambda s, t: F.kl_div(t, s.exp(), reduction="batchmean"))

def a_teacher_cut_at_its_beginning():
    torch.manual_seed(1)
    student, teacher = Reads(V), Reads(V + 4).requires_grad_(False)
    return fit(student, lambda net: F.kl_div(
        F.log_softmax(net(input_ids=text)["logits"], -1),
        F.softmax(teacher(input_ids=text)["logits"][..., -V:], -1), reduction="batchmean"))

def cooled(logits, tau):
    return logits if tau == 1 else logits / tau

def at_temperatures(student_tau, teacher_tau):
    torch.manual_seed(1)
    student, teacher = Reads(V), Reads(V).requires_grad_(False)
    return fit(student, lambda net: 4 * F.kl_div(
        F.log_softmax(cooled(net(input_ids=text)["logits"], student_tau), -1).flatten(0, 1),
        F.softmax(cooled(teacher(input_ids=text)["logits"], teacher_tau), -1).flatten(0, 1),
        reduction="batchmean"))

def a_teacher_without_the_temperature():
    return at_temperatures(2.0, 1.0)

def a_teacher_that_is_sharpened():
    return at_temperatures(1.0, 0.5)

def a_student_without_the_temperature():
    return at_temperatures(1.0, 3.0)

for function in (a_divergence_written_out, a_divergence_written_out_one_position_behind,
                 special_tokens_are_cut_off, special_tokens_are_left,
                 a_teacher_that_learns, a_teacher_that_is_held_by_the_optimizer, two_passes_of_one_model,
                 a_teacher_without_the_temperature, a_teacher_that_is_sharpened,
                 a_student_without_the_temperature, a_teacher,
                 a_teacher_without_the_last_position, a_teacher_one_position_ahead,
                 a_teacher_one_position_behind, a_teacher_that_drops, a_divergence_of_two_logarithms,
                 a_divergence_of_logits, a_reverse_divergence, a_teacher_cut_at_its_beginning):
    print(json.dumps({"name": function.__name__}))
    save(function())
"""
EXPECTED = {
    "attention": {
        "causality": (PASS, "another token at position 6 of 12 changes no logits before it")
    },
    "attention_to_all": {"causality": (SUSPICION, "the model sees what it must predict")},
    "a_convolution": {"causality": (PASS, "changes no logits before it")},
    "a_convolution_that_is_centred": {"causality": (SUSPICION, "changes logits before it")},
    "a_mean_over_the_row": {"causality": (SUSPICION, "changes logits before it")},
    "attention_by_keywords": {"causality": (PASS, "changes no logits before it")},
    "a_model_that_is_never_called": {"questions": (UNKNOWN, "no call of the model was seen")},
    "a_classifier": {"eval_is_random": (PASS, "the same outputs")},
    # What is trained to fill gaps may see what comes after them.
    "padding_is_masked": {"padding_seen": (PASS, "the same outputs"), "causality": None},
    "padding_is_not_masked": {
        "padding_seen": (SUSPICION, "3 positions of padding has other outputs"),
        "causality": None,
    },
    "documents_of_their_own": {"documents_mixed": (PASS, ""), "causality": (PASS, "")},
    "documents_that_see_each_other": {
        "documents_mixed": (SUSPICION, "attention goes across"),
        "causality": (PASS, ""),
    },
    "documents_by_place": {"documents_mixed": (PASS, "")},
    "documents_by_place_that_see_each_other": {"documents_mixed": (SUSPICION, "attention goes")},
    "a_view_where_a_transpose_is_meant": {"rows_mixed": (SUSPICION, "two rows swapped")},
    "a_transpose": {"rows_mixed": (PASS, "")},
    "similarities_of_all_rows_with_all": {"rows_mixed": (PASS, "")},
    "time_first": {"rows_mixed": None},
    "a_softmax_over_rows": {"rows_mixed": (SUSPICION, "another second row")},
    "a_softmax_over_classes": {"rows_mixed": (PASS, "")},
    "rows_that_share_a_scale": {"rows_mixed": (PASS, "")},
    "two_kinds_of_negatives": {"rows_mixed": (PASS, "")},
    "time_first_of_as_many_rows": {"rows_mixed": None},
    "a_mean_of_padding_too": {"padding_seen": (SUSPICION, "reads the padding")},
    "a_mean_without_padding": {"padding_seen": (PASS, "")},
    "a_bag_that_leaves_padding_out": {"padding_seen": (PASS, "the same outputs")},
    "a_bag_with_its_padding": {"padding_seen": (SUSPICION, "6 positions of padding")},
    "positions_of_tokens": {"padding_seen": (PASS, "the same outputs")},
    "positions_of_columns": {"padding_seen": (SUSPICION, "counts its positions")},
    "channels_of_the_past": {"causality": (PASS, "changes no logits before it")},
    "channels_of_both_sides": {"causality": (SUSPICION, "changes logits before it")},
    "dropout_that_never_ends": {"eval_is_random": (SUSPICION, "dropout is still active")},
    "dropout_in_training": {"eval_is_random": (PASS, "")},
    "a_model_that_draws_and_counts": {
        "eval_is_random": (FACT, "draws random numbers in eval mode"),
        "questions": (FACT, "they were restored"),
    },
    "a_teacher": {
        "teacher_alignment": (PASS, ""),
        "teacher_mode": (PASS, ""),
        "divergence_temperature": (PASS, ""),
    },
    "a_divergence_written_out": {"teacher_alignment": (PASS, "")},
    "a_divergence_written_out_one_position_behind": {
        "teacher_alignment": (SUSPICION, "1 position before")
    },
    "special_tokens_are_cut_off": {"teacher_alignment": (PASS, "")},
    "special_tokens_are_left": {
        "teacher_alignment": (SUSPICION, "meets id i + 0 of the teacher's 27 in the divergence")
    },
    "a_teacher_that_learns": {"teacher_trained": (SUSPICION, "from parameters of two models")},
    "a_teacher_that_is_held_by_the_optimizer": {
        "teacher_trained": None,
        "no_gradient": (SUSPICION, "had no gradient"),
    },
    "two_passes_of_one_model": {"teacher_trained": None, "label_shift": (SUSPICION, "not shifted")},
    "a_teacher_without_the_last_position": {"teacher_alignment": (PASS, "")},
    "a_teacher_one_position_ahead": {"teacher_alignment": (SUSPICION, "1 position after")},
    "a_teacher_one_position_behind": {"teacher_alignment": (SUSPICION, "1 position before")},
    "a_teacher_that_drops": {"teacher_mode": (SUSPICION, "it is random")},
    "a_divergence_of_two_logarithms": {"divergence_arguments": (SUSPICION, "gets logarithms")},
    "a_divergence_of_logits": {"divergence_arguments": (SUSPICION, "gets negative numbers")},
    "a_reverse_divergence": {"distillation": (FACT, "reverse divergence")},
    "a_teacher_cut_at_its_beginning": {"teacher_alignment": (SUSPICION, "id i + 4 of the teacher")},
    "a_teacher_without_the_temperature": {
        "divergence_temperature": (SUSPICION, "at temperature 1, the student's at 2")
    },
    "a_student_without_the_temperature": {
        "divergence_temperature": (SUSPICION, "at temperature 3, the student's at 1")
    },
    "a_teacher_that_is_sharpened": {"divergence_temperature": None},
    "a_hook_of_the_script": {"questions": (UNKNOWN, "a forward hook of the script")},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Equal to the byte with and without it: weights, statistics of the norm, random numbers, modes, output."""
    found: Found = {}
    for name, script in (
        ("questions", SCRIPT + FIRST),
        ("padding", SCRIPT + SECOND),
        ("teachers", DISTILLED),
    ):
        ran = watched_once(tmp_path_factory, name, script, forked=True)
        names = [line for line in ran.stdout.splitlines() if '"name"' in line]
        found |= outcomes(dataclasses.replace(ran, stdout="\n".join(names)))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_what_reaches_where_it_should_not_is_named(found: Found, name: str) -> None:
    for id, wanted in EXPECTED[name].items():
        lines = [line for line in found[name] if line["id"] == id]
        if wanted is None:
            assert lines == []
            continue
        level, text = wanted
        assert [(line["level"], text in line["text"]) for line in lines] == [(level, True)], lines
    others = [line for line in found[name] if line["level"] == SUSPICION]
    assert all(line["id"] in EXPECTED[name] for line in others), others


def test_nothing_is_asked_where_the_command_says_so(tmp_path: Path) -> None:
    words = ("--runs", tmp_path, "--name", "run", "--ask", "none")
    done = engine("watch", *words, "--", "sh", "-c", 'echo "$APR_WATCH_ASK"')
    assert (done.returncode, done.stdout) == (0, "none\n")
