"""A model's name on the hub is found in the hub's cache, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import BadInput, SpecError
from engine.spec import build_spec, spec_from_dict
from engine.spec.hub_cache import (
    HubName,
    cache_folder,
    find_snapshot,
    hub_name,
    local_path,
    snapshot_of,
)
from tests.support.hub_caches import COMMIT, NAME, OTHER, cached

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WHOLE = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        local_path(text)
    assert caught.value.exit_code == 65 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("at", range(len(VARIABLES) + 1))
def test_the_cache_is_where_the_first_variable_that_is_set_says(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, variable in enumerate(VARIABLES):
        monkeypatch.delenv(variable, raising=False)
        if number >= at:
            monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = [
        tmp_path / "HF_HUB_CACHE",
        tmp_path / "HUGGINGFACE_HUB_CACHE",
        tmp_path / "HF_HOME/hub",
        tmp_path / "XDG_CACHE_HOME/huggingface/hub",
        tmp_path / ".cache/huggingface/hub",
    ]
    assert cache_folder() == expected[at]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen/Qwen2.5-0.5B", ("Qwen/Qwen2.5-0.5B", "main")),
        ("Qwen/Qwen2.5-0.5B@v1.0", ("Qwen/Qwen2.5-0.5B", "v1.0")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", ("Qwen/Qwen2.5-0.5B", "refs/pr/1")),
        ("gpt2", None),
        ("a/b/c", None),
        ("../a/b", None),
        ("/a/b", None),
        ("~/b", None),
        ("a/..", None),
        ("a/b@../../c", None),
        ("a/b@refs/../../c", None),
        ("a--b/c", None),
        ("a/b..c", None),
        ("a/b\nc", None),
        ("models/teacher.gguf", None),
        (f"a/{'b' * 200}", None),
    ],
)
def test_only_a_name_of_the_hub_is_taken_for_one(text: str, found: tuple[str, str] | None) -> None:
    name = hub_name(text)
    assert (None if name is None else (name.name, name.revision)) == found


def test_a_name_is_the_snapshot_of_its_main_branch(cache: Path) -> None:
    snapshot = cached(cache, WHOLE)
    cached(cache, WHOLE, commit=OTHER, refs=("v2", "refs/pr/1"))
    assert local_path(NAME) == snapshot
    for revision in ("v2", "refs/pr/1", OTHER):
        assert local_path(f"{NAME}@{revision}") == snapshot.with_name(OTHER)
    assert local_path(NAME, "config") == snapshot / "config.json"


def test_a_path_that_is_there_is_no_name(cache: Path) -> None:
    cached(cache, WHOLE)
    Path(NAME).mkdir(parents=True)
    assert local_path(NAME) == Path(NAME)


def test_the_path_of_a_snapshot_says_name_and_commit(cache: Path) -> None:
    folder = cached(cache, WHOLE)
    for path in (folder, folder / "config.json"):
        found = snapshot_of(path)
        assert found is not None
        assert (found.name, found.commit, found.folder) == (NAME, COMMIT, folder)
    assert snapshot_of(folder.parent) is None
    assert snapshot_of(cache / "snapshots" / COMMIT) is None


def test_a_model_that_is_not_in_the_cache_is_refused_with_the_command(cache: Path) -> None:
    said = refusal(NAME)
    assert said == (
        f"model: {NAME} — expected a file or folder of that path, or that model in the hub cache {cache}, found "
        f"nothing there, and no such cache; `hf download {NAME}` fetches it"
    )
    cached(cache, WHOLE, name="Org/Another")
    assert f"hub cache {cache}, found neither; `hf download {NAME} --revision v2` fetches it" in (
        refusal(f"{NAME}@v2")
    )


def test_a_revision_that_is_not_there_is_refused_with_the_command(cache: Path) -> None:
    cached(cache, WHOLE)
    said = refusal(f"{NAME}@v9")
    assert "expected the revision v9 in " in said
    assert f"found none; `hf download {NAME} --revision v9` fetches it" in said
    assert f"expected the snapshot {'a' * 40}" in refusal(f"{NAME}@{'a' * 40}")


def test_a_branch_whose_snapshot_is_gone_is_refused(cache: Path) -> None:
    folder = cached(cache, WHOLE)
    folder.rename(folder.with_name(OTHER))
    assert f"expected the snapshot {COMMIT}" in refusal(NAME)
    assert f"found none; `hf download {NAME}` fetches it" in refusal(NAME)


@pytest.mark.parametrize("commit", ["../../../elsewhere", "", "0123", "g" * 40])
def test_a_branch_that_holds_no_commit_leads_nowhere(cache: Path, commit: str) -> None:
    folder = cached(cache, WHOLE)
    (folder.parents[1] / "refs/main").write_text(commit)
    assert "expected the 40 digits of a commit" in refusal(NAME)


def test_a_branch_larger_than_a_commit_is_not_read(cache: Path) -> None:
    folder = cached(cache, WHOLE)
    (folder.parents[1] / "refs/main").write_bytes(b"0" * 5000)
    with pytest.raises(BadInput, match="at most 4,096 bytes"):
        local_path(NAME)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_file_whose_blob_is_gone_is_named(cache: Path, name: str) -> None:
    folder = cached(cache, WHOLE | {name: b"another"})
    (folder / name).resolve().unlink()
    said = refusal(NAME)
    assert f"found no {name} (its link is broken) in it; `hf download {NAME}` fetches it" in said


@pytest.mark.parametrize(
    ("without", "missing"),
    [("config.json", "config.json"), ("model.safetensors", "weights (model.safetensors)")],
)
def test_a_file_that_was_not_downloaded_is_named(cache: Path, without: str, missing: str) -> None:
    cached(cache, {name: content for name, content in WHOLE.items() if name != without})
    assert f"found no {missing} in it; `hf download {NAME}`" in refusal(NAME)


@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_a_shard_that_is_missing_is_named(cache: Path, index: str) -> None:
    listed = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
    files = {"config.json": b"{}", index: listed, SHARDS[0]: b"1"}
    folder = cached(cache, files)
    assert f"found no {SHARDS[1]}, which {index} lists in it" in refusal(NAME)
    (folder / SHARDS[1]).write_bytes(b"2")
    assert local_path(NAME) == folder


def test_of_a_tokenizer_or_a_shape_no_weights_are_asked(cache: Path) -> None:
    folder = cached(cache, {"config.json": b"{}", "tokenizer.json": b"{}"})
    assert local_path(NAME, "tokenizer") == folder
    assert local_path(NAME, "config") == folder / "config.json"


def test_a_gguf_file_needs_no_configuration_beside_it(cache: Path) -> None:
    folder = cached(cache, {"tiny.gguf": b"GGUF"})
    assert local_path(NAME) == folder


def settings(teacher: str) -> dict[str, dict[str, str]]:
    return {"teacher": {"path": teacher}, "student": {"config": NAME}, "data": {"tokenizer": NAME}}


def test_a_spec_has_the_snapshots_and_a_resume_the_same_ones(cache: Path, tmp_path: Path) -> None:
    folder = cached(cache, WHOLE)
    spec = build_spec(settings(NAME), base=tmp_path)
    assert spec.teacher.path == spec.data.tokenizer == str(folder)
    assert spec.student.config == str(folder / "config.json")
    assert build_spec(settings("x"), base=tmp_path, sets=[f"teacher.path={NAME}"]) == spec
    # The branch moves on.
    cached(cache, WHOLE, commit=OTHER)
    assert build_spec(settings(NAME), base=tmp_path).teacher.path.endswith(OTHER)
    assert spec_from_dict(spec.to_dict()) == spec


def test_a_spec_names_every_model_that_is_not_there_at_its_setting(cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        build_spec(settings("Org/Absent"))
    assert [line.split(" — ")[0] for line in caught.value.problems] == [
        "spec: teacher.path: Org/Absent",
        "spec: student.config: Org/Tiny-1.5B",
        "spec: data.tokenizer: Org/Tiny-1.5B",
    ]
    assert all("`hf download Org/" in line for line in caught.value.problems)


def test_the_name_beside_a_spec_is_a_folder_there_first(cache: Path, tmp_path: Path) -> None:
    cached(cache, WHOLE)
    (tmp_path / NAME).mkdir(parents=True)
    assert build_spec(settings(NAME), base=tmp_path).teacher.path == str(tmp_path / NAME)


def test_a_snapshot_is_found_for_a_revision(cache: Path) -> None:
    cached(cache, WHOLE, refs=("v1",))
    assert find_snapshot(HubName(name=NAME, revision="v1")).commit == COMMIT
    assert "expected the revision main" in refusal(NAME)
