# ruff: noqa: E501
"""Long conversations, and templates that fail in unusual ways."""

from __future__ import annotations

from typing import Any

import pytest

from engine.data.chat_template import ChatTemplate
from engine.data.template_program import Unrenderable
from engine.errors import TokenizerError

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HI = [{"role": "user", "content": "Hi"}]
R = "range(99999)"


def make(text: str, **given: Any) -> ChatTemplate:
    return ChatTemplate(texts={"default": text}, special_tokens={}, where="test", **given)


def test_a_long_conversation_is_rendered() -> None:
    message = {"role": "user", "content": "word " * 20}
    assert make(CHATML).render([message] * 20_000).text.count("word") == 400_000
    large = {"role": "user", "content": "word " * 10_000_000}
    assert len(make(CHATML).render([large]).text) > 50_000_000
    # Each message is compared with those before it.
    pairs = "{% for m in messages %}{% for n in messages[:loop.index0] %}{% if m.content == n.content %}{% endif %}{% endfor %}{% endfor %}"
    assert make(pairs).render([{"role": "user", "content": f"{i}"} for i in range(900)]).text == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ '\\ud800' }}", "lone surrogate"),
        ("{% set x = 1e999 %}{{ x }}", "NameError"),
        ("{% include 'x' %}", "no loader"),
        ("{% extends messages %}", "."),
        ("{{ [] | first.x }}", "."),
    ],
)
def test_a_template_that_fails_in_other_ways_is_refused_too(text: str, said: str) -> None:
    with pytest.raises((Unrenderable, TokenizerError), match=said):
        make(text).render(HI)


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in x %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 200 + "{% endif %}" * 200,
        "{{ " + "9" * 5000 + " }}",
        "{% macro m(a, a) %}{% endmacro %}",
        "{% break %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "x" * (1 << 20),
    ],
)
def test_a_text_that_python_cannot_compile_is_no_template(text: str) -> None:
    with pytest.raises(TokenizerError, match="expected a Jinja template"):
        make(text)


def test_a_reason_with_half_of_a_surrogate_pair_can_be_written() -> None:
    with pytest.raises(Unrenderable) as raised:
        make("{{ raise_exception('a\\ud800') }}").render(HI)
    assert str(raised.value).encode() == b"a\\ud800"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user"),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('-') }}",
            "Hi",
        ),
        ("{% if messages | selectattr('role', 'equalto', 'x') %}yes{% endif %}", "yes"),
        (
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=user;content=Hi;",
        ),
        ("{% for k, v in messages[0] | dictsort %}{{ k }};{% endfor %}", "content;role;"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}|{x}'.format(1, x=2) }}", "a-007   1|2"),
        (
            "{{ 'a,b,c'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'abc'[::-1] }}{{ [3, 1] | sort | join }}",
            "cxcba13",
        ),
        (
            "{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 5 - 7 }}{{ 1 < 2 < 3 }}",
            "6abab3332-2True",
        ),
        (
            "{{ 'H' in messages[0].content }}{{ 'x' not in 'abc' }}{{ 'a' in {'a': 1} }}{{ 1 in [1] }}",
            "TrueTrueTrueTrue",
        ),
        (
            "{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
            "12",
        ),
        (
            "{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum }}{{ 2.567 | round(1) }}{{ 'x' | center(3) }}",
            "[1, 2]32.6 x ",
        ),
        (
            "{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}/{{ loop.length }};{% else %}none{% endfor %}",
            "1/2;2/2;",
        ),
        (
            "{{ 'a\nb' | indent(2) }}{{ range(3) | batch(2, 0) | list }}{{ '<' | e }}",
            "a\n  b[[0, 1], [2, 0]]&lt;",
        ),
    ],
)
def test_what_templates_do_is_done_as_before(text: str, written: str) -> None:
    assert make(text).render(HI).text == written
