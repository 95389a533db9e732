"""Batches of training examples in a shuffled order that is computed, not stored, read by a thread.

Position p of a run is example example_at(p): a new permutation of all examples each epoch, a function of (seed, p).
One integer, the examples consumed, is therefore the whole state of the loader, on any number of hosts and for any batch
size. An example is a window of tokens (nano/shards.py) or an image with its label (nano/images.py).
"""
import contextlib
import queue
import threading
import time
import weakref
from typing import Any, Callable, Iterator, Protocol

import numpy as np


class Source(Protocol):
    """Numbered examples."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """Arrays [n, ...] of the examples indices [n]."""

    def blank(self, n: int) -> tuple[np.ndarray, ...]:
        """The same of n examples that count for nothing."""


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (https://prng.di.unimi.it/splitmix64.c) on uint64 [n], arithmetic modulo 2**64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def example_at(position: np.ndarray, n_examples: int, seed: int) -> np.ndarray:
    """Positions int64 [n] of a run -> examples int64 [n]: epoch `position // n_examples` visits each of them once.

    A Feistel network keyed by (seed, epoch) permutes the numbers below the next power of two, at most twice too many;
    walking its cycle until the number is below n_examples makes it a permutation of exactly those (Black and Rogaway,
    https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf)."""
    position = np.asarray(position, np.int64)
    if n_examples < 1 or (position < 0).any():
        raise ValueError(f'n_examples {n_examples} must be at least 1 and positions at least 0')
    epoch, x = (a.astype(np.uint64) for a in np.divmod(position, n_examples))
    key = _mix(_mix(np.array([int(seed) % 2**64], np.uint64)) + epoch)
    bits = (n_examples - 1).bit_length()
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    out = np.empty(len(position), np.int64)
    todo = np.arange(len(position))
    while len(todo):
        low, high = x & low_mask, x >> low_bits
        for r in range(0, 8, 2):  # 8 rounds; Luby and Rackoff need 4. Round keys are splitmix64's sequence from `key`.
            high ^= _mix(low + (key + r * 0x9E3779B97F4A7C15 % 2**64)) & high_mask
            low ^= _mix(high + (key + (r + 1) * 0x9E3779B97F4A7C15 % 2**64)) & low_mask
        x = high << low_bits | low
        out[todo] = x
        outside = x >= n_examples
        todo, x, key = todo[outside], x[outside], key[outside]
    return out


def _global_batch(source: Source, indices: np.ndarray, global_batch: int,
                  rows: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """Row r is example indices[r]; rows past the end or not in `rows` are blank."""
    if rows is None and len(indices) == global_batch:
        return source.read(indices)
    rows = np.arange(len(indices)) if rows is None else rows[rows < len(indices)]
    batch = source.blank(global_batch)
    for whole, part in zip(batch, source.read(indices[rows]), strict=True):
        whole[rows] = part
    return batch


def _check_rows(global_batch: int, rows: np.ndarray | None) -> np.ndarray | None:
    if global_batch < 1:
        raise ValueError(f'global_batch {global_batch} must be at least 1')
    if rows is None:
        return None
    rows = np.asarray(rows, np.int64)
    if len(np.unique(rows)) != len(rows) or not ((0 <= rows) & (rows < global_batch)).all():
        raise ValueError(f'rows must be distinct and within the global batch of {global_batch}')
    return rows


class Loader:
    """Endless batches, prefetched by a thread: batch k is the examples at positions start + k * global_batch + [0, B).

    rows: which rows of the global batch this host's devices need (None: all). A batch is to_device(*arrays), what
    `source.read` gives, of full size: torch_xla takes the global array from each host and sends only the shards of its
    own devices. The other rows are never read and stay blank. Up to prefetch + 1 batches exist beside those handed out.
    What fails in the thread is raised by the next()s after the batches before it; where data do not come, next() ends
    the iteration as soon as `give_up()` is true. Close it, or use it in `with`."""

    def __init__(self, source: Source, global_batch: int, seed: int, start: int = 0, rows: np.ndarray | None = None,
                 to_device: Callable = lambda *arrays: arrays, prefetch: int = 2,
                 give_up: Callable[[], bool] = lambda: False):
        rows = _check_rows(global_batch, rows)
        if start < 0 or prefetch < 1:
            raise ValueError(f'start {start} must be at least 0 and prefetch {prefetch} at least 1')
        self.position, self.global_batch = start, global_batch  # examples consumed by the batches handed out so far
        self.wait_s = 0.0  # seconds that the last next() waited for data
        self._give_up = give_up
        self._queue, self._stop, self._error = queue.Queue(prefetch), threading.Event(), None
        # The thread must not hold the loader itself: one that is dropped without close() could then never end.
        self._thread = threading.Thread(target=_produce, daemon=True, name='loader', args=(
            self._queue, self._stop, source, global_batch, seed, start, rows, to_device))
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> 'Loader':
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        while not (self._error or self._stop.is_set()):
            try:
                batch, self._error = self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._give_up():
                    break
                continue
            if self._error is None:
                self.wait_s = time.perf_counter() - began
                self.position += self.global_batch
                return batch
        raise self._error or StopIteration

    def close(self):
        """Ends the thread, after at most the batch at hand; does not wait for one that takes longer than 5 s."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with contextlib.suppress(queue.Empty):
            while True:  # the memory of the batches that nobody will ask for
                self._queue.get_nowait()

    def __enter__(self) -> 'Loader':
        return self

    def __exit__(self, *_):
        self.close()


def _produce(out, stop, source, global_batch, seed, position, rows, to_device):
    ahead = -(-4096 // global_batch)  # batches whose order is computed at once: 0.3 ms, as for one example
    while not stop.is_set():
        try:
            order = example_at(position + np.arange(ahead * global_batch, dtype=np.int64), len(source), seed)
            for indices in order.reshape(ahead, global_batch):
                if not _put(out, stop, (to_device(*_global_batch(source, indices, global_batch, rows)), None)):
                    return
        except BaseException as e:  # raised in __next__
            _put(out, stop, (None, e))
            return
        position += len(order)


def _put(out, stop, item) -> bool:
    """Waits for room in the queue; False when the loader was closed meanwhile."""
    while not stop.is_set():
        try:
            out.put(item, timeout=0.1)
            return True
        except queue.Full:
            pass
    return False


def eval_examples(n_examples: int, n: int) -> np.ndarray:
    """The fixed examples of an evaluation, int64: all when n is 0 or at least n_examples, else n evenly spread ones."""
    if n < 0:
        raise ValueError(f'{n} examples to evaluate')
    n = n if 0 < n < n_examples else n_examples
    return np.arange(n, dtype=np.int64) * n_examples // n


def eval_batches(source: Source, n: int, global_batch: int, rows: np.ndarray | None = None,
                 to_device: Callable = lambda *arrays: arrays) -> Iterator[Any]:
    """Each example of eval_examples(len(source), n) once, as batches like the Loader's; the last is padded with blank
    ones, so every host sees the same number of batches of one shape."""
    rows = _check_rows(global_batch, rows)
    chosen = eval_examples(len(source), n)
    for i in range(0, len(chosen), global_batch):
        yield to_device(*_global_batch(source, chosen[i:i + global_batch], global_batch, rows))
