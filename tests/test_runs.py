"""Whole runs of train_gpt.py: in this process on 8 devices, where equal graphs compile once, and as users start it."""
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from nano import runtime, shards, trace
from nano.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
# 96 windows of 40, so two epochs end on the way. The highest lr equals z_loss: torch_xla merges equal scalars, which
# changes the graph.
OPTIONS = '''--device cpu --layers 2 --width 64 --heads 4 --kv_heads 2 --head_size 16 --mlp_width 96 --seq_len 32
--global_batch 8 --dropout 0.1 --z_loss 0.01 --lr 0.01 --schedule wsd --warmup 2 --decay 0.5
--final_lr 0 --steps 12 --log_every 1 --eval_every 4 --save_every 3 --keep 9 --sample_tokens 12'''.split()
METRICS = 'step loss lr grad_norm tokens tokens_per_s mfu data_wait_s trace_ms compiles wall_s'.split()


@pytest.fixture(scope='module')
def data(corpus, tmp_path_factory):
    """1,250 tokens to train on and 700 to validate, of the corpus."""
    folder = tmp_path_factory.mktemp('data')
    shutil.copy(f'{corpus}/tokenizer.model', folder)
    tokenizer = load_tokenizer(f'{folder}/tokenizer.model')
    manifest = shards.load_manifest(corpus)
    entries = []
    for split, n in (('train', 1250), ('val', 700)):
        with open(f'{corpus}/{split}_000000.bin', 'rb') as f:
            tokens = np.frombuffer(f.read()[1024:], '<u2')[:n]
        writer = shards.ShardWriter(str(folder), split, 'uint16', 500)
        writer.add(tokens, n_bytes=len(tokenizer.decode(tokens).encode()))
        entries += writer.close()
    shards.write_manifest(str(folder), dict(manifest, shards=entries))
    return folder


def run(out, data, *options):
    """Exit code, stdout and stderr of the script's main."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            train_gpt.main([*OPTIONS, '--out', str(out), '--data', str(data), *map(str, options)])
        except SystemExit as e:
            code = e.code
    print(stdout.getvalue(), stderr.getvalue())
    return code, stdout.getvalue(), stderr.getvalue()


def metrics(out):
    """Two lists of lines: of steps and of evaluations."""
    lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    return [x for x in lines if 'loss' in x], [x for x in lines if 'val_loss' in x]


def stored(out, step):
    """The tensors of a checkpoint, read by PyTorch alone."""
    import torch.distributed.checkpoint as dcp
    reader = dcp.FileSystemReader(out / 'ckpt' / f'step_{step:08d}')
    found = {n: torch.empty(t.size) for n, t in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.fixture(scope='module')
def whole(data, tmp_path_factory):
    """A run that nothing interrupted, and that may not compile after its first step."""
    out = tmp_path_factory.mktemp('whole')
    code, stdout, stderr = run(out, data, '--strict')
    assert code == 0, stderr
    return out, stdout


def test_a_run_compiles_before_its_second_step_only(whole):
    out, stdout = whole
    steps, _ = metrics(out)
    assert len({x['compiles'] for x in steps}) == 1
    assert f'compiled {steps[0]["compiles"]} graphs' in stdout
    assert 'warning' not in stdout


def test_what_a_run_leaves(whole, data):
    out, stdout = whole
    steps, evals = metrics(out)
    assert [x['step'] for x in steps] == list(range(1, 13)) and [x['step'] for x in evals] == [0, 4, 8, 12]
    assert all(set(METRICS) <= set(x) for x in steps)
    assert [x['tokens'] for x in steps] == [256 * n for n in range(1, 13)]
    assert [x['lr'] for x in steps] == pytest.approx(
        [0.01 / 3, 0.02 / 3, *[0.01] * 5, 0.05 / 6, 0.04 / 6, 0.03 / 6, 0.02 / 6, 0.01 / 6])
    assert steps[0]['tokens_per_s'] is None
    rates = sorted(x['tokens_per_s'] for x in steps[1:])
    assert 0 < rates[0] and rates[-1] < 20 * rates[len(rates) // 2], rates  # two steps read at once are no faster
    assert all(x['mfu'] is None and x['trace_ms'] > 0 and x['data_wait_s'] >= 0 for x in steps)
    manifest = shards.load_manifest(str(data))
    n_bytes = sum(s['bytes'] for s in manifest['shards'] if s['split'] == 'val')
    for x in evals:
        assert x['val_bpb'] == pytest.approx(x['val_loss'] / math.log(2) * 700 / n_bytes)
    assert evals[0]['val_loss'] == pytest.approx(math.log(350), abs=0.1) and evals[-1]['val_loss'] < 5.3
    assert sorted(p.name for p in (out / 'ckpt').iterdir()) == [f'step_{n:08d}' for n in (3, 6, 9, 12)]
    assert json.loads((out / 'config.json').read_text())['z_loss'] == 0.01
    assert sorted(p.name for p in (out / 'samples').iterdir()) == [f'step_{n:08d}.txt' for n in (4, 8, 12)]
    assert (out / 'samples' / 'step_00000012.txt').read_text(encoding='utf-8') in stdout
    assert 'next checkpoint after step 3' in stdout


def test_a_finished_run_says_so(whole, data):
    out, _ = whole
    before = (out / 'metrics.jsonl').read_bytes()
    code, stdout, _ = run(out, data)
    assert code == 0 and 'is complete: step 12 of 12' in stdout and (out / 'metrics.jsonl').read_bytes() == before


def same_run(out, other, exact):
    """The same record and the same weights."""
    for mine, theirs in zip(metrics(out), metrics(other)):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            for name in {'loss', 'grad_norm', 'lr', 'val_loss', 'tokens'} & set(a):
                assert a[name] == pytest.approx(b[name], rel=0 if exact else 1e-3, abs=0), (a['step'], name)
    mine, theirs = stored(out, 12), stored(other, 12)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]) if exact else torch.allclose(mine[name], theirs[name], atol=2e-3)


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(whole, data, tmp_path):
    """SIGINT and SIGTERM as soon as a step's checkpoint is there. Bit for bit, in another process or not."""
    def send(signum, step):
        until = time.monotonic() + 100
        while not (tmp_path / f'ckpt/step_{step:08d}').exists() and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(os.getpid(), signum)

    wall_s = 0
    for signum, after in ((signal.SIGINT, 3), (signal.SIGTERM, 6)):
        thread = threading.Thread(target=send, args=(signum, after))
        thread.start()
        code, stdout, stderr = run(tmp_path, data, '--strict')
        thread.join()
        stopped = int(re.search('stopped after step ([0-9]+): the same command goes on', stdout)[1])
        assert code == 128 + signum and not stderr and after <= stopped < 12
        assert (tmp_path / f'ckpt/step_{stopped:08d}').exists()
        steps, _ = metrics(tmp_path)
        assert steps[-1]['step'] == stopped and steps[-1]['wall_s'] > wall_s
        wall_s = steps[-1]['wall_s']
    code, stdout, _ = run(tmp_path, data, '--strict')
    assert code == 0 and f'goes on from {tmp_path}/ckpt/step_{stopped:08d}' in stdout
    same_run(tmp_path, whole[0], exact=True)
    assert metrics(tmp_path)[0][-1]['wall_s'] > wall_s


@pytest.mark.parametrize('due', [12, pytest.param(8, marks=pytest.mark.slow)])
def test_a_stop_in_an_evaluation_leaves_it_owed(whole, data, tmp_path, monkeypatch, due):
    """The next start makes up for it, also after the last step, and once; then all is as if nothing had been."""
    evaluate = train_gpt.evaluate

    def stopped(cfg, *args):
        if len(list(tmp_path.glob('ckpt/step_*/meta.json'))) == due // 3 - (due == 12):
            os.kill(os.getpid(), signal.SIGTERM)
            while not args[-1]():
                time.sleep(0.001)
        return evaluate(cfg, *args)

    with monkeypatch.context() as m:
        m.setattr(train_gpt, 'evaluate', stopped)
        code, stdout, _ = run(tmp_path, data, '--strict')
    assert code == 143 and f'stopped after step {due}: the same command goes on' in stdout
    assert [x['step'] for x in metrics(tmp_path)[1]] == list(range(0, due, 4))
    code, stdout, _ = run(tmp_path, data, '--strict')
    assert code == 0 and 'A sample after 12 steps' in stdout
    same_run(tmp_path, whole[0], exact=True)
    for step in (4, 8, 12):
        name = f'samples/step_{step:08d}.txt'
        assert (tmp_path / name).read_text() == (whole[0] / name).read_text()
    assert 'is complete' in run(tmp_path, data)[1]


STOPPED = '''
import signal, sys, time
from nano.runtime import StopSignal
how = sys.argv[1]
with StopSignal(grace_s=1 if how == 'never' else 60) as stop:
    stop.nothing_to_save = how == 'before'
    print('ready', flush=True)
    while not stop.asked() or how != 'once':
        time.sleep(0.01)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(stop.exit_code)
'''


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize('how', ['once', 'twice', 'before', 'never'])
def test_how_a_signal_ends_the_process(signum, how):
    """Asked, the loop ends; without an answer it is ended by a second signal or after the grace; and where there is
    nothing to save, at once."""
    process = subprocess.Popen([sys.executable, '-c', STOPPED, how], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signum)
    assert process.stderr.readline() == '\n'
    assert process.stderr.readline().startswith('stopped before' if how == 'before' else 'stopping: a checkpoint')
    if how == 'twice':
        if signum == signal.SIGHUP:  # the next one counts as the first, see the next test
            process.send_signal(signum := signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signum)
    assert process.wait(40) == 128 + signum and process.stderr.read() == ''


def test_a_terminal_that_closes():
    """SIGHUP asks, but is no second signal, and a stderr that cannot be written ends nothing."""
    for first, second in ((signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM),
                          (signal.SIGHUP, signal.SIGHUP)):
        with open('/dev/full', 'w') as full:
            process = subprocess.Popen([sys.executable, '-c', STOPPED, 'twice'], cwd=ROOT, stdout=subprocess.PIPE,
                                       stderr=full, text=True)
        assert process.stdout.readline() == 'ready\n'
        for signum in (first, second):
            process.send_signal(signum)
            time.sleep(0.2)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # the second that counts, or the first
        if signal.SIGTERM not in (first, second):
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143


def test_what_may_change_when_a_run_goes_on(whole, data, corpus, tmp_path):
    """README's table: refused, refused without --reset_data, allowed; `tokens` counts what was trained on."""
    out = tmp_path / 'run'
    assert run(out, data, '--stop_at', 3, '--sample_tokens', 0)[0] == 0
    for options, message in ((('--seed', 2), '--seed 1, not 2'), (('--seq_len', 16), '--seq_len 32, not 16'),
                             (('--data', corpus), 'other data than those in')):
        code, _, stderr = run(out, data, *options)
        assert code == 2 and message in stderr and '--reset_data' in stderr and stderr.count('\n') == 1, stderr
    code, stdout, _ = run(out, data, '--stop_at', 5, '--sample_tokens', 0, '--global_batch', 16, '--accumulate', 2)
    assert code == 0 and '--global_batch 16 (was 8)' in stdout
    code, stdout, _ = run(out, corpus, '--stop_at', 6, '--sample_tokens', 0, '--seed', 2, '--reset_data')
    assert code == 0
    code, stdout, _ = run(out, corpus, '--stop_at', 7, '--sample_tokens', 0, '--seed', 2, '--reset_data')  # not again
    assert code == 0 and [x['tokens'] for x in metrics(out)[0]] == [256, 512, 768, 1280, 1792, 2048, 2304]
    assert json.loads((out / 'ckpt/step_00000007/meta.json').read_text())['consumed'] == 16
    assert [x['lr'] for x in metrics(out)[0]] == [x['lr'] for x in metrics(whole[0])[0][:7]]


def test_a_killed_run_goes_on_with_other_devices(whole, data, tmp_path):
    """`kill -9` of a process with one device after the checkpoint of step 3; 8 devices, in which each weight lies on
    several, take the run over."""
    command = [sys.executable, ROOT / 'train_gpt.py', *OPTIONS, '--data', data, '--out', tmp_path, '--strict']
    with open(tmp_path / 'said', 'w') as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=dict(os.environ, CPU_NUM_DEVICES='1'), stdout=said,
                                   stderr=subprocess.STDOUT)
        while not (tmp_path / 'ckpt/step_00000003').exists():
            assert process.poll() is None, (tmp_path / 'said').read_text()
            time.sleep(0.001)
        process.kill()
        process.wait()
    said = (tmp_path / 'said').read_text()
    steps, evals = metrics(tmp_path)
    assert steps[-1]['step'] < 12 and {x['compiles'] for x in steps} == {4}, said
    assert 'compiled 4 graphs' in said  # the first weights, evaluation, sampling, the training step
    assert evals[0]['val_loss'] == pytest.approx(metrics(whole[0])[1][0]['val_loss'], rel=1e-6)
    code, stdout, _ = run(tmp_path, data, '--strict', '--mesh', '2,2,2')
    assert code == 0 and 'goes on from' in stdout
    same_run(tmp_path, whole[0], exact=False)


def test_init_from_takes_the_weights_alone(whole, data, tmp_path):
    out, _ = whole
    for source in (out, out / 'ckpt' / 'step_00000009'):
        new = tmp_path / f'from {source.name}'
        assert run(new, data, '--init_from', source, '--steps', 1, '--sample_tokens', 0)[0] == 0
        steps, evals = metrics(new)
        assert steps[0]['step'] == 1 and steps[0]['tokens'] == 256
        if source == out:
            assert evals[0]['val_loss'] == metrics(out)[1][-1]['val_loss']
        assert stored(new, 1)['adam_t'] == 1
    code, _, stderr = run(tmp_path / 'new', data, '--init_from', tmp_path / 'nothing')
    assert code == 2 and '--init_from' in stderr and not stderr.count('\n') > 1
    code, _, stderr = run(tmp_path / 'new', data, '--init_from', out, '--width', 128)
    assert code == 2 and '--width 64, not 128: leave these options out' in stderr
    begun = tmp_path / 'from step_00000009'
    for source, message in ((out, f'which began from {out}/ckpt/step_00000009'), (begun, f'--init_from {begun}: ')):
        code, _, stderr = run(begun, data, '--init_from', source, '--steps', 2)  # another than it began from
        assert code == 2 and message in stderr and stderr.count('\n') == 1


def test_an_out_that_is_no_run(whole, data, tmp_path):
    out, _ = whole
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'config.json').write_text('{"model_type": "llama"}')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'ckpt').symlink_to(tmp_path / 'unmounted')
    for folder, message in ((out / 'ckpt', 'is a checkpoint, or a folder of them'),
                            (out / 'ckpt' / 'step_00000009', 'is a checkpoint, or a folder of them'),
                            (tmp_path / 'model', "is a model folder of HuggingFace's"),
                            (tmp_path / 'run', 'is no folder, or a link to a disk that is not there')):
        before = sorted(folder.rglob('*'))
        code, _, stderr = run(folder, data)
        assert code == 2 and message in stderr and stderr.count('\n') == 1 and sorted(folder.rglob('*')) == before
    code, _, stderr = run(tmp_path / 'new', data, '--export', '')
    assert code == 2 and '--export needs a folder' in stderr


def test_a_record_without_a_checkpoint_is_kept(data, tmp_path):
    """Somebody moved ckpt/ away: the run begins anew, and says so."""
    (tmp_path / 'metrics.jsonl').write_text('{"step": 7, "loss": 1.0}\n')
    code, stdout, _ = run(tmp_path, data, '--steps', 1, '--sample_tokens', 0)
    assert code == 0 and 'there is a record, but nothing to go on from' in stdout and len(metrics(tmp_path)[0]) == 1
    assert (tmp_path / 'metrics.jsonl.old').read_text() == '{"step": 7, "loss": 1.0}\n'


def test_a_run_in_an_object_store(whole, data, tmp_path, monkeypatch):
    """fsspec's memory:// stands for gs://. A run that is stopped there goes on on another machine, bit for bit, with
    its record and samples; its weights are exported and start a new run from there too."""
    import fsspec
    out, fs = f'memory://{tmp_path.name}/run', fsspec.filesystem('memory')
    for n, options in enumerate((['--stop_at', 4], [])):
        (tmp_path / f'machine {n}').mkdir()
        monkeypatch.chdir(tmp_path / f'machine {n}')
        code, stdout, stderr = run(out, data, '--strict', *options)
        assert code == 0 and (not n or f'goes on from {out}/ckpt/step_00000004' in stdout), stderr
    copy = tmp_path / 'copy'
    fs.get(f'/{tmp_path.name}/run', str(copy), recursive=True)
    same_run(copy, whole[0], exact=True)
    assert {p.name for p in (copy / 'samples').iterdir()} == {p.name for p in (whole[0] / 'samples').iterdir()}
    assert (copy / 'log.txt').read_text().count('parameters on a mesh') == 2
    assert 'is complete' in run(out, data)[1]
    assert run('new', data, '--init_from', out, '--steps', 1, '--sample_tokens', 0)[0] == 0
    assert metrics(Path('new'))[1][0]['val_loss'] == metrics(copy)[1][-1]['val_loss']
    code, stdout, stderr = run(out, data, '--export', 'exported')
    assert code == 0 and {'config.json', 'model.safetensors', 'tokenizer.model'} <= set(os.listdir('exported')), stderr


@pytest.mark.parametrize('out, message', [('gs://bucket/run', 'pip install gcsfs=='), ('gx://a/b', 'Protocol not known')])
def test_addresses_that_cannot_be_used(out, message, data):
    try:
        import gcsfs  # noqa: F401
        pytest.skip('gcsfs is installed')
    except ImportError:
        code, _, stderr = run(out, data)
        assert code == 2 and stderr.startswith('error: ') and message in stderr and stderr.count('\n') == 1, stderr


def test_one_run_at_a_time(whole, data, tmp_path, monkeypatch):
    """A second process in the folder is refused; so is one that began while another was saving the last time."""
    from nano import UserError, checkpoint, resume
    folder = resume.Folder(str(tmp_path / 'run'))
    with folder.held(True, None):
        (tmp_path / 'run' / 'here').touch()
        code, _, stderr = run(tmp_path / 'run', data)
        assert code == 2 and 'another run is writing there' in stderr and stderr.count('\n') == 1
    found = iter([None, None, 'step_00000002'])
    monkeypatch.setattr(checkpoint, 'newest', lambda *_, **__: next(found))
    code, _, stderr = run(tmp_path / 'run', data)
    assert code == 2 and 'another run has just saved there' in stderr and os.listdir(tmp_path / 'run') == ['here']
    for out in ('', '/', 'gs://'):
        with pytest.raises(UserError, match='names no folder'):
            resume.Folder(out)


def test_a_run_stops_when_nothing_is_finite_any_more(data, tmp_path):
    """A learning rate of 1e30 makes weights that are finite and whose gradient is not."""
    code, stdout, stderr = run(tmp_path, data, '--lr', 1e30, '--warmup', 0, '--max_bad', 3, '--save_every', 1,
                               '--eval_every', 0)
    assert code == 2 and stderr.startswith('error: step 4: 3 steps in a row') and stderr.count('\n') == 1
    assert stdout.count('this update was left out') == 3
    steps, _ = metrics(tmp_path)
    assert [x['skipped'] for x in steps] == [False, True, True, True] and steps[1]['grad_norm'] is None
    good, last = stored(tmp_path, 1), stored(tmp_path, 4)
    assert all(torch.equal(good[n], last[n]) and last[n].isfinite().all() for n in good)


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path):
    """The first gradient is finite, and what the weight decay makes of the weights is not."""
    code, stdout, stderr = run(tmp_path, data, '--weight_decay', 1e30, '--lr', 1e10, '--warmup', 0, '--max_bad', 3,
                               '--save_every', 0, '--eval_every', 0)
    assert code == 2 and 'nothing is saved' in stderr and stderr.count('\n') == 1, stderr
    assert not list((tmp_path / 'ckpt').glob('step_*'))


def test_a_graph_that_changes_is_reported(data, tmp_path, monkeypatch, whole):
    call = trace.Once.__call__

    def changing(self, *args):
        out = call(self, *args)
        if not self.changes:
            return out  # of an evaluation
        changing.calls += 1
        return out + torch.zeros(changing.n, device=out.device).sum() if changing.calls > 4 else out

    monkeypatch.setattr(trace.Once, '__call__', changing)
    options = '--steps', 6, '--eval_every', 0, '--save_every', 0
    changing.calls, changing.n = 0, 1
    code, stdout, stderr = run(tmp_path / 'a', data, *options)
    assert code == 0 and not stderr
    assert [line.split(' compile')[0] for line in stdout.splitlines() if 'warning' in line] == [
        'warning: step 5, training step: 1']
    changing.calls, changing.n = 0, 2
    code, stdout, stderr = run(tmp_path / 'b', data, *options, '--strict')
    assert code == 2 and stderr.startswith('error: step 5, training step: 1 compile') and '--strict' in stderr


@pytest.mark.slow
def test_loss_falls_on_text(corpus, tmp_path):
    code, _, stderr = run(tmp_path, corpus, '--steps', 150, '--eval_every', 0, '--save_every', 0, '--log_every', 10)
    assert code == 0, stderr
    steps, evals = metrics(tmp_path)
    assert steps[0]['loss'] > 5.8 and steps[-1]['loss'] < 4.1 and evals[-1]['val_loss'] < 4.1, (steps, evals)


BAD = {  # options: what the one line must name
    '--layers 0': '--layers 0: must be between 1 and',
    '--steps 0': '--steps',
    '--seq_len 2**62': '--seq_len',
    '--steps -5': '--steps',
    '--steps many': "--steps 'many': expected a whole number",
    '--global_batch 12': '--global_batch 12: must be a multiple of 8 .* such as 16',
    '--global_batch 20 --accumulate 2': '--global_batch 20: must be a multiple of 16 .* such as 32',
    '--global_batch 16 --accumulate 3': '--accumulate 3',
    '--accumulate 0': '--accumulate',
    '--mesh 3,1,1': '--mesh 3,1,1 does not fill the 8 devices',
    '--mesh 8': '--mesh 8: expected 3 sizes',
    '--mesh 2,-1,-1': '--mesh',
    '--heads 4 --kv_heads 3': '--heads 4 --kv_heads 3',
    '--head_size 15': '--head_size 15: must be even',
    '--lr 0': '--lr',
    '--lr -1e-3': '--lr',
    '--lr nan': '--lr',
    '--lr 1e-3x': '--lr',
    '--dropout 1': '--dropout',
    '--beta2 1': '--beta2',
    '--final_lr 2': '--final_lr',
    '--decay -0.1': '--decay',
    '--warmup -1': '--warmup',
    '--temperature -1': '--temperature',
    '--schedule linear': '--schedule linear',
    '--dtype float16': '--dtype float16',
    '--device gpu': '--device gpu',
    '--eval_every -1': '--eval_every',
    '--keep 0': '--keep',
    '--preset 125m': '124m',
    '--learning_rate 1': 'learning_rate',
    '--warm_up 3': 'did you mean --warmup',
    '--strict maybe': "'maybe' is no option",
    'train': "'train' is no option",
    '--out /dev/null/x': '/dev/null/x',
    '--data nowhere': 'nowhere: no such folder',
    '--seq_len': '--seq_len needs a value',
    '--prompt \udcff': '--prompt',
}


@pytest.mark.parametrize('options', BAD, ids=ascii)
def test_bad_options_are_one_line(options, data, tmp_path):
    compiled = runtime.n_compiles()
    code, _, stderr = run(tmp_path / 'run', data, *options.split())
    assert code == 2 and stderr.startswith('error: ') and stderr.count('\n') == 1 and len(stderr) < 400, stderr
    assert re.search(BAD[options], stderr), stderr
    assert runtime.n_compiles() == compiled and not (tmp_path / 'run' / 'metrics.jsonl').exists()


def broken(data, tmp_path, change):
    folder = tmp_path / 'data'
    shutil.copytree(data, folder)
    (folder / '.verified.json').unlink(missing_ok=True)
    change(folder)
    return folder


def flip(folder):
    path = folder / 'train_000001.bin'
    text = bytearray(path.read_bytes())
    text[1500] ^= 1
    path.write_bytes(text)


def smaller_vocabulary(folder):
    manifest = shards.load_manifest(str(folder))
    shards.write_manifest(str(folder), dict(manifest, vocab_size=20))


@pytest.mark.parametrize('change, message', [
    (flip, 'train_000001.bin: sha256 is'),
    (lambda folder: os.truncate(folder / 'train_000002.bin', 1501), 'train_000002.bin: truncated'),
    (lambda folder: os.remove(folder / 'val_000000.bin'), 'val_000000.bin: cannot be read'),
    (lambda folder: os.remove(folder / 'manifest.json'), 'has no manifest.json'),
    (lambda folder: (folder / 'manifest.json').write_text('{"format": 1'), 'is not readable JSON'),
    (lambda folder: os.remove(folder / 'tokenizer.model'), 'tokenizer.model: named by the manifest, cannot be read'),
    (smaller_vocabulary, 'outside the vocabulary of 20'),
])
def test_bad_data_are_one_line(change, message, data, tmp_path):
    code, _, stderr = run(tmp_path / 'run', broken(data, tmp_path, change))
    assert code == 2 and stderr.startswith('error: ') and stderr.count('\n') == 1 and message in stderr, stderr


def test_data_without_validation_or_tokenizer_train(data, tmp_path):
    def change(folder):
        manifest = shards.load_manifest(str(folder))
        rest = [s for s in manifest['shards'] if s['split'] == 'train']
        shards.write_manifest(str(folder), dict(manifest, shards=rest, tokenizer=None, separator=None))
    code, stdout, stderr = run(tmp_path / 'run', broken(data, tmp_path, change), '--steps', 2)
    assert code == 0 and 'no validation tokens' in stdout, stderr
    assert metrics(tmp_path / 'run')[1] == []


def test_refusals_before_devices_are_asked_for(data, tmp_path, monkeypatch):
    for name in ('XLA_USE_BF16', 'XLA_DOWNCAST_BF16'):
        with monkeypatch.context() as m:
            m.setenv(name, '1')
            code, _, stderr = run(tmp_path, data)
            assert code == 2 and f'error: {name} is set' in stderr
    if not runtime.tpu_chips():
        code, _, stderr = run(tmp_path, data, '--device', 'tpu', '--seq_len', 128)
        assert code == 2 and 'no TPU on this machine' in stderr and '--device cpu' in stderr
    assert not (tmp_path / 'metrics.jsonl').exists()


def test_another_model_or_tokenizer_does_not_go_on(whole, data, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    for options, message in ((('--heads', 2, '--head_size', 32), '--heads 4, not 2'),
                             (('--norm_eps', 1e-3), '--norm_eps')):
        code, _, stderr = run(tmp_path / 'run', data, '--steps', 20, *options)
        assert code == 2 and message in stderr and stderr.count('\n') == 1

    def change(folder):
        manifest = shards.load_manifest(str(folder))
        with open(folder / 'tokenizer.model', 'ab') as f:
            f.write(b'\x00')
        tokenizer = dict(file='tokenizer.model', sha256=shards.file_sha256(folder / 'tokenizer.model'))
        shards.write_manifest(str(folder), dict(manifest, tokenizer=tokenizer))
    code, _, stderr = run(tmp_path / 'run', broken(data, tmp_path, change), '--steps', 20)
    assert code == 2 and 'another tokenizer' in stderr


def test_the_process_ends_as_main_says(tmp_path):
    """One line, no traceback, exit code 2; and 0 for --help."""
    for options, code, message in ((['--layers', '0'], 2, 'error: --layers 0'), (['--help'], 0, '--z_loss float')):
        done = subprocess.run([sys.executable, ROOT / 'train_gpt.py', *options], cwd=tmp_path, capture_output=True,
                              text=True)
        assert done.returncode == code and message in done.stdout + done.stderr
        assert not done.stderr or done.stderr.count('\n') == 1
