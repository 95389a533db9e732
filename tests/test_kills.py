"""Whole runs of train_gpt.py that are killed at random moments, move between devices, or find the disk full: each ends
as the run that nothing disturbed."""
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import test_runs
from nano import checkpoint
from test_runs import data, metrics, run, stored  # noqa: F401, data is a fixture

ROOT = Path(__file__).resolve().parent.parent
# A small model, as a kill costs a start and some steps. 39 windows, so an epoch ends in every third step.
SAVE_EVERY, EVAL_EVERY, BATCH, KEEP = 2, 3, 16, 2
SMALL = (f'--layers 1 --width 32 --heads 2 --kv_heads 1 --global_batch {BATCH} --accumulate 2 --keep {KEEP} --strict '
         f'--save_every {SAVE_EVERY} --eval_every {EVAL_EVERY}').split()
STEPS = {3: 14, 20: 80}  # kills: steps, more than that many lives can do; see `moment`


class Life:
    """A process of the script, and what it has said so far."""

    def __init__(self, out, data, *options, devices=8):  # noqa: F811
        self.out, self.said = out, ''
        env = {k: v for k, v in os.environ.items() if k != 'XLA_USE_SPMD'}  # a run in this process has set it
        self.process = subprocess.Popen(
            [sys.executable, ROOT / 'train_gpt.py', *test_runs.OPTIONS, *SMALL, '--data', data, '--out', out,
             *map(str, options)], cwd=out.parent, env=dict(env, CPU_NUM_DEVICES=str(devices)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # a pipe: a limit on the size of files spares it
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, seen):
        """Returns as soon as seen() is true."""
        while not seen():
            assert self.process.poll() is None, f'{seen}: ended with {self.end()} before it\n{self.said}'
            time.sleep(0.002)

    def end(self):
        code = self.process.wait(300)
        self.reader.join()
        return code

    def has_step(self, step):
        """Whether this life, not the one before, has recorded this step."""
        return 'compiling the training step' in self.said and reached(self.out) >= step


def reached(out):
    """The last step on record."""
    path = out / 'metrics.jsonl'
    return max(map(int, re.findall(rb'"step": (\d+), "loss"', path.read_bytes())), default=0) if path.exists() else 0


def newest(out):
    path = checkpoint.newest(out / 'ckpt')
    return checkpoint.step_of(path) if path else 0


def begun(out, step):
    """Whether the writing of a checkpoint, of this step or later, has begun and not ended."""
    return any(int(p.name[5:13]) >= step for p in (out / 'ckpt').glob('step_*.tmp'))


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):  # noqa: F811
    """Folders of runs that nothing disturbed, by their number of steps."""
    found = {}

    def of(steps):
        if steps not in found:
            found[steps] = tmp_path_factory.mktemp('whole') / 'run'
            code, _, stderr = run(found[steps], data, *SMALL, '--steps', steps)
            assert code == 0, stderr
        return found[steps]
    return of


def same_weights(out, other, step):
    mine, theirs = stored(out, step), stored(other, step)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def same_run(out, other, step):
    """Bit for bit: the record, the samples, the weights and the optimizer's state."""
    for mine, theirs in zip(metrics(out), metrics(other)):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            for name in {'loss', 'grad_norm', 'lr', 'val_loss', 'val_bpb', 'tokens', 'skipped'} & set(b):
                assert a[name] == b[name], (a['step'], name)
        assert sorted(mine, key=lambda x: x['wall_s']) == mine
    for path in (other / 'samples').iterdir():
        assert (out / 'samples' / path.name).read_bytes() == path.read_bytes()
    same_weights(out, other, step)


def moment(kind, life, start, rng):
    """Waits for a random moment of this kind in a life that goes on from step `start`: before its sixth step."""
    ms = rng.uniform(0, {'start': 10000, 'compile': 6000, 'step': 500, 'evaluation': 400, 'writing': 200,
                         'pruning': 5}[kind])
    if kind == 'start':
        what = 'the start'
    elif kind == 'compile':
        what = 'it compiled the training step'
        life.wait_for(lambda: 'compiling the training step' in life.said)
    elif kind == 'step':
        step = start + rng.randint(1, 4)
        what = f'step {step}'
        life.wait_for(lambda: life.has_step(step))
    elif kind == 'evaluation':  # a step is put on record before it is evaluated
        step = (start // EVAL_EVERY + 1) * EVAL_EVERY
        what = f'step {step}, which is evaluated'
        life.wait_for(lambda: life.has_step(step))
    else:
        step = ((start + rng.randint(0, 2)) // SAVE_EVERY + 1) * SAVE_EVERY
        what = f'checkpoint {step} was ' + ('begun' if kind == 'writing' else 'written, and the oldest goes')
        life.wait_for((lambda: life.has_step(start + 1) and begun(life.out, step)) if kind == 'writing' else
                      (lambda: f'step {step}: wrote' in life.said))
    time.sleep(ms / 1e3)
    return f'{kind}, {ms:.0f} ms after {what}'


KINDS = {'start': 2, 'compile': 2, 'step': 5, 'evaluation': 4, 'writing': 5, 'pruning': 2}  # of 20


@pytest.mark.parametrize('signum, kills', [
    (signal.SIGKILL, 3), *(pytest.param(s, n, marks=pytest.mark.slow)
                           for s, n in ((signal.SIGKILL, 20), (signal.SIGTERM, 3), (signal.SIGTERM, 20)))])
def test_a_run_that_is_stopped_again_and_again(whole, data, tmp_path, seed, signum, kills):  # noqa: F811
    """The same command, stopped at random moments of each kind, until it is through."""
    rng, out, steps = random.Random(f'{seed} {signum} {kills}'), tmp_path / 'run', STEPS[kills]
    kinds = list(Counter(KINDS).elements()) if kills == 20 else [
        'writing', rng.choice(('start', 'compile')), rng.choice(('step', 'evaluation'))]
    rng.shuffle(kinds)
    cut, furthest = 0, 0
    for n, kind in enumerate([*kinds, 'none']):
        start = newest(out)
        assert start >= furthest - 2 * SAVE_EVERY  # one save may be under way while the loop goes on to the next
        life = Life(out, data, '--steps', steps)
        try:
            where = kind != 'none' and moment(kind, life, start, rng)
            if where:
                life.process.send_signal(signum)
            code = life.end()
        finally:
            life.process.kill()
        furthest, now = max(furthest, reached(out)), newest(out)
        ran = 'compiling' in life.said  # before that the record and the rests are of the life before
        unfinished = ran and begun(out, now + 1)
        cut += unfinished
        print(f'life {n}: from step {start} to {reached(out) if ran else start}, ' + (
            f'{signum.name} at: {where}; then the newest checkpoint is {now}' if where else f'not stopped: {code}') +
            ', another was being written' * unfinished)
        said = life.said.split('\nA sample after')[0]
        assert not re.search('(?i)error|warning|traceback|no checkpoint|left out', said), said
        if ran:
            assert (f'goes on from {out}/ckpt/step_{start:08d}' in said) == (start > 0), said
        assert all(int(step) <= now for step in re.findall('step ([0-9]+): wrote', said)), said
        if not where:
            assert code == 0, said
        elif signum == signal.SIGKILL:
            assert code == -signal.SIGKILL, said
        elif 'asking for' not in said:  # Python itself was starting
            assert code in (143, -signal.SIGTERM), said
        elif (stopped := re.search('stopped after step ([0-9]+): the same command goes on', said)):
            assert code == 143 and int(stopped[1]) == now, said
        else:
            assert code == 143 and 'stopped before the first step' in said, said
    assert cut or kills == 3 or signum == signal.SIGTERM
    assert len(checkpoint.complete(out / 'ckpt')) == len(os.listdir(out / 'ckpt')) == KEEP  # and no rests
    same_run(out, whole(steps), steps)


@pytest.mark.slow
def test_a_run_moves_between_devices(whole, data, tmp_path):  # noqa: F811
    """8, 4, 1, and 8 devices in which each weight lies on several: the same batches, losses to float tolerance."""
    out, steps = tmp_path / 'run', STEPS[3]
    assert run(out, data, *SMALL, '--steps', steps, '--stop_at', 5)[0] == 0
    for devices, stop_at in ((4, 9), (1, 12)):
        life = Life(out, data, '--steps', steps, '--stop_at', stop_at, devices=devices)
        assert life.end() == 0, life.said
        assert f'{devices} of {devices} cpu devices' in life.said and 'goes on from' in life.said
        assert json.loads((out / f'ckpt/step_{stop_at:08d}/meta.json').read_text())['consumed'] == stop_at * BATCH
    assert run(out, data, *SMALL, '--steps', steps, '--stop_at', steps, '--mesh', '2,2,2')[0] == 0
    assert json.loads((out / f'ckpt/step_{steps:08d}/meta.json').read_text())['consumed'] == steps * BATCH
    for mine, theirs in zip(metrics(out), metrics(whole(steps))):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            for name in {'loss', 'val_loss', 'grad_norm', 'lr', 'tokens'} & set(b):
                assert a[name] == pytest.approx(b[name], rel=1e-3), (a['step'], name)
    mine, theirs = stored(out, steps), stored(whole(steps), steps)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], atol=2e-3) for name in mine)


def limit(life, n_bytes):
    """Stands for a full disk: no file of the process may grow beyond this."""
    resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_for_a_while(whole, data, tmp_path):  # noqa: F811
    """A save fails and metrics.jsonl fills up in the middle of a line: only these lines are lost."""
    out, steps = tmp_path / 'run', STEPS[3]
    life = Life(out, data, '--steps', steps)
    life.wait_for(lambda: 'step 4: wrote' in life.said)
    limit(life, (out / 'metrics.jsonl').stat().st_size + 100)
    life.wait_for(lambda: 'NO CHECKPOINT was written' in life.said)
    limit(life, resource.RLIM_INFINITY)
    assert life.end() == 0, life.said
    failed = [int(n) for n in re.findall('error: step ([0-9]+): NO CHECKPOINT', life.said)]
    later = failed[-1] + SAVE_EVERY  # its save has begun when the disk is seen to have room, or soon after
    assert f'step {later}: wrote' in life.said, life.said
    assert life.said.count('metrics.jsonl cannot be written') == 1
    for mine, theirs in zip(metrics(out), metrics(whole(steps))):
        theirs = [x for x in theirs if x['step'] in {y['step'] for y in mine}]
        for name in ('step', 'loss', 'val_loss', 'tokens'):
            assert [x.get(name) for x in mine] == [x.get(name) for x in theirs]
    assert {x['step'] for x in metrics(out)[0]} >= {*range(1, 5), *range(later + 1, steps + 1)}
    same_weights(out, whole(steps), steps)


@pytest.mark.slow
def test_a_disk_that_stays_full(whole, data, tmp_path):  # noqa: F811
    """Not a byte more can be written: training goes on to its end, which tells; the checkpoint before is whole."""
    out, steps = tmp_path / 'run', STEPS[3]
    life = Life(out, data, '--steps', steps, '--stop_at', 9)
    life.wait_for(lambda: 'step 4: wrote' in life.said)
    limit(life, 0)
    assert life.end() == 2 and 'error: step 9 is not saved, see above: make room' in life.said, life.said
    assert 'NO CHECKPOINT was written' in life.said and 'step 6: validation loss' in life.said
    assert newest(out) == 4 and not list((out / 'ckpt').glob('*.tmp'))
    metrics(out)
    code, said, _ = run(out, data, *SMALL, '--steps', steps)
    assert code == 0 and f'goes on from {out}/ckpt/step_00000004' in said
    same_run(out, whole(steps), steps)
