"""Every rule of a contract file: its id, its severity, and what it says.

The first group is that of upstream's `pv validate`, with the same ids, severities and counts. W- rules
answer what went wrong there: `W-` is a prefix and no severity. Those under `dialect: engine-1` ask only
of the contracts that this project runs, so that a contract written for the Rust tool has no more to
answer for here than there, beyond keys and forms that upstream drops without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.problems import ERROR, WARNING


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    severity: str
    says: str


def _rules(severity: str, **says: str) -> list[Rule]:
    return [Rule(id_.replace("_", "-"), severity, text) for id_, text in says.items()]


UPSTREAM = (
    *_rules(
        ERROR,
        SCHEMA_001="metadata.references is not empty",
        SCHEMA_002="metadata.version is not empty",
        SCHEMA_003="a kernel has an equation",
        SCHEMA_004="every formula is not empty",
        SCHEMA_005="every obligation has a property",
        SCHEMA_007="ids of falsification tests are unique",
        SCHEMA_008="every prediction is not empty",
        SCHEMA_010="ids of Kani harnesses are unique",
        SCHEMA_011="every Kani harness names an obligation",
        SCHEMA_014="requires stands on a postcondition only",
        SCHEMA_015="applies_to_phase stands on a loop obligation only",
        SCHEMA_016="parent_contract stands on a subcontract only",
        SCHEMA_017="a parent_contract is in metadata.depends_on",
        SCHEMA_018="no kind at the top: it is read from metadata",
        SCHEMA_019="no key at the top that is almost the name of a block",
        SCHEMA_020="no key twice in a mapping",
        SCHEMA_021="what is not applicable says why, in na_reason",
        SCHEMA_022="what is not applicable says who verifies it, in na_owner",
        SCHEMA_023="na_reason and na_owner stand on what is not applicable",
        PROVABILITY_001="a kernel has obligations, tests and harnesses, no fewer tests than obligations",
        CRUX_001="demand_score is within 1 to 5, and every story has one",
        CRUX_002="competitor is one of the known ones, and every story has one",
        BEAT_001="a beat-benchmark has a beat block",
        BEAT_002="beat.incumbent is a known one",
        BEAT_003="beat.metric is named",
        BEAT_004="beat.direction is higher_is_better or lower_is_better",
        BEAT_005="beat.beat_threshold is there and finite",
        BEAT_006="beat.ci_gate_name is named",
        BEAT_007="beat.approved_compute is CPU or GPU",
    ),
    *_rules(
        WARNING,
        SCHEMA_006="no formal predicate twice",
        SCHEMA_009="if_fails is not empty",
        SCHEMA_012="a Kani harness has a bound",
        SCHEMA_013="a kernel has a qa_gate",
    ),
)

OURS = (
    *_rules(
        ERROR,
        W_YAML="the file can be read: one document, no aliases, anchors, tags; within size and depth",
        W_FORM="every value has the form of its key, and what must be there is",
        W_KEY="every key at any depth is known",
        W_STEM="no two files with one name",
        W_REF="dialect engine-1: obligations have unique ids, and every id that is named is there",
        W_CLAIM="dialect engine-1: every active obligation has an active test or a proof",
        W_TOL="dialect engine-1: numeric obligations have a tolerance, and each says where it comes from",
        W_DEMOTE="dialect engine-1: what is demoted names the finding that demoted it, nothing else does",
        W_CTRL="dialect engine-1: every active test is turned red by a planted bug",
        W_TEST="dialect engine-1: every test and harness is there to be run",
        W_EDIT="dialect engine-1: the text that a planted bug replaces is there exactly once",
        W_BIND="dialect engine-1: bound code is there and names its contract, and the other way round",
    ),
    *_rules(WARNING, W_LVL="no level, count or verdict is written by hand: receipts say them"),
)

RULES = {rule.id: rule for rule in (*UPSTREAM, *OURS)}
UPSTREAM_IDS = frozenset(rule.id for rule in UPSTREAM)
