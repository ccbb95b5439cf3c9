"""Steps, samples and epochs of scripts of many forms, each beside the script's own count.

A count that is called measured is the script's own. One that is marked may be off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.scripts import run

from allranks.run.record import samples_per_epoch
from allranks.timing.remarks import result

pytestmark = pytest.mark.ranks

# `saw` is the script's own count of a step; `ended` of an epoch.
OWN = """
import itertools, json, queue, threading
own = {"steps": 0, "samples": 0, "epochs": 0}
def saw(samples, steps=1):
    own["steps"] += steps
    own["samples"] += samples
def ended():
    own["epochs"] += 1
def step(*losses):
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.step()
def loss_of(x, y):
    return mse_loss(model(x), y)
def learn(x, y, samples=None):
    step(loss_of(x, y))
    saw(len(x) if samples is None else samples)
class Items(Dataset):
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, n):
        return self.items[n]
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)
other_data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
"""
TELL = '\nprint("own", json.dumps(own), flush=True)\n'


@dataclass(frozen=True)
class Form:
    """A script; `counted`: what is known of its samples and epochs."""

    name: str
    text: str
    counted: tuple[str, str] = ("measured", "measured")
    per_epoch: int = 40  # samples
    ranks: int = 1


SURE = ("measured", "measured")
FORMS = [
    Form(
        "a validation between epochs",
        """
        for epoch in range(3):
            model.train()
            for x, y in DataLoader(data, batch_size=16):
                learn(x, y)
            ended()
            model.eval()
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=5):
                    model(x)
        """,
    ),
    Form(
        "accumulation with an uneven tail",
        """
        loader = DataLoader(data, batch_size=4)
        for epoch in range(2):
            for n, (x, y) in enumerate(loader, start=1):
                loss_of(x, y).backward()
                saw(len(x), 0)
                if n % 4 == 0 or n == len(loader):
                    optimizer.step()
                    saw(0)
            ended()
        """,
    ),
    Form(
        "a validation between a batch and its backward pass",
        """
        other = DataLoader(other_data, batch_size=8)
        for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
            if n % 2 == 0:
                with torch.no_grad():
                    for a, b in other:
                        model(a)
            learn(x, y)
        ended()
        """,
    ),
    Form(
        "a validation that is left unfinished",
        """
        other = DataLoader(other_data, batch_size=8)
        for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
            learn(x, y)
            if n % 3 == 0:
                for m, (a, b) in enumerate(other):
                    with torch.no_grad():
                        model(a)
                    if m == 1:
                        break
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "an iterable data set whose batch is a list of samples",
        """
        stream = Stream()
        for epoch in range(2):
            for batch in DataLoader(stream, batch_size=12, collate_fn=lambda batch: batch):
                learn(*map(torch.stack, zip(*batch)))
            ended()
        """,
    ),
    Form(
        "sequences first, from an iterable data set",
        """
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.randn(40, 7, 8))
        for x in DataLoader(Stream(), batch_size=12, collate_fn=lambda s: torch.stack(s, dim=1)):
            step(model(x).sum())
            saw(x.shape[1])
        ended()
        """,
    ),
    Form(
        "two zipped loaders with a backward pass each",
        """
        for epoch in range(2):
            pairs = zip(DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
            for (x, y), (a, b) in pairs:
                step(loss_of(x, y), loss_of(a, b))
                saw(len(x) + len(a))
            ended()
        """,
        per_epoch=80,
    ),
    Form(
        "four batches with one backward pass",
        """
        loader = iter(DataLoader(data, batch_size=2))
        for n in range(5):
            batches = [next(loader) for _ in range(4)]
            step(sum(loss_of(x, y) for x, y in batches))
            saw(sum(len(x) for x, y in batches))
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "items that are batches",
        """
        batches = Items([(torch.randn(6, 8), torch.randn(6)) for _ in range(10)])
        for epoch in range(2):
            for x, y in DataLoader(batches, batch_size=None, shuffle=True):
                learn(x, y[:, None])
            ended()
        """,
        per_epoch=60,
    ),
    Form(
        "items that are batches, in batches of one",
        """
        batches = Items([(torch.randn(6, 8), torch.randn(6, 1)) for _ in range(10)])
        for x, y in DataLoader(batches):
            learn(x[0], y[0])
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "a sampler of a subset",
        """
        from torch.utils.data import SubsetRandomSampler
        loader = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(10)))
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
        per_epoch=10,
    ),
    Form(
        "a sampler of batches",
        """
        loader = DataLoader(data, batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
        per_epoch=10,
    ),
    Form(
        "a new loader for every epoch",
        """
        for epoch in range(5):
            for x, y in DataLoader(data, batch_size=8, shuffle=True):
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "a new iterator for every step",
        """
        loader = DataLoader(data, batch_size=8, shuffle=True)
        for n in range(20):
            learn(*next(iter(loader)))
        """,
        ("measured", "unknown"),
    ),
    Form(
        "itertools.cycle",
        """
        loader = itertools.cycle(DataLoader(data, batch_size=8))
        for n in range(20):
            learn(*next(loader))
        own["epochs"] = 4
        """,
        ("about", "unknown"),
    ),
    Form(
        "one batch fetched ahead",
        """
        for epoch in range(3):
            loader = iter(DataLoader(data, batch_size=12))
            ahead = next(loader)
            while ahead is not None:
                batch, ahead = ahead, next(loader, None)
                learn(*batch)
            ended()
        """,
    ),
    Form(
        "batches fetched by another thread",
        """
        def fetch(batches):
            for batch in DataLoader(data, batch_size=8):
                batches.put(batch)
            batches.put(None)
        for epoch in range(3):
            batches = queue.Queue(2)
            thread = threading.Thread(target=fetch, args=(batches,))
            thread.start()
            while (batch := batches.get()) is not None:
                learn(*batch)
            thread.join()
            ended()
        """,
        ("about", "about"),
    ),
    Form(
        "a generator and a discriminator",
        """
        critic = nn.Linear(1, 1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=8):
                second.zero_grad()
                critic(y).mean().backward()
                (-critic(model(torch.randn(len(x), 8)).detach()).mean()).backward()
                second.step()
                step(critic(model(torch.randn(len(x), 8))).mean())
                saw(len(x))
            ended()
        """,
    ),
    Form(
        "a second optimizer that comes first and rarely",
        """
        critic = nn.Linear(8, 1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for epoch in range(8):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=5)):
                if n == 0 and epoch % 2 == 0:
                    critic(x).mean().backward()
                    second.step()
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "a closure that computes the gradients several times",
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for x, y in DataLoader(data, batch_size=10):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                return loss
            optimizer.step(closure)
            saw(len(x))
        ended()
        """,
    ),
    Form(
        "every batch three times",
        """
        for x, y in DataLoader(data, batch_size=8):
            for _ in range(3):
                learn(x, y)
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "a batch in pieces",
        """
        for x, y in DataLoader(data, batch_size=8):
            step(*(loss_of(a, b) for a, b in zip(x.chunk(4), y.chunk(4))))
            saw(len(x))
        ended()
        """,
    ),
    Form(
        "batches that are passed over",
        """
        for epoch in range(3):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
                if n % 3 == 1:
                    continue
                learn(x, y)
            ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "no loader",
        """
        for epoch in range(3):
            for indices in torch.randperm(40).split(8):
                learn(*data[indices.tolist()])
            ended()
        """,
        ("about", "unknown"),
    ),
    Form(
        "no loader, and a model that is called twice",
        """
        for n in range(20):
            x, y = torch.randn(6, 8), torch.randn(6, 1)
            step(loss_of(x, y) + loss_of(x + 1, y))
            saw(len(x))
        """,
        ("about", "unknown"),
    ),
    Form(
        "batches in dictionaries and objects",
        """
        class Batch:
            def __init__(self, items):
                self.x, self.y = map(torch.stack, zip(*items))
        for loader in (
            DataLoader(Items([{"x": x, "y": {"y": y}} for x, y in data]), batch_size=6),
            DataLoader(Items([*data]), batch_size=6, collate_fn=Batch),
        ):
            for batch in loader:
                if isinstance(batch, Batch):
                    learn(batch.x, batch.y)
                else:
                    learn(batch["x"], batch["y"]["y"])
            ended()
        """,
        ("measured", "about"),
    ),
    Form(
        "graphs, one after the other in a batch",
        """
        graphs = Items([(torch.randn(3 + n % 4, 8), torch.tensor(1.0)) for n in range(40)])
        def collate(items):
            nodes, labels = zip(*items)
            return torch.cat(nodes), torch.stack(labels)
        for nodes, labels in DataLoader(graphs, batch_size=7, collate_fn=collate):
            step(model(nodes).mean() - labels.mean())
            saw(len(labels))
        ended()
        """,
    ),
    Form(
        "two views of every sample",
        """
        def collate(items):
            x, y = map(torch.stack, zip(*items))
            return torch.cat([x, x + 0.1]), torch.cat([y, y])
        for x, y in DataLoader(data, batch_size=8, collate_fn=collate):
            learn(x, y)
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "a loop over the number of batches",
        """
        loader = DataLoader(data, batch_size=8)
        for epoch in range(3):
            batches = iter(loader)
            for n in range(len(loader)):
                learn(*next(batches))
            ended()
        """,
    ),
    Form(
        "a validation without a loader",
        """
        for epoch in range(3):
            model.train()
            for x, y in DataLoader(data, batch_size=8):
                learn(x, y)
            model.eval()
            time.sleep(0.05)
            ended()
        model.train()
        """,
    ),
    Form(
        "workers that stay",
        """
        loader = DataLoader(data, batch_size=12, num_workers=1, persistent_workers=True,
                            multiprocessing_context="fork")
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "phases that differ in whether gradients are on",
        """
        loaders = {"train": DataLoader(data, batch_size=8), "val": DataLoader(data, batch_size=8)}
        for epoch in range(3):
            for phase, loader in loaders.items():
                model.train(phase == "train")
                for x, y in loader:
                    with torch.set_grad_enabled(phase == "train"):
                        loss = loss_of(x, y)
                    if phase == "train":
                        step(loss)
                        saw(len(x))
            ended()
        """,
    ),
    Form(
        "without the last batch",
        """
        loader = DataLoader(data, batch_size=12, drop_last=True, shuffle=True)
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
        per_epoch=36,
    ),
    Form(
        "two ranks and a sampler for them",
        """
        from torch.utils.data import DistributedSampler
        dist.init_process_group("gloo")
        model = DDP(model)
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        dist.destroy_process_group()
        """,
        ranks=2,
    ),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_called_measured_is_what_the_script_counts(tmp_path: Path, form: Form) -> None:
    lines = [line for line in form.text.splitlines() if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[indent:] for line in lines)
    found = run(tmp_path, OWN + body + TELL, form.ranks)
    told = result(found.run, "finished")
    counted = told["counted"]
    assert (counted["samples"], counted["epochs"]) == form.counted, counted
    for rank in range(form.ranks):
        (own,) = map(json.loads, found.said("own", rank))
        assert len(found.steps(rank)) == own["steps"]
        if counted["samples"] == "measured":
            assert sum(found.samples(rank)) == own["samples"]
        if counted["epochs"] == "measured":
            assert told["epochs"] == own["epochs"]
    if form.counted == SURE:
        assert samples_per_epoch(found.run) == form.per_epoch
