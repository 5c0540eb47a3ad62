"""Labels of 15 kinds of conversations on every chat template of a folder:
`python evidence/chat/templates.py FOLDER OUT`.

FOLDER holds files of Jinja, as `trl/chat_templates` of an installed TRL does. OUT has a line of JSON for each template
and kind: the labelled text, or why there is none. To see what a change does, run it with two checkouts on PYTHONPATH
and compare; `--compare BEFORE AFTER` prints the rows that differ, equal differences together (`templates.txt`).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
ENDS = {
    **{"gemma4": "<turn|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi": "<|end|>"},
    **{"gptoss": "<|return|>", "glm": "<|endoftext|>", "cohere": "<|END_OF_TURN_TOKEN|>"},
    **{"deepseek": "<｜end▁of▁sentence｜>", "qwen": "<|im_end|>", "lfm": "<|im_end|>"},
    **{"nemotron": "<|im_end|>", "smol": "<end_of_utterance>", "idefics": "<end_of_utterance>"},
}
SPECIAL = re.compile(
    r"<\|[^|<>{}%\n]{1,40}\|>|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>|<[a-z_/]{1,24}>|\[/?[A-Z_]{2,20}\]|<｜[^｜]{1,40}｜>"
)


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(text: str, arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    result = {"role": "tool", "content": "warm", "name": "weather", "tool_call_id": "call00001"}
    return [user("Q1"), says(text, tool_calls=[call]), result, says("A2")]


TALK = [user("Q1"), says("A1"), user("Q2"), says("A2")]
KINDS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "one turn": (TALK[:2], False),
    "three turns": ([*TALK, user("Q3"), says("A3")], False),
    "a system prompt": ([{"role": "system", "content": "S"}, *TALK], False),
    "a question at the end": ([*TALK, user("Q3")], False),
    "a call": (called("", {"city": "Rome"}), True),
    "a call with arguments as text": (called("", '{"city": "Rome"}'), True),
    "a call and a content": (called("A1", {"city": "Rome"}), True),
    "reasoning": (
        [
            user("Q1"),
            says("A1", reasoning_content="R1"),
            user("Q2"),
            says("A2", reasoning_content="R2"),
        ],
        False,
    ),
    "reasoning in the last turn": ([*TALK[:3], says("A2", reasoning_content="R2")], False),
    "reasoning in the content": (
        [
            user("Q1"),
            says("<think>\nR1\n</think>\n\nA1"),
            user("Q2"),
            says("<think>\nR2\n</think>\n\nA2"),
        ],
        False,
    ),
    "a first turn": ([says("A1"), *TALK[2:]], False),
    "two turns in a row": ([*TALK[:2], says("A2"), user("Q3"), says("A3")], False),
    "names": (
        [user("Q1"), says("A1", name="bob"), user("Q2", name="ann"), says("A2", name="eve")],
        False,
    ),
    "tools that are not called": (TALK[:2], True),
    "weights": ([user("Q1"), says("A1", weight=0), user("Q2"), says("A2", weight=1)], False),
}


def tokenizer_for(text: str, folder: Path) -> Any:
    """Make a byte-level tokenizer with the special tokens that a template names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from engine.formats.tokenizer import open_tokenizer

    special = sorted({*SPECIAL.findall(text), "<|endoftext|>", "<bos>", "<eos>", "</s>", "<s>"})
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["a"], trainer)
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder)


def labelled(path: Path, folder: Path) -> list[list[Any]]:
    """Return template, kind and labelled runs, or the reason, for each kind."""
    from engine.data.chat_labels import Chat, encode_chats
    from engine.data.chat_template import ChatTemplate
    from engine.data.conversations import read_conversation

    text, name = path.read_text(), path.stem
    eos = next((end for family, end in ENDS.items() if name.startswith(family)), "</s>")
    tokenizer = tokenizer_for(text + eos, folder / name)
    special = {"eos_token": eos, "bos_token": "<bos>"}
    now = datetime(2024, 7, 26)
    template = ChatTemplate(texts={"default": text}, special_tokens=special, where=name, now=now)
    rows: list[list[Any]] = []
    for kind, (messages, has_tools) in KINDS.items():
        record = {"messages": messages} | ({"tools": [TOOL]} if has_tools else {})
        (found,) = encode_chats([read_conversation(record, kind)], tokenizer, template)
        if not isinstance(found, Chat):
            rows.append([name, kind, found.reason])
            continue
        edges = np.flatnonzero(np.diff(found.labelled.astype(int), prepend=0, append=0))
        runs = [tokenizer.decode(found.ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
        rows.append([name, kind, runs])
    return rows


def compare(before: Path, after: Path) -> None:
    """Print the rows that differ between two outputs."""
    old, new = (
        {
            (name, kind): found
            for name, kind, found in map(json.loads, path.read_text().splitlines())
        }
        for path in (before, after)
    )
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (name, kind), found in new.items():
        if (was := old.get((name, kind))) != found:
            groups[kind, json.dumps(was), json.dumps(found)].append(name)
    print(f"{len(new):,} rows, {sum(map(len, groups.values())):,} differ")
    for (kind, was, found), names in sorted(groups.items()):
        print(f"{kind}, {len(names)} templates ({', '.join(names[:4])})\n  {was}\n  {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs=2)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    first, second = options.paths
    if options.compare:
        compare(first, second)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row for path in sorted(first.glob("*.jinja")) for row in labelled(path, Path(folder))
        ]
    second.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows):,} rows")


if __name__ == "__main__":
    main()
