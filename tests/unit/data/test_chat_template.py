from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.demo
from engine.data.chat_template import ChatTemplate, Unrenderable, find_chat_template, template_of
from engine.errors import TokenizerError
from engine.formats.gguf_write import write_gguf
from engine.formats.open import open_weights
from engine.formats.tokenizer import open_tokenizer
from tests.support.chats import make_tokenizer
from tests.support.kit import tiny_config

DEMO = Path(engine.demo.__file__).parent / "teacher"

HI = [{"role": "user", "content": "Hi"}]


def make(text: str, **given: Any) -> ChatTemplate:
    return ChatTemplate(texts={"default": text}, special_tokens={}, where="test", **given)


def rendered(text: str, **given: Any) -> str:
    return make(text).render(HI, **given).text


def marks(text: str) -> list[str] | None:
    found = make(text).render(HI, find_marks=True)
    return None if found.marks is None else [found.text[a:b] for a, b in found.marks]


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        path = folder / name.replace("__", "/").replace("_json", ".json").replace(
            "_jinja", ".jinja"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    write(tmp_path, tokenizer_config_json={"eos_token": "</s>"})
    assert find_chat_template(tmp_path) is None


def test_a_file_of_its_own_wins_over_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": "config", "eos_token": "</s>"})
    found = find_chat_template(tmp_path / "tokenizer.json")
    assert found is not None and found.render(HI).text == "config"
    write(tmp_path, chat_template_jinja="file{{ eos_token }}{{ bos_token }}")
    found = find_chat_template(tmp_path)
    assert found is not None and found.render(HI).text == "file</s>"
    assert found.where == str(tmp_path / "chat_template.jinja")


def test_named_templates_are_taken_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config_json={"chat_template": named})
    for files in (
        {},
        {"chat_template_jinja": "plain", "additional_chat_templates__tool_use_jinja": "tools"},
    ):
        write(tmp_path, **files)
        found = find_chat_template(tmp_path)
        assert found is not None
        assert found.render(HI).text == "plain"
        assert found.render(HI, tools=[{}]).text == "tools"
    only = ChatTemplate(texts={"rag": "x"}, special_tokens={}, where="here")
    with pytest.raises(
        TokenizerError, match="expected a template named 'default', found only 'rag'"
    ):
        only.render(HI)


def test_special_tokens_are_texts_or_tables_and_the_map_is_for_old_files(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ add_bos_token }}",
        "bos_token": {"content": "<s>", "special": True},
        "add_bos_token": True,
        "eos_token": "</s>",
        "extra_special_tokens": {"image_token": "<image>"},
    }
    write(
        tmp_path,
        tokenizer_config_json=config,
        special_tokens_map_json={"eos_token": {"content": "<e>"}},
    )
    found = find_chat_template(tmp_path)
    assert found is not None and found.render(HI).text == "<s><e><image>"
    write(tmp_path, tokenizer_config_json=config | {"added_tokens_decoder": {}})
    found = find_chat_template(tmp_path)
    assert found is not None and found.render(HI).text == "<s></s><image>"
    assert found.eos_token == "</s>"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (7, "found 7"),
        ([{"name": "default"}], "found {'name': 'default'}"),
        ("{% if %}", "expected a Jinja template, found Expected an expression"),
        ("{% wrong %}", "Encountered unknown tag 'wrong'"),
        ("{% generation %}", "a Jinja template, found Unexpected end of template"),
    ],
)
def test_what_is_no_template_is_refused_in_one_line(tmp_path: Path, found: Any, said: str) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": found})
    with pytest.raises(TokenizerError) as raised:
        find_chat_template(tmp_path)
    assert said in str(raised.value) and "tokenizer_config.json" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_renders_as_transformers_says() -> None:
    assert rendered("  {% if true %}\n a{% endif %}\n b\n") == " a b"
    assert rendered("{{ {'a': '<&>\u00e9', 'b': [1]} | tojson }}") == '{"a": "<&>\u00e9", "b": [1]}'
    assert rendered("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert (
        rendered("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert rendered("{{ messages[0].content }}{{ tools }}{{ missing }}") == "HiNone"
    assert rendered("{{ add_generation_prompt }}", add_generation_prompt=True) == "True"
    assert rendered("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}") == "2"
    assert rendered("{{ dict(a=1).a }}") == "1"


def test_nulls_are_left_out_and_reasoning_has_each_of_its_names() -> None:
    template = make(
        "{{ messages[0].content is defined }} {{ messages[0].thinking }} {{ messages[0].reasoning_content }}"
    )
    for key in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": None, key: "so"}
        assert template.render([message]).text == "False so so"


def test_the_clock_is_the_one_that_was_given() -> None:
    then = datetime(2026, 2, 3)
    template = make("{{ strftime_now('%d %b %Y') }}", now=then)
    assert template.render(HI).text == "03 Feb 2026"
    assert template.reads_clock and not make("a").reads_clock


def test_variables_reach_the_template() -> None:
    template = make("{{ enable_thinking is false }}", variables={"enable_thinking": False})
    assert template.render(HI).text == "True"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('no\n system  role') }}", "^no system role$"),
        ("{{ messages[0].content + 3 }}", "TypeError: can only concatenate"),
        ("{{ messages[7].content }}", "undefined|has no element"),
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ strftime_now.__globals__ }}{{ strftime_now.__globals__.os }}", "unsafe"),
        ("{{ dict.__subclasses__() }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(text: str, said: str) -> None:
    with pytest.raises(Unrenderable, match=said) as raised:
        rendered(text)
    assert "\n" not in str(raised.value)


def test_marks_are_where_the_text_is() -> None:
    assert marks("a{% generation %}b{% endgeneration %}c{% generation %}{% endgeneration %}d") == [
        "b",
        "",
    ]
    assert marks("abc") == []
    # In a macro and in a block that is stored, where the text written so far says nothing.
    assert marks(
        "{% macro m() %}x{% generation %}y{% endgeneration %}{% endmacro %}a{{ m() }}"
    ) == ["y"]
    assert marks("{% set s %}x{% generation %}y{% endgeneration %}{% endset %}a{{ s }}") == ["y"]


def test_marks_that_cannot_be_placed_are_none() -> None:
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    assert marks(nested) is None
    # The mark keeps the blank from being trimmed, so the marked text is another.
    assert (
        marks("{% set s %}{% generation %} y{% endgeneration %}{% endset %}{{ s | trim }}") is None
    )
    assert marks("\ufdd0{% generation %}y{% endgeneration %}") is None
    assert make("a{% generation %}b{% endgeneration %}").render(HI).marks is None


def test_what_is_set_in_a_mark_is_not_seen_outside() -> None:
    text = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert rendered(text) == "21"


def test_a_gguf_brings_its_template_and_its_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    bos, eos = tokenizer.id_of("<s>"), tokenizer.id_of("</s>")
    rows = tokenizer.vocab_size
    write_gguf(
        path,
        config=tiny_config(head_dim=8, vocab_size=rows, bos_token_id=bos, eos_token_id=eos),
        tensors=[("token_embd.weight", torch.zeros(rows, 32))],
        tokenizer_json=tokenizer.raw,
        metadata={
            "tokenizer.chat_template": "{{ bos_token }}a{{ eos_token }}",
            "tokenizer.chat_template.tool_use": "with tools",
        },
    )
    with open_weights(path) as weights:
        raw = weights.tokenizer_json()
        assert raw is not None
        template = template_of(weights, open_tokenizer(path, raw=raw))
    assert template is not None
    assert template.render(HI).text == "<s>a</s>" and template.eos_token == "</s>"
    assert template.render(HI, tools=[{}]).text == "with tools"
    assert str(path) in template.where
    with open_weights(DEMO) as weights:
        assert template_of(weights, tokenizer) is None
