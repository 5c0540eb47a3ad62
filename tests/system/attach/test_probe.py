"""The probe inside a user's process: the run is the same to the byte, and the log says what the script says."""

from __future__ import annotations

from pathlib import Path

from tests.support.attached import agree, run_twice

PLAIN = """
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
rows = torch.utils.data.TensorDataset(torch.randn(44, 8), torch.randn(44, 1))
test = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(90, 8)), 30)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        said = dict(loss=loss.item(), lr=optimizer.param_groups[0]["lr"], grad_norm=norm.item())
        optimizer.step()
        schedule.step()
        say(**said, rows=len(x), tokens=None, backwards=1)
    with torch.no_grad():
        for (x,) in test:
            net(x)
save(net)
"""


def test_a_plain_loop_is_the_same_to_the_byte_and_every_step_is_in_the_log(tmp_path: Path) -> None:
    watched, alone = run_twice(tmp_path, PLAIN, "-W", "error")
    agree(watched)
    assert len(watched.steps) == 12 and not alone.lines
    (facts,) = watched.of_kind("watched")
    assert facts["parameters"] == 8 * 16 + 16 + 16 + 1
    assert (facts["optimizer"], facts["device"]) == ("AdamW", "cpu")
    assert (facts["rank"], facts["world"]) == (0, 1)
