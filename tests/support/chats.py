"""Chat templates of five styles, conversations to render with them, and a small tokenizer that has their tokens.

Each template is written for these tests in the style of a family. With marks, `{% generation %}` stands around
what the assistant writes, its end-of-turn token included.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.chat_template import ChatTemplate
from engine.formats.tokenizer import Tokenizer, open_tokenizer

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    name: str
    marked: str
    """The template, with marks."""
    bos: str | None = None
    eos: str
    end: str
    """The end-of-turn token."""

    @property
    def plain(self) -> str:
        return self.marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")

    @property
    def special_tokens(self) -> dict[str, str]:
        return {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})

    def template(self, *, marks: bool = False, text: str | None = None) -> ChatTemplate:
        text = text or (self.marked if marks else self.plain)
        return ChatTemplate(
            texts={"default": text}, special_tokens=self.special_tokens, where=self.name
        )


CHATML = Style(
    name="chatml",
    eos="<|im_end|>",
    end="<|im_end|>",
    marked="".join(
        line.strip()
        for line in """\
{%- for message in messages -%}
  {{ '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' -%}
    {% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
  {%- else -%}
    {{ message.content + '<|im_end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".splitlines()
    ),
)

QWEN3 = Style(
    name="qwen3",
    eos="<|im_end|>",
    end="<|im_end|>",
    marked="".join(
        line.strip()
        for line in """\
{%- if tools -%}
  {{ '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}
  {{ '# Tools\\n\\n<tools>' }}
  {%- for tool in tools -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
  {{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
  {{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- set ns = namespace(last=messages | length - 1, found=false) -%}
{%- for message in messages[::-1] -%}
  {%- if not ns.found and message.role == 'user' -%}
    {%- set ns.found = true -%}{%- set ns.last = messages | length - loop.index -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set thinking = message.reasoning_content or '' -%}
    {%- if '</think>' in content -%}
      {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{ '<|im_start|>assistant\\n' }}
    {% generation %}
    {%- if loop.index0 > ns.last and (loop.last or thinking) -%}
      {{ '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif -%}
    {{ content.lstrip('\\n') }}
    {%- for call in message.tool_calls or [] -%}
      {{ '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
    {%- endfor -%}
    {{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
""".splitlines()
    ),
)

LLAMA3 = Style(
    name="llama3",
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    end="<|eot_id|>",
    marked="".join(
        line.strip()
        for line in """\
{{- bos_token -}}
{%- for message in messages -%}
  {{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
  {%- if message.role == 'assistant' -%}
    {% generation %}
    {%- if message.tool_calls -%}
      {{ '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
      {{ message.tool_calls[0].function.arguments | tojson }}{{ '}' }}
    {%- else -%}
      {{ message.content | trim }}
    {%- endif -%}
    {{ '<|eot_id|>' }}{% endgeneration %}
  {%- else -%}
    {{ message.content | trim + '<|eot_id|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
""".splitlines()
    ),
)

GEMMA = Style(
    name="gemma",
    bos="<bos>",
    eos="<eos>",
    end="<end_of_turn>",
    marked="".join(
        line.strip()
        for line in """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif -%}
  {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
  {%- if message.role == 'assistant' -%}
    {% generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}
  {%- else -%}
    {{ message.content | trim + '<end_of_turn>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""".splitlines()
    ),
)

MISTRAL = Style(
    name="mistral",
    bos="<s>",
    eos="</s>",
    end="</s>",
    marked="".join(
        line.strip()
        for line in """\
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate user and assistant') }}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{ '[INST] ' }}
    {%- if system and loop.index0 // 2 == (rest | length - 1) // 2 -%}{{ system + '\\n\\n' }}{%- endif -%}
    {{ message.content + '[/INST]' }}
  {%- else -%}
    {% generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}
  {%- endif -%}
{%- endfor -%}
""".splitlines()
    ),
)

STYLES = {one.name: one for one in (CHATML, QWEN3, LLAMA3, GEMMA, MISTRAL)}
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<s>", "</s>", "[INST]", "[/INST]"),
)

_TEXT = (
    "the water boils at one hundred degrees and then turns to steam; please tell me more about this, in short. "
    "Certainly! Here is a list of what you asked for: first the name, second the place, third the time.\n\n"
    "assistant user system tool\n\nthink I should look at the question again.\n"
)
_WORDS = _TEXT.split(" ")
_ODD = (
    "naïve café",
    "温度是多少？",
    "👩‍👧 wow 🎉",
    "e\u0301te\u0301",
    "مرحبا",
    "a\u00a0b",
    "tab\there",
    "  two",
)


def make_tokenizer(
    folder: Path, *, size: int = 700, trim_offsets: bool = False, nfc: bool = False
) -> Tokenizer:
    """Train a byte-level BPE that has the special tokens of all styles, and open it."""
    from tokenizers import (
        Regex,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from tokenizers import Tokenizer as Inner

    from engine.formats.tokenizer import PRE_TOKENIZERS

    inner = Inner(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["qwen2"].splits[0]), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    inner.decoder = decoders.ByteLevel()
    if nfc:
        inner.normalizer = normalizers.NFC()
    if trim_offsets:
        inner.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Blank lines often enough that two of them are one token.
    inner.train_from_iterator([_TEXT, *_ODD, "a\n\nb\n\nc\n\n" * 20], trainer)
    inner.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder)


def conversations(count: int = 200, seed: int = 43) -> list[Record]:
    """Return records of every kind: with and without system prompt, tools, empty turns, unicode, reasoning as a
    key and in the text, one to four turns, and with a user's turn at the end.
    """
    rng = random.Random(seed)

    def text(least: int = 1) -> str:
        words = rng.choices(_WORDS, k=rng.randint(least, 12))
        if rng.random() < 0.3:
            words.insert(rng.randrange(len(words) + 1), rng.choice(_ODD))
        return " ".join(words) + rng.choice(["", "", ".", "\n", " ", "!\n\n"])

    found = []
    for number in range(count):
        messages: list[Record] = []
        record: Record = {"messages": messages}
        if number % 4 == 1:
            messages.append({"role": "system", "content": text()})
        with_tools = number % 5 == 2
        thinking = number % 3 == 0
        if with_tools:
            record["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": f"look_up_{number % 7}",
                        "description": rng.choice(_ODD),
                        "parameters": {"type": "object", "properties": {}},
                    },
                }
            ]
        for turn in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text()})
            if with_tools and turn == 0:
                call = {"name": "look_up", "arguments": {"what": rng.choice(_ODD)}}
                messages.append(
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": call}],
                    }
                )
                messages.append({"role": "tool", "content": json.dumps({"found": text()})})
            answer: Record = {"role": "assistant", "content": text()}
            if rng.random() < 0.08:
                answer["content"] = ""
            elif thinking and rng.random() < 0.5:
                answer["content"] = f"<think>\n{text()}\n</think>\n\n{answer['content']}"
            elif thinking:
                answer["reasoning_content"] = text()
            messages.append(answer)
        if number % 10 == 9:
            messages.append({"role": "user", "content": text()})
        found.append(record)
    return found
