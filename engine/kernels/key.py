"""Keys of compiled kernels: everything that determines the generated code, and nothing else.

A kernel cache returns wrong results if two different requests have the same key: the second then
gets a kernel whose block shape, epsilon or dtype belongs to the first. Here a request is a
`Variant`, built by one function per kernel from the shapes and dtypes at hand, and its `KernelKey`
is derived from it in one place. Warm-up, launch and log all use that key, so the kernel that was
warmed is the one that is launched and reported.

    Variant                     + target, compiler  ->  KernelKey
    function, argument types,                           the same, with the source as its hash: can be
    constants, warps, stages                            compared, printed, stored

Two variants are equal exactly if their keys are. Python's own `==` is too loose for that: it treats
1, 1.0 and True as equal, and -0.0 and 0.0, and Triton compiles each of them differently. So
constants are compared by their `repr`.

Not in the key, because not in the code: sizes and strides passed as runtime arguments. Kernels are
never specialised on the values of integers, and every pointer is aligned to 16 bytes, which each
launch checks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.errors import InternalError

Constant: TypeAlias = str | int | float | bool
"""The allowed types of a `tl.constexpr` argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey:
    kernel: str
    source: str
    """Hash of the text of the function and of everything it calls, as Triton computes it."""
    types: tuple[tuple[str, str], ...]
    """Each runtime argument with its type: `("blocks_ptr", "*u8")`, `("rows", "i32")`."""
    constants: tuple[tuple[str, str], ...]
    """Each `tl.constexpr` argument with the `repr` of its value: `1`, `1.0`, `True`, `'rows'`."""
    warps: int
    stages: int
    fp_fusion: bool
    """Whether `a * b + c` may become one fused multiply-add."""
    early: bool
    """Whether it may start before the previous kernel has ended; see `Variant`."""
    target: str
    """Instruction set: `sm_90`."""
    compiler: str
    """Versions of Triton and ptxas, and each environment variable that changes their output."""

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def symbol(self) -> str:
        """The name of the compiled function. It identifies the key in the binary itself: profilers
        show it, and a kernel stored under a wrong key is detected by it.
        """
        return f"{self.kernel}_{self.digest}"

    def fields(self) -> dict[str, str]:
        """Return every field by name, as text; constants and types by their own names."""
        named = {name: type_ for name, type_ in self.types} | dict(self.constants)
        rest = {
            item.name: str(getattr(self, item.name))
            for item in dataclasses.fields(self)
            if item.name not in ("types", "constants")
        }
        return named | rest

    def differing(self, other: KernelKey) -> tuple[tuple[str, str, str], ...]:
        """Return the differences as (name, value here, value in `other`); `none` if one has no such
        field.
        """
        mine, theirs = self.fields(), other.fields()
        return tuple(
            (name, mine.get(name, "none"), theirs.get(name, "none"))
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        )

    def __str__(self) -> str:
        types = tuple(type_ for _, type_ in self.types)
        return f"{_shown(self, self.kernel, types, self.constants)}, {self.target}"


def _shown(
    of: KernelKey | Variant,
    name: str,
    types: tuple[str, ...],
    constants: tuple[tuple[str, str], ...],
) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in constants)
    fused = "" if of.fp_fusion else ", no fused multiply-add"
    begins = ", begins early" if of.early else ""
    head = f"{name}({', '.join(types)})[{inside}]"
    return f"{head} {of.warps} warps, {of.stages} stages{fused}{begins}"


# contract: kernel-keys-v1
@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One way of compiling one kernel, for any target."""

    function: Any
    """The function decorated with `@triton.jit`."""
    types: tuple[str, ...]
    """Triton's type names of the runtime arguments, in order: `*u8`, `*bf16`, `*fp32`, `i32`,
    `fp32`.
    """
    constants: tuple[tuple[str, Constant], ...]
    """Every `tl.constexpr` argument, in the order of the signature, after all runtime arguments."""
    warps: int = 4
    stages: int = 3
    fp_fusion: bool = True
    early: bool = False
    """Whether it may start before the previous kernel has ended. It then waits before it reads that
    kernel's output and before it writes (`dependent_launch.py`).
    """
    name: str = field(init=False, repr=False)
    """The function's name, without leading underscores."""
    _identity: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.function.__name__).lstrip("_"))
        for name, value in self.constants:
            # Not isinstance: a numpy number or an enum may print differently from what it compiles
            # to.
            if type(value) not in (str, int, float, bool):
                raise InternalError(
                    f"kernel {self.name}: constant {name} — expected a str, int, float or bool, "
                    f"found {value!r} ({type(value).__name__})"
                )
        identity = (
            self.function,
            self.types,
            self._spelled(),
            self.warps,
            self.stages,
            self.fp_fusion,
            self.early,
        )
        object.__setattr__(self, "_identity", identity)
        object.__setattr__(self, "_hash", hash(identity))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Variant) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return _shown(self, self.name, self.types, self._spelled())

    def key(self, target: str, compiler: str) -> KernelKey:
        names = self.function.arg_names
        return KernelKey(
            kernel=self.name,
            source=self.function.cache_key[:16],
            types=tuple(zip(names[: len(self.types)], self.types, strict=True)),
            constants=self._spelled(),
            warps=self.warps,
            stages=self.stages,
            fp_fusion=self.fp_fusion,
            early=self.early,
            target=target,
            compiler=compiler,
        )

    def _spelled(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, repr(value)) for name, value in self.constants)
