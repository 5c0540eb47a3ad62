"""What a run says about itself: one record per line of a log, with the envelope `v, seq, t_s, kind`
and flat fields.

A run has three logs, each with one writer:

    events.jsonl   the trainer     decisions, steps, evaluations, checkpoints, how it ended
    device.jsonl   the supervisor  GPU and host readings
    watch.jsonl    the supervisor  the trainer process: started, stopped, killed; alerts, stacks

`t_s` is seconds on the monotonic clock since the writer opened its log; `log_opened` says what wall
time that was, so durations never see a clock step and yet three files and several sessions (a
resumed run) share one axis.

Numbers are floats or absent, never a placeholder; what is not finite is in `engine.log.envelope`, which
is what all lines have. The kinds are in `engine.log.trainer_events` and `engine.log.supervisor_events`, and
everybody takes them from here.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

from engine.log.envelope import NON_FINITE as NON_FINITE
from engine.log.envelope import VERSION as VERSION
from engine.log.envelope import Event as Event
from engine.log.envelope import LogOpened as LogOpened
from engine.log.envelope import Unrecognised as Unrecognised
from engine.log.envelope import name_of_non_finite as name_of_non_finite
from engine.log.supervisor_events import SLOWED as SLOWED
from engine.log.supervisor_events import AlertCleared as AlertCleared
from engine.log.supervisor_events import AlertRaised as AlertRaised
from engine.log.supervisor_events import FactsRead as FactsRead
from engine.log.supervisor_events import GpuSample as GpuSample
from engine.log.supervisor_events import HostSample as HostSample
from engine.log.supervisor_events import LauncherGone as LauncherGone
from engine.log.supervisor_events import StackDump as StackDump
from engine.log.supervisor_events import StopForwarded as StopForwarded
from engine.log.supervisor_events import TrainerExited as TrainerExited
from engine.log.supervisor_events import TrainerStarted as TrainerStarted
from engine.log.trainer_events import TRAINING as TRAINING
from engine.log.trainer_events import Checked as Checked
from engine.log.trainer_events import CheckpointSaved as CheckpointSaved
from engine.log.trainer_events import Compiled as Compiled
from engine.log.trainer_events import DataReady as DataReady
from engine.log.trainer_events import DecisionMade as DecisionMade
from engine.log.trainer_events import Evaluated as Evaluated
from engine.log.trainer_events import KernelCounts as KernelCounts
from engine.log.trainer_events import MemoryMeasured as MemoryMeasured
from engine.log.trainer_events import MemoryPlanned as MemoryPlanned
from engine.log.trainer_events import ModelReady as ModelReady
from engine.log.trainer_events import NonFinite as NonFinite
from engine.log.trainer_events import Note as Note
from engine.log.trainer_events import Phase as Phase
from engine.log.trainer_events import RunFinished as RunFinished
from engine.log.trainer_events import RunStarted as RunStarted
from engine.log.trainer_events import StepDone as StepDone
from engine.log.trainer_events import StopRequested as StopRequested
from engine.log.trainer_events import StudentSaved as StudentSaved
from engine.log.trainer_events import VocabularyCut as VocabularyCut

Known: TypeAlias = (
    LogOpened
    | RunStarted
    | Phase
    | DecisionMade
    | DataReady
    | ModelReady
    | MemoryPlanned
    | MemoryMeasured
    | Compiled
    | KernelCounts
    | VocabularyCut
    | Checked
    | StepDone
    | Evaluated
    | NonFinite
    | CheckpointSaved
    | StudentSaved
    | StopRequested
    | Note
    | RunFinished
    | FactsRead
    | HostSample
    | GpuSample
    | TrainerStarted
    | TrainerExited
    | LauncherGone
    | StopForwarded
    | AlertRaised
    | AlertCleared
    | StackDump
)
AnyEvent: TypeAlias = Known | Unrecognised

KINDS: dict[str, type[Known]] = {kind.__struct_config__.tag: kind for kind in get_args(Known)}
"""Every kind this version knows, by its name in the log."""


def kind_of(event: Event | Unrecognised) -> str:
    """The `kind` an event has in the log."""
    if isinstance(event, Unrecognised):
        return event.kind
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
