"""The attention kernel of short sequences, computed by its interpreter on CPU devices, against plain attention in float64;
and that it compiles for TPUs."""
import math
from dataclasses import replace

import pytest
import torch

import train_vit
from nano import UserError, attend, pallas, runtime, scan
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
