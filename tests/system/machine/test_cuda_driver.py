"""The CUDA driver through ctypes: against a library of the same functions compiled here, its header,
and, on a GPU, torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.cuda_driver import ATTRIBUTES, ask_in_child, normal_pci_address
from engine.machine.cuda_facts import CudaDevice, CudaFacts, CudaState, from_json, to_json
from engine.machine.facts import read_facts
from engine.machine.nvml import open_nvml
from engine.machine.reading import Reading
from tests.support.cuda_stub import compiled
from tests.support.machines import MACHINES


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("stub"))


def ask(folder: Path, limit_s: float = 60.0, **environ: str) -> CudaFacts:
    inherited = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    return ask_in_child({**inherited, "LD_LIBRARY_PATH": str(folder), **environ}, limit_s)


def test_every_fact_of_every_gpu_arrives_in_its_unit(stub: Path) -> None:
    facts = ask(stub, STUB_ATTRIBUTES=",75=12,76=1,18=1,83=1,89=0,16=48,38=25165824")
    assert facts.state is CudaState.WORKS
    assert (facts.count.value, facts.driver.value, facts.visible) == (2, "13.2", None)
    first, second = facts.devices
    values = {f.name: getattr(first, f.name).value for f in fields(CudaDevice) if f.name != "index"}
    assert values == {
        "name": "Stub 0",
        "uuid": "00010203-0405-0607-0809-0a0b0c0d0e0f",
        "pci_address": "00000000:3b:00.0",
        "total_bytes": 100 << 30,
        "compute_capability": "12.1",
        "multiprocessors": 48,
        "l2_bytes": 25165824,
        "integrated": "yes",
        "managed_memory": "yes",
        "concurrent_managed_access": "no",
        "pageable_memory_access": "yes",
        "uses_host_page_tables": "yes",
        "host_native_atomics": "yes",
        "unified_addressing": "yes",
    }
    assert (second.index, second.name.value) == (1, "Stub 1")
    assert second.uuid.value == "10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert second.total_bytes.value == 200 << 30


def test_attribute_numbers_are_those_of_cuda_h() -> None:
    triton = pytest.importorskip("triton", reason="Triton brings cuda.h and is not installed")
    header = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
    text = header.read_text(errors="replace")
    names = {
        "multiprocessors": "MULTIPROCESSOR_COUNT",
        "l2_bytes": "L2_CACHE_SIZE",
        "host_native_atomics": "HOST_NATIVE_ATOMIC_SUPPORTED",
        "uses_host_page_tables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    }
    for ours, number in ATTRIBUTES.items():
        name = names.get(ours, ours.upper())
        found = re.search(rf"CU_DEVICE_ATTRIBUTE_{name} = (\d+),", text)
        assert found and int(found[1]) == number, ours


def test_without_the_library_the_reason_is_the_loaders(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no ELF file")
    facts = ask(tmp_path)
    assert facts.state is CudaState.NO_LIBRARY
    assert "libcuda.so.1" in str(facts.count.absent)
    assert facts.devices == ()


@pytest.mark.parametrize(
    ("code", "visible", "state", "words"),
    [
        (100, None, CudaState.NO_DEVICE, "CUDA_ERROR_NO_DEVICE"),
        (100, "-1", CudaState.NONE_VISIBLE, "CUDA_VISIBLE_DEVICES is '-1'"),
        (100, "", CudaState.NONE_VISIBLE, "CUDA_VISIBLE_DEVICES is ''"),
        (803, None, CudaState.BROKEN, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: the NVIDIA driver"),
        (803, "0", CudaState.BROKEN, "differ in version"),
        (802, None, CudaState.BROKEN, "fabric manager"),
        (12345, None, CudaState.BROKEN, "CUDA error 12345"),
    ],
)
def test_a_driver_that_does_not_start_is_told_apart(
    stub: Path, code: int, visible: str | None, state: CudaState, words: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    facts = ask(stub, STUB_INIT=str(code), **environ)
    assert facts.state is state
    assert words in str(facts.count.absent)
    assert facts.driver.value == "13.2"
    assert facts.visible == visible


def test_a_count_of_zero_is_no_gpu(stub: Path) -> None:
    assert ask(stub, STUB_COUNT="0").state is CudaState.NO_DEVICE


def test_an_answer_that_is_missing_leaves_the_others(stub: Path) -> None:
    first, second = ask(stub, STUB_NO_ATTRIBUTE="18", STUB_LOST="1").devices
    assert first.integrated.absent == "CUDA_ERROR_INVALID_VALUE"
    assert first.managed_memory.value == "yes"
    assert second.name.absent == second.integrated.absent == "CUDA_ERROR_INVALID_DEVICE"


def test_a_driver_that_hangs_is_left_behind_after_the_limit(stub: Path) -> None:
    facts = ask(stub, limit_s=0.5, STUB_HANGS="1")
    assert facts.state is CudaState.BROKEN
    assert facts.count.absent == "the driver did not answer within 0.5 s"


def test_a_driver_that_crashes_takes_only_its_own_process_along(stub: Path) -> None:
    facts = ask(stub, STUB_CRASHES="1")
    assert facts.state is CudaState.BROKEN
    assert facts.count.absent == "it was ended by SIGSEGV"


def test_a_process_that_cannot_start_is_a_reason(tmp_path: Path) -> None:
    facts = ask_in_child({**os.environ, "PYTHONHOME": str(tmp_path)})
    assert facts.state is CudaState.BROKEN
    # The last line that a Python without its library prints.
    assert facts.count.absent == "it printed no facts and exited with 1:   <no Python frame>"


def test_asking_does_not_touch_this_process(stub: Path) -> None:
    ask(stub)
    assert "libcuda_stub" not in Path("/proc/self/maps").read_text()
    assert str(stub) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_facts_survive_the_way_between_two_processes(name: str) -> None:
    facts = MACHINES[name].facts.cuda
    assert from_json(to_json(facts)) == facts


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31))
def test_a_pci_address_has_one_form(domain: int, bus: int, device: int) -> None:
    by_nvml = f"{domain:08X}:{bus:02X}:{device:02X}.0"
    by_cuda = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    assert normal_pci_address(by_nvml) == normal_pci_address(by_cuda)


@pytest.mark.alone
@pytest.mark.gpu
def test_the_drivers_facts_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    facts = ask_in_child()
    assert facts.count.value == torch.cuda.device_count() == len(facts.devices)
    for device in facts.devices:
        said = torch.cuda.get_device_properties(device.index)
        assert device.name.value == said.name
        assert device.uuid.value == str(said.uuid)
        assert device.total_bytes.value == said.total_memory
        assert device.compute_capability.value == f"{said.major}.{said.minor}"
        assert device.integrated.value == ("yes" if said.is_integrated else "no")
        assert device.multiprocessors.value == said.multi_processor_count
        assert device.l2_bytes.value == said.L2_cache_size


@pytest.mark.gpu
def test_the_first_gpu_of_cuda_is_found_in_nvml_by_uuid() -> None:
    torch = pytest.importorskip("torch")
    nvml = open_nvml()
    assert not isinstance(nvml, Reading)
    memory = read_facts(nvml=nvml).memories[0]
    nvml.close()
    assert memory.nvml_index.source == "uuid"
    free, total = torch.cuda.mem_get_info(0)
    usable = memory.usable_bytes.number
    assert usable is not None and 0 < usable <= total
    # NVML was read before torch's context, which itself takes some hundred MiB.
    assert abs(usable - min(free, 0.95 * total)) < 2**31
