"""What the probe says of data, and of the modes of modules: each mistake in two styles of code, and healthy twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.catalogue import BY_ID
from engine.log.events import FACT, PASS, SUSPICION
from tests.support.attached import run_twice, watched_once
from tests.system.attach.test_identities import Found, degrees, outcomes

SETUP = """
import copy, gc
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
generator = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(24, 8, generator=generator), torch.randn(24, 1, generator=generator))
held_out = TensorDataset(torch.randn(12, 8, generator=generator), torch.randn(12, 1, generator=generator))

def drops():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

def norms():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(norms()[:3], nn.Dropout(0.1)), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x))

def of(net, x, y):
    return nn.functional.mse_loss(net(x), y)

def epoch(net, optimizer, batch=4):
    for x, y in DataLoader(data, batch_size=batch):
        optimizer.zero_grad()
        of(net, x, y).backward()
        optimizer.step()

@torch.no_grad()
def evaluate(net, loader=DataLoader(held_out, batch_size=4)):
    return sum(of(net, x, y).item() for x, y in loader)

def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)

def tell(*functions):
    for function in functions:
        # What one leaves behind is no other model of the next one's.
        gc.collect()
        say(name=function.__name__)
        save(function())
"""

MODES = """
# Each evaluates between two epochs.

def healthy(make=drops, before=lambda net: net.eval(), after=lambda net: net.train(), evaluation=evaluate):
    net = make()
    optimizer = adam(net)
    for _ in range(2):
        epoch(net, optimizer)
        before(net)
        evaluation(net)
        after(net)
    return net

def healthy_with_batch_norm():
    return healthy(norms)

def healthy_with_both():
    return healthy(Net)

def healthy_with_neither():
    net = nn.Linear(8, 1)
    return healthy(lambda: net, lambda net: None, lambda net: None)

def a_frozen_part_in_eval_mode():
    net = Net()
    net.body.requires_grad_(False).eval()
    optimizer = adam(net.head)
    epoch(net, optimizer)
    return net

def a_linear_probe_in_eval_mode():
    net = Net().eval()
    net.body.requires_grad_(False)
    epoch(net, adam(net.head))
    return net

def frozen_batch_norm():
    net = norms()
    net[1].eval()
    epoch(net, adam(net))
    return net

def a_judge_in_eval_mode():
    generator, judge = norms(), nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    judge.eval()
    optimizer = adam(generator)
    for x, _ in DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        (-judge(generator(x)).mean()).backward()
        optimizer.step()
    return generator

def an_average_is_evaluated():
    net = drops()
    average = copy.deepcopy(net).eval()

    @torch.no_grad()
    def evaluation(net):
        for x, y in DataLoader(held_out, batch_size=4):
            of(average, x + 0.1 * torch.randn_like(x), y)

    return healthy(lambda: net, lambda net: None, lambda net: None, evaluation)

def statistics_computed_anew():
    net = norms()
    epoch(net, adam(net))
    torch.optim.swa_utils.update_bn(DataLoader(data, batch_size=4), net)
    return net

def samples_that_are_looked_over():
    net = drops()

    def evaluation(net):
        for x, _ in DataLoader(held_out, batch_size=4):
            x + torch.randn_like(x)

    return healthy(lambda: net, lambda net: None, lambda net: None, evaluation)

# A model that trains in eval mode.

def loaded_in_eval_mode():
    net = drops().eval()
    epoch(net, adam(net))
    return net

class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, *args):
        return self.module(*args)

class Loop:
    def __init__(self):
        self.model = Net()
        self.wrapped = Wrapped(self.model)
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=0.01)

    def score(self):
        self.model.eval()
        with torch.inference_mode():
            for x, y in DataLoader(held_out, batch_size=6):
                of(self.wrapped, x, y)

    def run(self):
        self.wrapped.train()
        for _ in range(2):
            epoch(self.wrapped, self.optimizer, batch=5)
            self.score()
        return self.wrapped

def left_in_eval_mode_by_an_evaluation():
    return Loop().run()

# An evaluation in training mode.

def batch_norm_moves_in_the_evaluation():
    return healthy(norms, lambda net: None)

def validate(net):
    losses = []
    for batch in DataLoader(held_out, batch_size=3):
        with torch.inference_mode():
            losses.append(of(net, *batch).item())
    return losses

def batch_norm_moves_in_a_loop():
    return healthy(Net, lambda net: None, evaluation=validate)

def dropout_in_the_evaluation():
    return healthy(drops, lambda net: None)

class Evaluates:
    def __init__(self, net):
        self.net = net.train()

    def run(self):
        with torch.inference_mode():
            return [self.net(x) for x, _ in DataLoader(held_out, batch_size=2)]

def dropout_in_a_class():
    return healthy(drops, evaluation=lambda net: Evaluates(net).run())

def seeded(each):
    net = drops()
    optimizer = adam(net)
    for number in range(5):
        each(number)
        optimizer.zero_grad()
        of(net, *data[:12]).backward()
        optimizer.step()
    return net

def seeded_in_each_step():
    return seeded(lambda number: torch.manual_seed(7))

def seeded_by_the_step():
    return seeded(torch.manual_seed)

def dropout_of_nothing():
    net = drops()
    net[2].p = 0.0
    optimizer = adam(net)
    for _ in range(5):
        optimizer.zero_grad()
        of(net, *data[:12]).backward()
        optimizer.step()
    return net

def frozen(freeze):
    net = Net()
    freeze(net.body)
    optimizer = adam(net)
    for _ in range(3):
        epoch(net, optimizer)
    return net

def frozen_by_an_attribute():
    return frozen(lambda part: setattr(part, "requires_grad", False))

def frozen_by_its_method():
    return frozen(lambda part: part.requires_grad_(False))

tell(seeded_in_each_step, seeded_by_the_step, dropout_of_nothing, frozen_by_an_attribute, frozen_by_its_method)
tell(healthy, healthy_with_batch_norm, healthy_with_both, healthy_with_neither, a_frozen_part_in_eval_mode,
     a_linear_probe_in_eval_mode, frozen_batch_norm, a_judge_in_eval_mode, an_average_is_evaluated,
     statistics_computed_anew, samples_that_are_looked_over, loaded_in_eval_mode,
     left_in_eval_mode_by_an_evaluation, batch_norm_moves_in_the_evaluation, batch_norm_moves_in_a_loop,
     dropout_in_the_evaluation, dropout_in_a_class)
"""
MODE_OF = {
    "healthy": [PASS],
    "healthy_with_batch_norm": [PASS],
    "healthy_with_both": [PASS],
    "healthy_with_neither": [],
    "a_frozen_part_in_eval_mode": [],
    "a_linear_probe_in_eval_mode": [],
    "frozen_batch_norm": [FACT],
    "a_judge_in_eval_mode": [PASS],
    "an_average_is_evaluated": [PASS],
    "statistics_computed_anew": [PASS],
    "samples_that_are_looked_over": [PASS],
    "seeded_by_the_step": [PASS],
    "dropout_of_nothing": [],
    "frozen_by_its_method": [],
}
WRONG_MODES = {
    "seeded_in_each_step": (
        "seeded_again",
        4,
        "1 dropout layer in training mode, and the random state is the same before each of 4 steps",
    ),
    "frozen_by_an_attribute": (
        "not_frozen",
        1,
        "requires_grad is set to False on body, whose parameters are trained",
    ),
    "loaded_in_eval_mode": (
        "training_mode",
        1,
        "Adam steps a model with 1 dropout layer in eval mode: 2",
    ),
    "left_in_eval_mode_by_an_evaluation": (
        "training_mode",
        6,
        "1 dropout layer and 1 batch norm layer in eval mode, which they were not before: module.body.0.1, "
        "module.body.1",
    ),
    "batch_norm_moves_in_the_evaluation": (
        "evaluation_mode",
        6,
        "on batches without a backward pass, 1 batch norm layer updated statistics: 1",
    ),
    "batch_norm_moves_in_a_loop": (
        "evaluation_mode",
        6,
        "on batches without a backward pass, 1 batch norm layer updated statistics: body.0.1",
    ),
    "dropout_in_the_evaluation": (
        "evaluation_mode",
        6,
        "on batches without a backward pass, 1 dropout layer in training mode: 2",
    ),
    "dropout_in_a_class": (
        "evaluation_mode",
        6,
        "on batches without a backward pass, 1 dropout layer in training mode: 2",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of one process, as importing torch takes longer than the trainings."""
    script = SETUP + MODES + DATA
    return outcomes(watched_once(tmp_path_factory, "data_and_modes", script, twice=False))


@pytest.mark.parametrize("name", MODE_OF)
def test_nothing_is_said_against_modes_that_are_meant(found: Found, name: str) -> None:
    assert degrees(found[name], "training_mode") == MODE_OF[name]
    assert SUSPICION not in degrees(found[name], "evaluation_mode")


def test_a_seed_for_each_step_and_a_part_that_is_frozen_are_not_suspected(found: Found) -> None:
    assert degrees(found["seeded_by_the_step"], "seeded_again") == [PASS]
    for name in ("dropout_of_nothing", "frozen_by_its_method", "healthy"):
        for id in ("seeded_again", "not_frozen"):
            assert SUSPICION not in degrees(found[name], id), name


def test_an_evaluation_in_eval_mode_is_a_pass(found: Found) -> None:
    assert [name for name in MODE_OF if degrees(found[name], "evaluation_mode") == [PASS]]


@pytest.mark.parametrize("name", WRONG_MODES)
def test_a_mode_that_does_not_fit_is_suspected(found: Found, name: str) -> None:
    id, step, text = WRONG_MODES[name]
    (line,) = _suspicions_of_data(found, name)
    assert (line["id"], line["step"]) == (id, step)
    assert text in line["text"]


DATA = """
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data import SequentialSampler, WeightedRandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

def linear():
    torch.manual_seed(3)
    return nn.Linear(8, 1)

def on(loader, epochs=3, begin=lambda epoch: None, each=lambda batch: None):
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for epoch in range(epochs):
        begin(epoch)
        for x, y in loader() if callable(loader) else loader:
            optimizer.zero_grad()
            of(net, x, y).backward()
            optimizer.step()
    return net

def shuffled():
    return on(DataLoader(data, batch_size=4, shuffle=True))

def shuffled_by_a_loader_of_each_epoch():
    return on(lambda: DataLoader(data, batch_size=4, shuffle=True))

def shuffled_by_workers_that_stay():
    return on(DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True))

def in_order():
    return on(DataLoader(data, batch_size=4))

def spread_over_ranks():
    sampler = DistributedSampler(data, 2, 0)
    return on(DataLoader(data, batch_size=4, sampler=sampler), begin=sampler.set_epoch)

def with_replacement():
    return on(DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)), epochs=1)

def weighted():
    return on(DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] + 23 * [0.1], 24)), epochs=1)

def all_in_one_batch():
    return on(DataLoader(data, batch_size=24), epochs=6)

def the_same_batch_on_purpose():
    batch = next(iter(DataLoader(data, batch_size=4)))
    return on([batch] * 6)

shared = DataLoader(data, batch_size=4, shuffle=True)

def one_of_two_trainings():
    return on(shared, epochs=1)

def in_the_order_of_the_other_training():
    # What is alike are two runs, not two passes of one.
    return on(shared, epochs=1)

def some_batches_of_each_pass():
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=3, shuffle=True)
    for _ in range(3):
        for step, (x, y) in enumerate(loader):
            if step == 4:
                break
            optimizer.zero_grad()
            of(net, x, y).backward()
            optimizer.step()
    return net

def two_passes_at_a_time():
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    for _ in range(2):
        for (x, y), (z, _) in zip(loader, loader):
            optimizer.zero_grad()
            of(net, (x + z) / 2, y).backward()
            optimizer.step()
    return net

class Stream(IterableDataset):
    def __init__(self, splits):
        self.splits = splits

    def __iter__(self):
        at, of_all = (get_worker_info().id, get_worker_info().num_workers) if self.splits else (0, 1)
        return iter([data[place] for place in range(at, len(data), of_all)])

def a_stream_that_is_split():
    return on(DataLoader(Stream(True), batch_size=4, num_workers=2), epochs=1)

# What is wrong.

def seeded_in_each_epoch():
    return on(DataLoader(data, batch_size=4, shuffle=True), begin=lambda epoch: torch.manual_seed(1) and None)

def a_generator_of_each_epoch():
    return on(lambda: DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1))))

def a_generator_of_each_counted_pass():
    # Nobody asks for one batch more than there are, so that no pass is said to have ended.
    def counted():
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
        batches = iter(loader)
        for _ in range(len(loader)):
            yield next(batches)
    return on(counted, epochs=2)

def data_that_is_made_anew():
    kept = []
    def anew():
        # Kept, so that the next one is at another place.
        kept.append(torch.utils.data.TensorDataset(*data[:24]))
        return DataLoader(kept[-1], batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    return on(anew)

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [data[at] for at in range(24)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

def a_dataset_that_is_made_anew():
    kept = []
    def anew():
        kept.append(Rows())
        return DataLoader(kept[-1], batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    return on(anew)

def an_epoch_that_is_not_set():
    return on(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0)))

def the_first_batch_again_and_again():
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4)
    for _ in range(6):
        x, y = next(iter(loader))
        optimizer.zero_grad()
        of(net, x, y).backward()
        optimizer.step()
    return net

class Draws:
    def __init__(self, loader):
        self.loader = loader

    def __call__(self):
        for batch in self.loader:
            return batch

def a_first_batch_of_each_shuffle():
    draw = Draws(DataLoader(data, batch_size=4, shuffle=True))
    return on(lambda: [draw()], epochs=6)

def the_first_batches_of_each_pass():
    def first():
        for step, batch in enumerate(DataLoader(data, batch_size=3)):
            if step == 4:
                return
            yield batch
    return on(first)

class Repeats(Sampler):
    def __iter__(self):
        return iter([at for begin in torch.randperm(6).tolist() for at in range(4 * begin, 4 * begin + 4)
                     for _ in range(2)])

def each_sample_twice():
    return on(DataLoader(data, batch_size=4, sampler=Repeats()), epochs=2)

def a_stream_that_each_worker_reads():
    return on(DataLoader(Stream(False), batch_size=4, num_workers=2), epochs=1)

class OneItem(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, at):
        return data[0]

def an_index_that_is_not_used():
    return on(DataLoader(OneItem(), batch_size=4, shuffle=True), epochs=1)

tell(shuffled, shuffled_by_a_loader_of_each_epoch, shuffled_by_workers_that_stay, in_order, spread_over_ranks,
     with_replacement, weighted, all_in_one_batch, the_same_batch_on_purpose, one_of_two_trainings,
     in_the_order_of_the_other_training, some_batches_of_each_pass, two_passes_at_a_time, a_stream_that_is_split,
     seeded_in_each_epoch, a_generator_of_each_epoch, an_epoch_that_is_not_set, the_first_batch_again_and_again,
     a_first_batch_of_each_shuffle, the_first_batches_of_each_pass,
     a_stream_that_each_worker_reads, an_index_that_is_not_used, each_sample_twice,
     a_generator_of_each_counted_pass, data_that_is_made_anew, a_dataset_that_is_made_anew)
"""
HEALTHY_DATA = {
    "shuffled": {"data_order": [PASS]},
    "shuffled_by_a_loader_of_each_epoch": {"data_order": [PASS]},
    "shuffled_by_workers_that_stay": {"data_order": [PASS]},
    "in_order": {"data_order": [FACT]},
    "spread_over_ranks": {"data_order": [PASS]},
    "with_replacement": {},
    "each_sample_twice": {"data_order": [PASS]},
    "weighted": {},
    "all_in_one_batch": {"data_order": [FACT]},
    "the_same_batch_on_purpose": {},
    "one_of_two_trainings": {},
    "in_the_order_of_the_other_training": {},
    "some_batches_of_each_pass": {"data_order": [PASS]},
    "two_passes_at_a_time": {},
    "a_stream_that_is_split": {},
}
WRONG_DATA = {
    "seeded_in_each_epoch": ("data_order", "RandomSampler shuffles, but two epochs begin with the"),
    "a_generator_of_each_epoch": ("data_order", "the same 24 samples in the same order"),
    "a_generator_of_each_counted_pass": ("data_order", "the same 24 samples in the same order"),
    "data_that_is_made_anew": ("data_order", "the same 24 samples in the same order"),
    "a_dataset_that_is_made_anew": ("data_order", "the same 24 samples in the same order"),
    "an_epoch_that_is_not_set": ("data_order", "DistributedSampler shuffles, but two epochs"),
    "the_first_batch_again_and_again": (
        "cut_passes",
        "3 consecutive passes over 6 batches ended after the first batch, the same one",
    ),
    "a_first_batch_of_each_shuffle": ("cut_passes", "ended after the first batch"),
    "the_first_batches_of_each_pass": (
        "cut_passes",
        "over 8 batches end after the same first 5",
    ),
    "a_stream_that_each_worker_reads": (
        "repeated_batches",
        "equal the batch before them: each of 2 workers reads the whole stream",
    ),
    "an_index_that_is_not_used": ("repeated_batches", "2 of 2 batches equal the batch before"),
}


@pytest.mark.parametrize("name", HEALTHY_DATA)
def test_nothing_is_said_against_data_that_is_read_as_it_is_meant(found: Found, name: str) -> None:
    said: dict[str, list[str]] = {}
    for line in found[name]:
        if BY_ID["identity"][line["id"]].group == "data":
            said.setdefault(line["id"], []).append(line["level"])
    assert said == HEALTHY_DATA[name]


@pytest.mark.parametrize("name", WRONG_DATA)
def test_data_that_is_not_what_the_sampler_promised_is_suspected(found: Found, name: str) -> None:
    id, text = WRONG_DATA[name]
    line, *others = _suspicions_of_data(found, name)
    assert not others
    assert line["id"] == id
    assert text in str(line["text"])


def test_every_training_is_looked_at(found: Found) -> None:
    modes, data = MODE_OF.keys() | WRONG_MODES.keys(), HEALTHY_DATA.keys() | WRONG_DATA.keys()
    assert set(found) == modes | data


def _suspicions_of_data(found: Found, name: str) -> list[dict[str, object]]:
    return [
        line
        for line in found[name]
        if line["level"] == SUSPICION and BY_ID["identity"][line["id"]].group == "data"
    ]


@pytest.mark.soak
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path) -> None:
    run_twice(tmp_path, SETUP + MODES + DATA)
