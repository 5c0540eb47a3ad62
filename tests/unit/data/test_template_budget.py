# ruff: noqa: E501
"""Templates that take time or memory and write nothing: each ends, with a reason, and soon."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import limits
from engine.data import chat_template
from engine.data.chat import Chat, encode_chats
from engine.data.chat_template import ChatTemplate
from engine.data.conversations import Conversation
from engine.data.left_out import Skipped
from engine.data.template_program import OverBudget, Unrenderable
from engine.errors import TokenizerError
from tests.support.chats import make_tokenizer

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HI = [{"role": "user", "content": "Hi"}]
R = "range(99999)"
# A list of two of a list of two of ...: as a tree 2 ** 60 leaves.
TREE = "{% set ns = namespace(a=['x'], b=['x'], t=('x',), u=('x',)) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}{% set ns.u = (ns.u, ns.u) %}{% endfor %}"
BIG = "{% set big = 'a' * 30000000 %}"
DOUBLING = "{% set ns = namespace(s='abcdefgh') %}{% for i in range(60) %}"

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
    "an attribute of many names": f"{{% set p = 'a.' * 1000000 %}}{{{{ {R} | map(attribute=p, default='') | list | length }}}}",
    "the length of a loop of what is yielded": f"{{% for a in {R} %}}{{% for b in {R} | map('string') %}}{{% if loop.length %}}{{% break %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
    "text that is written and dropped": f"{{% for a in {R} %}}{{% set x %}}{{% for b in {R} %}}x{{% endfor %}}{{% endset %}}{{% endfor %}}",
    "a constant in loops": f"{{% for a in {R} %}}{{% set x %}}{{% for b in {R} %}}{'x' * 5000}{{% endfor %}}{{% endset %}}{{% endfor %}}",
}
TREES = {
    "written": TREE + "{{ ns.a }}",
    "joined to a text": TREE + "{% set x = 'a' ~ ns.a %}",
    "as JSON": TREE + "{% set x = ns.a | tojson %}",
    "compared": TREE + "{% if ns.a == ns.b %}{% endif %}",
    "less": TREE + "{% if ns.a < ns.b %}{% endif %}",
    "sought": TREE + "{% if ns.a in [ns.b] %}{% endif %}",
    "a test": TREE + "{% if ns.a is eq(ns.b) %}{% endif %}",
    "an index": TREE + "{% set x = [ns.b].index(ns.a) %}",
    "hashed": TREE + "{% set x = {ns.t: 1} %}",
    "a key": TREE + "{% set x = messages[0][ns.t] %}",
    "a key that is asked for": TREE + "{% set x = messages[0].get(ns.t) %}",
    "a key of pairs": TREE + "{% set x = dict([[ns.t, 1]]) %}",
    "unique": TREE + "{% set x = [ns.t, ns.u] | unique | list %}",
    "sorted": TREE + "{% set x = [ns.a, ns.b] | sort %}",
    "the least": TREE + "{% set x = [ns.a, ns.b] | min %}",
    "grouped": TREE + "{% set x = [[ns.a], [ns.b]] | groupby(0) %}",
    "formatted": TREE + "{% set x = '%s' % [ns.a] %}",
    "formatted by name": TREE + "{% set x = '{}'.format(ns.a) %}",
    "a filter that formats": TREE + "{% set x = '%s' | format(ns.a) %}",
    "summed": TREE + "{% set x = [ns.a, ns.a] | sum(start=[]) | string %}",
    "joined": TREE + "{% set x = ns.a | join %}",
    "joined by a method": TREE + "{% set x = ','.join([ns.a | string]) %}",
    "a text": TREE + "{% set x = ns.a | string %}",
    "printed": TREE + "{% set x = ns.a | pprint %}",
    "replaced": TREE + "{% set x = ns.a | replace('a', 'b') %}",
    "refused with": TREE + "{{ raise_exception(ns.a) }}",
    "changed": TREE
    + "{% for i in range(3) %}{% set x = loop.changed([ns.a, ns.b][i % 2]) %}{% endfor %}",
    "a missing element": TREE + "{{ messages[ns.a].x }}",
    "trimmed": TREE + "{% set x = ns.a | trim %}",
    "lower": TREE + "{% if ns.a is lower %}{% endif %}",
}
TEXTS = {
    "doubled by +": DOUBLING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubled by ~": DOUBLING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubled by join": DOUBLING + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "doubled by a method join": DOUBLING + "{% set ns.s = ','.join([ns.s, ns.s]) %}{% endfor %}",
    "doubled by replace": DOUBLING + "{% set ns.s = ns.s | replace('a', 'aa') %}{% endfor %}",
    "doubled by a method replace": DOUBLING + "{% set ns.s = ns.s.replace('', 'aa') %}{% endfor %}",
    "doubled by %": DOUBLING + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "doubled by % and a name": DOUBLING + "{% set ns.s = '%(a)s%(a)s' % {'a': ns.s} %}{% endfor %}",
    "doubled by format": DOUBLING + "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "doubled by a filter format": DOUBLING
    + "{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    "doubled by a block": DOUBLING
    + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubled by a macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}"
    + DOUBLING
    + "{% set ns.s = m(ns.s) %}{% endfor %}",
    "doubled by escapes": DOUBLING
    + "{% set ns.s = (ns.s ~ '&') | forceescape | string %}{% endfor %}"
    + f"{{% for a in {R} %}}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}",
    "doubled by JSON": DOUBLING
    + "{% set ns.s = ns.s ~ '\\\\' | tojson %}{% set ns.s = [ns.s, ns.s] | tojson %}{% endfor %}",
    "doubled lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "multiplied lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l * 9 %}{% endfor %}",
    "kept": f"{{% set ns = namespace(l=[]) %}}{{% for a in {R} %}}{{% set ns.l = ns.l + [('a' ~ a) * 100000] %}}{{% endfor %}}",
    "centred": "{% set x = 'a' | center(10000000000) %}",
    "aligned": "{% set x = 'a'.ljust(10000000000) %}{% set x = 'a'.rjust(10000000000) %}",
    "filled with zeros": "{% set x = 'a'.zfill(10000000000) %}",
    "tabs": "{% set x = '\\t'.expandtabs(2000000000) %}",
    "indented": "{% set x = 'a\\nb' | indent(10000000000) %}",
    "indented with a text": BIG + "{% set x = ('\\n' * 1000000) | indent(big) %}",
    "indented JSON": "{% set x = [[[[1]]]] | tojson(indent=1000000000) %}",
    "separated JSON": BIG + "{% set x = range(1000) | list | tojson(separators=(big, big)) %}",
    "a width": "{% set x = '%9999999999d' % 1 %}",
    "many widths": "{% set x = ('%9999d' * 1000000) % ([1] * 1000000) %}",
    "a width from an argument": "{% set x = '%*d' % (2000000000, 1) %}",
    "a precision": "{% set x = '%.2000000000f' % 1 %}",
    "a width of format": "{% set x = '{:9999999999}'.format(1) %}",
    "a width of format from an argument": "{% set x = '{:{}}'.format(1, 9999999999) %}",
    "a width of format_map": "{% set x = '{a:9999999999}'.format_map({'a': 1}) %}",
    "a batch that is filled": "{% set x = [1] | batch(10000000000, 'x') | list %}",
    "slices": "{% set x = [1] | slice(10000000000) | list %}",
    "a sum of lists": f"{{% set x = ({R} | map('list') | list) %}}{{% set y = [[1]] * 1000000 %}}{{% set x = y | sum(start=[]) %}}",
    "a list joined many times": BIG + "{% set x = ([big] * 100000) | join %}",
    "a list joined by a text": BIG + "{% set x = range(10000) | join(big) %}",
    "letters joined by a text": BIG + "{% set x = ('a' * 10000) | join(big) %}",
    "replaced by a text": BIG + "{% set x = ('a' * 10000) | replace('a', big) %}",
    "written many times": BIG
    + f"{{% set x %}}{{% for i in {R} %}}{{{{ big }}}}{{% endfor %}}{{% endset %}}",
    "split to letters": BIG
    + "{% set x = big | list %}{% set y = big.split('a') %}{% set z = big | list %}",
    "split to words": "{% set x = 'aa ' * 10000000 %}{% set y = x.split() %}",
    "split to lines": "{% set x = 'a\\n' * 10000000 %}{% for i in range(9) %}{% set y = x.splitlines() %}{% endfor %}",
    "as a word list": "{% set x = 'a ' * 10000000 %}{% for i in range(9) %}{% set y = x | wordcount %}{% endfor %}",
    "stripped of a text": "{% set x = 'a' * 10000000 %}{% set y = ('b' * 10000000 + 'a') %}{% set z = x.strip(y) %}",
    "trimmed of a text": "{% set x = 'a' * 10000000 %}{% set y = ('b' * 10000000 + 'a') %}{% set z = x | trim(y) %}",
    "found from the right": "{% set x = 'a' * 10000000 %}{% set y = ('b' + 'a' * 5000000) %}{% set z = x.rfind(y) %}",
    "split from the right": "{% set x = 'a' * 10000000 %}{% set y = ('b' + 'a' * 5000000) %}{% set z = x.rsplit(y) %}",
    "compared many times": "{% set x = 'a' * 9000000 %}{% set y = 'a' * 9000000 %}"
    + f"{{% for i in {R} %}}{{% if x == y %}}{{% endif %}}{{% endfor %}}",
    "sought many times": BIG
    + f"{{% for i in {R} %}}{{% if 'b' in big %}}{{% endif %}}{{% if big.startswith('b') or big.find('b') %}}{{% endif %}}{{% endfor %}}",
    "cut many times": BIG + f"{{% for i in {R} %}}{{% set x = big[1:] %}}{{% endfor %}}",
    "lists cut many times": f"{{% set l = {R} | list %}}{{% for i in {R} %}}{{% set x = l[::-1] %}}{{% endfor %}}",
    "wrapped": "{% set x = 'a' * 10000000 %}{% set y = x | wordwrap(1) %}",
    "encoded": BIG + "{% set x = big.encode('idna') %}",
    "translated": BIG + "{% set x = 'aaaaaaaaa'.translate({97: big}) %}",
    "in bytes": "{% set x = (1).to_bytes(10000000000, 'big') %}",
    "filler": "{% set x = lipsum(100000000) %}",
    "HTML": "{% set x = ('<!---->' * 1000000) | striptags %}",
    "addresses": "{% set x = ('http://' * 1000000) | urlize %}",
}
NUMBERS = {
    "squared": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a power": "{% set x = 9 ** 9999999 %}",
    "a power of powers": "{% set x = 9 ** 9 ** 9 ** 9 ** 9 ** 9 %}",
    "rounded": "{% set x = 5 | round(-1000000000) %}",
    "rounded up": "{% set x = 5 | round(1000000000, 'ceil') %}",
    "of hex digits": "{% set x = ('f' * 30000000) | int(base=16) %}{% set y = x % 7 %}",
    "of many digits": "{% set x = ('1.' ~ '9' * 30000000) | float %}{% set x = '9' * 30000000 %}{% set y = x | int %}",
    "a form of the time": "{% set x = strftime_now('%Y' * 10000000) %}",
}
HOSTILE = {
    f"{kind}: {name}": text
    for kind, found in {"loops": LOOPS, "trees": TREES, "texts": TEXTS, "numbers": NUMBERS}.items()
    for name, text in found.items()
}


def make(text: str, **given: Any) -> ChatTemplate:
    return ChatTemplate(texts={"default": text}, special_tokens={}, where="test", **given)


@pytest.fixture
def half_a_gigabyte() -> Iterator[None]:
    """No more than that of further addresses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def ends(name: str) -> None:
    try:
        template = make(HOSTILE[name])
    except TokenizerError as refused:
        assert "No filter named" in str(refused)
        return
    with pytest.raises(Unrenderable) as raised:
        template.render(HI)
    assert "MemoryError" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        # Every third of each kind, which take steps and memory in the same few places.
        pytest.param(name, marks=[pytest.mark.soak] * (place % 3 > 0))
        for found in (LOOPS, TREES, TEXTS, NUMBERS)
        for place, name in enumerate(name for name in HOSTILE if HOSTILE[name] in found.values())
    ],
)
@pytest.mark.usefixtures("half_a_gigabyte")
def test_a_template_that_takes_time_or_memory_ends_with_a_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a twentieth of the steps; what is left of them after a text or list of the full size is enough."""
    monkeypatch.setattr(limits, "TEMPLATE_STEPS", replace(limits.TEMPLATE_STEPS, most=400_000))
    ends(name)


@pytest.mark.soak
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("half_a_gigabyte")
def test_a_template_that_takes_all_of_its_budget_ends_too(name: str) -> None:
    ends(name)


def test_equal_faults_have_equal_reasons() -> None:
    reasons = set()
    for count in (1, 2, 50):
        with pytest.raises(OverBudget) as raised:
            make(LOOPS["two loops"]).render(HI * count)
        reasons.add(str(raised.value))
    assert reasons == {"the template takes more than 8,000,000 steps for a conversation"}


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


def test_a_conversation_that_takes_too_long_is_skipped_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    loops = "{% if messages[0].content == '1?' %}" + LOOPS["two loops"] + "{% endif %}"
    found = encode_chats(chats(40), make_tokenizer(tmp_path), make(loops + CHATML))
    assert [type(one) for one in found] == [Chat, Skipped, *[Chat] * 38]
    assert isinstance(found[1], Skipped) and found[1].name == "c.jsonl line 2"
    assert "8,000,000 steps" in found[1].reason


def test_a_template_that_takes_too_long_for_each_conversation_is_refused_at_the_third(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        TokenizerError, match=r"test — expected .*8,000,000 steps.*\(c.jsonl line 3\)"
    ):
        encode_chats(chats(1000), make_tokenizer(tmp_path), make(LOOPS["two loops"] + CHATML))


def test_a_template_that_stays_just_within_its_budget_each_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_FREE_STEPS", 2 * limits.TEMPLATE_STEPS.most)
    slow = "{% for a in range(70) %}{% for b in range(20000) %}{% endfor %}{% endfor %}" + CHATML
    assert make(slow).render(HI).text
    with pytest.raises(TokenizerError, match=r"steps for .* renderings"):
        encode_chats(chats(10_000), make_tokenizer(tmp_path), make(slow))


def test_a_long_conversation_has_a_budget_of_its_length() -> None:
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
