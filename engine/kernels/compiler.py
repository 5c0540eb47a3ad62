"""From a `Variant` to machine code, through Triton and its cache on disk. Needs no GPU.

Triton keeps a body in a folder named by its own hash. Two things are added to that here, both so
that a body can be held to its key (`bodies.py`):

- the compiled function is named by the digest of our key, and the name goes into Triton's hash too.
  So a folder belongs to one key, and the machine code says which;
- the first stage of a compilation can be run alone: some milliseconds from the kernel's source to
  the text in which its constants stand as numbers.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from engine.errors import InternalError
from engine.kernels import bodies
from engine.kernels.key import KernelKey, Variant
from engine.parsing import PARSING

ALIGNMENT_BYTES = 16
WARP_THREADS = 32
ARCHITECTURES = (80, 89, 90, 100, 120, 121)
"""Compute capabilities that every kernel compiles for: A100, L4 and 4090, H100 and H200, B200, 5090,
GB10."""


def key_for(variant: Variant, arch: int) -> KernelKey:
    """The key of `variant` for compute capability `arch` (90 is 9.0) under this compiler."""
    environment = "".join(
        f" {name}={value}" for name, value in sorted(get_cache_invalidating_env_vars().items())
    )
    return variant.key(
        f"sm_{arch}", f"triton {triton.__version__} ptxas {_assembler(arch)}{environment}"
    )


def compile_for(variant: Variant, arch: int) -> tuple[Any, bool]:
    """The compiled body of `variant` for compute capability `arch`, and whether the cache on disk
    had it.

    Raises InternalError when what the cache had is not a body of this variant.
    """
    key = key_for(variant, arch)
    body, disk_hit = _compile(variant, arch, key)
    if disk_hit and not bodies.has_manifest(body):
        # Whoever compiled it was killed before it said what it had compiled.
        bodies.forget(body)
        body, disk_hit = _compile(variant, arch, key)
    if disk_hit:
        bodies.verify(body, key, lambda: first_stage(variant, arch, key))
    else:
        bodies.vouch(body, key, first_stage(variant, arch, key))
    return body, disk_hit


def first_stage(variant: Variant, arch: int, key: KernelKey) -> str:
    """Triton's own language of a kernel, which it compiles further: all constants are numbers in it,
    and nothing of the target but what the source asks for. Without line numbers."""
    source = _Source(variant, key.symbol)
    target = _target(arch)
    backend = make_backend(target)
    options = backend.parse_options(_options(variant))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    return str(stages["ttir"](module, {}).str_nodebug())


class _Source(ASTSource):  # type: ignore[misc]  # triton is untyped
    """A kernel to compile under a name of our choice."""

    def __init__(self, variant: Variant, symbol: str) -> None:
        names = variant.function.arg_names
        constants = dict(variant.constants)
        if list(constants) != names[len(variant.types) :]:
            raise InternalError(
                f"kernel {variant.name}: expected constants {names[len(variant.types) :]} "
                f"after {len(variant.types)} arguments, found {list(constants)}"
            )
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
        """Triton asks a source for its code only when the cache on disk has no body of it."""

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
        "launch_pdl": variant.early,
    }


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, WARP_THREADS)


@functools.cache
def _assembler(arch: int) -> str:
    """Version of the program that turns PTX into machine code; Blackwell has one of its own."""
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    return str(tool.version)
