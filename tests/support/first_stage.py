"""The first stage of a kernel's compilation, by itself. Triton has no public function for it."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from engine.kernels.compiler import Variant, _options, _Source, _target, key_for


def first_stage(variant: Variant, arch: int) -> str:
    """Return the TTIR of a kernel, Triton's first intermediate language, with the name of the variant.

    All constants are literals in it, it depends on the target only where the source does, and it has no line numbers.
    """
    source = _Source(variant, key_for(variant, arch).symbol)
    target = _target(arch)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(_options(variant))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    text = str(stages["ttir"](module, {}).str_nodebug())
    return text.replace(source.symbol, variant.name)
