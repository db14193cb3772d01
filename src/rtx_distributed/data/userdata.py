"""What users hand over as data (a data set, a DataLoader, a stream) to a source and an order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import GeneratorType
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from rtx_distributed.data.mapdata import Collate, MapData, TooLong
from rtx_distributed.data.order import GivenOrder, Order, SampleOrder, StreamOrder, hash_words
from rtx_distributed.data.seeding import forked_streams
from rtx_distributed.data.streamdata import StreamData
from rtx_distributed.data.tokens import TokenDataset
from rtx_distributed.errors import DataError

_TAG_SAMPLER = 0x73616D706C65  # "sample"


@dataclass(frozen=True, slots=True, eq=False)
class UserData:
    """A source of batches, its order, and what was taken from a DataLoader.

    workers, batch_size, worker_init: the DataLoader's; None where there was none
    notes: lines for the user on what became of it
    """

    source: MapData | StreamData | TokenDataset
    order: Order
    workers: int | None
    batch_size: int | None
    notes: tuple[str, ...]
    worker_init: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class _Rules:
    """What holds for a data set, whichever way it came."""

    seed: int
    shuffle: bool
    collate: Collate | None
    name: str
    need_length: bool
    max_positions: int | None
    too_long: TooLong


def adapt(
    data: Any,
    *,
    seed: int,
    shuffle: bool = True,
    collate: Collate | None = None,
    name: str = "train_data",
    need_length: bool = False,
    max_positions: int | None = None,
    too_long: TooLong = "truncate",
) -> UserData:
    """Take over a user's data.

    data: a map-style data set, an iterable one, a DataLoader around either, or a TokenDataset
    seed, shuffle: of the run; a DataLoader's sampler decides instead of ``shuffle``
    collate: list of examples to a batch, unless a DataLoader brings its own
    need_length: training goes by epochs, or this is evaluation: a stream without a length is read
        once to count it
    max_positions, too_long: see MapData

    Raises DataError for data that are empty or that cannot be read in the run's order.
    """
    rules = _Rules(seed, shuffle, collate, name, need_length, max_positions, too_long)
    if isinstance(data, DataLoader):
        return _from_loader(data, rules)
    if isinstance(data, TokenDataset):
        order = SampleOrder(len(data), seed=seed, fingerprint=data.fingerprint, shuffle=shuffle)
        return UserData(data, order, None, None, ())
    if isinstance(data, GeneratorType):
        raise DataError(
            f"`{name}` is a generator, which can be read only once: give an object whose "
            "`__iter__` starts anew, or a list"
        )
    is_stream = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if is_stream:
        if not hasattr(data, "__iter__"):
            raise DataError(
                f"`{name}` is {type(data).__name__}, which has neither `__getitem__` nor "
                "`__iter__`: it is no data set"
            )
        return _from_stream(data, rules)
    source = _map_data(data, rules)
    order = SampleOrder(len(source), seed=seed, fingerprint=source.fingerprint, shuffle=shuffle)
    return UserData(source, order, None, None, ())


def _map_data(dataset: Any, rules: _Rules) -> MapData:
    return MapData(
        dataset,
        collate=rules.collate,
        name=rules.name,
        max_positions=rules.max_positions,
        too_long=rules.too_long,
    )


def _from_stream(dataset: Any, rules: _Rules) -> UserData:
    def make(samples: int | None) -> StreamData:
        return StreamData(
            dataset,
            seed=rules.seed,
            collate=rules.collate,
            name=rules.name,
            samples=samples,
            max_positions=rules.max_positions,
            too_long=rules.too_long,
        )

    try:
        samples: int | None = len(dataset)
    except TypeError:
        samples = None
    notes = [
        f"{rules.name} is a stream: its items come in its own order, every rank reads all of it "
        "and keeps its part, one loader worker at most, and a resume reads it again from the start "
        "of the epoch"
    ]
    source = make(samples)
    if samples is None and rules.need_length:
        samples = source.count()
        source = make(samples)
        notes.append(f"{rules.name} has no length; it was read once: {samples} items")
    order: Order
    if samples is None:
        order = StreamOrder()
    else:
        order = SampleOrder(samples, seed=rules.seed, shuffle=False)
    return UserData(source, order, None, None, tuple(notes))


def _from_loader(loader: DataLoader[Any], rules: _Rules) -> UserData:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            f"`{rules.name}` is a DataLoader with batch_size=None, so its items are batches; "
            "steps are made of single examples: give the data set itself, or a batch_size"
        )
    if rules.collate is None:
        rules = replace(rules, collate=loader.collate_fn)
    notes: list[str] = []
    source: MapData | StreamData
    order: Order
    if isinstance(loader.dataset, IterableDataset):
        stream = _from_stream(loader.dataset, rules)
        assert isinstance(stream.source, StreamData)
        source, order = stream.source, stream.order
        notes.extend(stream.notes)
        workers = min(loader.num_workers, 1)
    else:
        source = _map_data(loader.dataset, rules)
        order, line = _loader_order(loader, source, rules)
        notes.append(line)
        workers = loader.num_workers
    if loader.drop_last:
        notes.append(
            f"{rules.name}: drop_last has no effect, since batches go on over the end of an epoch: "
            "no sample is dropped"
        )
    return UserData(
        source, order, workers, loader.batch_size, tuple(notes), worker_init=loader.worker_init_fn
    )


def _loader_order(loader: DataLoader[Any], source: MapData, rules: _Rules) -> tuple[Order, str]:
    """The global order that the DataLoader's sampler asks for, and what to say about it."""
    name, count = rules.name, len(source)
    most = 100 * count + 1_000_000

    def built_in(shuffle: bool) -> Order:
        return SampleOrder(count, seed=rules.seed, fingerprint=source.fingerprint, shuffle=shuffle)

    if type(loader.batch_sampler) is not BatchSampler:
        given = _Drawn(loader.batch_sampler, rules.seed, batches=True, most=most)
        line = f"{name}: its batch sampler gives the global order; the batches are the run's own"
        return GivenOrder(given, dataset_length=count), line
    sampler = loader.sampler
    kind = type(sampler)
    if kind is SequentialSampler:
        return built_in(False), f"{name}: not shuffled, as its DataLoader"
    if kind is RandomSampler and _is_plain_shuffle(sampler, count):
        return built_in(True), f"{name}: shuffled, by the run's seed, as its DataLoader"
    if isinstance(sampler, DistributedSampler):
        line = (
            f"{name}: its DistributedSampler is not used, since who computes what is decided here; "
            f"shuffled: {sampler.shuffle}"
        )
        return built_in(sampler.shuffle), line
    given = _Drawn(sampler, rules.seed, batches=False, most=most)
    line = f"{name}: its {kind.__name__} gives the global order"
    return GivenOrder(given, dataset_length=count), line


def _is_plain_shuffle(sampler: Any, count: int) -> bool:
    return not sampler.replacement and sampler.num_samples == count


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A user's sampler as a function of the epoch: seeded before it is asked, so that a resumed
    run and every rank get the same answer."""

    sampler: Any
    seed: int
    batches: bool
    most: int

    def __call__(self, epoch: int) -> Sequence[int]:
        key = hash_words(_TAG_SAMPLER, self.seed, epoch)
        with forked_streams(key):
            for part in (self.sampler, getattr(self.sampler, "sampler", None)):
                if part is not None and hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                generator = getattr(part, "generator", None)
                if generator is not None:
                    generator.manual_seed(key >> 1)
            drawn = list(islice(self._ids(), self.most + 1))
        if len(drawn) > self.most:
            raise DataError(
                f"the sampler {type(self.sampler).__name__} gives more than {self.most} samples in "
                f"epoch {epoch} and seems to have no end: an epoch must end, then it is asked again"
            )
        return drawn

    def _ids(self) -> Iterator[int]:
        for part in self.sampler:
            if self.batches:
                yield from map(int, part)
            else:
                yield int(part)
