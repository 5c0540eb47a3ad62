"""Compile kernels under keys, and verify a compiled kernel against its key. Needs no GPU.

    Variant                     + target, compiler  ->  KernelKey
    function, argument types,                           the same, with the source as its hash: can be
    constants, warps, stages                            compared, printed, stored

**Keys** hold everything that determines the generated code, and nothing else. If two different requests
had the same key, the second would get the kernel of the first, with its block shape, epsilon or dtype.
Here a request is a `Variant`, built by one function per kernel from the shapes and dtypes of the call,
and its `KernelKey` is derived from it in one place. Warm-up, launch and log all use that key, so the
kernel that was warmed up is the one that is launched and reported.

Two variants are equal exactly if their keys are. Python's `==` is too loose for this: for it 1, 1.0 and
True are equal, and -0.0 and 0.0, but Triton compiles each of them differently. So constants are compared
by their `repr`.

Sizes and strides are runtime arguments. They are not in the key, because the generated code does not depend on
them: kernels are never specialised on the values of integers. Every pointer must be aligned to 16 bytes, which each
launch checks.

**Bodies** are compiled kernels, from Triton's compiler or its cache on disk. Triton stores a body in a folder
that is named by Triton's own hash. The compiled function's name has the digest of the key. Triton's hash
includes this name, so each folder belongs to one key.

If a body compiled with epsilon 1e-5 were stored under the key of 1e-6, lookups, counts and warm-up would
look right, and every result would be wrong. So each body has a manifest next to it, `manifest-1.json`,
with the whole key and a hash of every file. A body from disk is compared with its manifest before it is
used, which takes 2 ms; a mismatch names the fields and files that differ.

A body that fails this check raises an error instead of being replaced silently, because the cause must be found. A body
without a manifest was left by a process that was killed while compiling it; it is compiled again, and
counted as compiled.

Not covered: files that were altered together with their hashes in the manifest.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.errors import InternalError
from engine.parsing import PARSING

ALIGNMENT_BYTES = 16
WARP_THREADS = 32
ARCHITECTURES = (80, 89, 90, 100, 120, 121)
"""Compute capabilities that every kernel compiles for: A100, L4 and 4090, H100 and H200, B200,
5090, GB10.
"""
MANIFEST = "manifest-1.json"
"""File name of a manifest. It contains the format's version: a body with a manifest of another version counts as
having none, and is compiled again.
"""
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
    target: str
    """Instruction set: `sm_90`."""
    compiler: str
    """Versions of Triton and ptxas, and each environment variable that changes their output."""

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def symbol(self) -> str:
        """Name of the compiled function. It identifies the key in the binary itself: profilers show it, and
        it reveals a kernel that is stored under a wrong key.
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
        """Return the differences as (name, value here, value in `other`); a value is `none` if a key lacks the
        field.
        """
        own_fields, other_fields = self.fields(), other.fields()
        return tuple(
            (name, own_fields.get(name, "none"), other_fields.get(name, "none"))
            for name in own_fields | other_fields
            if own_fields.get(name) != other_fields.get(name)
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
    head = f"{name}({', '.join(types)})[{inside}]"
    return f"{head} {of.warps} warps, {of.stages} stages{fused}"


# contract: kernel-keys-v1
@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A kernel with its argument types, constants and compile options, for any target."""

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
    name: str = field(init=False, repr=False)
    """The function's name, without leading underscores."""
    _identity: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.function.__name__).lstrip("_"))
        for name, value in self.constants:
            # Not isinstance: a numpy number or an enum may print differently from what it compiles
            # to.
            assert type(value) in (str, int, float, bool), (self.name, name, value)
        identity = (
            self.function,
            self.types,
            self._spelled(),
            self.warps,
            self.stages,
            self.fp_fusion,
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
            target=target,
            compiler=compiler,
        )

    def _spelled(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, repr(value)) for name, value in self.constants)


def key_for(variant: Variant, arch: int) -> KernelKey:
    """Return the key of `variant` for compute capability `arch` (90 is 9.0) and the installed
    compiler.
    """
    environment = "".join(
        f" {name}={value}" for name, value in sorted(get_cache_invalidating_env_vars().items())
    )
    return variant.key(
        f"sm_{arch}", f"triton {triton.__version__} ptxas {_assembler(arch)}{environment}"
    )


def compile_for(variant: Variant, arch: int) -> tuple[Any, bool]:
    """Return the compiled body of `variant` for compute capability `arch`, and whether it came from
    the cache on disk.

    Raises InternalError if the cached body is not one of this variant.
    """
    key = key_for(variant, arch)
    body, disk_hit = _compile(variant, arch, key)
    if disk_hit and not (_folder(body) / MANIFEST).exists():
        # The process that compiled it was killed before it wrote the manifest: remove it from
        # Triton's index.
        for index in _folder(body).glob("__grp__*.json"):
            index.unlink(missing_ok=True)
        body, disk_hit = _compile(variant, arch, key)
    if disk_hit:
        verify(body, key)
    else:
        _write_manifest(body, key)
    return body, disk_hit


class _Source(ASTSource):  # type: ignore[misc]  # triton is untyped
    """A kernel source that is compiled under a chosen function name."""

    def __init__(self, variant: Variant, symbol: str) -> None:
        names = variant.function.arg_names
        constants = dict(variant.constants)
        assert list(constants) == names[len(variant.types) :], (variant.name, list(constants))
        super().__init__(
            fn=variant.function,
            signature=dict(zip(names, variant.types, strict=False))
            | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={
                (index,): [["tt.divisibility", ALIGNMENT_BYTES]]
                for index, type_ in enumerate(variant.types)
                if type_.startswith("*")
            },
        )
        self.variant = variant
        self.symbol = symbol
        self.compiled = False
        """Whether the kernel was compiled: Triton calls `make_ir` only if its cache on disk has no body."""

    def hash(self) -> str:
        with PARSING:
            return f"{super().hash()}-{self.symbol}"

    def make_ir(self, *arguments: Any) -> Any:
        self.compiled = True
        # A copy, because other threads may be compiling other variants of the function.
        named = copy.copy(self.variant.function)
        named.repr = lambda _: self.symbol
        self.fn = named
        try:
            with PARSING:
                return super().make_ir(*arguments)
        finally:
            self.fn = self.variant.function


def _compile(variant: Variant, arch: int, key: KernelKey) -> tuple[Any, bool]:
    source = _Source(variant, key.symbol)
    body = triton.compile(source, target=_target(arch), options=_options(variant))
    return body, not source.compiled


def _options(variant: Variant) -> dict[str, int | bool]:
    return {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "enable_fp_fusion": variant.fp_fusion,
    }


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, WARP_THREADS)


@functools.cache
def _assembler(arch: int) -> str:
    """Return the version of ptxas, which turns PTX into machine code; Blackwell has its own."""
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    return str(tool.version)


def _write_manifest(body: Any, key: KernelKey) -> None:
    manifest = {"key": key.fields(), "sha256": _hashes(body)}
    target = _folder(body) / MANIFEST
    partial = target.with_name(f"{MANIFEST}.{os.getpid()}-{id(body):x}")
    partial.write_text(json.dumps(manifest, indent=1))
    partial.replace(target)


# contract: kernel-keys-v1
def verify(body: Any, key: KernelKey) -> None:
    """Raise InternalError, naming each field and file, unless the manifest of `body` has this key
    and the hashes of its files.
    """
    try:
        manifest = json.loads((_folder(body) / MANIFEST).read_text())
        problems = [*_differing(dict(manifest["key"]), dict(manifest["sha256"]), body, key)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = [f"{MANIFEST}: expected a key and hashes, found {error!r}"]
    if problems:
        raise InternalError(
            f"kernel {key.kernel}: {_folder(body)} — expected a body of {key}, found another: "
            + "; ".join(problems),
            hint=f"delete {_folder(body)}; the kernel is then compiled again",
        )


def _differing(
    fields: dict[str, str], hashes: dict[str, str], body: Any, key: KernelKey
) -> Iterator[str]:
    for name, expected in key.fields().items():
        if fields.get(name) != expected:
            yield f"{name}: expected {expected}, found {fields.get(name, 'none')}"
    for name, found in _hashes(body).items():
        if hashes.get(name) != found:
            yield (
                f"{name}: expected the file with SHA-256 {str(hashes.get(name, 'none'))[:12]}, "
                f"found {found[:12]}"
            )


def _hashes(body: Any) -> dict[str, str]:
    """Return the SHA-256 of every file of a body by name."""
    return {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for name, path in sorted(body.metadata_group.items())
    }


def _folder(body: Any) -> Path:
    return Path(next(iter(body.metadata_group.values()))).parent
