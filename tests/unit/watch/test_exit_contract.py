"""Exit attribution over all combinations of what can be known (contract exit-attribution-v1): drawn at
random, SIGKILL with counters that stand still would hardly ever come up.
"""

from __future__ import annotations

import itertools

from engine.machine.kill_counters import KillCounters
from engine.machine.reading import Reading, absent, measured
from engine.watch.exit_cause import ExitState, attribute_exit

STATUSES = (None, 0, 1, 70, 130, 137, 139, 143, 255, -1, -2, -6, -9, -11, -15)
ROSE = (None, 0, 1)
LINES = (
    None,
    "oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=4242,uid=1000",
    "oom-kill:constraint=CONSTRAINT_NONE,global_oom,task=python3,pid=4242,uid=1000",
)
SAYS_OOM = {ExitState.OOM_MEMCG, ExitState.OOM_GLOBAL}
KILLED = {-9, 137}


def counters(vmstat: int | None, memcg: int | None) -> KillCounters:
    def reading(value: int | None, source: str) -> Reading:
        return absent("not readable", source) if value is None else measured(value, source)

    other = absent("not part of this case", "test")
    return KillCounters(
        boot_id=measured("aaaa", "boot_id"),
        cgroup=None,
        vmstat_oom_kill=reading(vmstat, "/proc/vmstat oom_kill"),
        memcg_oom_kill=reading(memcg, "memory.events oom_kill"),
        memcg_oom_kill_local=other,
        memcg_oom=other,
        memcg_oom_group_kill=other,
        memcg_limit_bytes=other,
        memcg_peak_bytes=other,
        host_available_bytes=other,
        host_swap_free_bytes=other,
        psi_memory_full_avg10_pct=other,
        oom_score_adj=other,
    )


def test_no_combination_says_oom_without_a_counter_that_rose() -> None:
    said = 0
    bools = (False, True)
    before = counters(0, 0)
    for status, vmstat, memcg, line, finished, integrated, stop in itertools.product(
        STATUSES, ROSE, ROSE, LINES, bools, bools, (None, "a person")
    ):
        found = attribute_exit(
            status,
            before,
            counters(vmstat, memcg),
            stop_requested=stop,
            kernel_line=line,
            finished=finished,
            integrated_gpu=integrated,
        )
        if found.state in SAYS_OOM:
            said += 1
            assert status in KILLED and vmstat == 1, (status, vmstat, memcg, line, found)
        else:
            assert "out of memory" not in f"{found.sentence} {found.cause}".lower(), found
    assert said > 0
