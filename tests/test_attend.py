"""The attention kernel of short sequences, computed by its interpreter on CPU devices, against plain attention in
float64; and that it compiles for TPUs."""
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_vit
from nano import UserError, attend, pallas, runtime, trace
from test_vit import SMALL, make_weights


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(pallas, 'INTERPRET', True)
    attend._lower.cache_clear()
    yield
    attend._lower.cache_clear()


def plain(q_RX, k_RX, v_RX, T, A):
    q, k, v = (t.view(-1, T, t.shape[1] // A, A).transpose(1, 2) for t in (q_RX, k_RX, v_RX))
    return ((q @ k.mT * A ** -0.5).softmax(-1) @ v).transpose(1, 2).reshape(q_RX.shape)


@pytest.mark.parametrize('mesh,B,T,N,A,dtype', [
    ('2,2,2', 16, 196, 4, 64, torch.float32),  # windows of 208 rows, of 4 images in a block
    ('1,8,1', 128, 197, 1, 32, torch.bfloat16),  # a window for each of 16 places in a tile; all lanes are 32
    ('8,1,1', 128, 49, 3, 64, torch.bfloat16),  # three heads in a block of 192 lanes
    ('4,1,2', 32, 16, 4, 128, torch.bfloat16), ('1,4,2', 64, 17, 8, 32, torch.float32),
    ('2,4,1', 8, 256, 1, 256, torch.float32)])
def test_values_and_gradients_are_plain_attentions(devices, interpreted, seed, mesh, B, T, N, A, dtype):
    import torch_xla
    torch.manual_seed(seed)
    q, k, v, grad = (torch.randn(B * T, N * A).to(dtype) for _ in range(4))
    expected = [t.double().requires_grad_() for t in (q, k, v)]
    out = plain(*expected, T, A)
    out.backward(grad.double())
    found = [t.to(torch_xla.device()).requires_grad_() for t in (q, k, v)]
    a = attend.attention(*found, T, A, runtime.make_mesh(mesh, 8), (('data', 'fsdp'), 'tensor'))
    a.backward(grad.to(torch_xla.device()))
    torch_xla.sync()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for name, x, y in zip('a dq dk dv'.split(), [a.detach(), *(t.grad for t in found)],
                          [out.detach(), *(t.grad for t in expected)]):
        error = (x.cpu().double() - y).norm() / y.norm()
        assert error < tolerance, f'{name}: {error}'


def test_every_rematerialization_has_plain_attentions_loss_and_gradients(devices, interpreted, seed):
    """Inside scan, as a training step runs it; 17 patches, one of them the class token."""
    import torch_xla
    cfg = replace(SMALL, pool='cls', layers=2, global_batch=64, attention='plain')
    mesh = runtime.make_mesh('2,2,2', 8)
    x_BCHW = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).to(torch_xla.device())

    def loss_and_gradients(cfg):
        weights = {n: torch.nn.Parameter(w.to(torch_xla.device())) for n, w in make_weights(cfg, seed).items()}
        loss = train_vit.ViT(cfg, mesh)(weights, x_BCHW, training=True).log_softmax(-1)[:, 0].mean()
        loss.backward()
        torch_xla.sync()
        return {'loss': loss.detach().cpu(), **{n: w.grad.cpu() for n, w in weights.items()}}

    expected = loss_and_gradients(cfg)
    for remat in ('none', 'dots'):
        trace._layers.clear()
        found = loss_and_gradients(replace(cfg, attention='kernel', remat=remat))
        for name in expected:
            # What a bias adds to all keys changes no softmax: its gradient is 0, and what is there is rounding.
            scale = 1e-4 if name == 'k_bias_LX' else expected[name].norm()
            error = (found[name] - expected[name]).norm() / scale
            assert error < (1 if name == 'k_bias_LX' else 1e-4), f'{remat}, {name}: {error}'
        if remat == 'dots':
            ((forward, _, _),) = trace._layers.values()
            R, D, F = 64 * 17, cfg.width, cfg.mlp_width
            # A layer's input, q, k and v, the kernel's result, what attention adds, and the MLP's hidden layer.
            assert sorted(tuple(shape) for shape, _ in forward._traced.results[1:]) == sorted([(R, D)] * 6 + [(R, F)])


def test_what_the_kernel_cannot_take_is_said(monkeypatch):
    mesh = runtime.make_mesh('1,8,1', 8)
    cfg = replace(SMALL, device='tpu', attention='kernel')
    assert attend.blocks(128, 196, 12, 64, 2) == (16, 128, 16, 208, 4)
    assert attend.blocks(128, 197, 12, 64, 2)[:2] == (16, 128)
    assert train_vit.why_plain(cfg, mesh, 64, 16) == ''
    assert train_vit.why_plain(replace(cfg, attention='plain'), mesh, 64, 16)
    assert train_vit.why_plain(replace(cfg, attention='auto', device='cpu'), mesh, 64, 16)
    for change, B, T, message in ((dict(device='cpu'), 64, 16, 'on a TPU only'),
                                  ({}, 64, 17, 'a multiple of 16 images'), (dict(width=96), 64, 16, 'heads'),
                                  ({}, 8 * 16, 1025, 'too much')):
        with pytest.raises(UserError, match=f'--attention kernel: .*{message}.*--attention plain'):
            train_vit.why_plain(replace(cfg, **change), mesh, B, T)
        assert train_vit.why_plain(replace(cfg, **{'attention': 'auto', **change}), mesh, B, T)
    with pytest.raises(UserError, match='--attention flash'):
        train_vit.check(replace(cfg, attention='flash'))


COMPILE = '''
import sys
import jax
from jax.experimental import topologies
from nano import attend, pallas

pallas.lower = lambda name, one_device, *_: one_device  # the kernel alone, without PyTorch
chip, B, T, N, A = sys.argv[1], *map(int, sys.argv[2:])
device = topologies.get_topology_desc(f'{chip}:2x2', platform='tpu').devices[0]
x = jax.ShapeDtypeStruct((B * T, N * A), 'bfloat16', sharding=jax.sharding.SingleDeviceSharding(device))
for direction, n in (('forward', 3), ('backward', 4)):
    kernel = attend._lower(direction, T, A, '', ())
    text = jax.jit(kernel).trace(*[x] * n).lower(lowering_platforms=('tpu',)).compile().as_text()
    print('kernels:', text.count(f'op_name="jit(one_device)/attend_{direction}_block_'))
'''


@pytest.mark.parametrize('chip,B,T,N,A', [
    ('v5e', 8, 196, 2, 64), pytest.param('v6e', 16, 197, 2, 64, marks=pytest.mark.slow)])
def test_it_compiles_for_tpus(chip, B, T, N, A):
    import libtpu
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'TPU_LIBRARY_PATH': libtpu.get_library_path(),
           'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_LOG_DIR': 'disabled'}
    done = subprocess.run([sys.executable, '-c', COMPILE, chip, *map(str, (B, T, N, A))], cwd=Path(train_vit.__file__).parent, env=env, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith('kernels:')]
    assert done.returncode == 0 and len(counts) == 2 and min(counts) > 0, done.stderr[-3000:]
