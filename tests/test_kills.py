"""Whole runs of both scripts that are killed at random moments, move between devices, or find the disk full: each ends
as the run that nothing disturbed."""
import json
import os
import random
import re
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import test_runs
import test_vit
from forks import Fork, run_script
from nano import checkpoint
from test_runs import data, metrics, stored  # noqa: F401, data is a fixture
from test_vit import image_set  # noqa: F401, a fixture

SAVE_EVERY, EVAL_EVERY, BATCH, KEEP = 2, 3, 16, 2
STEPS = {2: 14, 20: 80}  # kills: steps, more than that many lives can do; see `moment`


@dataclass
class Script:
    """One of both, with a small model, as a kill costs a start and some steps."""
    name: str
    data: Path
    tests: ModuleType  # with OPTIONS and run(), a run in this process
    more: list[str]  # options that make its model small
    compiles: int  # the first weights, evaluation, the training step, and sampling

    @property
    def options(self):
        return [*self.more, *f'--layers 1 --width 32 --heads 2 --global_batch {BATCH} --keep {KEEP} --strict '
                f'--save_every {SAVE_EVERY} --eval_every {EVAL_EVERY}'.split()]

    def run(self, out, *options):
        """Exit code, stdout and stderr."""
        return self.tests.run(out, self.data, *self.options, *options)

    def command(self, out):
        """The name and options of a process."""
        return [self.name, *self.tests.OPTIONS, *self.options, '--data', str(self.data), '--out', str(out)]


@pytest.fixture(scope='module')
def scripts(data, image_set):  # noqa: F811
    """By name. Of train_gpt.py's 39 windows an epoch ends in every third step, of train_vit.py's 75 images in every
    fifth."""
    few = image_set.parent / 'few'
    test_vit.write_images(few, train=(50, 25), val=77)
    return {s.name: s for s in (Script('train_gpt', data, test_runs, ['--kv_heads', '1', '--accumulate', '2'], 4),
                                Script('train_vit', few, test_vit, ['--randaugment', '', '--drop_path', '0'], 3))}  # half of its graph


class Life(Fork):
    """A process of a script."""

    def __init__(self, script, out, *options, devices=8):
        self.out = out
        super().__init__(run_script, *script.command(out), *map(str, options), cwd=out.parent,
                         CPU_NUM_DEVICES=str(devices))

    def wait_for(self, seen):
        """Returns as soon as seen() is true."""
        while not seen():
            assert self.runs(), f'{seen}: ended with {self.end()} before it\n{self.said}'
            time.sleep(0.002)

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
def whole(tmp_path_factory):
    """Folders of runs that nothing disturbed, by their script's options and number of steps."""
    found = {}

    def of(script, steps):
        if (*script.more, steps) not in found:
            out = found[*script.more, steps] = tmp_path_factory.mktemp('whole') / 'run'
            code, _, stderr = script.run(out, '--steps', steps)
            assert code == 0, stderr
        return found[*script.more, steps]
    return of


# What two runs of the same steps do not share.
OF_THE_MACHINE = {'tokens_per_s', 'images_per_s', 'mfu', 'data_wait_s', 'trace_ms', 'wall_s', 'rss_gb', 'compiles'}


def same_weights(out, other, step):
    mine, theirs = stored(out, step), stored(other, step)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def same_run(out, other, step):
    """Bit for bit: the record, the samples, the weights and the optimizer's state."""
    for mine, theirs in zip(metrics(out), metrics(other)):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            for name in b.keys() - OF_THE_MACHINE:
                assert a[name] == b[name], (a['step'], name)
        assert sorted(mine, key=lambda x: x['wall_s']) == mine
    for path in (other / 'samples').iterdir():
        assert (out / 'samples' / path.name).read_bytes() == path.read_bytes()
    same_weights(out, other, step)


def moment(kind, life, start, rng):
    """Waits for a random moment of this kind in a life that goes on from step `start`: before its sixth step."""
    ms = rng.uniform(0, {'start': 5000, 'compile': 6000, 'step': 500, 'evaluation': 400, 'writing': 200,
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


@pytest.mark.parametrize('name, signum, kills', [
    ('train_gpt', signal.SIGKILL, 2), ('train_vit', signal.SIGKILL, 2), *(
        pytest.param('train_gpt', s, n, marks=pytest.mark.slow)
        for s, n in ((signal.SIGKILL, 20), (signal.SIGTERM, 2), (signal.SIGTERM, 20))),
    pytest.param('train_vit', signal.SIGKILL, 20, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_again_and_again(scripts, whole, tmp_path, seed, name, signum, kills):
    """The same command, stopped at random moments of each kind, until it is through."""
    rng, script = random.Random(f'{seed} {name} {signum} {kills}'), scripts[name]
    out, steps = tmp_path / 'run', STEPS[kills]
    kinds = list(Counter(KINDS).elements()) if kills == 20 else [
        'writing', rng.choice(('start', 'compile', 'step', 'evaluation'))]
    rng.shuffle(kinds)
    cut, furthest = 0, 0
    for n, kind in enumerate([*kinds, 'none']):
        start = newest(out)
        assert start >= furthest - 2 * SAVE_EVERY  # one save may be under way while the loop goes on to the next
        life = Life(script, out, '--steps', steps)
        try:
            where = kind != 'none' and moment(kind, life, start, rng)
            if where:
                life.send_signal(signum)
            code = life.end()
        finally:
            life.kill()
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
        compiles = script.compiles + (start > 0)  # and one that puts what was loaded on the devices
        assert set(re.findall('compiled ([0-9]+) graphs', said)) <= {str(compiles)}, said
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
    assert cut or kills == 2 or signum == signal.SIGTERM
    assert len(checkpoint.complete(out / 'ckpt')) == len(os.listdir(out / 'ckpt')) == KEEP  # and no rests
    same_run(out, whole(script, steps), steps)


@pytest.mark.parametrize('name, of_1', [pytest.param('train_gpt', True, marks=pytest.mark.slow),
                                        pytest.param('train_vit', True, marks=pytest.mark.slow), ('train_vit', False)])
def test_a_run_moves_between_devices(scripts, whole, tmp_path, name, of_1):
    """8, 4, 1, and 8 devices in which each weight lies on several: the same batches, losses to float tolerance."""
    script, out, steps = scripts[name], tmp_path / 'run', STEPS[2]
    if name == 'train_vit':  # what mixes images mixes those of a device
        script = replace(script, more=[*script.more, '--mixup', '0'])
    assert script.run(out, '--steps', steps, '--stop_at', 4)[0] == 0
    for devices, stop_at in ((4, 7), (1, 9))[:1 + of_1]:
        life = Life(script, out, '--steps', steps, '--stop_at', stop_at, devices=devices)
        assert life.end() == 0, life.said
        assert f'{devices} of {devices} cpu devices' in life.said and 'goes on from' in life.said
        assert json.loads((out / f'ckpt/step_{stop_at:08d}/meta.json').read_text())['consumed'] == stop_at * BATCH
    assert script.run(out, '--steps', steps, '--stop_at', steps, '--mesh', '2,2,2')[0] == 0
    assert json.loads((out / f'ckpt/step_{steps:08d}/meta.json').read_text())['consumed'] == steps * BATCH
    for mine, theirs in zip(metrics(out), metrics(whole(script, steps))):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            for key in {'loss', 'val_loss', 'grad_norm', 'lr', 'tokens', 'images', 'val_images'} & set(b):
                assert a[key] == pytest.approx(b[key], rel=1e-3), (a['step'], key)
    mine, theirs = stored(out, steps), stored(whole(script, steps), steps)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], atol=2e-3) for name in mine)


def limit(life, n_bytes):
    """Stands for a full disk: no file of the process may grow beyond this."""
    resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_for_a_while(scripts, whole, tmp_path):
    """A save fails and metrics.jsonl fills up in the middle of a line: only these lines are lost."""
    script, out, steps = scripts['train_gpt'], tmp_path / 'run', STEPS[2]
    life = Life(script, out, '--steps', steps)
    life.wait_for(lambda: 'step 4: wrote' in life.said)
    limit(life, (out / 'metrics.jsonl').stat().st_size + 100)
    life.wait_for(lambda: 'NO CHECKPOINT was written' in life.said)
    limit(life, resource.RLIM_INFINITY)
    assert life.end() == 0, life.said
    failed = [int(n) for n in re.findall('error: step ([0-9]+): NO CHECKPOINT', life.said)]
    later = failed[-1] + SAVE_EVERY  # its save has begun when the disk is seen to have room, or soon after
    assert f'step {later}: wrote' in life.said, life.said
    assert life.said.count('metrics.jsonl cannot be written') == 1
    for mine, theirs in zip(metrics(out), metrics(whole(script, steps))):
        theirs = [x for x in theirs if x['step'] in {y['step'] for y in mine}]
        for name in ('step', 'loss', 'val_loss', 'tokens'):
            assert [x.get(name) for x in mine] == [x.get(name) for x in theirs]
    assert {x['step'] for x in metrics(out)[0]} >= {*range(1, 5), *range(later + 1, steps + 1)}
    same_weights(out, whole(script, steps), steps)


@pytest.mark.slow
def test_a_disk_that_stays_full(scripts, whole, tmp_path):
    """Not a byte more can be written: training goes on to its end, which tells; the checkpoint before is whole."""
    script, out, steps = scripts['train_gpt'], tmp_path / 'run', STEPS[2]
    life = Life(script, out, '--steps', steps, '--stop_at', 9)
    life.wait_for(lambda: 'step 4: wrote' in life.said)
    limit(life, 0)
    assert life.end() == 2 and 'error: step 9 is not saved, see above: make room' in life.said, life.said
    assert 'NO CHECKPOINT was written' in life.said and 'step 6: validation loss' in life.said
    assert newest(out) == 4 and not list((out / 'ckpt').glob('*.tmp'))
    metrics(out)
    code, said, _ = script.run(out, '--steps', steps)
    assert code == 0 and f'goes on from {out}/ckpt/step_00000004' in said
    same_run(out, whole(script, steps), steps)
