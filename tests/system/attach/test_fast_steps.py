"""Fast steps after the first 64 are only counted: what is still logged of them, and still named."""

from __future__ import annotations

from pathlib import Path

from tests.support.attached import run_watched

SCRIPT = """
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.randn(800, 8), torch.randn(800, 1))

def epoch(rows):
    for x, y in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True):
        loss = torch.nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(loss=loss.item())
"""


def named(lines: list[dict[str, object]]) -> set[object]:
    return {one["id"] for one in lines if one["kind"] == "judged" and one["level"] != "pass"}


def test_each_step_is_in_the_log_in_its_order(tmp_path: Path) -> None:
    ran = run_watched(tmp_path, SCRIPT + "epoch(rows); epoch(rows)\n")
    assert [one["step"] for one in ran.steps] == list(range(1, 401))
    assert [one["loss"] for one in ran.steps] == [one["loss"] for one in ran.said]
    assert [one["batch"] for one in ran.steps] == [*range(1, 201), *range(1, 201)]
    assert all(one["rows"] == 4 for one in ran.steps)
    assert [one["seq"] for one in ran.lines] == list(range(len(ran.lines)))
    times = [one["t_s"] for one in ran.lines]
    assert times == sorted(times)
    assert not named(ran.lines) - {"update_size"}


def test_a_killed_process_loses_the_newest_steps_alone(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "say(loss", "number.append(1)\n        len(number) == 190 and os.abort()\n        say(loss"
    )
    ran = run_watched(tmp_path, "number = []\n" + script + "epoch(rows)\n")
    assert ran.returncode != 0
    assert 190 - 32 <= len(ran.steps) <= 190


def test_a_mode_that_turns_late_is_named_at_an_attended_step(tmp_path: Path) -> None:
    ran = run_watched(tmp_path, SCRIPT + "epoch(rows); net.eval(); epoch(rows)\n")
    assert "training_mode" in named(ran.lines)


def test_an_evaluation_on_training_samples_is_named_after_many_fast_steps(tmp_path: Path) -> None:
    script = """
epoch(rows); epoch(rows)
net.eval()
with torch.no_grad():
    for x, y in torch.utils.data.DataLoader({data}, batch_size=100):
        net(x)
net.train(); epoch(rows)
"""
    ran = run_watched(tmp_path / "leak", SCRIPT + script.format(data="rows"))
    assert "held_out" in named(ran.lines)
    fresh = "torch.utils.data.TensorDataset(torch.randn(800, 8), torch.randn(800, 1))"
    ran = run_watched(tmp_path / "own", SCRIPT + script.format(data=fresh))
    assert "held_out" not in named(ran.lines)


def test_a_window_begun_late_is_no_mistake(tmp_path: Path) -> None:
    """Accumulation begins after many steps of one backward pass each."""
    script = """
epoch(rows)
for _ in range(3):
    batches = list(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True))
    for at, (x, y) in enumerate(batches):
        (torch.nn.functional.mse_loss(net(x), y) / 4).backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""
    ran = run_watched(tmp_path, SCRIPT + "optimizer.zero_grad()\n" + script)
    assert not named(ran.lines) - {"update_size", "data_order"}
