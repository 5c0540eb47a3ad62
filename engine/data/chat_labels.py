"""Conversations as tokens, with a label on what the assistant wrote and on nothing else.

**What is rendered** is the conversation up to its last assistant turn: nothing after that has a label.
The text is encoded as a whole and without adding special tokens, as Transformers does, so a template that
begins with the BOS token gives one BOS, and one that ends with the end-of-turn token gives no second one. If
the last turn has no end-of-turn token, the end-of-text token is added, with a label: without it the student
would never learn to stop.

**How the span of a turn is proved.** For assistant turn i of the messages m:

    prompt   = render(m[:i], add_generation_prompt=True)
    through  = render(m[:i+1])
    whole    = render(m)

`through` must begin with `prompt`, and the turn is what follows: the content (without the reasoning before it)
and then the end-of-turn token, which may be several special tokens in a row. If `through` has none, an EOS
token at that position in `whole` counts: some templates write it before the next message. Anything after it
belongs to the template, because a model stops generating at its end-of-turn token. A turn without such a token
ends with its last character that is not white space, and a turn with tool calls with the last special token.
`whole` must begin with `through` up to the end of the turn.

If this fails (the template removes the reasoning from earlier turns, or moves the system prompt), the turn is
found by its `{% generation %}` mark, provided that there is one mark for each assistant turn and that the mark
holds the content and not the header: the generation prompt, or only the start of the turn, comes before it. The
end-of-turn token is added to a mark that leaves it out, and white space after it is removed.

If both fail, the message is rendered after one short question, where both methods usually succeed. The turn is proved
if `through` ends with the turn rendered there, after the same header. This finds a turn after a default system prompt,
and after another turn of the assistant.

A turn that cannot be proved has no labels. Nor has a turn with fields that the template does not write
(`engine.data.unwritten`), nor one with a `weight` of 0 or `train` of false. The other turns keep their labels; a
conversation without any labels is skipped with the reason.

**A token has a label if its first character lies inside the turn.** A token that begins in the prompt and
extends into the turn (a space at the end of the prompt, with the word that follows) has none: at generation
the prompt is complete and contains the beginning of that token, so the model never predicts it. The prompt
alone is then tokenized differently from the beginning of the whole; a remark says so. A
token may extend over the end of a turn only if the turn has no end-of-turn token. It has a label, because the
model has to predict it to generate the last characters of the turn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.data.chat_template import (
    REASONING,
    ChatTemplate,
    Message,
    Rendered,
    Unrenderable,
)
from engine.data.conversations import ASSISTANT, Conversation
from engine.data.left_out import Skipped
from engine.data.unwritten import (
    added_before_answer,
    costs_labels,
    tools_are_written,
    unwritten_fields,
)
from engine.errors import CorpusError
from engine.formats.tokenizer import TextTooLong, Tokenizer

Turns = Literal["all", "last"]

NO_ASSISTANT = "no assistant turn"
OTHER_PROMPT = "the template's generation prompt is not the beginning of an assistant turn"
OTHER_LATER = "the template writes an assistant turn differently if messages follow it"
OTHER_CONTENT = "the template writes an assistant turn that does not end with its content"
NO_TOKEN = "no token begins in what the assistant wrote"
WITHHELD = "its weight is 0, or its train is false"
STRADDLING = "a turn begins inside a token of the prompt, which has no label"
WEIGHED = "a weight other than 0 counts as 1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat:
    """One conversation as T tokens."""

    name: str
    ids: NDArray[np.int32]
    """Shape (T,)."""
    labelled: NDArray[np.bool_]
    """Shape (T,). Whether each token is a label; at least one is."""
    reason: str | None = None
    """Reason why a requested turn has no labels; None if all have them."""
    remarks: tuple[str, ...] = ()
    """Warnings about turns without labels, and about what the template leaves out of the conversation or adds to it."""


def encode_chats(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    turns: Turns = "all",
) -> list[Chat | Skipped]:
    """Return each conversation as tokens, or why it is skipped, in order.

    Raises CorpusError for messages if there is no template, and TokenizerError if an end-of-text token must be added
    and the tokenizer has none.
    """
    proofs = [_prove(conversation, tokenizer, template, turns) for conversation in conversations]
    texts = [proof.text for proof in proofs if isinstance(proof, _Proved)]
    encoded = iter(_encode(tokenizer, texts))
    chats: list[Chat | Skipped] = []
    for conversation, proof in zip(conversations, proofs, strict=True):
        if isinstance(proof, _Proved):
            tokens = next(encoded)
            if isinstance(tokens, str):
                chats.append(Skipped(name=conversation.name, reason=tokens))
            else:
                chats.append(_label(conversation, proof, *tokens, tokenizer, template))
        else:
            chats.append(proof)
    return chats


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]] | str]:
    """Return the tokens of each text and the character offset of each token, or the reason why the text has no
    tokens."""
    try:
        return [*tokenizer.encode_with_starts(texts)]
    except TextTooLong as error:
        if len(texts) == 1:
            return [error.reason]
    return [encoded for text in texts for encoded in _encode(tokenizer, [text])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The span of one assistant turn, in characters of the rendered text."""

    start: int
    end: int
    ended: bool
    """Whether it ends with an end-of-turn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proved:
    text: str
    spans: tuple[_Span, ...]
    reason: str | None = None
    remarks: tuple[str, ...] = ()
    is_cut: bool = False
    """Whether turns without labels follow in the conversation; then no end-of-text token is added."""


_QUESTION: Message = {"role": "user", "content": "0"}


class _Unproved(Exception):
    """A turn that could not be located in the rendered text; the message is the reason."""


def _label(
    conversation: Conversation,
    proved: _Proved,
    ids: NDArray[np.uint32],
    starts: NDArray[np.int64],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Chat | Skipped:
    """Label the tokens that begin inside the spans of a text; `starts` holds the character offset of each token."""
    labelled = np.zeros(len(ids), dtype=np.bool_)
    straddles = False
    for span in proved.spans:
        first, after = np.searchsorted(starts, (span.start, span.end))
        labelled[first:after] = True
        begins = first < len(starts) and starts[first] == span.start
        straddles |= span.start < span.end and not begins
    if not labelled.any() and any(span.start < span.end for span in proved.spans):
        return Skipped(name=conversation.name, reason=NO_TOKEN)
    if not proved.spans[-1].ended and not proved.is_cut:
        eos = template.eos_token if template is not None else None
        end = tokenizer.id_of(eos) if eos is not None else None
        end = tokenizer.end_of_text_id if end is None else end
        if not len(ids) or ids[-1] != end:
            ids, labelled = np.append(ids, np.uint32(end)), np.append(labelled, True)
    return Chat(
        name=conversation.name,
        ids=ids.astype(np.int32),
        labelled=labelled,
        reason=proved.reason,
        remarks=(*proved.remarks, *([STRADDLING] if straddles else [])),
    )


def _prove(
    conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate | None, turns: Turns
) -> _Proved | Skipped:
    """Render a conversation and find the turns that are to have labels."""
    if conversation.pair is not None:
        prompt, completion = conversation.pair
        span = _Span(start=len(prompt), end=len(prompt) + len(completion), ended=False)
        return _Proved(text=prompt + completion, spans=(span,))
    if template is None:
        raise CorpusError.expected(
            "conversation",
            conversation.name,
            "a tokenizer with a chat template",
            f"none in the folder of {tokenizer.path}",
            hint="use the tokenizer of an instruct model, or give prompt and completion as text",
        )
    assistant = [i for i, one in enumerate(conversation.messages) if one["role"] == ASSISTANT]
    requested = [i for i in assistant if i >= conversation.labels_from]
    if not requested:
        return Skipped(name=conversation.name, reason=NO_ASSISTANT)
    messages = conversation.messages[: requested[-1] + 1]
    try:
        whole = template.render(messages, tools=conversation.tools, find_marks=True)
    except Unrenderable as error:
        reason = f"the template refuses the conversation: {error}"
        return Skipped(name=conversation.name, reason=reason)
    finder = _TurnFinder(
        conversation=conversation,
        messages=messages,
        template=template,
        whole=whole,
        special=_special(tokenizer.special_tokens, template.eos_token),
    )
    remarks = finder.unwritten_remarks()
    spans: dict[int, _Span] = {}
    reasons: list[str] = []
    # The last turn is searched first: it may be the only one that shows the end-of-turn tokens.
    for index in reversed(requested if turns == "all" else requested[-1:]):
        try:
            finder.check_not_excluded(index)
            span = finder.span(index)
        except _Unproved as error:
            reasons.append(str(error))
            continue
        if any(span.end > one.start for one in spans.values()):
            reasons.append(OTHER_LATER)
            continue
        spans[index] = span
    if not spans:
        return Skipped(name=conversation.name, reason=reasons[0])
    remarks += [f"a turn has no labels: {reason}" for reason in reasons]
    remarks += finder.invented_text(spans)
    last_span = spans[max(spans)]
    # Text after a turn without an end-of-turn token does not end it, and text after the last label is not trained on.
    is_whole = last_span.ended and max(spans) == requested[-1]
    return _Proved(
        text=whole.text if is_whole else whole.text[: last_span.end],
        spans=tuple(spans[index] for index in sorted(spans)),
        is_cut=max(spans) != requested[-1],
        reason=reasons[-1] if reasons else None,
        remarks=tuple(remarks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnFinder:
    """Finds the turns of one rendered conversation."""

    conversation: Conversation
    messages: tuple[Message, ...]
    """Up to the last assistant turn."""
    template: ChatTemplate
    whole: Rendered
    special: _Special
    ends: set[str] = field(default_factory=set)
    """End-of-turn tokens of the turns found so far."""
    lost: dict[int, list[str]] = field(default_factory=dict)
    """Fields that the template does not write, for each turn that has no labels because of them."""

    def unwritten_remarks(self) -> list[str]:
        """Return remarks on fields that the template does not write; record in `lost` those that cost a turn its
        labels."""
        tools = self.conversation.tools
        remarks = []
        if not tools_are_written(self.template, self.messages, tools):
            remarks.append("the template does not write the tools")
        for index, message in enumerate(self.messages):
            role = message["role"]
            for name in unwritten_fields(self.template, self.messages, index, tools):
                if role == ASSISTANT and costs_labels(name):
                    self.lost.setdefault(index, []).append(name)
                else:
                    remarks.append(f'the template does not write "{name}" of {role} messages')
            if len(message) > 2 and message.get("weight") not in (None, 0, 1):
                remarks.append(WEIGHED)
        return list(dict.fromkeys(remarks))

    def check_not_excluded(self, index: int) -> None:
        """Raise _Unproved for a turn that its record excludes, or that the template does not write completely."""
        message = self.messages[index]
        if message.get("weight") == 0 or message.get("train") is False:
            raise _Unproved(WITHHELD)
        if index in self.lost:
            raise _Unproved(f"the template does not write its {' and '.join(self.lost[index])}")

    def invented_text(self, spans: Mapping[int, _Span]) -> list[str]:
        """Return remarks on labelled text that the template adds before answers."""
        remarks = []
        for index, span in spans.items():
            message = self.messages[index]
            turn = self.whole.text[span.start : span.end]
            if text := added_before_answer(turn, message, _answer(message)):
                remarks.append(f"the template writes {text[:200]!a} before an answer, with labels")
        return list(dict.fromkeys(remarks))

    def span(self, index: int) -> _Span:
        """Return the span of message `index`. Raises _Unproved if it cannot be located."""
        span: _Span | None
        try:
            span = self._by_prefix(index)
        except (_Unproved, Unrenderable) as error:
            reason = str(error)
            if isinstance(error, Unrenderable):
                reason = f"the template refuses the beginning of the conversation: {error}"
            marked = self._by_mark(index)
            # A turn that begins with its prompt and changes later cannot be found by `_by_likeness` either.
            may_be_like = marked is None and reason != OTHER_LATER
            likened = self._by_likeness(index) if may_be_like else None
            span = marked or likened
            if span is None:
                raise _Unproved(reason) from None
        if span.ended:
            end = self.special.at_end(self.whole.text[span.start : span.end])
            assert end is not None
            self.ends.add(end)
        return span

    def _render(self, count: int, *, prompt: bool) -> str:
        return self.template.render(
            self.messages[:count],
            tools=self.conversation.tools,
            add_generation_prompt=prompt,
        ).text

    def _by_prefix(self, index: int) -> _Span:
        whole = self.whole.text
        is_last = index + 1 == len(self.messages)
        through = whole if is_last else self._render(index + 1, prompt=False)
        prompt = self._render(index, prompt=True)
        if not through.startswith(prompt):
            raise _Unproved(OTHER_PROMPT)
        start = len(prompt)
        header = self._header()
        if header and through.startswith(header, start) and not prompt.endswith(header):
            # Some templates write no generation prompt after a turn of the assistant.
            start += len(header)
        length, ended = self._end(through[start:], self.messages[index])
        end = start + length
        if not whole.startswith(through[:end]):
            raise _Unproved(OTHER_LATER)
        eos = self.template.eos_token
        if not ended and eos and whole.startswith(through + eos):
            end, ended = len(through) + len(eos), True
        return _Span(start=start, end=end, ended=ended)

    def _header(self) -> str:
        """Return the header of an assistant turn: what `add_generation_prompt` adds to a conversation."""
        known, key = self.template.known, ("header", self.conversation.tools is None)
        if key not in known:
            try:
                base, prompt = (
                    self.template.render(
                        [_QUESTION],
                        tools=self.conversation.tools,
                        add_generation_prompt=with_prompt,
                    ).text
                    for with_prompt in (False, True)
                )
            except Unrenderable:
                base = prompt = ""
            known[key] = (prompt[len(base) :] if prompt.startswith(base) else "",)
        return known[key][0]

    def _by_likeness(self, index: int) -> _Span | None:
        """Find a message by its rendering after a short question; None if the text does not contain it."""
        message = self.messages[index]
        header, tools = self._header(), self.conversation.tools
        if not header:
            return None
        try:
            prompt = self.template.render([_QUESTION], tools=tools, add_generation_prompt=True).text
            answered = self.template.render([_QUESTION, message], tools=tools).text
            is_last = index + 1 == len(self.messages)
            through = self.whole.text if is_last else self._render(index + 1, prompt=False)
            turn = answered[len(prompt) :]
            length, ended = self._end(turn, message)
        except (Unrenderable, _Unproved):
            return None
        start = len(through) - len(turn)
        if not answered.startswith(prompt) or not through.endswith(turn):
            return None
        if not through.endswith(header, 0, start):
            return None
        if not self.whole.text.startswith(through[: start + length]):
            return None
        return _Span(start=start, end=start + length, ended=ended)

    def _by_mark(self, index: int) -> _Span | None:
        """Find a message by its `{% generation %}` mark, trimmed to the end of the turn; None if the mark does not
        match the message."""
        assistant = [i for i, one in enumerate(self.messages) if one["role"] == ASSISTANT]
        marks, whole = self.whole.marks, self.whole.text
        if marks is None or len(marks) != len(assistant):
            return None
        start, end = marks[assistant.index(index)]
        if not self._after_header(index, start, end):
            return None
        try:
            length, ended = self._end(whole[start:end], self.messages[index])
        except _Unproved:
            return None
        eos = {self.template.eos_token} if self.template.eos_token else set()
        for token in () if ended else sorted(self.ends | eos, key=len, reverse=True):
            if whole.startswith(token, end):
                return _Span(start=start, end=end + len(token), ended=True)
        return _Span(start=start, end=start + length, ended=ended)

    def _after_header(self, index: int, start: int, end: int) -> bool:
        """Return whether a mark begins where the model begins to generate."""
        whole, message = self.whole.text, self.messages[index]
        marked_text = whole[start:end].lstrip()
        content, reasoning = _answer(message), message.get("reasoning_content")
        begins = [
            text for text in (content, "<think>", reasoning) if isinstance(text, str) and text
        ]
        if any(marked_text.startswith(text) for text in begins):
            return True
        if content == "" and self.special.are_all(marked_text):
            return True
        try:
            without = self._render(index, prompt=False)
            prompt = self._render(index, prompt=True)
        except Unrenderable:
            return False
        header = prompt.removeprefix(without)
        return header not in ("", prompt) and whole.endswith(header, 0, start)

    def _end(self, turn: str, message: Message) -> tuple[int, bool]:
        """Return the length of a turn at the beginning of `turn`, and whether an end-of-turn token ends it.

        Raises _Unproved if the content is missing, or is followed by anything but an end of the turn.
        """
        length = len(turn.rstrip())
        answer = _answer(message)
        if answer is None or message.get("tool_calls"):
            if answer and answer not in turn:
                raise _Unproved(OTHER_CONTENT)
            return length, self.special.at_end(turn[:length]) is not None
        begin = _after_reasoning(turn, message)
        if turn.find(answer, begin) < 0:
            # The template left the reasoning out: the text that looked like reasoning belongs to the answer.
            begin = 0
        # A short answer may also occur in a header, so the text after it decides.
        position = turn.find(answer, begin)
        while position >= 0:
            end = self.special.end_of_run(turn, position + len(answer))
            if end is not None:
                return end, True
            position = turn.find(answer, position + 1) if answer else -1
        # A special token that belongs neither to the content nor to the end begins something else, such as the next
        # turn, which some templates always open.
        count = self.special.count
        ends = turn[:length].endswith(answer) if answer else not turn[begin:length]
        if ends and count(turn) == count(str(message["content"])):
            return length, False
        raise _Unproved(OTHER_CONTENT)


def _after_reasoning(turn: str, message: Message) -> int:
    """Return the character offset at which the reasoning in a turn ends, 0 if there is none."""
    position = turn.rfind("</think>")
    if position >= 0:
        return position + len("</think>")
    reasoning = next((message[key] for key in REASONING if message.get(key)), None)
    position = turn.find(reasoning.strip()) if isinstance(reasoning, str) else -1
    return position + len(reasoning.strip()) if position >= 0 and isinstance(reasoning, str) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Special:
    """Finds the special tokens of a tokenizer in text; some tokenizers have thousands."""

    texts: frozenset[str]
    lengths: tuple[int, ...]
    """Lengths of the special tokens in characters, the longest first."""

    def at_end(self, text: str) -> str | None:
        """Return the longest special token that a text ends with."""
        ends = (text[-length:] for length in self.lengths)
        return next((end for end in ends if end in self.texts), None)

    def end_of_run(self, text: str, at: int) -> int | None:
        """Return the end of the run of special tokens that begins at `at`, after optional white space.

        The last token is left out if text follows it directly: it begins a header. None if no token remains.
        """
        begin = at = len(text) - len(text[at:].lstrip())
        length = 0
        while token := next(filter(self.texts.__contains__, self._beginnings(text, at)), ""):
            length = len(token)
            at += length
        if at < len(text) and not text[at].isspace():
            at -= length
        return at if at > begin else None

    def _beginnings(self, text: str, at: int) -> Iterator[str]:
        return (text[at : at + length] for length in self.lengths)

    def are_all(self, text: str) -> bool:
        """Return whether a text consists of special tokens and white space only."""
        text = text.rstrip()
        while (token := self.at_end(text)) is not None:
            text = text[: -len(token)].rstrip()
        return not text

    def count(self, text: str) -> int:
        return sum(text.count(token) for token in self.texts)


@functools.lru_cache(maxsize=4)
def _special(tokens: frozenset[str], eos: str | None) -> _Special:
    texts = (tokens | {eos} if eos else tokens) - {""}
    lengths = sorted({len(token) for token in texts}, reverse=True)
    return _Special(texts=texts, lengths=tuple(lengths))


def _answer(message: Message) -> str | None:
    """Return the text of a message without the reasoning before it."""
    content = message.get("content")
    if not isinstance(content, str):
        return None
    return content.rpartition("</think>")[2].strip()
