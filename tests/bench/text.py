"""Figures of data/text.py: MB/s on 2 cores against one process of sentencepiece, and peak memory as the input grows.

    python tests/bench/text.py [speed] [memory]

The text is Shakespeare's plays, if a registry answers, Python's standard library and the packages beside it, up to
60 MB, each document once. Memory: the plays and the library over and over, with other words. One tokenizer for both.
"""
import glob
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, 'data', 'text.py')
sys.path[:0] = [ROOT, os.path.join(ROOT, 'data')]
from sources import plays, standard_library  # noqa: E402

BASELINE = """
import sys, time
import numpy as np
from sentencepiece import SentencePieceProcessor
t, sp, n = time.perf_counter(), SentencePieceProcessor(model_file=sys.argv[1]), 0
with open(sys.argv[2], 'wb') as out:
    for path in open(sys.argv[3]).read().splitlines():
        with open(path, encoding='utf-8', errors='replace', newline='') as f:
            ids = np.array(sp.encode(f.read()) + [sp.eos_id()], np.uint16)
        out.write(ids.tobytes())
        n += len(ids)
print(n, time.perf_counter() - t)
"""


def text_py(*args: str) -> str:
    return subprocess.run([sys.executable, SCRIPT, *args], check=True, capture_output=True, text=True).stdout


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def speed(temp: str, files: list[str]):
    """Alternates the two, as the machine's speed drifts, and takes each one's best time."""
    folder = os.path.join(temp, 'speed')
    os.mkdir(folder)
    copies = []
    files = files + sorted(glob.glob(os.path.join(sysconfig.get_paths()['purelib'], '**', '*.py'), recursive=True))
    last = next((i for i in range(len(files)) if sum(map(os.path.getsize, files[:i])) > 60e6), len(files))
    for i, path in enumerate(files[:last]):
        copies.append(os.path.join(folder, f'{i:05d}.txt'))
        with open(path, 'rb') as f, open(copies[-1], 'wb') as g:
            g.write(f.read())
    size = sum(map(os.path.getsize, copies)) / 1e6
    names = os.path.join(temp, 'names')
    with open(names, 'w') as f:
        f.write('\n'.join(p for p in copies if os.path.getsize(p)))
    text_py(folder, '--out', os.path.join(temp, 'model'))
    model = os.path.join(temp, 'model', 'tokenizer.model')
    ours, theirs, cpu = [], [], [cpu_seconds()]
    for i in range(3):
        done = subprocess.run([sys.executable, '-c', BASELINE, model, os.path.join(temp, 'baseline.bin'), names],
                              check=True, capture_output=True, text=True).stdout.split()
        theirs.append(float(done[1]))
        cpu.append(cpu_seconds())
        t = time.perf_counter()
        out = text_py(folder, '--out', os.path.join(temp, f'ours{i}'), '--tokenizer', model, '--workers', '2')
        ours.append(time.perf_counter() - t)
        cpu.append(cpu_seconds())
        assert f' {int(done[0]):,} tokens' in out, (done, out)
    print(f'{size:.1f} MB in {last} documents, {int(done[0]):,} tokens')
    print(f'sentencepiece, 1 process:     {size / min(theirs):6.2f} MB/s (start-up of Python left out)')
    print(f'data/text.py, 2 workers:      {size / min(ours):6.2f} MB/s (whole command: both passes, start-up, writing)')
    print(f'ratio {min(theirs) / min(ours):.2f} (goal 1.8)')
    used = [b - a for a, b in zip(cpu, cpu[1:])]
    print(f'CPU seconds, all processes and start-up: {min(used[::2]):.1f} against {min(used[1::2]):.1f}: '
          f'on two idle cores at most {2 * min(used[::2]) / min(used[1::2]):.1f}', flush=True)


def rss(pid: int) -> int:
    """Resident bytes that are a process's own, so that memory shared by several counts once or not at all."""
    try:
        with open(f'/proc/{pid}/status') as f:
            fields = dict(line.split(':', 1) for line in f)
        return int(fields['RssAnon'].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


def children(pid: int) -> list[int]:
    try:
        with open(f'/proc/{pid}/task/{pid}/children') as f:
            below = [int(p) for p in f.read().split()]
    except OSError:
        return []
    return below + [q for p in below for q in children(p)]


def peak(args: list[str]) -> tuple[float, float]:
    """Runs data/text.py; returns the peaks in MB of (all its processes together, the main process)."""
    process = subprocess.Popen([sys.executable, SCRIPT, *args], stdout=subprocess.DEVNULL)
    most = [0, 0]

    def watch():
        while process.poll() is None:
            main = rss(process.pid)
            most[0] = max(most[0], main + sum(map(rss, children(process.pid))))
            most[1] = max(most[1], main)
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    assert process.wait() == 0
    thread.join()
    return most[0] / 1e6, most[1] / 1e6


def memory(temp: str, files: list[str]):
    texts = [open(p, 'rb').read() for p in files]
    for kind in ('many documents', 'one document'):
        peaks = []
        for size in (20, 400):
            folder = os.path.join(temp, f'{kind} {size}')
            os.mkdir(folder)
            written = n = 0
            while written < size * 10**6:
                name = f'{n if kind == "many documents" else 0:06d}.txt'
                text = texts[n % len(texts)].replace(b' t', b' t%d' % (n // len(texts)))
                with open(os.path.join(folder, name), 'ab') as f:
                    written += f.write(text)
                n += 1
            peaks.append(peak([folder, '--out', os.path.join(temp, f'out {kind} {size}'), '--workers', '2']))
            print(f'{kind}, {size} MB: peak {peaks[-1][0]:.0f} MB over all processes (2 workers and the main one), '
                  f'{peaks[-1][1]:.0f} MB the main one', flush=True)
        print(f'{kind}: ratio {peaks[1][0] / peaks[0][0]:.2f} over all, {peaks[1][1] / peaks[0][1]:.2f} main (goal 1)')


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as temp:
        files = plays(temp) + standard_library()
        for what in sys.argv[1:] or ('speed', 'memory'):
            {'speed': speed, 'memory': memory}[what](temp, files)
