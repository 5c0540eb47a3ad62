"""`engine doctor`: what follows from the facts of each machine, and how it is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.cli.doctor import report_lines
from engine.cli.main import main
from engine.machine.cuda_facts import CudaState
from engine.machine.doctor import RULES_OUT, Diagnosis, diagnose
from engine.machine.host import Host
from engine.machine.rates import kept_rates, measure_in_child
from engine.machine.reading import Reading, absent, measured
from engine.machine.surroundings import Surroundings, find_command, read_surroundings
from engine.verdict import Level
from tests.support.cuda_stub import compiled
from tests.support.doctor_around import AROUND
from tests.support.machines import MACHINES, NO_LIBRARY, cuda_facts
from tests.support.nvml_machines import GB10, H200, ORIN, opened
from tests.support.nvml_machines import Machine as NvmlMachine

EXPECTED = {
    "h200": (Level.PASS, "1 GPU(s)"),
    "rtx_4090": (Level.PASS, "1 GPU(s)"),
    "rtx_5090": (Level.PASS, "1 GPU(s)"),
    "b200": (Level.PASS, "1 GPU(s)"),
    "gh200": (Level.PASS, "1 GPU(s)"),
    "two_gpus_crossed": (Level.PASS, "2 GPU(s)"),
    "gb10": (Level.UNKNOWN, "CUDA memory of cuda:0 in control groups"),
    "gb10_in_a_container_with_a_limit": (Level.UNKNOWN, "in control groups"),
    "gb10_total_zero": (Level.UNKNOWN, "in control groups"),
    "gb10_host_total": (Level.UNKNOWN, "in control groups"),
    "thor": (Level.UNKNOWN, "in control groups"),
    "n1x": (Level.UNKNOWN, "in control groups"),
    "orin": (Level.UNKNOWN, "in control groups"),
    "orin_without_nvml": (Level.UNKNOWN, "NVML"),
    "discrete_without_nvml": (Level.UNKNOWN, "NVML, usable memory of cuda:0"),
    "discrete_not_supported": (Level.UNKNOWN, "usable memory of cuda:0"),
    "mig": (Level.UNKNOWN, "usable memory of cuda:0"),
    "hidden": (Level.UNKNOWN, "CUDA's facts"),
    "no_gpu": (Level.PASS, "no GPU, a run computes on the CPU"),
    "driver_mismatch": (Level.FAIL, "differ in version"),
    "lost": (Level.FAIL, "GPU is lost"),
}


def around(**changed: Reading) -> Surroundings:
    return replace(AROUND, **changed)


def with_torch(version: Reading) -> Surroundings:
    return replace(AROUND, versions=AROUND.versions | {"torch": version})


def found(name: str, surroundings: Surroundings = AROUND) -> Diagnosis:
    if name == "no_gpu":
        surroundings = replace(surroundings, pci_gpus=measured(0, "/sys/bus/pci"))
    return diagnose(MACHINES[name].facts, [], surroundings)


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_has_its_verdict_and_says_why(name: str) -> None:
    level, words = EXPECTED[name]
    verdict = found(name).verdict
    assert (verdict.level, words in verdict.reason) == (level, True), verdict


def test_a_machine_without_a_gpu_is_asked_nothing_about_one() -> None:
    diagnosis = found("no_gpu", around(c_compiler=absent("none of cc is on the PATH", "PATH")))
    assert diagnosis.verdict.exit_code == 0
    assert {m.what for m in diagnosis.missing} == {"py-spy", "a C compiler"}
    assert not any(m.counts for m in diagnosis.missing)


def test_a_gpu_on_the_bus_without_a_driver_is_not_a_machine_without_a_gpu() -> None:
    diagnosis = diagnose(MACHINES["no_gpu"].facts, [], AROUND)
    assert diagnosis.verdict.level is Level.UNKNOWN
    assert diagnosis.missing[0].what == "the GPU on the PCI bus"
    assert "container" in diagnosis.missing[0].reason


WITNESSES = {
    "memory_pressure_pct": "memory pressure (PSI)",
    "vmstat_oom_kill": "OOM kills of the kernel",
    "memcg_oom_kill": "OOM kills of the control group",
    "kernel_log": "the kernel's log",
    "c_compiler": "a C compiler",
}


@pytest.mark.parametrize("field", WITNESSES)
def test_each_witness_that_is_not_there_is_named_and_lowers_the_verdict(field: str) -> None:
    diagnosis = found("h200", around(**{field: absent("planted", "test")}))
    assert diagnosis.verdict.level is Level.UNKNOWN
    (missing,) = [m for m in diagnosis.missing if m.counts]
    assert (missing.what, missing.reason) == (WITNESSES[field], "planted")
    assert missing.rules_out


def test_what_no_run_reads_is_listed_and_does_not_count() -> None:
    diagnosis = found("h200", around(attach=absent("ptrace_scope is 1", "ptrace_scope")))
    assert diagnosis.verdict.level is Level.PASS
    assert [m.what for m in diagnosis.missing] == ["attaching to a trainer", "py-spy"]


@pytest.mark.parametrize(
    ("name", "surroundings", "words"),
    [
        ("h200", with_torch(absent("not installed", "package metadata")), "torch: not installed"),
        ("h200", with_torch(measured("2.13.0+cpu", "metadata")), "built without CUDA"),
        ("gb10", around(c_compiler=absent("none of cc", "PATH")), "managed allocator cannot"),
    ],
)
def test_what_is_broken_fails(name: str, surroundings: Surroundings, words: str) -> None:
    diagnosis = found(name, surroundings)
    assert diagnosis.verdict.exit_code == 1
    assert words in diagnosis.verdict.reason


def test_a_torch_without_cuda_is_right_on_a_machine_without_a_gpu() -> None:
    assert not found("no_gpu", with_torch(measured("2.13.0+cpu", "metadata"))).broken


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (CudaState.NO_LIBRARY, NO_LIBRARY, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (CudaState.NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "CUDA finds none: CUDA_ERROR_NO_DEVICE"),
        (CudaState.BROKEN, "the driver did not answer within 20 s", "within 20 s"),
    ],
)
def test_a_gpu_that_nvml_lists_and_cuda_cannot_use_is_broken(
    state: CudaState, reason: str, words: str
) -> None:
    machine = replace(MACHINES["h200"], cuda=cuda_facts(state=state, reason=reason))
    diagnosis = diagnose(machine.facts, [], AROUND)
    assert diagnosis.verdict.level is Level.FAIL
    assert words in diagnosis.verdict.reason


def readings_of(recording: dict[str, Any]) -> dict[str, Reading]:
    nvml = opened(NvmlMachine(recording))
    nvml.fast(0)
    return nvml.fast(0) | nvml.slow(0)


def test_a_whole_gpu_answers_everything_and_an_answer_of_zero_is_one() -> None:
    readings = readings_of(H200 | {"nvmlDeviceGetTotalEnergyConsumption": 0})
    assert not [name for name, reading in readings.items() if reading.absent is not None]
    assert RULES_OUT.keys() <= readings.keys()
    diagnosis = diagnose(MACHINES["h200"].facts, [readings], AROUND)
    assert diagnosis.verdict.level is Level.PASS


def test_what_an_integrated_gpu_does_not_answer_is_named_with_what_it_rules_out() -> None:
    diagnosis = diagnose(MACHINES["gb10"].facts, [readings_of(GB10)], AROUND)
    by_name = {m.what: m for m in diagnosis.missing}
    assert by_name["GPU 0 gpu_mem_used_bytes"].reason == "NVML: Not Supported"
    assert "all processes" in by_name["GPU 0 gpu_mem_used_bytes"].rules_out
    assert by_name["GPU 0 gpu_power_limit_w"].counts
    assert "GPM" in by_name["GPU 0 sm_util_pct"].reason
    assert "GPU 0 gpu_util_pct" not in by_name


def test_without_utilisation_no_alert_about_an_idle_gpu_can_fire() -> None:
    diagnosis = diagnose(MACHINES["orin"].facts, [readings_of(ORIN)], AROUND)
    by_name = {m.what: m for m in diagnosis.missing}
    assert "idle GPU cannot fire" in by_name["GPU 0 gpu_util_pct"].rules_out


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", MACHINES)
def test_the_report_fits_its_width_and_is_plain(name: str, width: int) -> None:
    diagnosis = diagnose(MACHINES[name].facts, [readings_of(GB10)], AROUND)
    for line in report_lines(diagnosis, width):
        assert line.isprintable()
        assert len(line) <= width or len(line.split()) == 1, line
        assert line == line.rstrip()


@pytest.mark.parametrize("name", MACHINES)
def test_the_report_says_all_that_the_diagnosis_knows(name: str) -> None:
    diagnosis = found(name)
    text = "\n".join(report_lines(diagnosis, 10_000))
    for missing in diagnosis.missing:
        assert f"{missing.what}: {missing.reason}. Rules out: {missing.rules_out}." in text
    assert all(sentence in text for sentence in diagnosis.broken)
    assert text.endswith(str(diagnosis.verdict))
    assert all(line in text for line in diagnosis.facts.lines())


@pytest.mark.parametrize("name", MACHINES)
def test_the_json_says_the_same_as_the_report(name: str) -> None:
    diagnosis = diagnose(MACHINES[name].facts, [readings_of(H200)], AROUND)
    record = json.loads(json.dumps(diagnosis.as_json(), allow_nan=False))
    assert record["verdict"] == diagnosis.verdict.level.name.lower()
    assert record["broken"] == list(diagnosis.broken)
    assert [m["what"] for m in record["missing"]] == [m.what for m in diagnosis.missing]
    assert record["facts"] == diagnosis.facts.as_event_fields()
    assert record["allocator"]["choice"] == MACHINES[name].auto
    assert record["gpu_readings"][0]["gpu_util_pct"] == 96
    readings = [f.name for f in fields(Surroundings) if f.name != "versions"]
    assert all(f"{name}_source" in record["surroundings"] for name in readings)


def around_here(root: Path, **more: Any) -> Surroundings:
    log = measured("readable", "test")
    host = Host(proc=root / "proc", cgroups=root / "cgroup")
    return read_surroundings(log, ("sh",), host, root / "sys", **more)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("capabilities", "scope", "words"),
    [
        ("000001fffeffffff", "2", "CAP_SYS_PTRACE"),
        ("0000000000000000", "0", "allowed for processes of the same user"),
        ("0000000000000000", None, "allowed for processes of the same user"),
        ("0000000000000000", "1", "ptrace_scope is 1: only a parent or root may attach"),
        ("0000000000000000", "2", "ptrace_scope is 2"),
    ],
)
def test_who_may_attach_is_the_kernels_rule(
    tmp_path: Path, capabilities: str, scope: str | None, words: str
) -> None:
    write(tmp_path / "proc/self/status", f"CapEff:\t{capabilities}\n")
    if scope is not None:
        write(tmp_path / "proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    attach = around_here(tmp_path).attach
    assert words in str(attach.absent or attach.value)
    assert (attach.absent is not None) == words.startswith("ptrace_scope")


def test_gpus_on_the_bus_are_nvidias_display_devices(tmp_path: Path) -> None:
    bus = tmp_path / "sys/bus/pci/devices"
    for place, (vendor, kind) in {
        "0000:3b:00.0": ("0x10de", "0x030200"),
        "0000:5e:00.0": ("0x10de", "0x030000"),
        "0000:5e:00.1": ("0x10de", "0x040300"),  # the sound device of a card
        "0000:00:02.0": ("0x8086", "0x030000"),
    }.items():
        write(bus / place / "vendor", f"{vendor}\n")
        write(bus / place / "class", f"{kind}\n")
    assert around_here(tmp_path).pci_gpus.value == 2


def test_an_empty_machine_has_reasons_and_no_numbers(tmp_path: Path) -> None:
    found = around_here(tmp_path, version_of={}.get)
    for reading in (found.memory_pressure_pct, found.vmstat_oom_kill, found.memcg_oom_kill):
        assert reading.value is None and "not readable" in str(reading.absent)
    assert "not readable" in str(found.pci_gpus.absent)
    assert found.versions["torch"].absent == "not installed"
    assert str(found.c_compiler.value).endswith("/sh")


def test_a_compiler_that_is_not_there_is_named_by_what_was_tried(tmp_path: Path) -> None:
    commands = ("no-such-cc", "no-such-gcc")
    found = read_surroundings(measured("readable", "test"), commands, sys=tmp_path)
    assert found.c_compiler.absent == "none of no-such-cc, no-such-gcc is on the PATH"


def test_a_program_of_a_virtual_environment_that_is_not_on_the_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    found = find_command("py-spy")
    assert found.value == str(program) and found.source == "next to the interpreter"
    program.unlink()
    assert find_command("py-spy").absent == "py-spy is not on the PATH"


def run_doctor(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "engine", "doctor", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environ, check=False
    )


def test_the_command_prints_one_json_value_and_its_exit_code_is_the_verdict(
    tmp_path: Path,
) -> None:
    stub = compiled(tmp_path)
    done = run_doctor(
        "--json", LD_LIBRARY_PATH=str(stub), STUB_ATTRIBUTES=",18=1,83=1", STUB_HANGS="0"
    )
    record = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unknown": 2}[record["verdict"]]
    assert record["facts"]["cuda_count"] == 2
    assert record["facts"]["cuda0_integrated"] == "yes"
    assert record["allocator"]["choice"] == "managed"
    assert "engine doctor: asking the CUDA driver" in done.stderr
    for heavy in ("torch", "numpy", "triton", "textual"):
        assert f" {heavy}\n" not in done.stderr


def test_the_command_writes_to_a_pipe_and_says_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured in a test below.
    rates = absent("not measured", "a test"), absent("not measured", "a test")
    monkeypatch.setattr("engine.machine.rates.measure_in_child", lambda: rates)
    monkeypatch.setenv("COLUMNS", "60")
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if len(line.split()) > 1) <= 60
    assert out.splitlines()[0] == "Machine"
    assert code == main(["doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert f"  {record['verdict']}: " in out
    assert "\x1b" not in out


def test_the_allocator_that_the_environment_asks_for_is_the_one_that_is_told() -> None:
    def diagnosed(name: str, wanted: str) -> Diagnosis:
        return diagnose(MACHINES[name].facts, [], AROUND, wanted)

    native = diagnosed("gb10", "native")
    assert native.allocator.choice == "native" and native.allocator.overridden
    assert diagnosed("h200", "managed").allocator.choice == "managed"
    refused = diagnosed("no_gpu", "managed")
    assert refused.allocator.choice == "native" and refused.verdict.level == Level.FAIL
    assert any("a run would be refused: memory.allocator" in line for line in refused.broken)


def test_a_value_of_the_environment_that_no_run_takes_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANAGED_MEMORY", "2")
    assert main(["doctor"]) == 65
    assert "MANAGED_MEMORY" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_class_of_its_memory_is_known() -> None:
    torch = pytest.importorskip("torch")
    done = run_doctor("--json")
    record = json.loads(done.stdout)
    facts = record["facts"]
    integrated = torch.cuda.get_device_properties(0).is_integrated
    assert done.returncode in (0, 2) and not record["broken"]
    assert facts["cuda0_memory_class"].startswith("unified") == bool(integrated)
    assert facts["cuda0_memory_class"] != "unknown"
    assert facts["cuda0_usable_bytes"] > 0
    assert record["gpu_readings"][0]["gpu_util_pct"] is not None


def test_the_doctor_keeps_the_best_rates_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matmul, copy = measure_in_child()
    assert isinstance(matmul.value, int) and isinstance(copy.value, int)
    assert matmul.value > 1e8 and copy.value > 1e7
    machine = matmul.source.partition(";")[0]
    kept = kept_rates(machine)
    assert kept is not None and kept.flops == pytest.approx(matmul.value, rel=0.01)
    monkeypatch.setattr("engine.child.command", lambda module: ["false"])
    assert "could not measure" in str(measure_in_child()[0].absent)
