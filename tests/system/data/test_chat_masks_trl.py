"""The labels of 200 conversations in five styles beside those of TRL's own SFTTrainer. Every difference is of a class
that `docs/reference/chat-masks.md` lists.

What the suite's own environment lacks is skipped there and run by `make frameworks`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.data.chat_labels import STRADDLING as STRADDLES
from engine.data.chat_labels import Chat, encode_chats
from engine.data.conversations import Conversation, read_conversation
from engine.formats.tokenizer import Tokenizer
from tests.support.chat_masks import (
    AFTER_END,
    LATER,
    STRADDLING,
    all_chats,
    classes,
    reference,
    rendered,
    tools,
    whole,
    written_by,
)
from tests.support.chats import (
    CHATML,
    GEMMA,
    LLAMA3,
    MISTRAL,
    QWEN3,
    STYLES,
    Style,
    make_tokenizer,
)
from tests.support.lacks import needs

pytestmark = [
    needs("TRL", find_spec("trl") is not None),
    # Of the defaults that TRL gives to Transformers.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

Row = tuple[list[int], NDArray[np.bool_]]
"""The tokens of a conversation, and which of them have a label."""
BATCH = 8
ASSISTANT_ONLY = {"assistant_only_loss": True}
COMPLETION_ONLY = {"completion_only_loss": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats() -> list[Conversation]:
    return all_chats()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the trainer makes its folder when it is made


def record(chat: Conversation, mode: dict[str, bool]) -> dict[str, Any]:
    """A row of a data set, as its users write it: with the last turn as completion, or all messages."""
    messages = rendered(chat)
    pair = {"prompt": messages[:-1], "completion": messages[-1:]}
    # Columns are those of the first row. TRL reads tools from JSON, too.
    given = None if tools(chat) is None else json.dumps(tools(chat))
    return (pair if mode is COMPLETION_ONLY else {"messages": whole(chat)}) | {"tools": given}


def trained_on(
    tokenizer: Tokenizer,
    style: Style,
    text: str,
    records: list[dict[str, Any]],
    mode: dict[str, bool],
) -> Iterator[Row]:
    """Yield each row as the batches of an SFTTrainer hold it, without its padding."""
    from datasets import Dataset, disable_progress_bars
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}
    settings |= {"max_length": None, "shuffle_dataset": False}
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        train_dataset=Dataset.from_list(records),
        processing_class=reference(tokenizer, text, style.special_tokens),
        args=SFTConfig(output_dir="out", **settings, **mode),
    )
    rows = list(trainer.train_dataset)
    assert len(rows) == len(records)
    for begin in range(0, len(rows), BATCH):
        names = ("input_ids", "labels")
        batch = trainer.data_collator(
            [{name: row[name] for name in names} for row in rows[begin : begin + BATCH]]
        )
        for ids, labels, there in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            kept = ids[there.bool()].tolist()
            assert (labels[~there.bool()] == -100).all()
            labelled = labels[there.bool()]
            assert labelled[labelled != -100].tolist() == ids[labels != -100].tolist()
            yield kept, (labelled != -100).numpy()


def both(
    tokenizer: Tokenizer, style: Style, text: str, chats: list[Conversation], mode: dict[str, bool]
) -> Iterator[tuple[Conversation, Chat, Row]]:
    """Yield what we and TRL make of each conversation that the template does not refuse."""
    turns = "last" if mode is COMPLETION_ONLY else "all"
    chats = written_by(style.name, chats)
    made = encode_chats(chats, tokenizer, style.template(text=text), turns=turns)  # type: ignore[arg-type]
    pairs = [(chat, one) for chat, one in zip(chats, made, strict=True) if isinstance(one, Chat)]
    theirs = trained_on(tokenizer, style, text, [record(chat, mode) for chat, _ in pairs], mode)
    for (chat, ours), row in zip(pairs, theirs, strict=True):
        yield chat, ours, row


def compared(
    tokenizer: Tokenizer, style: Style, text: str, chats: list[Conversation], mode: dict[str, bool]
) -> dict[str, int]:
    """Count the conversations of each class of difference."""
    counts: Counter[str] = Counter()
    for chat, ours, (ids, mask) in both(tokenizer, style, text, chats, mode):
        size = len(ours.ids)
        if mode is ASSISTANT_ONLY and whole(chat)[-1]["role"] == "user":
            # They go on to the user's turn, which may change what the template writes before it.
            counts[LATER] += 1
            if ids[:size] != ours.ids.tolist():
                counts[f"{LATER}, and other tokens"] += 1
            else:
                assert mask[:size].tolist() == ours.labelled.tolist() and not mask[size:].any()
            continue
        assert ids == ours.ids.tolist()
        counts.update(classes(ours, mask, tokenizer) or {"equal"})
    return dict(counts)


MESSAGES = {
    "chatml": {"equal": 180, LATER: 20},
    "qwen3": {"equal": 140, STRADDLING: 40, LATER: 20, f"{LATER}, and other tokens": 20},
    "llama3": {"equal": 180, LATER: 20},
    "gemma": {"equal": 110, LATER: 10},
    "mistral": {"equal": 140, LATER: 20, f"{LATER}, and other tokens": 10},
}
PAIRS = {
    "chatml": {AFTER_END: 200},
    "qwen3": {AFTER_END: 200},
    "llama3": {"equal": 200},
    "gemma": {AFTER_END: 120},
    "mistral": {"equal": 160},
}


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_messages_with_right_marks_have_the_same_labels(
    style: Style, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    found = compared(tokenizer, style, style.marked, chats, ASSISTANT_ONLY)
    assert found == MESSAGES[style.name]


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_prompts_and_completions_differ_in_what_follows_the_end(
    style: Style, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    found = compared(tokenizer, style, style.plain, chats, COMPLETION_ONLY)
    assert found == PAIRS[style.name]


def test_a_prompt_that_ends_in_the_middle_of_a_token(tokenizer: Tokenizer) -> None:
    """The generation prompt opens the reasoning, and an answer without reasoning begins with a blank line. TRL labels
    what comes after the tokens that the prompt alone and the whole have in common."""
    text = QWEN3.plain.replace(
        "{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined",
        "{{ '<|im_start|>assistant\\n<think>\\n' }}{%- if enable_thinking is defined",
    )
    assert text != QWEN3.plain
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chat = read_conversation({"messages": messages}, "here")
    ((_, ours, (ids, mask)),) = both(tokenizer, QWEN3, text, [chat], COMPLETION_ONLY)
    assert ids == ours.ids.tolist() and STRADDLES in ours.remarks
    label = tokenizer.decode(ours.ids[ours.labelled])
    assert label == "</think>\n\nHello<|im_end|>"
    assert tokenizer.decode(np.array(ids)[mask]) == f"\n\n{label}\n"


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_a_template_without_marks_is_refused_there(
    style: Style, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    with pytest.raises(ValueError, match="not training-compatible"):
        list(both(tokenizer, style, style.plain, chats[:4], ASSISTANT_ONLY))


@pytest.mark.parametrize("mode", [ASSISTANT_ONLY, COMPLETION_ONLY], ids=("messages", "pairs"))
@pytest.mark.parametrize("style", [GEMMA, MISTRAL], ids=lambda style: style.name)
def test_one_conversation_that_the_template_refuses_ends_the_run_there(
    style: Style, mode: dict[str, bool], tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    records = [record(chat, mode) for chat in chats]
    with pytest.raises(Exception, match="ole"):
        list(trained_on(tokenizer, style, style.marked, records, mode))


def test_offsets_without_white_space_end_the_run_there(
    tmp_path: Path, chats: list[Conversation]
) -> None:
    trimming = make_tokenizer(tmp_path / "trimming", trim_offsets=True)
    with pytest.raises(RuntimeError, match="no assistant tokens"):
        list(both(trimming, MISTRAL, MISTRAL.marked, chats, ASSISTANT_ONLY))


KNOWN = {
    "llama3": (LLAMA3, Counter({"equal": 200})),
    "gemma": (GEMMA, Counter({"⏎ after each end": 120})),
    "qwen2_5": (QWEN3, Counter({"⏎ before each turn and after each end": 200})),
    "qwen3": (QWEN3, Counter({"⏎ after each end": 42, "another text": 158})),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_template_that_trl_knows_is_replaced_there(
    name: str, tokenizer: Tokenizer, chats: list[Conversation]
) -> None:
    import trl.chat_template_utils

    style, expected = KNOWN[name]
    text = getattr(trl.chat_template_utils, f"{name}_chat_template")
    counts: Counter[str] = Counter()
    for _, ours, (ids, mask) in both(tokenizer, style, text, chats, ASSISTANT_ONLY):
        size = len(ours.ids)
        if ids[:size] != ours.ids.tolist():
            counts["another text"] += 1
            continue
        assert not mask[size:].any() and mask[:size][ours.labelled].all()
        more = np.flatnonzero(mask[:size] & ~ours.labelled)
        assert all(tokenizer.decode([ours.ids[at]]) == "\n" for at in more)
        per_turn = {0: "equal", 1: "⏎ after each end", 2: "⏎ before each turn and after each end"}
        turns = np.count_nonzero(np.diff(ours.labelled.astype(int), prepend=0) == 1)
        counts[per_turn[len(more) // turns]] += 1
        assert len(more) % turns == 0
    assert counts == expected


def test_the_qwen3_template_of_trl_writes_reasoning_into_every_turn(tokenizer: Tokenizer) -> None:
    import trl.chat_template_utils

    messages = [
        {"role": "user", "content": "At what?"},
        {"role": "assistant", "content": "It boils."},
    ] * 2
    chat = read_conversation({"messages": messages}, "here")
    text = trl.chat_template_utils.qwen3_chat_template
    ((_, ours, (ids, mask)),) = both(tokenizer, CHATML, text, [chat], ASSISTANT_ONLY)
    turn = "<think>\n\n</think>\n\nIt boils.<|im_end|>"
    assert tokenizer.decode(np.array(ids)[mask]) == f"{turn}\n" * 2
    assert tokenizer.decode(ours.ids[ours.labelled]) == turn
    assert "assistant\nIt boils.<|im_end|>" in tokenizer.decode(ours.ids)
