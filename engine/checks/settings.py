"""Checks that the run has the settings of its spec: read back from the loader and the optimizer.

A spec echoed into a log proves nothing. A run whose manifest said a batch of 4 and a learning rate of
1.5e-5 trained on 32 rows at 1e-3.
"""

from __future__ import annotations

import torch

from engine.checks.check import Answer, Numbers, passed
from engine.checks.checkpoint import differences
from engine.checks.context import Context
from engine.errors import EngineError

LISTED = 4


def effective_settings(context: Context) -> Answer:
    spec = context.spec
    taken = context.micro_batches()
    shapes = {batch.tokens_BT.shape for batch in taken}
    wanted = (spec.train.rows, spec.data.seq_len)
    problems = [
        f"rows x length: expected {wanted[0]} x {wanted[1]}, found {shape[0]} x {shape[1]}"
        for shape in shapes
        if shape != wanted
    ]
    groups = context.optimizer.param_groups
    held = [parameter for group in groups for parameter in group["params"]]
    owned = list(context.student.parameters())
    missing = {id(p) for p in owned} - {id(p) for p in held}
    strangers = {id(p) for p in held} - {id(p) for p in owned}
    if missing:
        problems.append(f"optimizer: expected all {len(owned)} tensors, {len(missing)} are missing")
    if strangers:
        problems.append(f"optimizer: holds {len(strangers)} tensors that are not the student's")
    if len(held) != len({id(p) for p in held}):
        problems.append("optimizer: holds a tensor twice")
    for group in groups:
        problems += _group_problems(context, group)
    last = context.learning_rate(spec.train.steps - 1)
    if not 0 <= last <= spec.train.lr:
        problems.append(f"learning rate of the last step: expected 0 to the peak, found {last:g}")
    numbers = Numbers(
        rows=taken[0].tokens_BT.shape[0] * spec.train.accumulation,
        seq_len=taken[0].tokens_BT.shape[1],
        steps=spec.train.steps,
        peak_lr=spec.train.lr,
        tensors=len(held),
    )
    if problems:
        return numbers.failed("; ".join(problems[:LISTED]))
    return numbers.passed(
        f"{numbers['rows']:.0f} x {numbers['seq_len']:.0f} tokens a step and {len(held)} tensors in "
        "AdamW, as the spec says"
    )


def _group_problems(context: Context, group: dict[str, object]) -> list[str]:
    train = context.spec.train
    parameters = group["params"]
    assert isinstance(parameters, list)
    matrices = any(p.ndim >= 2 for p in parameters)
    wanted: dict[str, object] = {
        "betas": (train.beta1, train.beta2),
        "eps": train.eps,
        "weight_decay": train.weight_decay if matrices else 0.0,
    }
    return [
        f"optimizer {name}: expected {value}, found {group.get(name)}"
        for name, value in wanted.items()
        if group.get(name) != value
    ]


@torch.no_grad()
def resume_continues(context: Context) -> Answer:
    if context.step == 0:
        return passed("the run begins at step 0: there is nothing to continue", step=0)
    train = context.spec.train
    rows = train.rows * train.accumulation * context.spec.compute.gpus
    numbers = Numbers(step=context.step, position=context.position, expected=context.step * rows)
    resumed = context.resumed
    if resumed is None:
        return numbers.unknown(f"step {context.step}, and nothing says which checkpoint it is from")
    try:
        wrong = differences(context, resumed, numbers)
    except EngineError as error:
        return numbers.failed(f"{resumed.checkpoint.name} cannot be read again: {error}")
    if wrong:
        return numbers.failed(f"not as {resumed.checkpoint.name} has them: {wrong}")
    if context.position != context.step * rows:
        return numbers.failed(
            f"{context.step} steps of {rows} rows are {context.step * rows} rows, the data stands at "
            f"{context.position}: rows are met twice or left out"
        )
    state = context.optimizer.state
    trained = [p for group in context.optimizer.param_groups for p in group["params"]]
    cold = [p for p in trained if not state.get(p)]
    if cold:
        return numbers.failed(
            f"{len(cold)} of {len(trained)} tensors have no moments after {context.step} steps: "
            "AdamW starts cold",
            cold=len(cold),
        )
    # A skipped update counts as a step of the run but not of AdamW.
    updates = {int(state[p]["step"]) for p in trained}
    numbers |= dict(updates_min=min(updates), updates_max=max(updates))
    if max(updates) > context.step or min(updates) == 0:
        return numbers.failed(
            f"AdamW counts {min(updates)} to {max(updates)} updates after {context.step} steps"
        )
    if not any(bool(state[p]["exp_avg_sq"].any()) for p in trained):
        return numbers.failed("every second moment of AdamW is zero")
    if max(updates) < context.step:
        text = f"AdamW counts {max(updates)} updates in {context.step} steps"
        if train.on_non_finite == "stop":
            return numbers.failed(f"{text}, and the spec lets no update be skipped")
        return numbers.unknown(f"{text}: updates were skipped, or moments are older")
    return numbers.passed(
        f"step {context.step}, row {context.position}, {max(updates)} updates, every tensor, moment and random "
        f"generator are those of {resumed.checkpoint.name}, bit for bit"
    )
