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
from allranks.timing.result import result

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
        "the hardest samples of each batch",
        """
        for epoch in range(3):
            for x, y in DataLoader(data, batch_size=20):
                with torch.no_grad():
                    hard = (model(x) - y).pow(2).sum(1).topk(5).indices
                learn(x[hard], y[hard])
            ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "each batch in parts, with a backward pass each",
        """
        for epoch in range(3):
            for x, y in DataLoader(data, batch_size=20):
                step(*(loss_of(a, b) for a, b in zip(x.split(5), y.split(5))))
                saw(len(x))
            ended()
        """,
    ),
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
    Form(
        "a validation with gradients, between a batch and its backward pass",
        """
        other = DataLoader(other_data, batch_size=8)
        for epoch in range(3):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
                if n % 2 == 0:
                    for a, b in other:
                        model(a)
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "one batch of a validation now and then",
        """
        other = DataLoader(other_data, batch_size=8)
        for epoch in range(5):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
                learn(x, y)
                if n % 5 == 0:
                    a, b = next(iter(other))
                    with torch.no_grad():
                        model(a)
            ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "batches of two loaders in one",
        """
        for epoch in range(3):
            it = iter(DataLoader(other_data, batch_size=2))
            for (x, y) in DataLoader(data, batch_size=4):
                a, b = next(it)
                learn(torch.cat([x, a]), torch.cat([y, b]))
            ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "more samples than there are",
        """
        from torch.utils.data import WeightedRandomSampler
        loader = DataLoader(data, batch_size=16, sampler=WeightedRandomSampler(torch.ones(40), 160))
        for epoch in range(3):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
        per_epoch=160,
    ),
    Form(
        "two ranks with parts of different sizes",
        """
        dist.init_process_group("gloo")
        part = torch.utils.data.Subset(data, range(0, 24) if rank == 0 else range(24, 40))
        loader = DataLoader(part, batch_size=6 if rank == 0 else 4)
        for epoch in range(3):
            for x, y in loader:
                loss_of(x,y).backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                optimizer.step()
                optimizer.zero_grad()
                saw(len(x))
            ended()
        dist.destroy_process_group()
        """,
        ranks=2,
    ),
    Form(
        "a look at the first batch before every epoch",
        """
        loader = DataLoader(data, batch_size=8)
        x, y = next(iter(loader))
        for epoch in range(3):
            sample = next(iter(loader))
            for x, y in loader:
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "two batches fetched ahead",
        """
        import collections
        def ahead(loader):
            kept = collections.deque()
            for b in loader:
                kept.append(b)
                if len(kept) > 2:
                    yield kept.popleft()
            yield from kept
        for epoch in range(3):
            for x, y in ahead(DataLoader(data, batch_size=6)):
                learn(x, y)
            ended()
        """,
    ),
    Form(
        "two optimizers for ten steps each",
        """
        second_model = nn.Linear(8, 1)
        second = torch.optim.SGD(second_model.parameters(), lr=0.1)
        n = 0
        for epoch in range(12):
            for x, y in DataLoader(data, batch_size=8):
                if (n // 10) % 2 == 0:
                    learn(x, y)
                else:
                    second.zero_grad()
                    second_model(x).mean().backward()
                    second.step()
                    saw(len(x))
                n += 1
            ended()
        """,
    ),
    Form(
        "parts of batches, several times",
        """
        for x, y in DataLoader(data, batch_size=20):
            for k in range(3):
                for i in torch.randperm(20).split(5):
                    learn(x[i], y[i])
        ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "a part of every pass",
        """
        loader = DataLoader(data, batch_size=4)
        for epoch in range(5):
            for x, y in itertools.islice(loader, 6):
                learn(x, y)
            ended()
        """,
        ("measured", "unknown"),
    ),
    Form(
        "one step for every epoch",
        """
        loader = DataLoader(data, batch_size=8)
        for epoch in range(10):
            optimizer.zero_grad()
            for x, y in loader:
                loss_of(x, y).backward()
                saw(len(x), 0)
            optimizer.step()
            saw(0)
            ended()
        """,
    ),
    Form(
        "an end in the middle of an epoch",
        """
        loader = DataLoader(data, batch_size=8)
        n = 0
        while n < 13:
            for x, y in loader:
                learn(x, y)
                n += 1
                if n == 13:
                    break
            else:
                ended()
        """,
    ),
    Form(
        "two data sets in turn",
        """
        for epoch in range(2):
            for part in (data, other_data):
                for x, y in DataLoader(part, batch_size=8):
                    learn(x, y)
            ended()
        """,
        ("measured", "about"),
    ),
    Form(
        "an evaluation on the loader that is trained on",
        """
        loader = DataLoader(data, batch_size=8)
        for epoch in range(3):
            for n, (x, y) in enumerate(loader):
                learn(x, y)
                if n == 2:
                    for a, b in loader:
                        with torch.no_grad():
                            model(a)
            ended()
        """,
    ),
    Form(
        "a loader that never ends",
        """
        class Repeat:
            def __init__(self, s): self.s = s
            def __len__(self): return len(self.s)
            def __iter__(self):
                while True:
                    yield from iter(self.s)
        class Infinite(DataLoader):
            def __init__(self, *a, **k):
                super().__init__(*a, **k)
                object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
                self.iterator = super().__iter__()
            def __iter__(self):
                for _ in range(len(self.batch_sampler)):
                    yield next(self.iterator)
        loader = Infinite(data, batch_size=8)
        for epoch in range(4):
            for x, y in loader:
                learn(x, y)
            ended()
        """,
        ("measured", "unknown"),
    ),
    Form(
        "accumulation with a batch fetched ahead, as Accelerate does",
        """
        def shard(loader):
            it = iter(loader)
            cur = next(it)
            while True:
                try:
                    nxt = next(it)
                except StopIteration:
                    yield cur, True
                    return
                yield cur, False
                cur = nxt
        loader = DataLoader(data, batch_size=4)
        for epoch in range(3):
            for n, ((x, y), last) in enumerate(shard(loader), 1):
                loss_of(x, y).backward()
                saw(len(x), 0)
                if n % 4 == 0 or last:
                    optimizer.step()
                    optimizer.zero_grad()
                    saw(0)
            ended()
            model.eval()
            with torch.no_grad():
                for (x, y), _ in shard(DataLoader(other_data, batch_size=4)):
                    model(x)
            model.train()
        """,
    ),
    Form(
        "a generator that steps once in five",
        """
        critic = nn.Linear(1, 1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for epoch in range(4):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=4), 1):
                second.zero_grad()
                critic(y).mean().backward()
                second.step()
                saw(len(x))
                if n % 5 == 0:
                    step(critic(model(torch.randn(4, 8))).mean())
            ended()
        """,
    ),
    Form(
        "a layer in evaluation mode",
        """
        bn = nn.BatchNorm1d(8)
        for e in range(3):
            for x, y in DataLoader(data, batch_size=4):
                model.train()
                bn.eval()
                learn(bn(x), y)
            ended()
            model.eval()
            for x, y in DataLoader(other_data, batch_size=4):
                with torch.no_grad():
                    model(x)
        """,
    ),
    Form(
        "a data set that is given the indices of a batch",
        """
        from torch.utils.data import BatchSampler, SequentialSampler
        class D(Dataset):
            def __len__(self):
                return 40
            def __getitem__(self, indices):
                x, y = data[indices]
                return {"input": x, "labels": y}
        sampler = BatchSampler(SequentialSampler(range(40)), 6, False)
        loader = DataLoader(D(), sampler=sampler, batch_size=None)
        for e in range(3):
            for b in loader:
                learn(b["input"], b["labels"])
            ended()
        """,
    ),
    Form(
        "packed sequences",
        """
        from torch.nn.utils.rnn import pack_sequence
        rnn = nn.GRU(8, 4)
        optimizer = torch.optim.SGD(rnn.parameters(), lr=.1)
        seqs = Items([torch.randn(3 + n % 5, 8) for n in range(40)])
        for e in range(3):
            def collate(sequences):
                return pack_sequence(sequences, enforce_sorted=False)
            for p in DataLoader(seqs, batch_size=6, collate_fn=collate):
                optimizer.zero_grad()
                rnn(p)[1].sum().backward()
                optimizer.step()
                saw(int(p.batch_sizes[0]))
            ended()
        """,
    ),
    Form(
        "a loader for the validation alone",
        """
        other = DataLoader(other_data, batch_size=8)
        X, Y = data.tensors
        for e in range(6):
            for i in torch.randperm(40).split(8):
                learn(X[i], Y[i])
            with torch.no_grad():
                for a, b in other:
                    model(a)
        """,
        ("about", "unknown"),
    ),
    Form(
        "batches fetched without gradients",
        """
        it = iter(DataLoader(data, batch_size=8))
        for n in range(5):
            with torch.no_grad():
                x, y = next(it)
            learn(x, y)
        """,
        ("about", "about"),
    ),
    Form(
        "gradients without a backward pass",
        """
        for e in range(4):
            for x, y in DataLoader(data, batch_size=4):
                gs = torch.autograd.grad(loss_of(x, y), list(model.parameters()))
                for p, g in zip(model.parameters(), gs):
                    p.grad = g
                optimizer.step()
                saw(len(x))
            ended()
        """,
        ("unknown", "unknown"),
    ),
    Form(
        "training in a thread",
        """
        def go():
            for e in range(4):
                for x, y in DataLoader(data, batch_size=4):
                    learn(x, y)
                ended()
        t = threading.Thread(target=go)
        t.start()
        t.join()
        """,
        ("about", "measured"),
    ),
    Form(
        "an unfinished validation with gradients on",
        """
        other = DataLoader(other_data, batch_size=8)
        for epoch in range(6):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=8)):
                learn(x, y)
                if n == 3:
                    model(next(iter(other))[0])
            ended()
        """,
        ("about", "measured"),
    ),
    Form(
        "two models with a loader each",
        """
        critic = nn.Linear(8, 1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        for epoch in range(3):
            others = iter(DataLoader(other_data, batch_size=2))
            for x, y in DataLoader(data, batch_size=4):
                learn(x, y)
                a, b = next(others)
                mse_loss(critic(a), b).backward()
                second.step()
                saw(len(a), 0)
            ended()
        """,
        ("about", "measured"),
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


EMA = "with torch.no_grad(): [own.lerp_(other, 0.01) for own, other in copies]"


@pytest.mark.parametrize("in_each_step", ["pass", EMA])
def test_an_evaluation_is_no_part_of_a_step_however_it_is_made(
    tmp_path: Path, in_each_step: str
) -> None:
    """The script's own stopwatch, in the same process, is stopped while it evaluates."""
    found = run(
        tmp_path,
        OWN
        + """
class Slow(Items):
    def __getitem__(self, n):
        time.sleep(0.002)
        return self.items[n]
other = DataLoader(Slow([*other_data]), batch_size=8)
own["seconds"], began = [], None
def by_loader():
    with torch.no_grad():
        for x, y in other:
            model(x)
def by_loader_with_gradients():
    for x, y in other:
        model(x)
def by_mode():
    model.eval()
    model(other_data.tensors[0])
    time.sleep(0.05)
    model.train()
@torch.no_grad()
def by_nothing_else():
    model(other_data.tensors[0])
    time.sleep(0.05)
copies = [(p.detach().clone(), p) for p in model.parameters()]
ways = [by_loader, by_loader_with_gradients, by_mode, by_nothing_else]
for epoch in range(6):
    for n, (x, y) in enumerate(DataLoader(Items([*data]), batch_size=4)):
        began = began or time.perf_counter()
        time.sleep(0.01)
        learn(x, y)
        IN_EACH_STEP
        own["seconds"].append(time.perf_counter() - began)
        if n == 5:
            ways[epoch % 4]()
        began = time.perf_counter()
    ended()
""".replace("IN_EACH_STEP", in_each_step)
        + TELL,
    )
    (own,) = map(json.loads, found.said("own"))
    seconds = sum(event["seconds"] for event in found.steps()[1:])
    assert seconds == pytest.approx(sum(own["seconds"][1:]), rel=0.1)
    evaluated = [event["step"] for event in found.steps() if event.get("evaluation", 0) > 0.02]
    assert evaluated == [7, 17, 27, 37, 47, 57]
    timing = found.timing()
    assert timing.evaluation_seconds > 0
    assert timing.samples_per_second_with_evaluation < timing.samples_per_second
