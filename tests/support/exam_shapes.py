"""Tests of many forms that a correct program passes, and wrong programs of many kinds, none of which may pass.

Each form is a way in which the tests of public problem files reach their assertions, or miss them. The
programs define `f` (twice its argument), `draw` (1, 2, 3, None, one per call) and `seq` (the first doubles).
"""

from __future__ import annotations

from engine.evaluate.sandbox import Exam

RIGHT = """
drawn = []
def f(x):
    if isinstance(x, str):
        raise TypeError('a number')
    return 2 * x
def draw():
    drawn.append(1)
    return len(drawn) if len(drawn) < 4 else None
def seq(n):
    return [2 * i for i in range(n)]
"""

RIGHT_TOO = (
    "import itertools\nF = {'f': lambda x: x + x}\n"
    "def f(x):\n    if not isinstance(x, int): raise TypeError\n    return F['f'](x)\n"
    "def numbers():\n    yield from (1, 2, 3)\nsource = numbers()\n"
    "def draw():\n    try:\n        return next(source)\n    except StopIteration:\n        return None\n"
    "def seq(n):\n    return list(itertools.islice(itertools.count(0, 2), n))\n",
    "print('hello')\ndef f(x):\n    print(x)\n    return int.__lshift__(x, 1)\n"
    "class Count:\n    at = 0\ndef draw():\n    Count.at += 1\n    return {1: 1, 2: 2, 3: 3}.get(Count.at)\n"
    "class Mine(list): pass\ndef seq(n):\n    return Mine(f(i) for i in range(n))\n",
)
"""Programs that are correct in other ways, with exceptions and classes of their own."""

SHAPES = {
    "plain": "assert f(1) == 2\nassert f(x=2) == 4",
    "map": "for got, want in zip(map(f, [1, 2]), [2, 4]):\n    assert got == want",
    "map in a list": "assert not [1 for got in map(f, [1, 2]) if got not in (2, 4)]",
    "all": "assert all(got == want for got, want in zip(map(f, [1, 2]), [2, 4]))",
    "next": "for n in (1, 2):\n    assert next(map(f, [n]), 2 * n) == 2 * n",
    "sentinel": "for n, got in enumerate(iter(draw, None)):\n    assert got == n + 1",
    "loop over the answer": "for n, got in enumerate(seq(3)):\n    assert got == 2 * n",
    "sequence": (
        "class Seq:\n    def __getitem__(self, i):\n        if i > 2: raise IndexError\n"
        "        return f(i)\nfor n, got in enumerate(Seq()):\n    assert got == 2 * n"
    ),
    "attribute": (
        "class Box:\n    @property\n    def value(self): return f(1)\n"
        "if hasattr(Box(), 'value'):\n    assert Box().value == 2\n"
        "assert getattr(Box(), 'value', 2) == 2"
    ),
    "length hint": (
        "class Many:\n    def __iter__(self): return iter([1, 2])\n"
        "    def __length_hint__(self): return f(1)\nassert list(Many()) == [1, 2]\nassert f(1) == 2"
    ),
    "bare except": (
        "for n in (1, 2):\n    try:\n        got = f(n)\n    except:\n        continue\n"
        "    assert got == 2 * n"
    ),
    "suppress": (
        "import contextlib\nwith contextlib.suppress(BaseException):\n    assert f(1) == 2\n"
        "    assert f(2) == 4"
    ),
    "finally": (
        "def run():\n    for n in (1, 2):\n        try:\n            assert f(n) == 2 * n\n"
        "        finally:\n            continue\nrun()"
    ),
    "raise": "for n in (1, 2):\n    if f(n) != 2 * n:\n        raise ValueError(n)",
    "error wanted": (
        "try:\n    f('x')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError\n"
        "assert f(3) == 6"
    ),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertEqual(list(map(f, [1, 2])), [2, 4])\n        self.assertTrue(f(0) == 0)\n"
        "        self.assertRaises(TypeError, f, 'x')\n"
        "        with self.assertRaises(TypeError):\n            f('y')\n"
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"
    ),
    "sets": "assert {f(1), f(2)} == {2, 4}\nassert {f(1): 1}[2]\nassert sorted(map(f, [2, 1])) == [2, 4]",
    "generator": (
        "def cases():\n    for n in (1, 2):\n        yield f(n), 2 * n\n"
        "for got, want in cases():\n    assert got == want"
    ),
}


def exam(shape: str) -> Exam:
    return Exam(setup="", tests=SHAPES[shape], reference=RIGHT, entries=("f", "draw", "seq"))


def everywhere(body: str, head: str = "") -> str:
    """Return a program all of whose functions have the same body."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{head}\nimport os, sys, signal\n" + "".join(
        f"def {name}(*_, **__):\n{lines}" for name in ("f", "draw", "seq")
    )


_RAISED = (
    "StopIteration",
    "StopIteration(2)",
    "StopAsyncIteration",
    "GeneratorExit",
    "SystemExit(0)",
    "KeyboardInterrupt",
    "BaseException",
    "IndexError",
    "KeyError(1)",
    "AttributeError('value')",
    "TypeError",
    "ValueError",
    "AssertionError",
    "RuntimeError",
    "RecursionError",
    "MemoryError",
    "OSError(5, 'no')",
    "EOFError",
    "NotImplementedError",
    "ImportError",
    "UserWarning",
    "ExceptionGroup('a', [StopIteration()])",
    "UnicodeDecodeError('utf-8', b'', 0, 1, '')",
    "type('StopIteration', (Exception,), {})",
    "type('Ended', (BaseException,), {})",
)
_SAME = """
class Same{bases}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 2
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __contains__(self, other): return True
    def __lt__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *_, **__): return self
"""
_VALUES = (
    "None",
    "True",
    "...",
    "NotImplemented",
    "[]",
    "()",
    "{}",
    "set()",
    "''",
    "b''",
    "float('nan')",
    "-0.5",
    "1j",
    "iter(())",
    "(x for x in ())",
    "lambda *_: 2",
    "int",
    "object",
    "sys",
    "f",
    "'2'",
    "10 ** 50000",
    "1 << 15_000_000",
    "'9' * 1_000_000",
    "{n * (2 ** 61 - 1) for n in range(1, 3000)}",
    "eval('[' * 90 + ']' * 90)",
)
_DEEP = "value = []\nfor _ in range(100000): value = [value]\nreturn value"

WRONG = {
    **{f"raise {one}": everywhere(f"raise {one}") for one in _RAISED},
    **{f"return {one}": everywhere(f"return {one}") for one in _VALUES},
    **{
        f"an object that equals all{bases}": everywhere(
            "return Same()", _SAME.replace("{bases}", bases)
        )
        for bases in ("", "(int)", "(str)", "(list)", "(dict)", "(tuple)", "(float)")
    },
    "a list in itself": everywhere("value = []\nvalue.append(value)\nreturn value"),
    "deep": everywhere(_DEEP),
    "yield": everywhere("yield 2"),
    "exit": everywhere("os._exit(0)"),
    "sys.exit": everywhere("sys.exit(0)"),
    "kill": everywhere("os.kill(os.getpid(), signal.SIGTERM)"),
    "exit when defined": "raise SystemExit(0)",
    "stop when defined": "raise StopIteration",
    "nothing": "",
    "not Python": "def f(",
    "half a character": "\ud800",
    "a zero byte": "\x00",
    "brackets": "f = " + "(" * 50_000,
    "signs": "f = " + "-" * 50_000 + "1",
    "long lines": "f = " + " + ".join(["1"] * 50_000),
    "true assertions": everywhere(
        "return 0", "import builtins\nbuiltins.AssertionError = StopIteration"
    ),
    "first call right": everywhere(
        "f.calls = getattr(f, 'calls', 0) + 1\nif f.calls == 1: return 2\nraise StopIteration"
    ),
    "read an answer's frame": everywhere(
        "frame = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
        "frame.f_globals['answered'] = lambda *_: {'value': 2}\nreturn 0"
    ),
}
"""Programs that must fail every form of tests."""
