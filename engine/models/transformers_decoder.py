"""Run any causal language model of `transformers` as a `Decoder`, with the forward pass of transformers.

Two properties of the model are measured on a few tokens when it is loaded:

    logits      Are the model's logits head(hidden), for hidden states of any magnitude? If so, the loss gets hidden
                states and the head, as from our own decoder. If not (a cap, a scale, a bias: Gemma 2, Cohere,
                Granite, Phi-2), the loss gets the model's logits, and its head is the identity.
    documents   Do a mask and positions keep the documents of a row apart? This is tested by changing one document and
                comparing the outputs of the other bit for bit. If so, whole rows are run. If not, each document is run
                alone and padded at its end; a causal model does not attend to later padding.

Dropout is never applied: the model stays in evaluation mode, in which a step is a function of weights and rows.

Not covered: the engine's kernels inside layers, compiled layers, CUDA graphs of layers, several GPUs.
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
from engine.models.decoder import Decoder, RunLayer, matmul_dtype, run_layer
from engine.models.names import LISTED_PROBLEMS, untied_head_error
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
"""Number of tokens on which the head is tested."""
LARGE_LOGIT = 1024.0
"""Approximate largest logit of the second test of the head: hidden states are scaled up so that a cap of 30 shows."""
TEXT_MODEL_NAMES = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Name prefixes of a language model's tensors in a multimodal checkpoint, and in a plain language model."""
MOST_ROUNDING = 0.1
"""Maximum relative difference due to rounding, 0 to 1; above it rounding would hide the effect of a wrong mask."""
EXACT = 1e-4
"""Maximum difference of logits, relative to the largest logit, of two equal matmuls in fp32."""


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
        """Names of the parameters; frozen parameters, which become buffers, included."""
        self._head_error = math.inf
        self.gives_logits = False
        """Whether `hidden` returns the model's own logits."""
        self.masks_documents = False
        """Whether a mask keeps the documents of a row apart; otherwise each document is run alone."""
        self.eval()

    def train(self, mode: bool = True) -> TransformersDecoder:
        """Stay in evaluation mode: dropout would make a step depend on more than weights and rows."""
        super().train(False)
        return self

    # Modules of the model under the names that `Decoder` has for them.

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
        """The model's layers: its longest list of modules of the same class."""
        lists = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        return max(lists, key=len, default=nn.ModuleList())

    @property
    def dtype(self) -> torch.dtype:
        tensors = (*self.parameters(), *self.buffers())
        return next(tensor.dtype for tensor in tensors if tensor.is_floating_point())

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
            # Without a mask, attention can use faster kernels.
            return self._run(tokens_BT)
        if self.masks_documents:
            return self._masked(tokens_BT, documents_BT)
        assert starts is not None
        return self._run_each_document(tokens_BT, starts)

    def logits_of(self, hidden_BTD: Tensor) -> Tensor:
        weight = self.head_weight
        return hidden_BTD if weight is None else F.linear(hidden_BTD, weight)

    def gather_for(self, name: str) -> None:
        """Do nothing: every tensor is in memory."""

    def _run(self, tokens_BT: Tensor, **inputs: Any) -> Tensor:
        if self.gives_logits:
            logits_BTV: Tensor = self.model(
                input_ids=tokens_BT, use_cache=False, return_dict=True, **inputs
            ).logits
            return logits_BTV
        hidden_BTD: Tensor = self.model.base_model(
            input_ids=tokens_BT, use_cache=False, return_dict=True, **inputs
        ).last_hidden_state
        return hidden_BTD

    def _masked(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        visible_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
        weight: Tensor = self.embed.weight  # type: ignore[assignment]
        # Use a float mask: a model without fused attention adds the mask to the scores even if it is bool.
        mask_BTT = torch.zeros(
            visible_BTT.shape, dtype=matmul_dtype(weight), device=tokens_BT.device
        ).masked_fill_(~visible_BTT, -math.inf)
        inputs: dict[str, Tensor] = {"attention_mask": mask_BTT[:, None]}
        if self._takes_positions:
            inputs["position_ids"] = visible_BTT.sum(-1) - 1
        return self._run(tokens_BT, **inputs)

    def _run_each_document(self, tokens_BT: Tensor, starts: Sequence[int]) -> Tensor:
        """Run each document of each row alone. `starts`: first token of each document in the flattened batch, and the
        end."""
        rows, length = tokens_BT.shape
        begins = starts[:-1]
        lengths = [end - begin for begin, end in pairwise(starts)]
        flat_N = tokens_BT.flatten()
        hidden_of_document: list[Tensor | None] = [None] * len(begins)
        for group in _groups(lengths, rows * length):
            # Padding after a document does not influence it.
            longest = lengths[group[0]]
            tokens_GL = flat_N.new_zeros(len(group), longest)
            for row, document in enumerate(group):
                part_N = flat_N[begins[document] : begins[document] + lengths[document]]
                tokens_GL[row, : lengths[document]] = part_N
            out_GLD = self._run(tokens_GL)
            for row, document in enumerate(group):
                hidden_of_document[document] = out_GLD[row, : lengths[document]]
        whole_ND = torch.cat([part for part in hidden_of_document if part is not None])
        return whole_ND.view(rows, length, -1)

    def run_like(self, other: Decoder) -> None:
        super().run_like(other)
        assert isinstance(other, TransformersDecoder)
        self.gives_logits, self.masks_documents = other.gives_logits, other.masks_documents

    def checkpoint_layers(self, on: bool, kept: int = 0) -> None:
        """Switch activation checkpointing on or off: keep only each layer's input for the backward pass, except for the
        last `kept` layers, which keep all activations."""
        for index, layer in enumerate(self.layers):
            vars(layer).pop("forward", None)
            if on and index < len(self.layers) - kept:
                layer.forward = partial(_checkpointed, layer.forward)

    @torch.no_grad()
    def probe(self, whose: str, length: int) -> tuple[Decision, Decision]:
        """Measure whether the logits are head(hidden), and whether a mask keeps documents apart in rows of `length`
        tokens. The length matters: our mask would replace a sliding window, which shows only in longer rows."""
        return self._head_decision(whose), self._probe_documents(whose, length)

    def _probe_row(self, length: int) -> Tensor:
        """Return a row of different tokens spread over the vocabulary, (1, T)."""
        at_T = torch.arange(length, device=self.embed.weight.device)  # type: ignore[arg-type]
        return ((at_T * 7919 + 13) % self.config.vocab_size)[None]

    @torch.no_grad()
    def probe_head(self) -> TransformersDecoder:
        """Measure whether the logits are head(hidden), and set `gives_logits` accordingly."""
        self.gives_logits = False
        tokens_BT = self._probe_row(min(HEAD_TOKENS, self.config.max_position_embeddings))
        distance = math.inf
        if isinstance(self.head, nn.Linear):
            at_factor_1 = self._head_distance(tokens_BT, 1.0)
            at_large_logits = self._head_distance(tokens_BT, None)
            distance = max(at_factor_1, at_large_logits)
        rounding = torch.finfo(self.dtype).eps
        allowed = max(EXACT, 2 * rounding)
        # Use `not <=` instead of `>`, so that NaN counts as a difference.
        self._head_error, self.gives_logits = distance, not distance <= allowed
        return self

    def _head_decision(self, whose: str) -> Decision:
        distance = self._head_error
        shown_distance = (
            f"{distance:.1e} of the largest" if math.isfinite(distance) else "beyond comparison"
        )
        cost = "all logits of a batch are in memory at once, in the model's own precision"
        if self.gives_logits:
            return Decision(
                knob=f"{whose}.logits",
                choice="of the model",
                reason=f"its logits are not head(hidden): {shown_distance}; {cost}",
                rejected=(("head(hidden)", "would be another model: a cap, a scale or a bias"),),
            )
        return Decision(
            knob=f"{whose}.logits",
            choice="head(hidden)",
            reason=f"the model's own logits are head(hidden): within {shown_distance}, also where logits are large",
            rejected=(("of the model", cost),),
        )

    def _head_distance(self, tokens_BT: Tensor, factor: float | None) -> float:
        """Return the largest difference between the model's logits and head(hidden), relative to the largest logit.
        Hidden states are multiplied by `factor` before the model's head; None chooses a factor that makes the logits
        large."""
        head_inputs: list[Tensor] = []
        if factor is None:
            weight: Tensor = self.head.weight  # type: ignore[assignment]
            hidden_BTD = self._run(tokens_BT)
            largest = float(F.linear(hidden_BTD, weight).abs().amax())
            # A power of two, so that the multiplication is exact.
            factor = 2.0 ** round(math.log2(LARGE_LOGIT / largest)) if largest > 0 else 1.0

        def multiply(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            head_inputs.append(inputs[0])
            return (inputs[0] * factor, *inputs[1:])

        handle = self.head.register_forward_pre_hook(multiply)
        try:
            logits_BTV = self.model(input_ids=tokens_BT, use_cache=False, return_dict=True).logits
        finally:
            handle.remove()
        hidden_BTD = self._run(tokens_BT)
        if len(head_inputs) != 1 or head_inputs[0].shape != hidden_BTD.shape:
            return math.inf
        expected_BTV = F.linear(hidden_BTD * factor, self.head.weight).float()  # type: ignore[arg-type]
        if logits_BTV.shape != expected_BTV.shape:
            return math.inf
        return float((logits_BTV.float() - expected_BTV).abs().amax() / expected_BTV.abs().amax())

    def _probe_documents(self, whose: str, length: int) -> Decision:
        knob, alone = (
            f"{whose}.documents",
            "each document is run alone, padded to the longest of its group",
        )
        why_not = self._why_documents_mix(length)
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

    def _why_documents_mix(self, length: int) -> str | None:
        """Return a description of how one document of a row influences another under a mask; None if it does not."""
        tokens_BT = self._probe_row(max(length, 2))
        split = max(1, length // 3)
        documents_BT = torch.zeros_like(tokens_BT)
        documents_BT[:, split:] = 1
        changed_BT = tokens_BT.clone()
        changed_BT[:, :split] = (
            changed_BT[:, :split] + self.config.vocab_size // 2
        ) % self.config.vocab_size
        try:
            together_BTD = self._masked(tokens_BT, documents_BT)
            changed_BTD = self._masked(changed_BT, documents_BT)
        except Exception as error:  # noqa: BLE001 - documents are run alone if the model does not accept such a mask
            text = str(error).strip().splitlines()
            return f"it does not accept a mask for documents ({type(error).__name__}: {(text or [''])[0]:.100})"
        if torch.equal(together_BTD[:, :split], changed_BTD[:, :split]):
            return "a changed token changes nothing"
        if not torch.equal(together_BTD[:, split:], changed_BTD[:, split:]):
            return "a document sees the one before it"
        alone_BTD = self._run(tokens_BT[:, split:])
        distance = _distance_of(together_BTD[:, split:], alone_BTD)
        with perturbed(self.model, torch.finfo(self.dtype).eps):
            by_rounding = _distance_of(self._run(tokens_BT[:, split:]), alone_BTD)
        if not distance <= max(EXACT, 4 * by_rounding):
            return f"a document after another is {distance:.1e} from what it is alone"
        if by_rounding > MOST_ROUNDING:
            return f"rounding moves a document by {by_rounding:.1e}, so that nothing can be decided"
        return None


def _distance_of(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).float().norm() / expected.float().norm())


def _groups(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Yield groups of document indices to run together, longest documents first. A padded group has at most `budget`
    tokens."""
    order = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    first = 0
    while first < len(order):
        count = max(1, budget // lengths[order[first]])
        yield order[first : first + count]
        first += count


@contextlib.contextmanager
def perturbed(model: nn.Module, share: float) -> Iterator[None]:
    """Change the output of each module without children by the relative amount `share`, alternately up and down. The
    change of the model's output shows how much rounding may change it."""

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


def _checkpointed(run: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def new_transformers_decoder(
    config: TransformersConfig, seed: int, dtype: torch.dtype
) -> TransformersDecoder:
    """Create an untrained model on the CPU: transformers' own initial weights, from `seed` alone."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = library().AutoModelForCausalLM.from_config(
            hf_config(config), dtype=torch.float32, trust_remote_code=bool(config.folder)
        )
    return TransformersDecoder(config, model.to(dtype)).probe_head()


def load_transformers_decoder(
    config: TransformersConfig, folder: Path, dtype: torch.dtype, device: str | torch.device
) -> TransformersDecoder:
    """Load the model in `folder`, cast to `dtype` on `device`.

    Raises `WeightsError` if a tensor is missing, unexpected, of another shape or not finite, and if the files have a
    separate head although the configuration ties it.
    """
    raw = read_json_object(folder / CONFIG_FILE, "model", MODEL_CONFIG)
    # A language model in a multimodal checkpoint, whose tensor names have another prefix.
    text_model_alone = "text_config" in raw and "text_config" not in config.to_hf_dict()
    renamed = {"key_mapping": TEXT_MODEL_NAMES} if text_model_alone else {}
    try:
        with quiet():
            model, loading_info = library().AutoModelForCausalLM.from_pretrained(
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
    left_over = [
        name for name in loading_info["unexpected_keys"] if not ROPE_BUFFER.fullmatch(name)
    ]
    if text_model_alone:
        own = model.state_dict()
        prefixes = {name.partition(".")[0] for name in own}
        left_over = [name for name in left_over if name.partition(".")[0] in prefixes]
    problems = [
        *(f"missing {name}" for name in sorted(loading_info["missing_keys"])),
        *(f"unexpected {name}" for name in sorted(left_over)),
        *(
            f"misshapen {mismatch}"
            for mismatch in sorted(map(str, loading_info["mismatched_keys"]))
        ),
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
        # transformers only warns and keeps two matrices, but would save them as one tied matrix.
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        raise untied_head_error(folder, name_of[id(head.weight)], name_of[id(embedding)])
    return TransformersDecoder(config, model.to(device)).probe_head()


def save_transformers_decoder(
    decoder: TransformersDecoder, folder: Path, dtype: torch.dtype
) -> Iterable[str]:
    """Write `config.json` and the weights as transformers saves them, in `dtype`, into the existing `folder`."""
    state: dict[str, Tensor] = {}
    saved_by_storage: dict[tuple[int, torch.Size], Tensor] = {}
    for name, tensor in decoder.model.state_dict().items():
        # A tied matrix stays one tensor under two names, which transformers writes once.
        storage = tensor.data_ptr(), tensor.shape
        if storage not in saved_by_storage:
            saved_by_storage[storage] = tensor.detach().to(
                "cpu", dtype if tensor.is_floating_point() else tensor.dtype
            )
        state[name] = saved_by_storage[storage]
    with quiet():
        decoder.model.save_pretrained(folder, state_dict=state)
    # transformers writes the dtype of the parameters in memory, not that of the saved tensors.
    path = folder / CONFIG_FILE
    config = read_json_object(path, "model", MODEL_CONFIG)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())
