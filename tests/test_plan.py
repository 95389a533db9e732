"""--plan, against bytes counted by hand, against libtpu's own report and against what the theory says of collectives.

One small step is compiled for a TPU here; the others are slow, and run at night."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train_gpt
from nano import chips
from nano.plan import aot, report

ROOT = Path(__file__).resolve().parent.parent
# A model whose parts are told apart by their sizes: 2 layers, width 256, 4 heads of 128 on 2, MLP 512, 512 tokens.
SMALL = dict(layers=2, width=256, heads=4, kv_heads=2, head_size=128, mlp_width=512, vocab_size=512, seq_len=256,
             global_batch=16)
WORDS = [word for name, value in SMALL.items() for word in (f'--{name}', str(value))]
# The same by hand: weights by how they lie: [matrices along fsdp and tensor, norms in full].
MATRICES = 512 * 256 + 2 * (256 * 512 + 2 * 256 * 256 + 512 * 256 + 3 * 256 * 512)
NORMS = 2 * 2 * 256 + 256


@pytest.fixture(scope='session')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('cache')


def run_plan(cache, tmp_path, *words, script=ROOT / 'train_gpt.py', fails=False):
    """The plan's JSON and what it printed; of one that `fails` its one line on stderr."""
    env = {k: v for k, v in os.environ.items() if k not in ('PJRT_DEVICE', 'CPU_NUM_DEVICES', 'XLA_FLAGS')}
    done = subprocess.run([sys.executable, str(script), *words, '--plan_json', 'plan.json'], cwd=tmp_path,
                          env=env | dict(XDG_CACHE_HOME=str(cache), PYTHONPATH=str(ROOT)), capture_output=True,
                          text=True)
    if fails:
        assert done.returncode == 2 and not Path(tmp_path, 'plan.json').exists(), done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
        assert len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
        return lines[0]
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(Path(tmp_path, 'plan.json').read_text()), done.stdout


TRACE = f'''
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
from nano import runtime
from nano.plan import aot
aot.start(16)
import torch_xla.runtime
cfg = train_gpt.Config(device='tpu', **{SMALL!r})
for sizes in json.loads(sys.argv[1]):
    n = sizes[0] * sizes[1] * sizes[2]
    torch_xla.runtime.global_runtime_device_count = lambda: n
    mesh = runtime.make_mesh(','.join(map(str, sizes)), n)
    traced = aot.trace(lambda device: train_gpt.step_to_plan(cfg, mesh, device), n)
    print(json.dumps([sum(v.values()) for v in traced.local_bytes.values()] + [traced.n_weights]), flush=True)
'''


def test_bytes_of_a_chip_are_those_counted_by_hand(tmp_path):
    """On 4, 8 and 16 chips: matrices are cut in fsdp x tensor parts, norms in none, nothing by data."""
    meshes = [(1, 4, 1), (4, 1, 1), (2, 1, 2), (1, 8, 1), (2, 2, 2), (1, 16, 1), (4, 2, 2), (1, 8, 2)]
    script = tmp_path / 'trace.py'
    script.write_text(TRACE)
    done = subprocess.run([sys.executable, script, json.dumps(meshes)], capture_output=True, text=True,
                          env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'})
    assert done.returncode == 0, done.stderr
    for (data, fsdp, tensor), line in zip(meshes, done.stdout.splitlines()[-len(meshes):], strict=True):
        weights, state, batch, n_weights = json.loads(line)
        local = MATRICES // (fsdp * tensor) + NORMS
        assert (n_weights, weights, state) == (MATRICES + NORMS, 4 * local, 8 * local + 4), (data, fsdp, tensor)
        assert batch == 2 * 4 * SMALL['global_batch'] * SMALL['seq_len'] // (data * fsdp) + 4  # ids, targets, lr


def near(found, expected, share):
    return abs(found - expected) <= share * expected


def check_memory(p):
    """The parts make up libtpu's own total, and the inputs are the weights, the optimizer and the batch."""
    m = p['memory']
    assert p['fits'] and m['total'] < m['limit']
    assert near(m['total'], m['reserved'] + m['program'] + m['arguments'], 0.01)
    assert near(m['arguments'], m['weights'] + m['optimizer'] + m['batch'], 0.01)
    assert sum(b['bytes'] * b['count'] for b in p['largest_buffers'] if b['what'].startswith('temporary')) <= m['program']
    assert near(sum(m[part] for part in ('weights', 'optimizer', 'batch', 'program', 'reserved')), m['total'], 0.01)


def sent(p, op, axis):
    return sum(c['bytes'] for c in p['collectives'] if (c['op'], c['axis']) == (op, axis))


@pytest.fixture(scope='session')
def fsdp(cache, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp('fsdp')
    before = sorted(ROOT.rglob('*'))
    p, out = run_plan(cache, tmp_path, *WORDS, '--plan', 'v5e-4', '--remat', 'attn')
    assert [f for f in sorted(ROOT.rglob('*')) if '__pycache__' not in f.parts] == \
        [f for f in before if '__pycache__' not in f.parts], 'a plan left something behind'
    assert sorted(os.listdir(tmp_path)) == ['plan.json']
    return p, out


def test_a_small_step_compiled_for_a_tpu(fsdp):
    p, out = fsdp
    check_memory(p)
    assert p['memory']['weights'] == 4 * (MATRICES // 4 + NORMS)
    # FSDP: each weight is gathered in bfloat16 for the forward and again for the backward pass (the compiler may gather
    # some twice there: for what is computed again, and for the gradients), and its gradient is reduced.
    one = 3 / 4 * 2 * MATRICES
    assert 1.9 < sent(p, 'all-gather', 'fsdp') / one < 3.1
    assert 0.9 < (sent(p, 'all-reduce', 'fsdp') + sent(p, 'reduce-scatter', 'fsdp')) / one < 2.5
    assert {c['axis'] for c in p['collectives']} == {'fsdp'}
    # What the model does by its own count, and once more what is computed again: at least the gate and the up matmul.
    tokens = SMALL['global_batch'] * SMALL['seq_len']
    assert p['model_flops'] == tokens * (6 * (MATRICES + NORMS) + 6 * 2 * 4 * 128 * 256)
    assert p['program_flops'] > 6 * MATRICES * tokens
    assert 0 < p['device_s_overlapped'] <= p['step_s'] and p['device_s_compiler'] > 0
    assert math.isclose(sum(p['seconds_by_kind'].values()), p['step_s'])
    assert math.isclose(sum(p['seconds_by_limit'].values()), p['step_s']) and 'limited by' in out
    assert not p['uncosted_kernels'] and p['seconds_by_kind']['attention'] > 0
    assert math.isclose(p['mfu'], p['model_flops'] / p['step_s'] / (4 * 197e12))
    assert 'PREDICTED for v5e-4' in out and 'fits' in out and 'optimizer: adam_' in out


def test_a_plan_comes_from_the_cache_the_second_time(fsdp, cache, tmp_path):
    p, out = run_plan(cache, tmp_path, *WORDS, '--plan', 'v5e-4', '--remat', 'attn', '--price', '2', '--tokens', '1e9')
    assert p['cached'] and not fsdp[0]['cached'] and p['collectives'] == fsdp[0]['collectives']
    hours = 1e9 / p['units_per_s'] / 3600
    assert math.isclose(p['budget']['hours'], hours) and math.isclose(p['budget']['usd'], 2 * 4 * hours)


@pytest.mark.parametrize('words,says', [
    (['--plan', 'v5e-17'], 'v5e-16'), (['--plan', 'v5e-16', '--mesh', '3,-1,1'], '--mesh 3,-1,1'),
    (['--plan', 'v5e-4', '--price', '-1'], '--price'), (['--search'], 'goes with --plan')])
def test_what_cannot_be_planned_is_one_line(tmp_path, monkeypatch, capsys, words, says):
    """Refused before torch_xla is started, so this process will do."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='2'):
        train_gpt.main([*WORDS, *words, '--plan_json', 'plan.json'])
    error = capsys.readouterr().err
    assert error.startswith('error: ') and error.count('\n') == 1 and says in error and not os.listdir(tmp_path)


def test_a_step_that_cannot_be_planned_is_one_line(cache, tmp_path):
    """A batch that the mesh does not divide: tests/test_readme.py."""
    assert '--kv_heads 2' in run_plan(cache, tmp_path, *WORDS, '--plan', 'v5e-16', '--mesh', '1,4,4', fails=True)


def test_parts_of_a_tensor():
    assert aot.local_shape((6, 10), '') == aot.local_shape((6, 10), '{replicated}') == (6, 10)
    assert aot.local_shape((6, 10), '{devices=[1,4]0,1,2,3}') == (6, 3)
    assert aot.local_shape((6, 10), '{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}') == (3, 10)


def test_axes_of_groups():
    """The devices of a mesh 2,4,2 are numbered data first."""
    mesh = (2, 4, 2)
    ids = [[[4 * 2 * d + 2 * f + t for t in range(2)] for f in range(4)] for d in range(2)]
    assert report.axes_of((ids[0][1][0], ids[0][1][1]), mesh) == 'tensor'
    assert report.axes_of(tuple(ids[1][f][1] for f in range(4)), mesh) == 'fsdp'
    assert report.axes_of((ids[0][2][1], ids[1][2][1]), mesh) == 'data'
    assert report.axes_of(tuple(ids[d][f][0] for d in range(2) for f in range(4)), mesh) == 'data,fsdp'


# ---- At night ----

@pytest.mark.slow
def test_data_parallel_reduces_gradients_once_and_gathers_no_weights(cache, tmp_path):
    p, _ = run_plan(cache, tmp_path, *WORDS, '--plan', 'v5e-4', '--mesh', '4,1,1', '--remat', 'attn')
    check_memory(p)
    assert p['memory']['weights'] == 4 * (MATRICES + NORMS)
    assert {c['axis'] for c in p['collectives']} == {'data'}
    ids = 8 * SMALL['global_batch'] * SMALL['seq_len']  # twice, for the embedding and its gradient
    assert sent(p, 'all-gather', 'data') <= 2 * 3 / 4 * ids
    reduced = sent(p, 'all-reduce', 'data') / (2 * 3 / 4 * (MATRICES + NORMS))  # bytes for each gradient
    assert 1.9 < reduced < 4.2, 'in bfloat16 or in float32'


@pytest.mark.slow
def test_tensor_parallel_sums_activations_twice_a_layer_and_pass(cache, tmp_path):
    p, _ = run_plan(cache, tmp_path, *WORDS, '--plan', 'v5e-4', '--mesh', '1,1,4', '--remat', 'attn', '--kv_heads', '4')
    check_memory(p)
    # Forward: after attention's and the MLP's second matmul; backward: before their first ones. In bfloat16. And again
    # what the backward pass computes anew.
    one = 2 * 3 / 4 * SMALL['global_batch'] * SMALL['seq_len'] * SMALL['width'] * 2
    assert 3.5 * 2 * one < sent(p, 'all-reduce', 'tensor') < 8 * 2 * one
    assert {c['axis'] for c in p['collectives']} == {'tensor'}


@pytest.mark.slow
@pytest.mark.parametrize('slice_,words', [
    ('v4-8', []), ('v5p-16', ['--mesh', '2,-1,2']), ('v6e-16', []), ('v5e-1', []), ('v5e-8', []),
    ('2xv5e-4', ['--mesh', '2,-1,1'])])
def test_every_kind_of_slice(cache, tmp_path, slice_, words):
    p, _ = run_plan(cache, tmp_path, *WORDS, '--plan', slice_, *words)
    check_memory(p)
    assert p['chips'] == chips.find_slice(slice_).n_chips
    if p['slices'] > 1:
        assert sent(p, 'all-reduce', 'data') > 0.9 * 2 * 1 / 2 * 2 * MATRICES / 4


@pytest.mark.slow
def test_a_model_that_is_too_large_is_an_answer(cache, tmp_path):
    """A chip of v5e has 15.75 GiB; weights and optimizer take 12 bytes a parameter, gradients and copies come on top."""
    short = {}
    for mlp_width in (2**17, 2**17 + 2**15):
        words = ['--layers', '2', '--width', '8192', '--mlp_width', str(mlp_width), '--global_batch', '4',
                 '--vocab_size', '512', '--seq_len', '256', '--heads', '4', '--kv_heads', '2', '--head_size', '128',
                 '--remat', 'block', '--search_minutes', '0']
        p, out = run_plan(cache, tmp_path, *words, '--plan', 'v5e-4')
        assert not p['fits'] and 'DOES NOT FIT' in out
        short[mlp_width] = p['memory']['total'] - p['memory']['limit']
        inputs = p['memory']['weights'] + p['memory']['optimizer']
        assert inputs == pytest.approx(12 * (3 * 2 * 8192 * mlp_width) / 4, rel=0.01)
        assert p['memory']['total'] > inputs
        assert 'mlp' in p['largest_buffers'][0]['what'] or 'w_' in p['largest_buffers'][0]['what']
    more = 12 * 3 * 2 * 8192 * 2**15 / 4
    assert short[2**17 + 2**15] - short[2**17] > 0.9 * more


FORK = '''
from dataclasses import dataclass
import torch
from nano import config, plan

@dataclass
class Config:
    device: str = 'cpu'  # tpu or cpu
    mesh: str = '1,-1,1'  # data,fsdp,tensor
    width: int = 1024  # of both layers

def step(cfg, mesh, device):
    import torch_xla.distributed.spmd as xs
    w = {n: torch.nn.Parameter(torch.empty(cfg.width, cfg.width, device=device)) for n in 'ab'}
    x = torch.zeros(256, cfg.width, device=device)
    for t in w.values():
        xs.mark_sharding(t, mesh, (None, 'fsdp'))
    xs.mark_sharding(x, mesh, ('fsdp', None))
    def run():
        loss = (torch.relu(x @ w['a']) @ w['b']).square().mean()
        loss.backward()
        with torch.no_grad():
            for t in w.values():
                t -= 0.1 * t.grad
                t.grad = None
        return loss
    return plan.Step(w, {}, dict(x=x), run, 'rows', 256, 1000, 6 * 2 * cfg.width ** 2 * 256, '6 P')

cfg, planning = config.parse(Config, {}, beside=plan.Options)
plan.run(planning, cfg, step, {})
'''


def test_an_array_larger_than_the_memory_is_an_answer(tmp_path):
    """The compiler then writes no report, only this."""
    log = '''... rematerialization hbm reduction: 70.81G => 54.82G
RESOURCE_EXHAUSTED: Allocation (size=34359738368) would exceed memory (size=17179869184) :: #allocation369 [shape = 'f32[2048,512,8192]{2,1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff]'''
    found = aot._read(log, tmp_path, chips.find_slice('v5e-1'), 1.)
    assert not found.fits and found.total == found.program == round(54.82 * 2**30) > found.limit
    assert found.largest == [(2**35, 'f32[2048,512,8192]{2,1,0:T(8,128)}', '')]


@pytest.mark.slow
def test_a_fork_with_its_own_model(cache, tmp_path):
    script = tmp_path / 'fork.py'
    script.write_text(FORK)
    p, out = run_plan(cache, tmp_path, '--plan', 'v6e-4', script=script)
    check_memory(p)
    assert p['memory']['weights'] == 2 * 4 * 1024 * 1024 / 4 and p['memory']['optimizer'] == 0
    assert p['program_flops'] == 5 * 2 * 1024 ** 2 * 256  # forward two matmuls, backward three: x wants no gradient
    assert 'rows per second' in out
