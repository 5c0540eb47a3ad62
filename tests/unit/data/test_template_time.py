# ruff: noqa: E501
"""Templates that take time and write nothing: each ends, with a reason, and soon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import limits
from engine.data.chat import Chat, encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import Conversation
from engine.data.left_out import Skipped
from engine.data.template_program import Unrenderable
from engine.errors import TokenizerError
from tests.support.chats import make_tokenizer

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HI = [{"role": "user", "content": "Hi"}]
R = "range(99999)"

LOOPS = {
    "two loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "three loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% for c in {R} %}}{{% set x = 1 %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "a condition that is never true": f"{{% for a in {R} %}}{{% for b in {R} if false %}}{{% endfor %}}{{% endfor %}}",
    "loops that go on": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% continue %}}{{% endfor %}}{{% endfor %}}",
    "a macro in loops": f"{{% macro m() %}}{{% for b in {R} %}}{{% endfor %}}{{% endmacro %}}{{% for a in {R} %}}{{% set x = m() %}}{{% endfor %}}",
    "macros that call two": "".join(
        f"{{% macro m{i}() %}}{f'{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}' if i else ''}{{% endmacro %}}"
        for i in range(40)
    )
    + "{{ m39() }}",
    "blocks that call two": "{% if false %}"
    + "".join(
        f"{{% block b{i} %}}{f'{{{{ self.b{i - 1}() }}}}{{{{ self.b{i - 1}() }}}}' if i else ''}{{% endblock %}}"
        for i in range(40)
    )
    + "{% endif %}{{ self.b39() }}",
    "a recursive loop": "{% for a in [[1, 1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "a call block in loops": f"{{% macro m() %}}{{{{ caller() }}}}{{% endmacro %}}{{% for a in {R} %}}{{% for b in {R} %}}{{% call m() %}}{{% endcall %}}{{% endfor %}}{{% endfor %}}",
    "filters that yield": f"{{% for a in {R} %}}{{% set x = {R} | map('string') | select('equalto', 'x') | list %}}{{% endfor %}}",
    "a search in what is yielded": f"{{% for a in {R} %}}{{% if 'x' in ({R} | map('string')) %}}{{% endif %}}{{% endfor %}}",
    "lists of ranges": f"{{% set ns = namespace(l=[]) %}}{{% for a in {R} %}}{{% set ns.l = ns.l + [{R} | list] %}}{{% endfor %}}",
    "a list that grows": f"{{% set ns = namespace(l=[]) %}}{{% for a in {R} %}}{{% set ns.l = ns.l + [a] %}}{{% endfor %}}",
    "arguments from a range": f"{{% macro m() %}}{{% endmacro %}}{{% for a in {R} %}}{{% set x = dict(a=1, *[]) %}}{{% set y = '{{}}'.format(*{R}) %}}{{% endfor %}}",
    "sorting": f"{{% set l = {R} | list %}}{{% for a in {R} %}}{{% set x = l | sort(reverse=true) %}}{{% endfor %}}",
    "a search in a list": f"{{% set l = {R} | list %}}{{% for a in {R} %}}{{% if -1 in l or l.count(-1) %}}{{% endif %}}{{% endfor %}}",
    "the length of a loop of what is yielded": f"{{% for a in {R} %}}{{% for b in {R} | map('string') %}}{{% if loop.length %}}{{% break %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
    "text that is written and dropped": f"{{% for a in {R} %}}{{% set x %}}{{% for b in {R} %}}x{{% endfor %}}{{% endset %}}{{% endfor %}}",
    "a constant in loops": f"{{% for a in {R} %}}{{% set x %}}{{% for b in {R} %}}{'x' * 5000}{{% endfor %}}{{% endset %}}{{% endfor %}}",
}


def make(text: str, **given: Any) -> ChatTemplate:
    return ChatTemplate(texts={"default": text}, special_tokens={}, where="test", **given)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the time."""
    monkeypatch.setattr(limits, "TEMPLATE_TIME", replace(limits.TEMPLATE_TIME, most=0.25))


@pytest.mark.usefixtures("soon")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_a_template_that_takes_time_ends_with_a_reason(text: str) -> None:
    with pytest.raises(Unrenderable, match=r"the template (takes longer than|ends in a)"):
        make(text).render(HI)


def chats(count: int) -> list[Conversation]:
    return [
        Conversation(
            name=f"c.jsonl line {i + 1}",
            messages=(
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "Yes"},
            ),
        )
        for i in range(count)
    ]


@pytest.mark.usefixtures("soon")
def test_a_conversation_that_takes_too_long_is_skipped_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    loops = "{% if messages[0].content == '1?' %}" + LOOPS["two loops"] + "{% endif %}"
    found = encode_chats(chats(40), make_tokenizer(tmp_path), make(loops + CHATML))
    assert [type(one) for one in found] == [Chat, Skipped, *[Chat] * 38]
    assert isinstance(found[1], Skipped) and found[1].name == "c.jsonl line 2"
    assert "takes longer than" in found[1].reason


@pytest.mark.usefixtures("soon")
def test_a_template_that_takes_too_long_for_each_conversation_is_refused_at_the_third(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        TokenizerError, match=r"test — expected .*seconds.*takes longer.*\(c.jsonl line 3\)"
    ):
        encode_chats(chats(1000), make_tokenizer(tmp_path), make(LOOPS["two loops"] + CHATML))


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
