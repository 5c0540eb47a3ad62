"""Load and run a model in other implementations, each in its own process: `python -m engine.export.peers
KIND`.

    engine         this engine: a Hugging Face folder, a GGUF or an .apr file
    transformers   AutoModelForCausalLM and AutoTokenizer, from the folder alone
    llama          llama.cpp, through llama-cpp-python, from a GGUF file

`ask` starts such a process and returns one of:

    Answered   tokens, text and logits
    Absent     the library is not installed, or the process took too long: nothing is known
    Crashed    the library is installed and could not load or run the model

The request is one JSON value on the process's stdin, and the reply is the last line of its stdout. Logits are
large: they are written to a .npz file that the request names. A library that is absent, crashes or hangs affects only
its own process. All implementations compute in fp32 on the CPU.

    texts    encoded by the peer's own tokenizer, to compare token ids
    prompts  token ids to continue greedily for `steps` tokens; no token ends a text here
    rows     token ids of whole sequences whose logits are requested at every position; null means each
             prompt with its continuation

If the library is not installed, the process exits with 3 and prints the reason on stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine import child

# Shapes: T tokens of a row, V vocabulary

# kind -> its module, and the package that provides it.
LIBRARIES = {
    "transformers": ("transformers", "transformers"),
    "llama": ("llama_cpp", "llama-cpp-python"),
}
LIMIT_S = 1800.0
_ABSENT = 3
_TAIL = 1500
_F32 = 0
"""GGML_TYPE_F32: by default llama.cpp keeps the KV cache in 16 bits."""

Logits: TypeAlias = NDArray[np.float32]
Question = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    version: str
    ids: list[list[int]]
    """Token ids of each text, by the peer's tokenizer."""
    tokens: list[list[int]]
    """The greedy continuation of each prompt."""
    text: list[str]
    """The continuations, decoded."""
    rows: list[list[int]]
    logits: list[Logits]
    """Logits of each row, (T, V)."""


@dataclass(frozen=True, slots=True)
class Absent:
    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    reason: str


def absent(kind: str) -> Absent | None:
    """Return why peer `kind` cannot run here; None if its library is installed. Nothing is imported."""
    if kind not in LIBRARIES:
        return None
    module, package = LIBRARIES[kind]
    if importlib.util.find_spec(module) is not None:
        return None
    return Absent(f"{package} is not installed: pip install 'apr-workbench[peers]'")


def ask(
    kind: str,
    path: Path,
    scratch: Path,
    *,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    steps: int,
    rows: Sequence[Sequence[int]] | None,
    limit_s: float = LIMIT_S,
) -> Answered | Absent | Crashed:
    """Run peer `kind` on the model at `path`; `scratch` is a folder for its logits."""
    if (why := absent(kind)) is not None:
        return why
    logits = scratch / f"{kind}-{len(list(scratch.iterdir()))}.npz"
    question = {
        "path": str(path),
        "texts": list(texts),
        "prompts": [list(prompt) for prompt in prompts],
        "steps": steps,
        "rows": None if rows is None else [list(row) for row in rows],
        "logits": str(logits),
    }
    try:
        done = subprocess.run(
            child.command("engine.export.peers", kind),
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=limit_s,
            check=False,
            env=child.environment(),
        )
    except subprocess.TimeoutExpired:
        return Absent(f"no answer in {limit_s:g} s")
    output = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == _ABSENT:
        return Absent(output)
    if done.returncode != 0:
        code = done.returncode
        ending = f"ended by signal {-code}" if code < 0 else f"exit {code}"
        lines = done.stderr.decode("utf-8", "replace").strip()[-_TAIL:].splitlines()
        return Crashed(f"{ending}: {lines[-1] if lines else 'no output on stderr'}")
    answer = json.loads(output.splitlines()[-1])
    with np.load(logits) as saved:
        arrays = [saved[f"row{index}"] for index in range(len(answer["rows"]))]
    logits.unlink()
    return Answered(**answer, logits=arrays)


# The functions below run in the peer's own process.


def _engine(question: Question) -> Answer:
    import torch

    from engine.evaluate.model import open_model
    from engine.generation.generate import generate
    from engine.version import VERSION

    model = open_model(question["path"], device="cpu", precision="fp32")
    tokenizer = model.tokenizer
    tokens: list[list[int]] = []
    for prompt in question["prompts"]:
        generated = generate(model.decoder, [prompt], max_tokens=question["steps"], slots=1)
        tokens.append([one.token for one in generated])

    @torch.inference_mode()
    def logits(row: list[int]) -> Any:
        return model.decoder(torch.tensor([row]))[0].float().numpy()

    return {
        "version": f"engine {VERSION}",
        "ids": [[int(one) for one in ids] for ids in tokenizer.encode_documents(question["texts"])],
        "tokens": tokens,
        "text": [tokenizer.decode(row) for row in tokens],
        **_save_logits(question, tokens, logits),
    }


def _transformers(question: Question) -> Answer:
    # Use local files only: a name that looks like one on the Hub is not looked up there.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        import transformers
    except ImportError as error:
        _absent("transformers", error)
    import torch

    path, options = question["path"], {"local_files_only": True}
    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(path, **options)
    model = library.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, **options
    ).eval()
    model.generation_config = library.GenerationConfig(
        do_sample=False, max_new_tokens=question["steps"], pad_token_id=0
    )
    tokens: list[list[int]] = []
    for prompt in question["prompts"]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids))
        tokens.append(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(row: list[int]) -> Any:
        return model(torch.tensor([row])).logits[0].float().numpy()

    decode = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return {
        "version": f"transformers {transformers.__version__}",
        "ids": [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in question["texts"]
        ],
        "tokens": tokens,
        "text": [tokenizer.decode(row, **decode) for row in tokens],
        **_save_logits(question, tokens, logits),
    }


def _llama(question: Question) -> Answer:
    try:
        import llama_cpp
    except ImportError as error:
        _absent("llama-cpp-python", error)
    _plain_blocks(llama_cpp.llama_cpp)
    longest = max(
        [len(row) for row in question["rows"] or []]
        + [len(prompt) + question["steps"] for prompt in question["prompts"]]
    )
    model = llama_cpp.Llama(
        model_path=question["path"],
        n_ctx=longest,
        n_batch=longest,
        logits_all=True,
        type_k=_F32,
        type_v=_F32,
        flash_attn=False,
        verbose=False,
    )

    def logits(row: list[int]) -> Any:
        model.reset()
        model.eval(row)
        return np.array(model.scores[: len(row)], dtype=np.float32)

    tokens: list[list[int]] = []
    for prompt in question["prompts"]:
        model.reset()
        model.eval(prompt)
        continuation: list[int] = []
        for _ in range(question["steps"]):
            # Take the first of equal maxima, as in this engine.
            continuation.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(continuation[-1:])
        tokens.append(continuation)
    return {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "ids": [
            model.tokenize(text.encode(), add_bos=False, special=True) for text in question["texts"]
        ],
        "tokens": tokens,
        "text": [model.detokenize(row, special=True).decode("utf-8", "replace") for row in tokens],
        **_save_logits(question, tokens, logits),
    }


def _plain_blocks(binding: Any) -> None:
    """Make llama.cpp use the blocks in the file's layout instead of repacking them for this processor.
    Repacking uses AMX when the processor reports it, and a virtual machine that does not allow AMX then kills
    the process with a signal."""
    defaults = binding.llama_model_default_params

    def plain() -> Any:
        parameters = defaults()
        if hasattr(parameters, "use_extra_bufts"):
            parameters.use_extra_bufts = False
        return parameters

    binding.llama_model_default_params = plain


def _save_logits(
    question: Question, tokens: list[list[int]], logits: Callable[[list[int]], Any]
) -> Answer:
    """Write the logits of each row to the file that the request names, and return the rows."""
    rows = question["rows"]
    if rows is None:
        rows = [
            prompt + continuation
            for prompt, continuation in zip(question["prompts"], tokens, strict=True)
        ]
    arrays = {f"row{index}": logits(row) for index, row in enumerate(rows)}
    np.savez(question["logits"], **arrays)
    return {"rows": rows}


def _absent(name: str, error: ImportError) -> NoReturn:
    print(f"{name} is not installed: {error}")
    sys.exit(_ABSENT)


PEERS = {"engine": _engine, "transformers": _transformers, "llama": _llama}


def main() -> None:
    answer = PEERS[sys.argv[1]](json.load(sys.stdin))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
