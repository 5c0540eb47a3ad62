"""The managed pool: compiling its C file, its refusals against a recorded machine, and torch's tensors in it.

Without a GPU the C file runs over a driver of 30 lines that counts what it is asked for.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from engine.errors import BadInput, EngineError
from engine.files import user_cache
from engine.models.config import ModelConfig
from engine.models.load import new_decoder
from engine.runtime.c_library import compiled_library
from engine.runtime.managed import SOURCE, ManagedLibrary, managed_pool, memory_scope
from tests.support.lacks import skip_for
from tests.support.perf import within
from tests.support.pointers import is_managed

MIB = 2**20
DRIVER = r"""
#include <stddef.h>
#include <stdlib.h>
size_t free_bytes = 1000; int integrated = 0, concurrent = 1, fail_prefetch = 0;
int live = 0, advised = 0, prefetched = 0, waited = 0;
static size_t sizes[4096]; static void *live_at[4096];
int cuInit(unsigned f) { return 0; }
int cuGetErrorName(int e, const char **n) { *n = "CUDA_ERROR_PLANTED"; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i == 0 ? 0 : 101; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 18 ? integrated : a == 89 ? concurrent : -1; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &free_bytes; return 0; }
int cuCtxPushCurrent_v2(void *c) { return c == &free_bytes ? 0 : 201; }
int cuCtxPopCurrent_v2(void **c) { return 0; }
int cuCtxSynchronize(void) { waited++; return 0; }
int cuStreamSynchronize(void *s) { waited++; return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = free_bytes; *t = 1 << 20; return 0; }
int cuMemAllocManaged(unsigned long long *p, size_t n, unsigned flags) {
    live++; *p = (unsigned long long)malloc(n);
    for (int i = 0; i < 4096; i++) if (!live_at[i]) { live_at[i] = (void *)*p; sizes[i] = n; break; }
    if (!concurrent) free_bytes -= n;
    return 0; }
int cuMemFree_v2(unsigned long long p) {
    for (int i = 0; i < 4096; i++) if (live_at[i] == (void *)p) {
        live_at[i] = 0; live--; free_bytes += sizes[i]; free((void *)p); return 0; }
    return 1; }
int cuMemAdvise(unsigned long long p, size_t n, int a, int d) { advised += a == 3; return 0; }
int cuMemPrefetchAsync(unsigned long long p, size_t n, int d, void *s) {
    free_bytes -= n; prefetched++; return fail_prefetch ? 1 : 0; }
"""


@pytest.fixture(scope="session")
def compiler() -> None:
    if shutil.which("cc") is None:
        skip_for("a C compiler")


COMPILES = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def compiled(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C file and the driver above, compiled once."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "driver.c").write_text(DRIVER)
    for source in (folder / "driver.c", SOURCE):
        compiled_library(source, folder)
    return folder


def in_a_copy(compiled: Path, folder: Path) -> Path:
    """A file of its own has variables of its own in a process."""
    return Path(shutil.copytree(compiled, folder, dirs_exist_ok=True))


class Library(ManagedLibrary):
    """The library, asked as torch asks it."""

    def alloc(self, size: int, device: int) -> int | None:
        """Return the address of a segment; None when refused."""
        self._c.managed_alloc.restype = ctypes.c_void_p
        self._c.managed_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        pointer: int | None = self._c.managed_alloc(size, device, None)
        return pointer

    def free(self, pointer: int, size: int, device: int) -> None:
        self._c.managed_free.restype = None
        self._c.managed_free.argtypes = (
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        self._c.managed_free(pointer, size, device, None)


class Machine:
    """The C file over the driver above, fresh state for each."""

    def __init__(self, compiled: Path, folder: Path, available_kib: int = 0) -> None:
        in_a_copy(compiled, folder)
        driver = compiled_library(folder / "driver.c", folder).path
        self.meminfo = folder / "meminfo"
        self.meminfo.write_text(
            f"MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"
        )
        library = compiled_library(SOURCE, folder)
        self.library = Library(library, str(driver), str(self.meminfo))
        self.library.set_limits(limit_bytes=None, reserve_bytes=0)
        self._driver = ctypes.CDLL(str(driver))

    def __getitem__(self, name: str) -> int:
        kind = ctypes.c_size_t if name == "free_bytes" else ctypes.c_int
        return int(kind.in_dll(self._driver, name).value)

    def __setitem__(self, name: str, value: int) -> None:
        kind = ctypes.c_size_t if name == "free_bytes" else ctypes.c_int
        kind.in_dll(self._driver, name).value = value


@pytest.fixture
def machine(compiled: Path, tmp_path: Path) -> Machine:
    return Machine(compiled, tmp_path / "machine")


# Compiling


@COMPILES
@pytest.mark.perf
def test_the_second_use_compiles_nothing(tmp_path: Path) -> None:
    first = compiled_library(SOURCE, tmp_path / "c")
    written_ns = first.path.stat().st_mtime_ns
    second = compiled_library(SOURCE, tmp_path / "c")
    assert (first.cached, second.cached) == (False, True)
    assert first.note.startswith("compiled at first use") and second.note == ""
    assert second.path == first.path and second.path.stat().st_mtime_ns == written_ns
    assert "cc" in first.compiler and first.name == "managed_alloc"
    assert second.seconds > 0
    within(second.seconds, first.seconds)
    assert [path.name for path in (tmp_path / "c").iterdir()] == [first.path.name]


@COMPILES
def test_a_changed_source_is_another_library(tmp_path: Path) -> None:
    copy = tmp_path / SOURCE.name
    copy.write_text(SOURCE.read_text() + "/* changed */\n")
    first, second = compiled_library(SOURCE, tmp_path), compiled_library(copy, tmp_path)
    assert not second.cached and first.path != second.path


def test_without_a_compiler_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="expected one of cc, gcc, clang") as caught:
        compiled_library(SOURCE, tmp_path)
    assert caught.value.hint is not None
    assert "install" in caught.value.hint and "memory.allocator=native" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@COMPILES
def test_what_the_compiler_says_is_in_the_error(tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int one(void) { return nothing; }\n")
    with pytest.raises(EngineError, match=r"broken\.c — expected exit code 0[\s\S]*nothing"):
        compiled_library(source, tmp_path)
    assert list(tmp_path.glob("*.so")) == []


@COMPILES
def test_a_cache_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    library = compiled_library(SOURCE, tmp_path / "file" / "c")
    assert not library.cached and "for this process alone" in library.note
    assert library.path.parent.stat().st_mode == 0o40700
    ctypes.CDLL(str(library.path))


@COMPILES
def test_processes_that_compile_at_once_share_one_whole_library(tmp_path: Path) -> None:
    code = (
        "import ctypes, sys; from pathlib import Path\n"
        "from engine.runtime.c_library import compiled_library\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"found = compiled_library(Path({str(SOURCE)!r}), Path({str(tmp_path / 'c')!r}))\n"
        "ctypes.CDLL(str(found.path)).managed_open\n"
    )
    many = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in many:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in many:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [(process.communicate(timeout=240), process.returncode) for process in many]
    assert [code for _, code in ends] == [0] * 4, ends
    assert len(list((tmp_path / "c").iterdir())) == 1
    assert compiled_library(SOURCE, tmp_path / "c").cached


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/somewhere")
    assert user_cache("c") == Path("/var/somewhere/apr-workbench/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache("c") == Path.home() / ".cache/apr-workbench/c"


# Refusing


def test_more_than_is_free_is_refused_and_the_driver_not_asked(machine: Machine) -> None:
    library = machine.library
    assert library.alloc(1001, 0) is None
    assert library.last_error() == (
        "expected at most 1000 bytes (cuMemGetInfo says 1000 are free, 0 stay in reserve), "
        "found a request for 1001"
    )
    stats = library.stats()
    assert (stats.asked, stats.refused, stats.held_bytes, machine["live"]) == (0, 1, 0, 0)
    assert library.alloc(1000, 0) is not None


def test_the_reserve_is_never_taken(machine: Machine) -> None:
    machine.library.set_limits(limit_bytes=None, reserve_bytes=300)
    assert machine.library.alloc(701, 0) is None
    assert machine.library.alloc(700, 0) is not None
    machine.library.set_limits(limit_bytes=None, reserve_bytes=10**6)
    assert machine.library.alloc(1, 0) is None


def test_a_limit_bounds_what_is_held_at_once(machine: Machine) -> None:
    library = machine.library
    library.set_limits(limit_bytes=500, reserve_bytes=0)
    first = library.alloc(400, 0)
    assert first is not None and library.alloc(101, 0) is None
    assert "at most 500 bytes in all, found 400 held" in library.last_error()
    library.free(first, 400, 0)
    assert library.alloc(500, 0) is not None
    stats = library.stats()
    assert (stats.held_bytes, stats.peak_bytes, stats.asked, stats.refused) == (500, 500, 2, 1)


def test_an_integrated_gpu_has_what_the_host_has_available(compiled: Path, tmp_path: Path) -> None:
    """cuMemGetInfo says a thousand bytes there: it calls the page cache used."""
    machine = Machine(compiled, tmp_path, available_kib=2)
    machine["integrated"] = 1
    assert machine.library.alloc(2048, 0) is not None
    assert machine.library.alloc(2049, 0) is None
    assert f"{machine.meminfo} says 2048 are free" in machine.library.last_error()
    machine.meminfo.write_text("MemFree: 100 kB\n")
    assert machine.library.alloc(1, 0) is None
    assert "expected a line MemAvailable" in machine.library.last_error()


def test_a_segment_is_on_the_device_before_it_is_used(machine: Machine) -> None:
    assert machine.library.alloc(600, 0) is not None
    assert (machine["advised"], machine["prefetched"], machine["waited"]) == (1, 1, 1)
    assert machine.library.alloc(600, 0) is None  # what was promised is no longer free


def test_a_device_that_cannot_move_pages_is_not_asked_to(machine: Machine) -> None:
    machine["concurrent"] = 0
    assert machine.library.alloc(600, 0) is not None
    assert (machine["advised"], machine["prefetched"], machine["waited"]) == (0, 0, 0)


def test_a_failing_prefetch_gives_the_segment_back(machine: Machine) -> None:
    machine["fail_prefetch"] = 1
    assert machine.library.alloc(600, 0) is None
    assert "cuMemPrefetchAsync: expected success, found CUDA_ERROR_PLANTED (1)" in (
        machine.library.last_error()
    )
    assert (machine["live"], machine.library.stats().held_bytes) == (0, 0)


@pytest.mark.parametrize(("size", "device"), [(0, 0), (-1, 0), (10, 1), (10, -1), (10, 64)])
def test_impossible_requests_are_refused(machine: Machine, size: int, device: int) -> None:
    assert machine.library.alloc(size, device) is None
    assert machine.library.last_error() and machine.library.stats().refused == 1


def test_a_machine_without_a_driver_is_told_so(compiled: Path) -> None:
    with pytest.raises(EngineError, match=r"libcuda\.absent\.so") as caught:
        ManagedLibrary(compiled_library(SOURCE, compiled), "libcuda.absent.so")
    assert caught.value.hint is not None and "native" in caught.value.hint


def test_a_driver_without_a_function_is_named(compiled: Path) -> None:
    with pytest.raises(EngineError, match="expected the function cuInit"):
        ManagedLibrary(compiled_library(SOURCE, compiled), "libc.so.6")


@pytest.fixture(scope="module")
def shared_machine(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(compiled, tmp_path_factory.mktemp("shared"))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=30), st.integers(0, 1000))
def test_no_order_of_requests_takes_what_is_not_there(
    shared_machine: Machine, requests: list[tuple[bool, int]], reserve: int
) -> None:
    library, held = shared_machine.library, list[tuple[int, int]]()
    library.set_limits(limit_bytes=900, reserve_bytes=reserve)
    for wants_free, size in requests:
        if wants_free and held:
            pointer, freed = held.pop(size % len(held))
            library.free(pointer, freed, 0)
        else:
            room = min(shared_machine["free_bytes"] - reserve, 900 - sum(s for _, s in held))
            given_pointer = library.alloc(size, 0)
            assert (given_pointer is not None) == (size <= room)
            if given_pointer is not None:
                held.append((given_pointer, size))
        assert library.stats().held_bytes == sum(s for _, s in held)
    for pointer, size in held:
        library.free(pointer, size, 0)
    assert shared_machine["live"] == 0 and shared_machine["free_bytes"] == 1000


def test_requests_of_many_threads_never_pass_the_limit(machine: Machine) -> None:
    machine["free_bytes"] = 10**6
    machine.library.set_limits(limit_bytes=1000, reserve_bytes=0)

    def ask() -> None:
        for _ in range(200):
            pointer = machine.library.alloc(300, 0)
            if pointer is not None:
                machine.library.free(pointer, 300, 0)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = machine.library.stats()
    assert stats.held_bytes == 0 and machine["live"] == 0 and stats.peak_bytes <= 900


# Choosing


def test_managed_memory_needs_a_cuda_device() -> None:
    with pytest.raises(BadInput, match="expected a CUDA device, found cpu") as caught:
        memory_scope("managed", torch.device("cpu"))
    assert caught.value.hint is not None and "memory.allocator=native" in caught.value.hint


def test_native_is_torch_as_it_is() -> None:
    scope = memory_scope("native", torch.device("cpu"))
    with scope.use():
        assert torch.ones(3).sum() == 3
    assert scope.pool is None and scope.compiled is None


def test_cpu_memory_has_no_pointer_attribute_and_says_why() -> None:
    reading = is_managed(torch.ones(1))
    assert reading.value is None and reading.absent == "the tensor is on cpu"


# On a GPU


CUDA = torch.device("cuda", 0)


@pytest.mark.gpu
def test_the_driver_calls_tensors_made_inside_managed() -> None:
    scope = memory_scope("managed", CUDA)
    outside = torch.ones(1000, device=CUDA)
    with scope.use():
        small, large = torch.ones(10, device=CUDA), torch.ones(30 * MIB, device=CUDA)
    after = torch.ones(1000, device=CUDA)
    assert [is_managed(t).value for t in (outside, small, large, after)] == [0, 1, 1, 0]
    assert scope.pool is not None and scope.pool.bytes() >= 120 * MIB
    assert scope.compiled is not None and scope.compiled.path.exists()
    assert float(large.sum(dtype=torch.float64)) == 30 * MIB


@pytest.mark.alone
@pytest.mark.gpu
def test_more_than_the_limit_is_refused_by_us_and_not_by_the_driver() -> None:
    pool = managed_pool(CUDA)
    pool.library.set_limits(limit_bytes=64 * MIB, reserve_bytes=0)
    try:
        before = pool.library.stats()
        limit = before.held_bytes + 64 * MIB
        pool.library.set_limits(limit_bytes=limit, reserve_bytes=0)
        with (
            pytest.raises(BadInput, match=r"memory\.allocator: managed memory of cuda:0"),
            pool.use(),
        ):
            torch.empty(200 * MIB, dtype=torch.uint8, device=CUDA)
        after = pool.library.stats()
        assert after.asked == before.asked and after.refused > before.refused
        with pool.use():
            kept = torch.empty(40 * MIB, dtype=torch.uint8, device=CUDA)
        assert is_managed(kept).value == 1
    finally:
        managed_pool(CUDA)


def _train(choice: str, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A few AdamW steps in bf16; losses and final weights."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    scope, losses = memory_scope(choice, CUDA), []
    with scope.use():
        model = new_decoder(config, 3).to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(4)
        tokens_BT = torch.randint(512, (4, 65), generator=generator).to(CUDA)
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits_BTV = model(tokens_BT[:, :-1])
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
    managed = {is_managed(p).value for p in model.parameters()}
    managed |= {is_managed(s["exp_avg"]).value for s in optimizer.state.values()}
    assert managed == {int(choice == "managed")}
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.alone
@pytest.mark.gpu
def test_training_in_managed_memory_is_bit_equal_to_native() -> None:
    # The embedding's gradient is summed in the order of atomic additions unless told otherwise.
    torch.use_deterministic_algorithms(True)
    try:
        native_losses, native = _train("native")
        managed_losses, managed = _train("managed")
    finally:
        torch.use_deterministic_algorithms(False)
    assert managed_losses == native_losses and native_losses[-1] < native_losses[0]
    for name, tensor in native.items():
        assert torch.equal(managed[name], tensor), name
