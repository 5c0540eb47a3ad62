"""A decoder whose forward pass is that of `transformers`: any causal language model that it has a class for.

It is a `Decoder` to everything that trains, teaches, judges and saves. What it takes from the model is found out on
the model itself, on a few tokens when it is loaded, and never assumed:

    logits      Where the model's own logits are head(hidden), for hidden states of any size, the loss gets hidden
                states and the head, as from our own decoder. Otherwise (a cap, a scale, a bias: Gemma 2, Cohere,
                Granite, Phi-2) it gets the logits themselves, and its head is the identity.
    documents   Where a mask and positions keep the documents of a row apart, proved by changing one and comparing the
                other bit for bit, rows are run as they are. Otherwise each document is run alone, padded at its end, so
                that a causal model cannot see it.

Dropout is never applied: the model stays in evaluation mode, in which a step is a function of weights and rows.

Not covered: kernels of ours inside the layers, compiled or captured layers, several GPUs, caches in generation.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from engine.decision import Decision
from engine.errors import WeightsError
from engine.files import read_json_object
from engine.limits import MODEL_CONFIG
from engine.model_families import ROPE_BUFFER
from engine.models.attention import starts_on_host
from engine.models.config import CONFIG_FILE, ModelConfig
from engine.models.decoder import Decoder, RunLayer, product_dtype, run_layer
from engine.models.names import LISTED_PROBLEMS, head_of_its_own
from engine.models.transformers_config import (
    TransformersConfig,
    hf_config,
    library,
    quiet,
    refused,
    version,
)

# Shapes: B rows, T tokens, D model width (V where the hidden states are logits), G documents of a group, L its longest

HEAD_TOKENS = 24
LARGE_LOGIT = 1024.0
"""Hidden states are also multiplied so that the largest logit is about this: there a cap of 30 shows."""
TEXT_MODEL_NAMES = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Names of a language model's tensors in a checkpoint of several models, and alone."""
MOST_ROUNDING = 0.1
"""Beyond this share rounding hides what a wrong position or mask would do."""
EXACT = 1e-4
"""Largest distance of logits, relative to the largest, that counts as the same product in fp32."""


class TransformersDecoder(Decoder):
    """A causal language model of transformers as a `Decoder`."""

    def __init__(self, config: TransformersConfig, model: Any) -> None:
        nn.Module.__init__(self)
        self.config: ModelConfig = config
        self.model = model
        self.run_layer: RunLayer = run_layer
        self.packed = False
        self.shards = None
        self._takes_positions = (
            "position_ids" in inspect.signature(model.base_model.forward).parameters
        )
        self.weight_names = tuple(name for name, _ in self.named_parameters())
        """Names of parameters, also once they are frozen."""
        self._farthest = math.inf
        self.gives_logits = False
        """Whether `hidden` returns the model's own logits."""
        self.masks_documents = False
        """Whether a mask keeps the documents of a row apart; otherwise each is run alone."""
        self.eval()

    def train(self, mode: bool = True) -> TransformersDecoder:
        """Stay in evaluation mode: dropout would make a step depend on more than weights and rows."""
        super().train(False)
        return self

    # Parts of the model by the names of `Decoder`; the model owns them.

    @property
    def embed(self) -> nn.Module:  # type: ignore[override]
        part: nn.Module = self.model.get_input_embeddings()
        return part

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        part: nn.Module = self.model.get_output_embeddings()
        return part

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The model's layers: its longest list of modules of one class."""
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len, default=nn.ModuleList())

    @property
    def dtype(self) -> torch.dtype:
        tensors = (*self.parameters(), *self.buffers())
        return next(one.dtype for one in tensors if one.is_floating_point())

    @property
    def head_weight(self) -> Tensor | None:
        """The output matrix (V, D); None where `hidden` returns logits."""
        if self.gives_logits:
            return None
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return weight

    def hidden(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        embedded_BTD: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states (B, T, D), or the logits (B, T, V) of a model that `gives_logits`."""
        rows, length = tokens_BT.shape
        starts = None if documents_BT is None else starts_on_host(documents_BT)
        if documents_BT is None or starts == list(range(0, rows * length + 1, length)):
            # Without a mask attention has kernels that need none.
            return self._run(tokens_BT)
        if self.masks_documents:
            return self._masked(tokens_BT, documents_BT)
        assert starts is not None
        return self._one_by_one(tokens_BT, starts)

    def logits_of(self, hidden_BTD: Tensor) -> Tensor:
        weight = self.head_weight
        return hidden_BTD if weight is None else F.linear(hidden_BTD, weight)

    def reach(self, name: str) -> None:
        """Every tensor is in memory."""

    def _run(self, tokens_BT: Tensor, **given: Any) -> Tensor:
        if self.gives_logits:
            logits_BTV: Tensor = self.model(
                input_ids=tokens_BT, use_cache=False, return_dict=True, **given
            ).logits
            return logits_BTV
        found_BTD: Tensor = self.model.base_model(
            input_ids=tokens_BT, use_cache=False, return_dict=True, **given
        ).last_hidden_state
        return found_BTD

    def _masked(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
        weight: Tensor = self.embed.weight  # type: ignore[assignment]
        # Added to scores, not a condition: a model without fused attention adds it whatever it is.
        mask_BTT = torch.zeros(
            seen_BTT.shape, dtype=product_dtype(weight), device=tokens_BT.device
        ).masked_fill_(~seen_BTT, -math.inf)
        given: dict[str, Tensor] = {"attention_mask": mask_BTT[:, None]}
        if self._takes_positions:
            given["position_ids"] = seen_BTT.sum(-1) - 1
        return self._run(tokens_BT, **given)

    def _one_by_one(self, tokens_BT: Tensor, starts: Sequence[int]) -> Tensor:
        """Run each document of each row alone. `starts` are the first token of each, and the end."""
        rows, length = tokens_BT.shape
        begins = starts[:-1]
        lengths = [end - begin for begin, end in pairwise(starts)]
        flat_N = tokens_BT.flatten()
        found: list[Tensor | None] = [None] * len(begins)
        for group in _groups(lengths, rows * length):
            # Tokens after a document have no influence on it.
            longest = lengths[group[0]]
            tokens_GL = flat_N.new_zeros(len(group), longest)
            for place, number in enumerate(group):
                part_N = flat_N[begins[number] : begins[number] + lengths[number]]
                tokens_GL[place, : lengths[number]] = part_N
            out_GLD = self._run(tokens_GL)
            for place, number in enumerate(group):
                found[number] = out_GLD[place, : lengths[number]]
        whole_ND = torch.cat([part for part in found if part is not None])
        return whole_ND.view(rows, length, -1)

    def run_like(self, other: Decoder) -> None:
        super().run_like(other)
        assert isinstance(other, TransformersDecoder)
        self.gives_logits, self.masks_documents = other.gives_logits, other.masks_documents

    def checkpoint_layers(self, on: bool, kept: int = 0) -> None:
        """Keep only the input of each layer but the last `kept` for the backward pass, or everything."""
        for index, layer in enumerate(self.layers):
            vars(layer).pop("forward", None)
            if on and index < len(self.layers) - kept:
                layer.forward = partial(_checkpointed, layer.forward)

    @torch.no_grad()
    def look(self, whose: str, length: int) -> tuple[Decision, Decision]:
        """Find out whether the logits are head(hidden), and how documents are kept apart in rows of `length` tokens: a
        window that a mask would replace shows only in rows that are longer."""
        return self._about_head(whose), self._look_at_documents(whose, length)

    def _probe(self, length: int) -> Tensor:
        """Return a row of different tokens over the whole vocabulary, (1, T)."""
        at_T = torch.arange(length, device=self.embed.weight.device)  # type: ignore[arg-type]
        return ((at_T * 7919 + 13) % self.config.vocab_size)[None]

    @torch.no_grad()
    def look_at_head(self) -> TransformersDecoder:
        """Find out whether the logits are head(hidden); `hidden` returns what the loss can use from then on."""
        self.gives_logits = False
        tokens_BT = self._probe(min(HEAD_TOKENS, self.config.max_position_embeddings))
        farthest = math.inf
        if isinstance(self.head, nn.Linear):
            plain = self._distance(tokens_BT, 1.0)
            large = self._distance(tokens_BT, None)
            farthest = max(plain, large)
        rounding = torch.finfo(self.dtype).eps
        allowed = max(EXACT, 2 * rounding)
        # This form makes NaN differ.
        self._farthest, self.gives_logits = farthest, not farthest <= allowed
        return self

    def _about_head(self, whose: str) -> Decision:
        farthest = self._farthest
        far = f"{farthest:.1e} of the largest" if math.isfinite(farthest) else "beyond comparison"
        lost = "all logits of a batch are in memory at once, in the model's own precision"
        if self.gives_logits:
            return Decision(
                knob=f"{whose}.logits",
                choice="of the model",
                reason=f"its logits are not head(hidden): {far}; {lost}",
                rejected=(("head(hidden)", "would be another model: a cap, a scale or a bias"),),
            )
        return Decision(
            knob=f"{whose}.logits",
            choice="head(hidden)",
            reason=f"the model's own logits are head(hidden): within {far}, also where logits are large",
            rejected=(("of the model", lost),),
        )

    def _distance(self, tokens_BT: Tensor, factor: float | None) -> float:
        """Return how far the model's logits are from head(hidden), relative to the largest, with hidden states
        multiplied by `factor` before its head; None makes the logits large."""
        given: list[Tensor] = []
        if factor is None:
            weight: Tensor = self.head.weight  # type: ignore[assignment]
            hidden_BTD = self._run(tokens_BT)
            largest = float(F.linear(hidden_BTD, weight).abs().amax())
            # A power of two, which rounds nothing.
            factor = 2.0 ** round(math.log2(LARGE_LOGIT / largest)) if largest > 0 else 1.0

        def multiply(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            given.append(inputs[0])
            return (inputs[0] * factor, *inputs[1:])

        handle = self.head.register_forward_pre_hook(multiply)
        try:
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False, return_dict=True).logits
        finally:
            handle.remove()
        hidden_BTD = self._run(tokens_BT)
        if len(given) != 1 or given[0].shape != hidden_BTD.shape:
            return math.inf
        wanted_BTV = F.linear(hidden_BTD * factor, self.head.weight).float()  # type: ignore[arg-type]
        if logits_BTV.shape != wanted_BTV.shape:
            return math.inf
        return float((logits_BTV.float() - wanted_BTV).abs().amax() / wanted_BTV.abs().amax())

    def _look_at_documents(self, whose: str, length: int) -> Decision:
        knob, alone = (
            f"{whose}.documents",
            "each document is run alone, padded to the longest of its group",
        )
        why_not = self._mixes_documents(length)
        self.masks_documents = why_not is None
        if why_not is not None:
            return Decision(
                knob=knob,
                choice="alone",
                reason=f"in one row {why_not}; {alone}",
                rejected=(("masked", why_not),),
            )
        return Decision(
            knob=knob,
            choice="masked",
            reason="with a mask and positions, another document in the row changes no bit of a document",
            rejected=(("alone", f"{alone}: more work and a wait for the device"),),
        )

    def _mixes_documents(self, length: int) -> str | None:
        """Return how the documents of a row reach each other under a mask; None where they do not."""
        tokens_BT = self._probe(max(length, 2))
        split = max(1, length // 3)
        documents_BT = torch.zeros_like(tokens_BT)
        documents_BT[:, split:] = 1
        other_BT = tokens_BT.clone()
        other_BT[:, :split] = (
            other_BT[:, :split] + self.config.vocab_size // 2
        ) % self.config.vocab_size
        try:
            found_BTD = self._masked(tokens_BT, documents_BT)
            changed_BTD = self._masked(other_BT, documents_BT)
        except Exception as error:  # noqa: BLE001 - a model that takes no such mask is run in another way
            text = str(error).strip().splitlines()
            return f"a mask for documents is not taken ({type(error).__name__}: {(text or [''])[0]:.100})"
        if torch.equal(found_BTD[:, :split], changed_BTD[:, :split]):
            return "a changed token changes nothing"
        if not torch.equal(found_BTD[:, split:], changed_BTD[:, split:]):
            return "a document sees the one before it"
        alone_BTD = self._run(tokens_BT[:, split:])
        apart = _apart(found_BTD[:, split:], alone_BTD)
        with moved(self.model, torch.finfo(self.dtype).eps):
            by_rounding = _apart(self._run(tokens_BT[:, split:]), alone_BTD)
        if not apart <= max(EXACT, 4 * by_rounding):
            return f"a document after another is {apart:.1e} from what it is alone"
        if by_rounding > MOST_ROUNDING:
            return f"rounding moves a document by {by_rounding:.1e}, so that nothing can be decided"
        return None


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).float().norm() / wanted.float().norm())


def _groups(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Yield the numbers of documents that are run together, longest first; padded, they have at most `budget`
    tokens."""
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    first = 0
    while first < len(order):
        count = max(1, budget // lengths[order[first]])
        yield order[first : first + count]
        first += count


@contextlib.contextmanager
def moved(model: nn.Module, share: float) -> Iterator[None]:
    """Move what each innermost module of `model` returns by `share` of itself, every other number up and down: what
    becomes of that shows how far rounding alone may carry the answers."""

    def move(_module: nn.Module, _inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        sign_D = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return (output * (1 + share * sign_D)).to(output.dtype)

    inner = [part for part in model.modules() if not any(True for _ in part.children())]
    handles = [part.register_forward_hook(move) for part in inner]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpointed(run: Any, *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return run(*given, **named)
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, **named)


def new_transformers_decoder(
    config: TransformersConfig, seed: int, dtype: torch.dtype
) -> TransformersDecoder:
    """Create an untrained model on the CPU: transformers' own initial weights, from `seed` alone."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = library().AutoModelForCausalLM.from_config(
            hf_config(config), dtype=torch.float32, trust_remote_code=bool(config.folder)
        )
    return TransformersDecoder(config, model.to(dtype)).look_at_head()


def load_transformers_decoder(
    config: TransformersConfig, folder: Path, dtype: torch.dtype, device: str | torch.device
) -> TransformersDecoder:
    """Load the model in `folder`, cast to `dtype` on `device`.

    Raises `WeightsError` where a tensor is missing, left over, of another shape or not finite, and where the files
    have a head of their own though the configuration ties it.
    """
    raw = read_json_object(folder / CONFIG_FILE, "model", MODEL_CONFIG)
    # The language model of several, which its files name as a part of the whole.
    alone = "text_config" in raw and "text_config" not in config.to_hf_dict()
    renamed = {"key_mapping": TEXT_MODEL_NAMES} if alone else {}
    try:
        with quiet():
            model, found = library().AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config(config),
                **renamed,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=bool(config.folder),
                output_loading_info=True,
            )
    except Exception as error:
        raise refused(
            folder,
            f"a {config.title} that transformers {version()} loads",
            error,
            config.to_hf_dict(),
        ) from error
    left_over = [name for name in found["unexpected_keys"] if not ROPE_BUFFER.fullmatch(name)]
    if alone:
        own = model.state_dict()
        first = {name.partition(".")[0] for name in own}
        left_over = [name for name in left_over if name.partition(".")[0] in first]
    problems = [
        *(f"missing {name}" for name in sorted(found["missing_keys"])),
        *(f"unexpected {name}" for name in sorted(left_over)),
        *(f"misshapen {one}" for one in sorted(map(str, found["mismatched_keys"]))),
    ]
    tensors = model.state_dict()
    problems += [
        f"{name}: {int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values are NaN or infinite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if problems:
        listed = problems[:LISTED_PROBLEMS]
        if len(problems) > LISTED_PROBLEMS:
            listed.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
        raise WeightsError.expected(
            "weights",
            folder,
            f"those of a {config.title}",
            "".join(f"\n  {problem}" for problem in listed),
        )
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding:
        # transformers warns and lets the two apart, and what it saves of them says that they are tied.
        name_of = {id(one): name for name, one in model.named_parameters()}
        raise head_of_its_own(folder, name_of[id(head.weight)], name_of[id(embedding)])
    return TransformersDecoder(config, model.to(device)).look_at_head()


def save_transformers_decoder(
    decoder: TransformersDecoder, folder: Path, dtype: torch.dtype
) -> Iterable[str]:
    """Write `config.json` and the weights as transformers saves them, in `dtype`, into the existing `folder`."""
    state: dict[str, Tensor] = {}
    made: dict[tuple[int, torch.Size], Tensor] = {}
    for name, tensor in decoder.model.state_dict().items():
        # A tied matrix stays one tensor under two names, which transformers writes once.
        place = tensor.data_ptr(), tensor.shape
        if place not in made:
            made[place] = tensor.detach().to(
                "cpu", dtype if tensor.is_floating_point() else tensor.dtype
            )
        state[name] = made[place]
    with quiet():
        decoder.model.save_pretrained(folder, state_dict=state)
    # transformers names the type of the parameters in memory, not that of what it was given.
    path = folder / CONFIG_FILE
    config = read_json_object(path, "model", MODEL_CONFIG)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())
