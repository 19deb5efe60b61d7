"""The loader of streams, which knows the position of each lane behind the last batch that it gave."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from warnings import warn

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from lightning_ups.data.packed_tokens import PackedBatch
from lightning_ups.data.streaming.lanes import Recipe
from lightning_ups.data.workers import as_it_is


class Streams(IterableDataset[tuple[PackedBatch, str]]):
    """The lanes of one rank, which its workers share.

    Args:
        recipe: How documents become batches.
        lanes: The number of lanes of all ranks.
        states: The lanes of this rank in the order in which they are due, each with its position.
    """

    def __init__(self, recipe: Recipe, *, lanes: int, states: dict[int, Any]) -> None:
        self.recipe, self.lanes, self.states = recipe, lanes, states

    def __iter__(self) -> Iterator[tuple[PackedBatch, str]]:
        """Yield batches, each with the number of its lane and the position behind it, as JSON."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = [*self.states.items()][number::workers]
        streams = [(lane, self.recipe.batches(lane, self.lanes, state)) for lane, state in own]
        while True:
            for lane, stream in streams:
                batch, state = next(stream)
                yield batch, json.dumps([lane, state])


class StreamLoader(DataLoader[Any]):
    """Gives the batches of this rank's lanes in turn, without end.

    A state has the lanes of one rank. `divide` distributes those of all ranks among another number of ranks.

    Args:
        recipe: How documents become batches.
        rank: The index of this rank.
        num_ranks: The number of ranks.
        num_workers: Processes that read, of each rank.
        checksum: A number that changes with the sources and their order.
        options: Of the DataLoader.
    """

    def __init__(
        self, recipe: Recipe, *, rank: int, num_ranks: int, num_workers: int, checksum: int, **options: Any
    ) -> None:
        each = max(num_workers, 1)
        states: dict[int, Any] = dict.fromkeys(range(rank * each, (rank + 1) * each))
        self._streams = Streams(recipe, lanes=num_ranks * each, states=states)
        self._rank, self._num_ranks, self._checksum = rank, num_ranks, checksum
        super().__init__(self._streams, batch_size=None, num_workers=num_workers, collate_fn=as_it_is, **options)

    @override
    def __iter__(self) -> Any:
        return _Batches(super().__iter__(), self._streams)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch."""
        streams = self._streams
        return {"rank": self._rank, "lanes": streams.lanes, "states": dict(streams.states), "data": self._checksum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the position of ``state_dict``."""
        if state_dict["rank"] != self._rank:  # Lightning saves that of rank 0 alone
            warn(
                "StreamedTokens: the checkpoint has the position of rank 0 alone, so rank"
                f" {self._rank} reads from the beginning. Train with ExactResume or FSDP2Strategy.",
                stacklevel=2,
            )
            return
        if state_dict["data"] != self._checksum:
            warn(
                "StreamedTokens: the checkpoint was saved with other sources, tokenizer, val_fraction, shuffle or seed."
                " A resumed run repeats some documents and leaves others out.",
                stacklevel=2,
            )
        self._streams.lanes, self._streams.states = state_dict["lanes"], dict(state_dict["states"])
        lanes = len(self._streams.states)
        if self.num_workers:  # if it divides the lanes, batches come in the same order for any number
            self.num_workers = max(n for n in range(1, min(self.num_workers, lanes) + 1) if lanes % n == 0)

    def divide(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's part of the states of all ranks that saved a checkpoint."""
        queues = [[*state["states"].items()] for state in states]
        due = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
        if len(due) < self._num_ranks:
            rank_zero_info(
                f"StreamedTokens: the checkpoint has {len(due)} streams, too few for {self._num_ranks} ranks. All"
                " begin anew, so documents are repeated. Use at most as many ranks as ranks x workers before."
            )
            return self.state_dict()
        rank_zero_info(
            f"StreamedTokens: {len(due)} streams of {len(states)} ranks continue on {self._num_ranks}. No document is"
            " repeated or left out."
        )
        return {**states[0], "rank": self._rank, "states": dict(due[self._rank :: self._num_ranks])}


class _Batches:
    """The batches of a loader without their positions, which it keeps.

    Attributes:
        inner: The iterator of torch's DataLoader.
    """

    def __init__(self, inner: Any, streams: Streams) -> None:
        self.inner, self._streams = inner, streams

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        batch, text = next(self.inner)
        lane, state = json.loads(text)
        del self._streams.states[lane]  # to be the last one that is due
        self._streams.states[lane] = state
        return batch
