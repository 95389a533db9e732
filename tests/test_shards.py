"""Token shards: the files against a reader written here, the loader against plain lists, and every error message."""
import gc
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from data.manifest import derive, split_of
from nano import shards
from nano.loader import Loader, eval_batches, eval_examples, example_at
from nano.shards import IGNORE, DataError, ShardWriter, Windows, load_manifest, read_header, verify, write_manifest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def raw_shard(path, tokens, magic=20240520, version=1, count=None, dtype='<u2', extra=b''):
    """A shard as llm.c's data_common.py writes it, without the code under test."""
    header = struct.pack('<3i', magic, version, len(tokens) if count is None else count).ljust(1024, b'\0')
    with open(path, 'wb') as f:
        f.write(header + np.asarray(tokens, dtype).tobytes() + extra)


def corpus(folder, shard_tokens=100, dtype='uint16', vocab_size=None, **splits):
    """Writes a folder with each split's list of tokens."""
    entries = []
    for split, tokens in splits.items():
        writer = ShardWriter(str(folder), split, dtype, shard_tokens)
        writer.add(np.asarray(tokens, np.int64), documents=1, n_bytes=3 * len(tokens))
        entries += writer.close()
    write_manifest(str(folder), {
        'format': 1, 'dtype': dtype, 'vocab_size': vocab_size or max(max(t) for t in splits.values() if len(t)) + 1,
        'separator': None, 'tokenizer': None, 'shards': entries, 'source': {}})
    return str(folder)


def windows_of(tokens, T):
    """The definition, on a plain list: every token but the first is a target of exactly one window."""
    out = []
    for start in range(0, len(tokens) - 1, T):
        x, y = tokens[start:start + T], tokens[start + 1:start + T + 1]
        x = x[:len(y)]
        out.append((tuple(x + [0] * (T - len(x))), tuple(y + [IGNORE] * (T - len(y)))))
    return out


def resident_file_mb():
    with open('/proc/self/status') as f:
        return int(re.search(r'RssFile:\s+(\d+)', f.read()).group(1)) / 1024


# The order

def test_example_at_is_a_permutation_for_every_small_n():
    for n in range(1, 301):
        for epoch in (0, 1, 2**20):
            got = example_at(np.arange(n) + epoch * n, n, seed=5)
            assert got.dtype == np.int64 and sorted(got.tolist()) == list(range(n)), (n, epoch)


def test_example_at_is_a_permutation_for_large_n(seed):
    rng = random.Random(seed)
    for n in (2**16, 2**16 + 1, rng.randrange(300, 10**6), rng.randrange(300, 10**6)):
        assert (np.sort(example_at(np.arange(n) + 3 * n, n, seed)) == np.arange(n)).all(), n
    for n in (2**31 - 1, 2**31 + 1, 2**40, rng.randrange(2**31, 2**44)):
        position = np.unique([rng.randrange(n) for _ in range(20000)]) + 7 * n
        got = example_at(position, n, seed)
        assert got.min() >= 0 and got.max() < n and len(np.unique(got)) == len(position), n
        assert abs(got.mean() / n - 0.5) < 0.02, n


def test_example_at_depends_on_each_position_alone(seed):
    position = np.random.default_rng(seed).integers(0, 10**6, 1000)  # several epochs, in any order, with repeats
    together = example_at(position, 997, seed)
    assert together.tolist() == [int(example_at(np.array([p]), 997, seed)[0]) for p in position]
    assert len(example_at(np.arange(0), 5, seed)) == 0


def one_window(position, n, seed):
    """example_at on Python integers, from its description."""
    M = 2**64 - 1

    def mix(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M
        z = (z ^ z >> 27) * 0x94D049BB133111EB & M
        return z ^ z >> 31

    epoch, x = divmod(position, n)
    key = mix(mix(seed & M) + epoch & M)
    bits = (n - 1).bit_length()
    half = bits // 2
    while True:
        high, low = divmod(x, 2**half)
        for r in range(8):
            half_key = key + r * 0x9E3779B97F4A7C15
            if r % 2 == 0:
                high ^= mix(low + half_key & M) % 2**(bits - half)
            else:
                low ^= mix(high + half_key & M) % 2**half
        x = high * 2**half + low
        if x < n:
            return x


def test_example_at_is_the_order_that_checkpoints_rely_on(seed):
    """Another order would make a resumed run repeat and skip windows, so it is written down twice, and once as data."""
    rng = random.Random(seed)
    for _ in range(300):
        n, s = rng.choice([1, 2, 3, rng.randrange(1, 50), rng.randrange(1, 2**40)]), rng.randrange(-2**63, 2**64)
        position = rng.randrange(rng.choice([n, 5 * n, 2**62]))
        assert example_at(np.array([position]), n, s).tolist() == [one_window(position, n, s)], (position, n, s)
    assert example_at(np.arange(12), 12, 0).tolist() == [1, 9, 8, 5, 6, 0, 11, 10, 2, 4, 3, 7]


def test_example_at_mixes():
    n, epochs = 1000, 200
    orders = example_at(np.arange(n * epochs), n, 1).reshape(epochs, n)
    assert len(np.unique(orders[:, 0])) > 0.8 * epochs * (1 - epochs / n / 2)  # the first window differs by epoch
    for a, b in ((orders[0], orders[1]), (orders[0], example_at(np.arange(n), n, 2)), (orders[0], np.arange(n))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # 5 standard deviations
        assert (a == b).sum() < 10  # 1 is expected
    steps = np.diff(orders, axis=1) % n  # neighbours are not followed by neighbours
    assert (steps == 1).mean() < 3 / n
    # Each place gets each window equally often: chi-square of 6 windows over 6 places, 25 degrees of freedom.
    small = example_at(np.arange(6 * 6000), 6, 3).reshape(6000, 6)
    counts = np.array([[(small[:, place] == w).sum() for w in range(6)] for place in range(6)])
    assert ((counts - 1000) ** 2 / 1000).sum() < 70
    # All 24 orders of 4 windows occur.
    assert len({tuple(o) for o in example_at(np.arange(4 * 2000), 4, 0).reshape(-1, 4).tolist()}) == 24


def test_example_at_refuses_nonsense():
    for position, n in (([0], 0), ([-1], 5)):
        with pytest.raises(ValueError):
            example_at(np.array(position), n, 0)


# Windows and the loader against plain lists

@pytest.mark.parametrize('case', range(25))
def test_loader_against_brute_force(tmp_path, seed, case):
    rng = random.Random(seed * 1000 + case)
    dtype = rng.choice(['uint16', 'uint32'])
    N, T = rng.choice([2, 3, rng.randrange(2, 400)]), rng.choice([1, 2, rng.randrange(1, 60), 500])
    B = rng.randrange(1, 20)
    hosts, data_seed, start = rng.randrange(1, B + 1), rng.randrange(-9, 9), rng.choice([0, rng.randrange(200)])
    shard_tokens = rng.choice([1, 2, T, T + 1, rng.randrange(1, 200)])
    print(f'N {N} T {T} B {B} hosts {hosts} start {start} shard_tokens {shard_tokens} {dtype}')
    tokens = rng.sample(range(60000 if dtype == 'uint16' else 2**31 - 1), N)  # distinct, so ids tell the window
    folder = corpus(tmp_path, shard_tokens, dtype, train=tokens)
    expected = windows_of(tokens, T)
    windows = Windows(folder, 'train', T)
    assert len(windows) == len(expected) == -(-(N - 1) // T) and windows.n_tokens == N

    all_rows = list(range(B))
    rng.shuffle(all_rows)  # a mesh may give a host any rows
    rows = [np.array(sorted(all_rows[h::hosts])) for h in range(hosts)]
    steps = -(-3 * len(expected) // B) + 1
    loaders = [Loader(Windows(folder, 'train', T), B, data_seed, start=start, rows=r) for r in rows]
    served = []
    for step in range(steps):
        batch = [None] * B
        for loader, mine in zip(loaders, rows):
            x, y = next(loader)
            assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == np.int32
            for row in range(B):
                if row in mine:
                    assert batch[row] is None  # disjoint
                    batch[row] = (tuple(x[row].tolist()), tuple(y[row].tolist()))
                else:
                    assert not x[row].any() and (y[row] == IGNORE).all()
            assert loader.position == start + (step + 1) * B and loader.wait_s >= 0
        served += batch
    for loader in loaders:
        loader.close()

    # The same windows whatever the batch size and the point of resuming: a pure function of (seed, position).
    with Loader(windows, 1, data_seed, start=0) as loader:
        alone = [(tuple(x[0].tolist()), tuple(y[0].tolist())) for x, y in (next(loader) for _ in range(start + 40))]
    assert alone[start:][:len(served)] == served[:40]
    # Each whole epoch: each window once, each target once.
    first = -(-start // len(expected)) * len(expected)
    for e in range(first, start + len(served) - len(expected) + 1, len(expected)):
        epoch = served[e - start:e - start + len(expected)]
        assert sorted(epoch) == sorted(expected)
        assert sorted(t for _, y in epoch for t in y if t != IGNORE) == sorted(tokens[1:])


def test_a_long_run_over_several_epochs(tmp_path):
    """More positions than the loader's thread orders at once (4,096), by batches that divide nothing."""
    tokens = list(range(5001))
    windows = Windows(corpus(tmp_path, 1234, train=tokens), 'train', 1)
    with Loader(windows, 701, seed=3, start=17) as loader:
        served = np.concatenate([next(loader)[0][:, 0] for _ in range(25)])
    assert served.tolist() == example_at(np.arange(17, 17 + len(served)), 5000, 3).tolist()
    assert np.sort(served[5000 - 17:10000 - 17]).tolist() == list(range(5000))


@pytest.mark.parametrize('case', range(10))
def test_evaluation_is_the_same_set_for_any_batch_and_hosts(tmp_path, seed, case):
    rng = random.Random(seed * 1000 + case)
    N, T = rng.randrange(2, 300), rng.randrange(1, 40)
    tokens = rng.sample(range(60000), N)
    windows = Windows(corpus(tmp_path, rng.randrange(1, 200), val=tokens), 'val', T)
    expected = windows_of(tokens, T)
    for n in (0, 1, rng.randrange(1, 60)):
        chosen = eval_examples(len(windows), n).tolist()
        assert len(chosen) == len(set(chosen)) == (min(n, len(expected)) or len(expected)) and chosen == sorted(chosen)
        for B, hosts in ((1, 1), (rng.randrange(1, 9), 1), (8, 4), (64, 3)):
            got, n_batches = [], set()
            for h in range(hosts):
                rows = None if hosts == 1 else np.arange(h, B, hosts)
                batches = list(eval_batches(windows, n, B, rows))
                n_batches.add(len(batches))
                for x, y in batches:
                    assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == np.int32
                    got += [(tuple(a), tuple(b)) for a, b in zip(x.tolist(), y.tolist()) if max(b) != IGNORE]
            assert sorted(got) == sorted(expected[w] for w in chosen), (N, T, n, B, hosts)
            assert len(n_batches) == 1  # no host waits for another


def test_eval_windows_are_spread():
    assert eval_examples(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert eval_examples(10, 0).tolist() == eval_examples(10, 11).tolist() == list(range(10))
    assert eval_examples(2**33, 2).tolist() == [0, 2**32]
    assert set(np.diff(eval_examples(299, 100))) == {2, 3} and eval_examples(299, 100)[-1] == 296
    with pytest.raises(ValueError):
        eval_examples(10, -1)


def test_offsets_are_64_bit(tmp_path):
    """2.4 billion tokens in sparse shards, whose header counts are int32; only what is written takes disk space."""
    per, folder = 800_000_000, str(tmp_path)
    for i in range(3):
        path = os.path.join(folder, f'train_{i:06d}.bin')
        raw_shard(path, [], count=per)
        os.truncate(path, 1024 + 2 * per)
    with open(path, 'r+b') as f:
        f.seek(-14, os.SEEK_END)
        f.write(np.arange(1, 8, dtype='<u2').tobytes())
    with open(os.path.join(folder, 'train_000001.bin'), 'r+b') as f:
        f.seek(-4, os.SEEK_END)
        f.write(np.array([51, 52], '<u2').tobytes())
    assert sum(os.stat(os.path.join(folder, n)).st_blocks for n in os.listdir(folder)) * 512 < 2**20
    entries = [{'file': f'train_{i:06d}.bin', 'split': 'train', 'tokens': per, 'documents': None, 'bytes': None,
                'sha256': ''} for i in range(3)]
    write_manifest(folder, {'format': 1, 'dtype': 'uint16', 'vocab_size': 60, 'separator': None, 'tokenizer': None,
                            'shards': entries, 'source': {}})
    windows = Windows(folder, 'train', 1000)
    assert windows.n_tokens == 3 * per > 2**31 and len(windows) == 2_400_000
    x, y = windows.read(np.array([len(windows) - 1, 2 * per // 1000 - 1, 2 * per // 1000]))
    assert x[0, -7:].tolist() == [1, 2, 3, 4, 5, 6, 0] and y[0, -7:].tolist() == [2, 3, 4, 5, 6, 7, IGNORE]
    assert x[1, -3:].tolist() == [0, 51, 52] and y[1, -3:].tolist() == [51, 52, 0] and not x[2].any()
    one = Windows(folder, 'train', 1)
    assert one.read(np.array([3 * per - 2]))[0].tolist() == [[6]] and one.read([3 * per - 2])[1].tolist() == [[7]]
    with pytest.raises(IndexError):
        one.read(np.array([len(one)]))


def test_resident_memory_is_bounded(tmp_path, monkeypatch):
    """Reads a file 4 times the bound in the loader's order, in small and in large pages of the page cache."""
    monkeypatch.setattr(shards, 'RESIDENT_BYTES', 64 << 20)  # a quarter of the real one, for a short test
    n, folder = 2 * shards.RESIDENT_BYTES, str(tmp_path)  # 2 bytes each
    path = os.path.join(folder, 'train_000000.bin')
    raw_shard(path, [], count=n)
    with open(path, 'r+b') as f:
        f.seek(0, os.SEEK_END)
        for _ in range(2 * n // (4 << 20) - 10):  # written at once, it is cached in pages of up to 2 MB
            f.write(bytes(4 << 20))
    os.truncate(path, 1024 + 2 * n)  # a sparse tail: cached page by page when read
    write_manifest(folder, {
        'format': 1, 'dtype': 'uint16', 'vocab_size': 1, 'separator': None, 'tokenizer': None, 'source': {},
        'shards': [{'file': 'train_000000.bin', 'split': 'train', 'tokens': n, 'documents': None, 'bytes': None,
                    'sha256': ''}]})
    windows = Windows(folder, 'train', 1024)
    windows.read([0])
    bound, before, peak = shards.RESIDENT_BYTES / 2**20, resident_file_mb(), 0.0
    for i in range(0, 20000, 20):
        windows.read(example_at(np.arange(i, i + 20), len(windows), 0))
        peak = max(peak, resident_file_mb() - before)
    kept = np.memmap(path, np.uint16, 'r', 1024)  # what a map that stays open takes: this is what was measured
    before = resident_file_mb()
    kept[::1024].max()
    whole = resident_file_mb() - before
    print(f'bound {bound:.0f} MB, at most {peak:.0f} MB resident; one map kept open: {whole:.0f} MB')
    assert peak < bound and whole > 3 * bound


def test_file_descriptors_are_bounded(tmp_path):
    windows = Windows(corpus(tmp_path, 1, train=list(range(400))), 'train', 3)
    before = len(os.listdir('/proc/self/fd'))
    x, _ = windows.read(np.arange(len(windows)))
    assert x.reshape(-1)[:399].tolist() == list(range(399))
    assert len(os.listdir('/proc/self/fd')) - before <= shards.RESIDENT_BYTES // shards.HUGE_PAGE


def test_ids_outside_the_vocabulary_never_leave_the_loader(tmp_path):
    for dtype, bad in (('uint16', 60000), ('uint32', 60000), ('uint32', 2**32 - 1), ('uint32', 2**31)):
        for at in (0, 99, 100, 249):
            folder = tmp_path / f'{dtype}-{bad}-{at}'
            tokens = np.arange(250) % 50
            tokens[at] = bad
            corpus(folder, 100, dtype, vocab_size=50, train=tokens)
            message = rf'train_00000{at // 100}.bin: token {at % 100} has id {bad}, outside the vocabulary of 50:'
            with pytest.raises(DataError, match=message):
                windows = Windows(str(folder), 'train', 7)
                windows.read(np.arange(len(windows)))
            with pytest.raises(DataError, match=f'has id {bad}'), Loader(windows, 4, 0) as loader:
                for _ in range(20):
                    next(loader)
    folder = corpus(tmp_path / 'small model', train=[1, 2, 30, 4])
    assert Windows(folder, 'train', 3, vocab_size=99).vocab_size == 31
    with pytest.raises(DataError, match='token 2 has id 30, outside the vocabulary of 30'):
        Windows(folder, 'train', 3, vocab_size=30).read([0])


# The loader's thread

def plain_windows(tmp_path, n=100):
    return Windows(corpus(tmp_path, train=list(range(n))), 'train', 4)


def test_errors_of_the_thread_are_raised_after_the_batches_before_them(tmp_path):
    original = RuntimeError('the device is gone')
    calls = []

    def to_device(x, y):
        calls.append(threading.current_thread())
        if len(calls) == 3:
            raise original
        return x, y

    loader = Loader(plain_windows(tmp_path), 2, 0, to_device=to_device)
    next(loader), next(loader)
    for _ in range(3):  # again and again, and never a hang
        with pytest.raises(RuntimeError) as e:
            next(loader)
        assert e.value is original
    assert loader.position == 4 and threading.main_thread() not in calls and calls[0].daemon
    loader.close()
    loader.close()


def test_a_shard_cut_while_in_use_is_an_error_and_not_a_crash(tmp_path):
    windows = plain_windows(tmp_path, 150)
    os.truncate(windows.paths[1], 1030)
    with pytest.raises(DataError, match='train_000001.bin: removed or cut while in use'):
        windows.read(np.arange(len(windows)))
    windows = plain_windows(tmp_path / 'b')
    os.remove(windows.paths[0])
    with pytest.raises(DataError, match='train_000000.bin: removed or cut while in use'):
        windows.read([0])


def test_close_never_hangs(tmp_path):
    windows = plain_windows(tmp_path)
    for prefetch in (1, 2, 5):  # the queue is full
        loader = Loader(windows, 2, 0, prefetch=prefetch)
        next(loader)
        time.sleep(0.05)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 1 and not loader._thread.is_alive() and loader._queue.empty()
        with pytest.raises(StopIteration):
            next(loader)
    with pytest.raises(ZeroDivisionError), Loader(windows, 2, 0) as loader:  # the consumer raises
        next(loader)
        1 / 0
    assert not loader._thread.is_alive()
    slow = threading.Event()  # to_device is slow
    loader = Loader(windows, 2, 0, to_device=lambda x, y: slow.wait(60))
    began = time.monotonic()
    loader.close()
    assert 4 < time.monotonic() - began < 7
    slow.set()
    loader._thread.join(60)
    assert not loader._thread.is_alive()


def test_close_from_another_thread_ends_a_wait(tmp_path):
    loader = Loader(plain_windows(tmp_path), 2, 0, to_device=lambda x, y: time.sleep(3))
    threading.Timer(0.1, loader.close).start()
    began = time.monotonic()
    with pytest.raises(StopIteration):
        next(loader)
    assert time.monotonic() - began < 2


def test_prefetch_is_bounded_and_in_the_background(tmp_path):
    made = []
    with Loader(plain_windows(tmp_path), 2, 0, prefetch=3, to_device=lambda x, y: made.append(1)) as loader:
        time.sleep(0.3)
        assert len(made) == 4  # three wait in the queue, one in the thread's hand
        next(loader)
        assert loader.wait_s < 0.05
    with Loader(plain_windows(tmp_path / 'b'), 2, 0, to_device=lambda x, y: time.sleep(0.2)) as loader:
        next(loader)
        next(loader)
        assert loader.wait_s > 0.1


def test_a_dropped_loader_ends_its_thread(tmp_path):
    loader = Loader(plain_windows(tmp_path), 2, 0)
    next(loader)
    thread = loader._thread
    del loader
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_batches_handed_out_are_never_written_again(tmp_path):
    with Loader(plain_windows(tmp_path), 3, 0) as loader:
        kept = [next(loader) for _ in range(20)]
        copies = [(x.copy(), y.copy()) for x, y in kept]
        next(loader)
        assert all((a == c).all() and (b == d).all() for (a, b), (c, d) in zip(kept, copies))


def test_loader_refuses_nonsense(tmp_path):
    windows = plain_windows(tmp_path)
    for bad in ({'global_batch': 0}, {'start': -1}, {'prefetch': 0}, {'rows': [0, 0]}, {'rows': [4]}, {'rows': [-1]}):
        with pytest.raises(ValueError):
            Loader(windows, **{'global_batch': 4, 'seed': 0, **bad})
    with Loader(windows, 4, 0, rows=np.array([], np.int64)) as loader:  # a host whose devices hold copies of others
        x, y = next(loader)
        assert not x.any() and (y == IGNORE).all()


def test_ctrl_c_interrupts_a_wait_and_the_process_ends(tmp_path):
    folder = corpus(tmp_path, train=list(range(100)))
    code = ('import sys, time; from nano.loader import *; from nano.shards import *\n'
            'loader = Loader(Windows(sys.argv[1], "train", 4), 2, 0, to_device=lambda x, y: time.sleep(100))\n'
            'print("waiting", flush=True)\n'
            'next(loader)\n')
    p = subprocess.Popen([sys.executable, '-c', code, folder], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.readline() == b'waiting\n'
    time.sleep(0.2)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert b'KeyboardInterrupt' in err and p.returncode != 0


def test_shards_import_no_torch():
    code = 'import sys, nano.shards; sys.exit(any("torch" in m or "jax" in m for m in sys.modules))'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


# Files

@pytest.mark.parametrize('dtype', ['uint16', 'uint32'])
def test_writer_against_a_reader_of_bytes(tmp_path, seed, dtype):
    rng = np.random.default_rng(seed)
    writer = ShardWriter(str(tmp_path), 'train', dtype, 1000)
    tokens, n_bytes = [], 0
    for i in range(40):
        part = rng.integers(0, 2**16 if dtype == 'uint16' else 2**32, rng.integers(0, 300 if i else 2500))
        writer.add(part.astype(rng.choice([np.int64, np.uint64])), documents=int(len(part) > 0), n_bytes=len(part) * 5)
        tokens += part.tolist()
        n_bytes += len(part) * 5
    entries = writer.close()
    assert writer.close() == entries
    got = []
    for i, e in enumerate(entries):
        assert e['file'] == f'train_{i:06d}.bin' and e['split'] == 'train'
        body = (tmp_path / e['file']).read_bytes()
        magic, version, count = struct.unpack('<3i', body[:12])
        assert (magic, version) == ((20240520, 1) if dtype == 'uint16' else (20240801, 7)) and not any(body[12:1024])
        part = struct.unpack(f'<{count}{"H" if dtype == "uint16" else "I"}', body[1024:])
        assert count == e['tokens'] == (1000 if i < len(entries) - 1 else len(tokens) - 1000 * i)
        got += part
        out = subprocess.run(['sha256sum', str(tmp_path / e['file'])], capture_output=True, text=True).stdout
        assert out.split()[0] == e['sha256']
    assert got == tokens and sum(e['bytes'] for e in entries) == n_bytes
    assert sorted(os.listdir(tmp_path)) == [e['file'] for e in entries]


def test_writer_refuses_what_numpy_would_wrap(tmp_path):
    for dtype, bad in (('uint16', [70000]), ('uint16', [1, -1]), ('uint32', [2**32]), ('uint16', [1.0]),
                       ('uint16', [True]), ('uint16', [[1, 2]]),
                       ('uint32', np.array([-5], np.int8)), ('uint16', np.array([2**63], np.uint64))):
        writer = ShardWriter(str(tmp_path), 'train', dtype, 10)
        with pytest.raises(DataError):
            writer.add(bad)
        assert writer.close() == [] and os.listdir(tmp_path) == []
    for args in (('int64', 10), ('uint16', 0), ('uint16', 2**31)):
        with pytest.raises(DataError):
            ShardWriter(str(tmp_path), 'train', *args)


def test_unfinished_writing_looks_unfinished(tmp_path):
    code = ('import os, sys; from nano.shards import *\n'
            'w = ShardWriter(sys.argv[1], "train", "uint16", 100000)\n'
            'w.add([1] * 250000); w._file.flush(); os._exit(1)\n')
    subprocess.run([sys.executable, '-c', code, str(tmp_path)], cwd=ROOT)
    assert sorted(os.listdir(tmp_path)) == ['train_000000.bin', 'train_000001.bin', 'train_000002.bin.tmp']
    with pytest.raises(DataError, match='magic number 0'):
        read_header(str(tmp_path / 'train_000002.bin.tmp'))
    with pytest.raises(DataError, match='has no manifest.json, so its data is not complete'):
        load_manifest(str(tmp_path))
    corpus(tmp_path, train=[1, 2, 3])  # the same folder can be written again
    verify(str(tmp_path), load_manifest(str(tmp_path)), ['train'])
    with pytest.raises(DataError, match='holds a finished corpus'):
        ShardWriter(str(tmp_path), 'train', 'uint16', 100)


def test_a_write_that_fails_leaves_no_shard(tmp_path):
    code = ('import resource, signal, sys; from nano.shards import *\n'
            'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
            'resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n'  # as a full disk
            'w = ShardWriter(sys.argv[1], "train", "uint16", 90000)\n'
            'for step in (lambda: w.add([1] * 80000), lambda: w.add([1] * 9000), w.close, w.close):\n'
            '    try: step()\n'
            '    except (OSError, DataError, ValueError) as e: print(type(e).__name__, e)\n')
    p = subprocess.run([sys.executable, '-c', code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert 'File too large' in p.stdout, p
    assert not [n for n in os.listdir(tmp_path) if n.endswith('.bin')]


HEADERS = {
    'magic': (dict(magic=1), 'magic number 1, expected 20240520'),
    'version': (dict(version=2), 'version 2, expected 1'),
    'version32': (dict(magic=20240801, version=1, dtype='<u4'), 'version 1, expected 7'),
    'negative': (dict(count=-3), 'counts -3 tokens'),
    'truncated': (dict(count=9), 'truncated: the header counts 9 uint16 tokens, so 1042 bytes, but the file has 1032'),
    'trailing': (dict(count=3), 'trailing bytes: the header counts 3'),
    'odd': (dict(extra=b'x'), 'trailing bytes: .* has 1033 and is not a whole number of uint16 tokens'),
    'odd32': (dict(magic=20240801, version=7, dtype='<u4', count=5, extra=b'xyz'), 'truncated: .* has 1043 and is not'),
    'dtype': (dict(magic=20240801, version=7, dtype='<u4'), 'holds 4 uint32 tokens, the manifest says 4 uint16'),
}


@pytest.mark.parametrize('case', HEADERS)
def test_damaged_shards_are_named(tmp_path, case):
    folder = corpus(tmp_path, train=[1, 2, 3, 4])
    options, message = HEADERS[case]
    raw_shard(tmp_path / 'train_000000.bin', [1, 2, 3, 4], **options)
    for read in (lambda: Windows(folder, 'train', 2), lambda: verify(folder, load_manifest(folder), ['train'])):
        with pytest.raises(DataError, match=message) as e:
            read()
        assert str(e.value).startswith(str(tmp_path / 'train_000000.bin')) and '\n' not in str(e.value)


def test_other_damage(tmp_path):
    folder = corpus(tmp_path / 'a', train=list(range(250)), val=[1, 2])
    path = os.path.join(folder, 'train_000001.bin')
    raw_shard(path, [1] * 99)
    with pytest.raises(DataError, match='train_000001.bin: holds 99 uint16 tokens, the manifest says 100'):
        Windows(folder, 'train', 4)
    Windows(folder, 'val', 4)  # the other split is whole
    for size in (0, 1, 1023):
        os.truncate(path, size)
        with pytest.raises(DataError, match=f'train_000001.bin: has {size} bytes, a header alone 1024'):
            Windows(folder, 'train', 4)
    os.remove(path)
    with pytest.raises(DataError, match='train_000001.bin: cannot be read .No such file'):
        Windows(folder, 'train', 4)
    with pytest.raises(DataError, match="split 'test' is empty; splits with tokens: train, val"):
        Windows(folder, 'test', 4)
    for seq_len in (0, -1):
        with pytest.raises(DataError, match=f'seq_len {seq_len}: must be at least 1'):
            Windows(folder, 'val', seq_len)
    folder = corpus(tmp_path / 'b', train=[7], val=[5, 6])
    with pytest.raises(DataError, match="split 'train' has 1 token"):
        Windows(folder, 'train', 4)
    x, y = Windows(folder, 'val', 5).read([0])  # longer than the data: padded
    assert x.tolist() == [[5, 0, 0, 0, 0]] and y.tolist() == [[6] + [IGNORE] * 4]


def test_verify(tmp_path, monkeypatch):
    folder = corpus(tmp_path, train=list(range(350)), val=[1, 2])
    manifest = load_manifest(folder)
    hashed = []
    real = shards.file_sha256
    monkeypatch.setattr(shards, 'file_sha256', lambda p: hashed.append(os.path.basename(p)) or real(p))
    verify(folder, manifest, ['train'])
    verify(folder, manifest, ['train', 'val'])
    verify(folder, manifest, ['train', 'val'])
    assert sorted(hashed) == sorted(s['file'] for s in manifest['shards'])  # each once
    path = tmp_path / 'train_000002.bin'
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    time.sleep(0.02)
    path.write_bytes(body)
    for _ in range(2):
        with pytest.raises(DataError) as e:
            verify(folder, manifest, ['train', 'val'])
        assert re.search(rf'train_000002.bin: sha256 is {real(str(path))}, the manifest says '
                         rf'{manifest["shards"][2]["sha256"]}', str(e.value))
    body[-1] ^= 1
    path.write_bytes(body)
    for memo in ('{', '[1]', '{"train_000000.bin": 3}', '[]', 'null'):
        (tmp_path / '.verified.json').write_text(memo)
        verify(folder, manifest, ['train', 'val'])
    (tmp_path / '.verified.json').unlink()
    (tmp_path / '.verified.json').mkdir()  # it cannot be written
    hashed.clear()
    verify(folder, manifest, ['val'])
    verify(folder, manifest, ['val'])
    assert hashed == ['val_000000.bin'] * 2
    with pytest.raises(DataError, match="split 'test' is empty"):
        verify(folder, manifest, ['test'])
    manifest['tokenizer'] = {'file': 'tokenizer.model', 'sha256': 'x'}
    with pytest.raises(DataError, match='tokenizer.model: named by the manifest, cannot be read'):
        verify(folder, manifest, ['val'])
    (tmp_path / 'tokenizer.model').write_text('hello')
    with pytest.raises(DataError, match='tokenizer.model: sha256 is 2cf24dba.*, the manifest says x'):
        verify(folder, manifest, ['val'])


def test_manifest_errors(tmp_path):
    folder = corpus(tmp_path / 'a', train=[1, 2, 3])
    good = load_manifest(folder)
    path = tmp_path / 'a' / 'manifest.json'

    def edited(change):
        m = json.loads(json.dumps(good))
        change(m)
        return json.dumps(m)

    cases = [('', 'is not readable JSON'), ('{"format": 1', 'is not readable JSON'), ('\xff', 'lacks|JSON'),
             ('[]', 'the manifest is not a JSON object'), ('{}', 'the manifest lacks format, dtype, vocab_size')]
    for key in ('format', 'dtype', 'vocab_size', 'separator', 'tokenizer', 'shards'):
        cases.append((edited(lambda m: m.pop(key)), f'the manifest lacks {key}:'))
    for key in ('file', 'split', 'tokens', 'documents', 'bytes', 'sha256'):
        cases.append((edited(lambda m: m['shards'][0].pop(key)), f'shard 0 lacks {key}:'))
    for key, value, message in (
            ('format', 2, 'format is 2, this program reads 1'), ('dtype', 'int64', "dtype is 'int64'"),
            ('dtype', ['uint16'], 'dtype is'), ('vocab_size', 0, 'vocab_size is 0, expected 1 to 65536'),
            ('vocab_size', 65537, 'vocab_size is 65537'), ('vocab_size', True, 'vocab_size is True'),
            ('vocab_size', '9', "vocab_size is '9'"), ('separator', 4, 'separator is 4, expected null or an id below'),
            ('separator', -1, 'separator is -1'), ('tokenizer', 'x', 'tokenizer is not a JSON object'),
            ('tokenizer', {'file': 'x'}, 'tokenizer lacks sha256'), ('shards', [], 'lists no shards'),
            ('shards', {}, 'lists no shards'), ('shards', [3], 'shard 0 is not a JSON object'),
            ('shards', good['shards'] * 2, 'lists a shard twice'),
            ('shards', [{**good['shards'][0], 'file': '../x.bin'}], 'is not a file name'),
            ('shards', [{**good['shards'][0], 'tokens': -1}], 'shard 0 has wrong types'),
            ('shards', [{**good['shards'][0], 'tokens': 2.0}], 'shard 0 has wrong types')):
        cases.append((edited(lambda m: m.update({key: value})), message))
    for text, message in cases:
        path.write_bytes(text.encode('latin-1'))
        with pytest.raises(DataError, match=message) as e:
            load_manifest(folder)
        assert str(path) in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(DataError, match='no such folder'):
        load_manifest(str(tmp_path / 'none'))
    with pytest.raises(DataError, match='format is 3'):
        write_manifest(str(tmp_path), {**good, 'format': 3})
    assert not (tmp_path / 'manifest.json').exists()


# Shards of other tools

def run_shards(*args):
    command = [sys.executable, f'{ROOT}/data/manifest.py', *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize('kind', ['gpt2', 'llama3'])
def test_existing_shards_train_as_they_are(tmp_path, kind):
    eot, options = {'gpt2': (50256, {}), 'llama3': (128000, dict(magic=20240801, version=7, dtype='<u4'))}[kind]
    rng, streams, before = np.random.default_rng(0), {}, {}
    sizes = {'fineweb_val_000000.bin': 500, 'fineweb_train_000001.bin': 1000, 'fineweb_train_000002.bin': 700}
    for name, n in sizes.items():
        tokens = rng.integers(0, eot, n)
        tokens[::100] = eot  # llm.c puts it before each document
        raw_shard(tmp_path / name, tokens, **options)
        before[name] = (tmp_path / name).read_bytes()
        streams[name[8:-11]] = streams.get(name[8:-11], []) + tokens.tolist()
    p = run_shards(tmp_path)
    assert p.returncode == 0, p.stderr
    assert f'vocab_size {eot + 1}: the largest id + 1' in p.stdout and f'no separator: if {eot}' in p.stdout
    assert 'train: 2 shards, 1,700 tokens' in p.stdout
    manifest = load_manifest(str(tmp_path))
    assert manifest['separator'] is None and {s['documents'] for s in manifest['shards']} == {None}
    p = run_shards(tmp_path, '--separator', eot)
    assert p.returncode == 2 and p.stderr.count('\n') == 1 and 'has a manifest.json already' in p.stderr
    (tmp_path / 'manifest.json').unlink()
    p = run_shards(tmp_path, '--separator', eot, '--vocab_size', 130000 if kind == 'llama3' else 50304)
    assert p.returncode == 0, p.stderr
    manifest = load_manifest(str(tmp_path))
    assert [(s['documents'], s['bytes']) for s in manifest['shards']] == [(10, None), (7, None), (5, None)]
    assert manifest['separator'] == eot and manifest['vocab_size'] in (130000, 50304)
    verify(str(tmp_path), manifest, ['train', 'val'])
    for split in ('train', 'val'):
        windows = Windows(str(tmp_path), split, 64)
        x, y = windows.read(np.arange(len(windows)))
        assert list(zip(map(tuple, x.tolist()), map(tuple, y.tolist()))) == windows_of(streams[split], 64)
    assert before == {n: (tmp_path / n).read_bytes() for n in before}  # nothing is changed


def test_derive_refuses_with_one_line(tmp_path):
    def case(name, message, files, *args):
        folder = tmp_path / name
        folder.mkdir()
        for file, options in files.items():
            raw_shard(folder / file, **{'tokens': [1, 2, 3], **options})
        with pytest.raises(DataError, match=message) as e:
            derive(str(folder), *args)
        assert '\n' not in str(e.value) and not (folder / 'manifest.json').exists()

    wide = dict(magic=20240801, version=7, dtype='<u4')
    case('none', 'has no .bin shards', {})
    case('split', 'shard_0.bin: its name does not say which split', {'shard_0.bin': {}, 'train.bin': {}})
    case('both', 'its name does not say which split', {'val_train.bin': {}})
    case('mixed', 'train_1.bin: holds uint32 tokens but .*train_0.bin uint16', {'train_0.bin': {}, 'train_1.bin': wide})
    case('magic', 'train.bin: magic number 5', {'train.bin': dict(magic=5)})
    case('short', 'val.bin: truncated', {'train.bin': {}, 'val.bin': dict(count=5)})
    case('vocab', 'train.bin: holds id 3, outside the vocabulary of 3', {'train.bin': {}}, None, 3)
    case('separator', 'separator 9 never occurs; the first token is 1', {'train.bin': {}}, 9, 10)
    case('negative', 'separator -1 never occurs', {'train.bin': {}}, -1)
    case('large', 'vocab_size is 65537, expected 1 to 65536', {'train.bin': {}}, None, 65537)
    case('empty', 'its shards hold no tokens', {'train.bin': dict(tokens=[])})
    case('interrupted', 'writing it was interrupted', {'train_000000.bin': {}, 'train_000001.bin.tmp': {}})
    p = run_shards(tmp_path / 'nowhere')
    assert p.returncode == 2 and p.stderr == f'error: {tmp_path / "nowhere"}: no such folder\n'
    for name, split in (('train.bin', 'train'), ('val_1.bin', 'val'), ('edu_fineweb_train_000001.bin', 'train'),
                        ('TinyStories_val.bin', 'val'), ('validation.bin', 'val'), ('c4-train2.bin', 'train')):
        assert split_of(name) == split


def test_derive_counts_bytes_with_a_tokenizer(tmp_path):
    import sentencepiece as spm
    tokenizer = pytest.importorskip('nano.tokenizer')
    text = 'Zwölf Boxkämpfer jagen Eva quer über den Sylter Deich — 日本語 😀\n'
    model = tmp_path / 'tokenizer.model'
    with open(model, 'wb') as f:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter([text] * 20), model_writer=f, vocab_size=320, model_type='bpe', byte_fallback=True,
            normalization_rule_name='identity', remove_extra_whitespaces=False, add_dummy_prefix=False,
            split_by_whitespace=True, minloglevel=2)
    tok = tokenizer.load_tokenizer(str(model))
    documents = [text, 'Deich 😀 ☃', '']
    ids = [i for d in documents for i in [*tok.encode(d), tok.separator]]
    raw_shard(tmp_path / 'val.bin', ids)
    raw_shard(tmp_path / 'train.bin', ids)
    raw_shard(tmp_path / 'val_empty.bin', [])
    p = run_shards(tmp_path, '--tokenizer', model)
    assert p.returncode == 0, p.stderr
    manifest = load_manifest(str(tmp_path))
    assert manifest['tokenizer']['file'] == 'tokenizer.model' and manifest['separator'] == tok.separator
    assert manifest['vocab_size'] == tok.vocab_size
    assert {s['file']: (s['bytes'], s['documents']) for s in manifest['shards']} == {
        'train.bin': (None, 3), 'val.bin': (sum(len(d.encode()) for d in documents), 3), 'val_empty.bin': (0, 0)}
    windows = Windows(str(tmp_path), 'val', 7)
    assert len(windows) == -(-(len(ids) - 1) // 7) and windows.read([0])[0][0].tolist() == ids[:7]
    verify(str(tmp_path), manifest, ['train', 'val'])
