"""No stage of the audit fails on a healthy run: 24 runs, in which every pair of settings occurs."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest
import torch

from engine.catalogue import STAGES
from engine.data.batches import Batches
from engine.data.corpus import open_corpus
from engine.formats.tokenizer import open_tokenizer
from engine.log.events import Judged
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.models.config import ModelConfig
from engine.models.load import new_decoder, save_decoder
from engine.spec import LossSection, RunSpec, TrainSection, load_spec
from engine.train.trainer import Trainer
from engine.watch.replay import diagnose
from tests.support.chats import CHATML, conversations, make_tokenizer
from tests.support.finished_runs import carry_out, resumed_here
from tests.support.kit import tiny_config
from tests.support.preparing import make_store
from tests.support.running import engine
from tests.support.streams import documents_of, tokenize
from tests.support.train_tokenizer import train_bpe

STEPS, STOPS_AFTER, LONGEST = 6, 3, 2048


class Healthy(NamedTuple):
    accumulation: int
    rows: int
    seq_len: int
    alpha: float
    temperature: float
    divergence: str
    text: str
    ranks: int
    resumes: bool
    last_rate_is_0: bool
    precision: str
    family: str


HEALTHY = [
    Healthy(4, 3, 256, 1.0, 0.5, "reverse_kl", "wraps", 1, False, True, "bf16", "qwen3"),
    Healthy(1, 1, 48, 0.3, 8.0, "forward_kl", "code", 1, True, False, "fp32", "llama"),
    Healthy(1, 8, 16, 0.0, 1.0, "jsd", "languages", 2, False, False, "bf16", "qwen2"),
    Healthy(2, 8, 256, 1.0, 2.0, "forward_kl", "chat", 2, True, True, "fp32", "qwen2"),
    Healthy(2, 1, 2048, 0.3, 8.0, "jsd", "chat", 2, False, True, "bf16", "qwen3"),
    Healthy(4, 3, 16, 0.0, 1.0, "reverse_kl", "chat", 1, True, False, "fp32", "llama"),
    Healthy(2, 3, 48, 1.0, 2.0, "jsd", "wraps", 2, False, False, "fp32", "llama"),
    Healthy(1, 3, 2048, 0.3, 2.0, "reverse_kl", "languages", 1, True, True, "bf16", "qwen2"),
    Healthy(4, 1, 16, 0.0, 0.5, "forward_kl", "code", 2, False, True, "fp32", "qwen3"),
    Healthy(4, 8, 48, 0.3, 0.5, "jsd", "wraps", 1, True, False, "bf16", "qwen2"),
    Healthy(2, 8, 48, 0.0, 1.0, "reverse_kl", "code", 2, True, True, "bf16", "qwen3"),
    Healthy(4, 1, 256, 1.0, 8.0, "forward_kl", "languages", 1, False, True, "bf16", "llama"),
    Healthy(1, 1, 2048, 1.0, 1.0, "forward_kl", "wraps", 2, True, False, "fp32", "qwen2"),
    Healthy(1, 1, 256, 0.0, 2.0, "jsd", "languages", 2, False, False, "fp32", "qwen3"),
    Healthy(2, 3, 2048, 0.0, 8.0, "forward_kl", "code", 1, True, True, "bf16", "qwen2"),
    Healthy(2, 8, 16, 0.3, 8.0, "reverse_kl", "wraps", 2, False, False, "fp32", "llama"),
    Healthy(1, 1, 2048, 0.3, 0.5, "reverse_kl", "chat", 1, False, False, "bf16", "llama"),
    Healthy(4, 8, 16, 1.0, 2.0, "jsd", "code", 1, False, False, "bf16", "qwen2"),
    Healthy(4, 3, 256, 0.3, 1.0, "reverse_kl", "code", 2, False, True, "bf16", "qwen2"),
    Healthy(2, 1, 48, 0.3, 0.5, "reverse_kl", "languages", 2, False, True, "fp32", "qwen2"),
    Healthy(4, 1, 2048, 0.0, 8.0, "reverse_kl", "wraps", 1, False, False, "bf16", "qwen3"),
    Healthy(1, 1, 48, 1.0, 1.0, "jsd", "chat", 2, False, False, "fp32", "qwen3"),
    Healthy(1, 3, 256, 0.3, 2.0, "jsd", "chat", 1, True, True, "fp32", "qwen3"),
    Healthy(2, 8, 256, 0.3, 0.5, "forward_kl", "languages", 2, True, False, "bf16", "llama"),
]
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 1e3,
    },
    "phi3-long": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": None,
        "original_max_position_embeddings": 24,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
    "phi3": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "head_dim": 16,
        "partial_rotary_factor": 0.75,
        "sliding_window": 20,
    },
}
OF_OTHER_FAMILIES = [
    Healthy(2, 3, 48, 0.3, 2.0, "jsd", "languages", 1, False, False, "fp32", "phi3-long"),
    Healthy(2, 3, 48, 0.3, 2.0, "forward_kl", "code", 1, True, False, "fp32", "gemma3_text"),
    Healthy(1, 3, 48, 0.3, 2.0, "reverse_kl", "languages", 1, False, True, "bf16", "gemma3_text"),
    Healthy(2, 3, 48, 0.3, 2.0, "forward_kl", "code", 1, True, False, "fp32", "phi3"),
    Healthy(1, 3, 48, 0.3, 2.0, "reverse_kl", "languages", 1, False, True, "bf16", "phi3"),
]
LINES = (
    "Сегодня снег идёт с утра, и дети лепят бабу номер {n}.",
    "今日は朝から雪が降り、子供たちは{n}番目の雪だるまを作る。",
    "اليوم يتساقط الثلج والأطفال يصنعون رجل ثلج رقم {n}",
    "Heute schneit es, und die Kinder bauen Schneemann Nummer {n} 🙂.",
)


def _code(first: int, count: int) -> str:
    lines = (f"def f{n}(x):\n    return x + {n}\n" for n in range(first, first + count))
    return "".join(lines)


def _write(folder: Path, text: str) -> None:
    """Write a corpus and its tokenizer into the folder."""
    corpus = folder / "corpus"
    if text == "chat":
        make_tokenizer(folder / "tokenizer")
        (folder / "tokenizer" / "chat_template.jinja").write_text(CHATML.plain)
        special = json.dumps(CHATML.special_tokens)
        (folder / "tokenizer" / "tokenizer_config.json").write_text(special)
        lines = [json.dumps(record) for record in conversations(800)]
        corpus.mkdir()
        (corpus / "chats.jsonl").write_text("\n".join(lines))
        return
    corpus.mkdir()
    for index in range(40):
        if text == "languages":
            body = "\n".join(LINES[n % 4].format(n=n) for n in range(40 * index, 40 * index + 40))
        else:
            # Those that wrap have fewer rows than six steps take, at each length.
            body = _code(200 * index, {"wraps": 4, "wraps-long": 33}.get(text, 160))
        (corpus / f"part_{index:02}.txt").write_text(body)
    (folder / "tokenizer").mkdir()
    documents = documents_of(open_corpus(str(corpus), heldout_fraction=0.2).train)
    (folder / "tokenizer" / "tokenizer.json").write_text(train_bpe(list(documents), 320))


def _teach(folder: Path, text: str) -> None:
    """Train a teacher on the text for some seconds: a run refuses one that has learnt nothing of it."""
    tokenizer = open_tokenizer(folder / "tokenizer")
    template = CHATML.template() if text == "chat" else None
    documents = documents_of(open_corpus(str(folder / "corpus"), heldout_fraction=0.2).train)
    config = tiny_config(
        hidden_size=48, vocab_size=tokenizer.vocab_size, max_position_embeddings=LONGEST
    )
    trainer = Trainer(
        student=new_decoder(ModelConfig.from_dict(config, "teacher"), seed=7),
        teacher=None,
        batches=Batches(
            tokenize(documents, tokenizer, template=template), seq_len=64, rows_per_batch=8, seed=1
        ),
        train=TrainSection(steps=80, rows=8, lr=1e-2, warmup_steps=4),
        loss=LossSection(alpha=1.0),
        device=torch.device("cpu"),
        precision="fp32",
    )
    for _ in trainer.steps():
        pass
    files = sorted((folder / "tokenizer").iterdir())
    save_decoder(trainer.student, folder / "teacher", torch.float32, extra_files=files)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a text: its corpus, its tokenizer, and a teacher that knows it."""

    @cache
    def made(text: str) -> Path:
        folder = tmp_path_factory.mktemp(text)
        _write(folder, text)
        _teach(folder, text)
        return folder

    return made


def _spec(healthy: Healthy, text: Path, folder: Path) -> Path:
    vocabulary = open_tokenizer(text / "tokenizer").vocab_size
    shape = tiny_config(
        vocab_size=vocabulary, max_position_embeddings=LONGEST, **FAMILIES[healthy.family]
    )
    (folder / "student.json").write_text(json.dumps(shape))
    teacher = "" if healthy.alpha == 1 else f'[teacher]\npath = "{text / "teacher"}"\n'
    path = folder / "spec.toml"
    path.write_text(
        f"""{teacher}
[student]
config = "{folder / "student.json"}"
precision = "{healthy.precision}"
[data]
corpus = "{text / "corpus"}"
tokenizer = "{text / "tokenizer"}"
seq_len = {healthy.seq_len}
heldout_fraction = 0.2
[loss]
alpha = {healthy.alpha}
temperature = {healthy.temperature}
divergence = "{healthy.divergence}"
[train]
steps = {STEPS}
stop_after = {STOPS_AFTER if healthy.resumes else 0}
rows = {healthy.rows}
accumulation = {healthy.accumulation}
warmup_steps = 2
lr = 0.003
schedule = "{"cosine" if healthy.last_rate_is_0 else "constant"}"
final_lr_ratio = 0.0
[eval]
every = 0
rows = 4
[checkpoint]
every = 0
[checks]
every = 2
on_fail = "report"
[compute]
device = "cpu"
threads = 1
"""
    )
    return path


def _begun(spec: Path, run: Path, ranks: int) -> CompletedProcess[str]:
    """A run of several ranks through the command; that of one with its trainer in this process."""
    if ranks > 1:
        return engine("distill", spec, "--gpus", ranks, "--out", run)
    with redirect_stderr(io.StringIO()) as err:
        _, code = carry_out(spec, run)
    return CompletedProcess([str(run)], code, "", err.getvalue())


def _resumed(run: Path, ranks: int) -> CompletedProcess[str]:
    return engine("distill", "--resume", run) if ranks > 1 else resumed_here(run)


def pairs(of: Sequence[object]) -> set[tuple[int, object, int, object]]:
    return {(a, of[a], b, of[b]) for a, b in itertools.combinations(range(len(of)), 2)}


def test_every_pair_of_settings_occurs_in_a_healthy_run() -> None:
    values = [sorted({row[place] for row in HEALTHY}) for place in range(len(HEALTHY[0]))]
    wanted = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(values)), 2)
        for x, y in itertools.product(values[a], values[b])
    }
    missing = wanted - set().union(*(pairs(row) for row in HEALTHY))
    # 8 rows of 2,048 tokens would take two cores a minute a step.
    assert missing == {(1, 8, 2, 2048)}


@pytest.mark.parametrize(
    "healthy",
    [
        *(pytest.param(row, marks=pytest.mark.soak) for row in HEALTHY),
        # One run of each family that is further from the others, in each of the precisions.
        *(
            pytest.param(row, marks=[pytest.mark.soak] * (place in (1, 4)))
            for place, row in enumerate(OF_OTHER_FAMILIES)
        ),
    ],
    ids=lambda row: "-".join(map(str, row)),
)
def test_no_stage_fails_on_a_healthy_run(
    texts: Callable[[str], Path], healthy: Healthy, tmp_path: Path
) -> None:
    long = "-long" if healthy.text == "wraps" and healthy.seq_len == LONGEST else ""
    spec = _spec(healthy, texts(healthy.text + long), tmp_path)
    done = _begun(spec, tmp_path / "run", healthy.ranks)
    if healthy.resumes:
        assert done.returncode in (0, 75), done.stderr
        done = _resumed(tmp_path / "run", healthy.ranks)
    assert done.returncode == 0, done.stderr
    view = Follower(RunFolder(tmp_path / "run")).read_all()
    stages = {about.id for about in STAGES}
    said = [
        line.event
        for line in view.lines
        if isinstance(line.event, Judged) and line.event.id in stages
    ]
    assert {one.step for one in said} >= {1, 2, 4, 6}
    assert {one.id for one in said} == stages
    if healthy.text == "wraps":
        taken = view.steps.last("position")
        assert view.data is not None and taken is not None and taken > view.data.epoch_rows
    other = [f"step {one.step}: {one.id}: {one.text}" for one in said if one.level != "pass"]
    assert not other


USUAL = Healthy(1, 4, 48, 0.3, 2.0, "forward_kl", "code", 1, False, False, "fp32", "qwen2")
SETTINGS = [
    "student.checkpointing=on",
    "student.save_as=bf16",
    "student.precision=bf16 student.save_as=bf16 train.accumulation=2",
    "teacher.precision=bf16",
    "train.accumulation=2",
    "teacher.attention=masked student.attention=masked",
    "data.packing=documents",
    "data.packing=off",
    "data.max_bytes=20000",
    "loss.kernel=eager loss.chunk_rows=8",
    "loss.chunk_rows=7 loss.divergence=jsd train.accumulation=3",
    "train.update=torch train.clip_norm=0 train.weight_decay=0",
    "train.on_non_finite=skip train.seed=7",
    "eval.every=1 eval.sample_tokens=0 checkpoint.every=2 checkpoint.keep_last=1",
    "eval.every=2 checkpoint.every=3 checkpoint.keep_last=5 train.steps=14",
    "checkpoint.at_end=false checkpoint.every=4",
    "compute.deterministic=true compute.threads=2",
    "compute.slow_by=0.5",
    "train.steps=40 train.lr=0.01 checks.every=0",
    "model.engine=transformers",
]
STORES = {
    "hidden": "hidden",
    "top_k": "top_k",
    "sampled": "sampled",
    "hidden, in part": "hidden",
    "top_k, in part": "top_k",
}
IN_PART = (
    "so the teacher itself is asked for it and for any other; their number is in the log at the end"
)


def _said(run: RunFolder, settings: RunSpec) -> list[str]:
    """All that a run says of itself: failed checks, warnings, errors and alerts."""
    view = Follower(run).read_all()
    found = diagnose(run, settings)
    return [
        *(f"{one.check.id}: {one.check.text}" for one in found.failed),
        *(note.text for note in view.notes if note.level != "info"),
        *(f"{one.alert.id}: {one.alert.text}" for one in found.raised),
    ]


@pytest.mark.soak
@pytest.mark.parametrize("text", ["code", "chat"])
@pytest.mark.parametrize("sets", SETTINGS)
def test_nothing_is_said_of_a_healthy_run_whatever_its_settings(
    texts: Callable[[str], Path], sets: str, text: str, tmp_path: Path
) -> None:
    spec = _spec(USUAL._replace(text=text), texts(text), tmp_path)
    run, code = carry_out(spec, tmp_path / "run", *sets.split())
    assert (_said(run, load_spec(spec, sets.split())[0]), code) == ([], 0)


def _soak_but_first(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.soak] * (n > 0)) for n, name in enumerate(names)]


@pytest.mark.parametrize("text", _soak_but_first(["code", "chat"]))
@pytest.mark.parametrize("name", _soak_but_first(STORES))
def test_nothing_is_said_of_a_healthy_run_with_stored_outputs(
    texts: Callable[[str], Path], name: str, text: str, tmp_path: Path
) -> None:
    spec = _spec(USUAL._replace(text=text), texts(text), tmp_path)
    rows = {"rows": 10} if "in part" in name else {}
    count = {"hidden": 0, "top_k": 16, "sampled": 8}[STORES[name]]
    make_store(spec, tmp_path / "store", form=STORES[name], count=count, **rows)
    sets = [f"teacher.cache={tmp_path / 'store'}", "train.stop_after=3"]
    run, _ = carry_out(spec, tmp_path / "run", *sets)
    resumed = resumed_here(run.path)
    said = [text for text in _said(run, load_spec(spec, sets)[0]) if not text.endswith(IN_PART)]
    assert (said, resumed.returncode) == ([], 0), resumed.stderr
