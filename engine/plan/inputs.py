"""Check all that can be checked of a run's inputs without torch, before a run folder exists.

This reads headers, configs and names but no tensors, so it takes well under a second for a 7B teacher.
The trainer checks the tensors and the tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from engine.catalogue import skipped_ids
from engine.checkpoint_folders import FREE_SPACE_FACTOR, published, step_of
from engine.data.chat_labels import Turns
from engine.data.chat_template import ChatTemplate, find_chat_template, template_of
from engine.data.corpus import Corpus, check_corpus, open_corpus
from engine.data.sources import column_names
from engine.data.token_cache import Progress, Recipe, Tokens, load_tokens, no_progress
from engine.data.tokens import Encoder
from engine.errors import BadInput, DiskFull, TokenizerError
from engine.formats.adapter import is_adapter
from engine.formats.open import open_weights
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.log.folder import RunFolder
from engine.models.adapter_targets import trained_parameters
from engine.models.config import ModelConfig
from engine.models.names import check_fits
from engine.models.packed_size import PackedSize, packed_size, without_blocks
from engine.models.read_config import config_of, read_config
from engine.spec import RunSpec
from engine.spec.build import models_of_hub
from engine.spec.sections import DataSection, ModelSection
from engine.teachers.store.manifest import fitting_manifest, uses_cache
from engine.teachers.vocabulary import check_vocabularies
from engine.units import format_bytes

NOW = datetime(2024, 7, 26)
"""Date that chat templates write if they ask for the current one: the default of Llama 3's template."""
ADAM_COPIES = 3
"""Number of fp32 copies of the parameters in one checkpoint: the weights and AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs that the checks have read: the shapes of both models, and the tokenizers."""

    teacher: ModelConfig | None
    teacher_size: PackedSize | None
    """Sizes of the teacher's weights if quantised blocks stay quantised; None without a teacher."""
    student: ModelConfig
    tokenizer: Tokenizer
    tokenizers: Mapping[str, Tokenizer | None]
    """All tokenizers by their owner; None for a model without a tokenizer."""
    notes: tuple[str, ...]
    """Warnings about inputs that could not be checked, or that are unusual but accepted; one line each."""
    student_blocks: PackedSize | None = None
    """Sizes of a student's weights if its adapters are trained on matrices in quantised blocks; else None."""
    is_one_file: bool = False
    """Whether the base of the student's adapters is the teacher's file; false if student.path is an adapter's
    folder."""
    context: tuple[int, ...] = ()
    """Tokens of teacher.context."""
    models: tuple[str, ...] = ()
    """The models that are read from the Hugging Face cache, with their commits; one line each."""
    template: ChatTemplate | None = None
    """Chat template that renders the conversations of the corpus; None if its first MiB has no conversation."""

    def load_tokens(
        self,
        data: DataSection,
        progress: Progress = no_progress,
        *,
        corpus: Corpus | None = None,
        root: Path | None = None,
    ) -> Tokens:
        """Return the tokens of the corpus, from the token cache if they are in it. `root` is the folder of the cache,
        by default the user's; `corpus` is the corpus of `data` if it is already open."""
        recipe = Recipe(
            source=data.corpus,
            include_tests=data.include_tests,
            columns=column_names(data.columns),
            heldout_fraction=data.heldout_fraction,
            max_bytes=data.max_bytes or None,
            encoder=self.encoder(data),
            packing=data.packing,
            seq_len=data.seq_len,
            skip_at_most=data.skip_at_most,
        )
        return load_tokens(recipe, progress, corpus=corpus, root=root)

    def encoder(self, data: DataSection) -> Encoder:
        """Return the encoder that tokenizes the documents of the corpus."""
        return Encoder(tokenizer=self.tokenizer, template=self.template, turns=_turns(data))


def open_corpus_of(
    data: DataSection, progress: Callable[[int], None] = lambda done: None
) -> Corpus:
    """Read and split the corpus of a spec; `progress` is called with the bytes read so far. Raises CorpusError."""
    return open_corpus(
        data.corpus,
        heldout_fraction=data.heldout_fraction,
        include_tests=data.include_tests,
        max_bytes=data.max_bytes or None,
        columns=column_names(data.columns),
        skip_at_most=data.skip_at_most,
        progress=progress,
    )


def _turns(data: DataSection) -> Turns:
    return "last" if data.turns == "last" else "all"


def _model(path: str, how: ModelSection) -> tuple[ModelConfig, PackedSize]:
    with open_weights(Path(path)) as weights:
        config = config_of(weights, how)
        check_fits(config, weights, path, weights.convention)
        return config, packed_size(config, weights)


def _file_warnings(spec: RunSpec) -> Iterator[str]:
    """Yield warnings about files of the models that are unusual but accepted."""
    for whose, path in (("teacher", spec.teacher.path), ("student", spec.student.path)):
        if path:
            with open_weights(Path(path)) as weights:
                yield from (f"{whose}: {text}" for text in weights.warnings)


def _tokenizers(spec: RunSpec) -> dict[str, Tokenizer | None]:
    """Return the tokenizers by their owner, with None for a model without a tokenizer.

    A student with fresh weights has no entry: its token ids have no meaning yet.
    """
    tokenizers: dict[str, Tokenizer | None] = {}
    if spec.data.tokenizer:
        tokenizers["data.tokenizer"] = open_tokenizer(spec.data.tokenizer)
    for whose, path in (("teacher", spec.teacher.path), ("student", spec.student.path)):
        if path:
            tokenizers[whose] = _own_tokenizer(path)
    return tokenizers


def _own_tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer in a model's folder or file; None if it has none."""
    if Path(path).is_dir() and (Path(path) / TOKENIZER_FILE).exists():
        return open_tokenizer(path)
    with open_weights(Path(path)) as weights:
        raw = weights.tokenizer_json()
    return None if raw is None else open_tokenizer(path, raw=raw)


def _template(spec: RunSpec, tokenizer: Tokenizer) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Return the chat template that renders the conversations, and notes for the user about it. The template comes from
    data.tokenizer, else from the student, else from the teacher. Raises TokenizerError if none of them has one."""
    named = spec.data.tokenizer
    templates = {"data.tokenizer": find_chat_template(named, now=NOW) if named else None}
    for whose, path in (("student", spec.student.path), ("teacher", spec.teacher.path)):
        if path:
            with open_weights(Path(path)) as weights:
                templates[whose] = template_of(weights, tokenizer, now=NOW)
    chosen = next((template for template in templates.values() if template is not None), None)
    if chosen is None:
        looked_in = ", ".join(filter(None, (named, spec.student.path, spec.teacher.path)))
        raise TokenizerError(
            f"data.corpus: expected a chat template for its conversations, found none in {looked_in or 'any model'}",
            hint="use models or a data.tokenizer with a chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json), or give prompt and completion as text",
        )
    notes = []
    if chosen.reads_clock:
        notes.append(
            f"the chat template writes the date, which is fixed to {NOW:%d %b %Y}: a resume reads the same tokens"
        )
    teacher = templates.get("teacher")
    if teacher is not None and teacher.texts != chosen.texts:
        notes.append(
            f"the teacher has another chat template; for both models, {chosen.where} renders the conversations"
        )
    return chosen, tuple(notes)


def _main_tokenizer(tokenizers: Mapping[str, Tokenizer | None], spec: RunSpec) -> Tokenizer:
    """Return the tokenizer that the spec names, else that of the teacher, else that of the student."""
    for tokenizer in tokenizers.values():
        if tokenizer is not None:
            return tokenizer
    paths = [path for path in (spec.teacher.path, spec.student.path) if path]
    where = " nor ".join(paths) or "the spec"
    raise TokenizerError(
        f"data.tokenizer: expected a tokenizer.json, found none in {where}",
        hint="set data.tokenizer to a folder or file",
    )


def _check_not_teacher(spec: RunSpec) -> None:
    """Refuse a student that is the teacher's file or folder. The trainer also compares the values of the weights, which
    finds copies and other formats (`engine.teachers.same_model`)."""
    teacher, student = spec.teacher, spec.student
    if teacher.allow_identical or teacher.context or not spec.has_teacher:
        return
    if Path(student.path).samefile(teacher.path):
        raise BadInput.expected(
            "student.path",
            student.path,
            "other weights than the teacher's",
            "the same values: it is the teacher's path",
            hint="a student equal to its teacher has nothing to learn from it; give a smaller model, or a shape for "
            "fresh weights in student.config; with teacher.context the student learns what the context changes; "
            "teacher.allow_identical=true trains the student anyway",
        )


def _check_widths(spec: RunSpec, teacher: ModelConfig, student: ModelConfig) -> None:
    """Refuse vocabulary sizes that do not fit: the student's tokens must be the first tokens of the teacher."""
    if student.vocab_size > teacher.vocab_size:
        raise BadInput(
            f"vocabulary: student — expected at most the teacher's {teacher.vocab_size} ids, "
            f"found {student.vocab_size}",
            hint="the teacher has no probabilities for further ids; truncate the student's embedding",
        )
    if spec.vocab.align == "refuse" and student.vocab_size != teacher.vocab_size:
        raise BadInput(
            f"vocabulary: student — expected the teacher's {teacher.vocab_size} ids, because "
            f"vocab.align is refuse, found {student.vocab_size}",
            hint="vocab.align=truncate removes the teacher's logits beyond the student's vocabulary",
        )


def _check_native(spec: RunSpec, teacher: ModelConfig | None, student: ModelConfig) -> None:
    """Refuse settings that only the native decoder supports, if transformers runs a model."""
    if spec.teacher.precision == "fp8" and teacher is not None and not teacher.native:
        raise BadInput.expected(
            "teacher.precision",
            "fp8",
            "bf16, tf32 or fp32, because transformers runs the teacher",
            "fp8, which only the native decoder supports",
            hint="teacher.precision=bf16 runs any model",
        )
    if spec.compute.gpus > 1 and not (student.native and (teacher is None or teacher.native)):
        raise BadInput.expected(
            "compute.gpus",
            spec.compute.gpus,
            "1, because transformers runs a model",
            "more",
            hint="models of a native family train on several GPUs (docs/extending.md lists them)",
        )


def check_inputs(spec: RunSpec, run: Path | None = None) -> Inputs:
    """Open and check every input of `spec`. Raises BadInput.

    With `run`, also check that the disk has space for its checkpoints, and that the stored teacher
    outputs belong to this teacher.
    """
    skipped_ids(spec.checks.skip)
    models = tuple(f"{key}: {model.text}" for key, model in models_of_hub(spec).items())
    teacher, teacher_size = (
        _model(spec.teacher.path, spec.model) if spec.teacher.path else (None, None)
    )
    if spec.student.path:
        _check_not_teacher(spec)
        student, student_size = _model(spec.student.path, spec.model)
    else:
        student, student_size = read_config(Path(spec.student.config), spec.model), None
    if teacher is not None:
        _check_widths(spec, teacher, student)
    _check_native(spec, teacher, student)
    packed = spec.teacher.backend == "quantized"
    if packed and teacher_size is not None and not teacher_size.matrices:
        raise without_blocks(spec.teacher.path)
    tokenizers = _tokenizers(spec)
    tokenizer = _main_tokenizer(tokenizers, spec)
    if not spec.has_teacher:
        tokenizers.pop("teacher", None)
    notes = (*_file_warnings(spec), *check_vocabularies(tokenizers, student.vocab_size))
    tokenizer.fits(student.vocab_size, f"student {spec.student.path or spec.student.config}")
    context = tuple(map(int, tokenizer.encode_whole(spec.teacher.context)))
    for whose, config, context_tokens in (
        ("student", student, 0),
        ("teacher", teacher, len(context)),
    ):
        if (
            config is not None
            and spec.data.seq_len + context_tokens > config.max_position_embeddings
        ):
            and_context = f" and {context_tokens} of teacher.context" if context_tokens else ""
            raise BadInput(
                f"data.seq_len: expected at most the {whose}'s {config.max_position_embeddings} "
                f"positions, found {spec.data.seq_len}{and_context}"
            )
    template = None
    if check_corpus(spec.data.corpus, columns=column_names(spec.data.columns)):
        template, about_template = _template(spec, tokenizer)
        notes = (*notes, *about_template)
    if run is not None:
        check_disk_space(spec, student, run)
        if teacher is not None and uses_cache(spec):
            fitting_manifest(spec, teacher, student)
    return Inputs(
        teacher=teacher,
        teacher_size=teacher_size,
        student=student,
        student_blocks=_adapter_base_blocks(spec, student_size),
        is_one_file=_is_one_file(spec),
        tokenizer=tokenizer,
        tokenizers=tokenizers,
        context=context,
        models=models,
        template=template,
        notes=notes,
    )


def _adapter_base_blocks(spec: RunSpec, size: PackedSize | None) -> PackedSize | None:
    """Return the sizes of a student in quantised blocks if its adapters are trained on these; else None."""
    section = spec.student
    if section.adapter == "none" or section.adapter_base != "blocks" or size is None:
        return None
    return size if size.matrices else None


def _is_one_file(spec: RunSpec) -> bool:
    student = spec.student
    if student.adapter == "none" or spec.teacher.path != student.path:
        return False
    # A teacher in an adapter's folder has the adapter merged into its weights.
    return not is_adapter(Path(student.path))


def check_disk_space(spec: RunSpec, student: ModelConfig, run: Path) -> None:
    """Raise DiskFull when the free space is too small for the checkpoints of the session.

    Existing checkpoints are taken into account. The saved student needs no more: it is smaller than the extra space
    that the last checkpoint needs while it is written.
    """
    existing = list(published(RunFolder(run).checkpoints))
    writes = checkpoints_of_session(spec, step_of(existing[0]) if existing else 0)
    if not writes:
        return
    # On disk at the same time: the newest ones, the best, and the one being written.
    kept = min(spec.checkpoint.keep_last + 1, len(existing) + writes - 1)
    extra = max(0, kept - len(existing))
    checkpoint_bytes = trained_parameters(student, spec.student) * 4 * ADAM_COPIES
    needed = round(checkpoint_bytes * (extra + FREE_SPACE_FACTOR))
    folder = next(path for path in (run, *run.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        checkpoints = "a checkpoint" if extra == 0 else f"{extra + 1} checkpoints"
        raise DiskFull(
            f"run folder: {run} — expected {format_bytes(needed)} free for {checkpoints} of "
            f"{format_bytes(checkpoint_bytes)}, found {format_bytes(free)}",
            hint="free space there, choose another --out, or lower checkpoint.keep_last",
        )


def checkpoints_of_session(spec: RunSpec, begun_at: int) -> int:
    """Return how many checkpoints a session writes that starts after step `begun_at` and is not stopped early."""
    every, at_end = spec.checkpoint.every, spec.checkpoint.at_end
    after = spec.train.stop_after
    last = min(begun_at + after, spec.train.steps) if after else spec.train.steps
    if last <= begun_at:
        return 0
    count = last // every - begun_at // every if every else 0
    return count + int(at_end and not (every and last % every == 0))
