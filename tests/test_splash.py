"""Splash attention, computed by its interpreter on CPU devices, against plain attention in float64; and what scan keeps
of a layer. That the kernel compiles for a TPU: tests/test_plan.py."""
import math
import random
from dataclasses import replace

import pytest
import torch

import train_gpt
from nano import UserError, pallas, runtime, splash, trace

CFG = train_gpt.Config(device='cpu', layers=2, width=64, heads=4, kv_heads=2, head_size=32, mlp_width=96, seq_len=128,
                       vocab_size=300, attention='splash')


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(pallas, 'INTERPRET', True)
    splash._lower.cache_clear()
    yield
    splash._lower.cache_clear()


def plain(q_BHTC, k_BKTC, v_BKTC):
    G, T = q_BHTC.shape[1] // k_BKTC.shape[1], q_BHTC.shape[2]
    k, v = k_BKTC.repeat_interleave(G, 1), v_BKTC.repeat_interleave(G, 1)
    score = (q_BHTC @ k.mT).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return score.softmax(-1) @ v


@pytest.mark.parametrize('mesh,heads,kv_heads,T,C,dtype', [
    ('2,2,2', 4, 2, 256, 64, torch.float32), ('1,8,1', 3, 1, 128, 128, torch.float32),
    ('4,1,2', 4, 4, 256, 32, torch.bfloat16)])
def test_values_and_gradients_are_plain_attentions(devices, interpreted, monkeypatch, seed, mesh, heads, kv_heads, T, C,
                                                   dtype):
    import torch_xla
    monkeypatch.setattr(splash, 'BLOCK', 128)  # so that a short sequence has several blocks
    torch.manual_seed(seed)
    q, k, v = (torch.randn(8, n, T, C).to(dtype) for n in (heads, kv_heads, kv_heads))
    grad = torch.randn(8, heads, T, C).to(dtype)
    expected = [t.double().requires_grad_() for t in (q, k, v)]
    out = plain(*expected)
    out.backward(grad.double())
    found = [t.to(torch_xla.device()).requires_grad_() for t in (q, k, v)]
    a = splash.attention(*found, runtime.make_mesh(mesh, 8), (('data', 'fsdp'), 'tensor'))
    a.backward(grad.to(torch_xla.device()))
    torch_xla.sync()
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for name, x, y in zip('a dq dk dv'.split(), [a.detach(), *(t.grad for t in found)],
                          [out.detach(), *(t.grad for t in expected)]):
        error = (x.cpu().double() - y).norm() / y.norm()
        assert error < tolerance, f'{name}: {error}'


def loss_and_gradients(cfg, seed):
    import torch_xla
    mesh = runtime.make_mesh('2,2,2', 8)
    weights, _ = train_gpt.build(cfg, mesh, torch_xla.device())
    torch_xla.sync()
    ids = torch.randint(0, 300, (8, cfg.seq_len), generator=torch.Generator().manual_seed(seed)).to(torch_xla.device())
    nll, _ = train_gpt.loss_sums(train_gpt.GPT(cfg, mesh), weights, ids, ids.roll(-1, 1))
    nll.backward()
    torch_xla.sync()
    return {'loss': nll.detach().cpu(), **{n: w.grad.cpu() for n, w in weights.items()}}


def test_every_rematerialization_has_the_same_gradients(devices, interpreted, seed):
    expected = loss_and_gradients(replace(CFG, attention='plain'), seed)
    for remat in train_gpt.REMAT:
        found = loss_and_gradients(replace(CFG, remat=remat), seed)
        for name in expected:
            error = (found[name] - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, f'{remat}, {name}: {error}'


def kept(cfg):
    """Shapes of what the forward loop saves for the backward loop, beside the weights, which are there anyway."""
    import torch_xla
    trace._layers.clear()
    loss_and_gradients(cfg, 1)
    ((forward, _, _),) = trace._layers.values()
    return sorted(tuple(shape) for shape, _ in forward._traced.results[1:])


def test_what_each_rematerialization_keeps(devices, interpreted):
    """By hand: of 8 sequences with 128 positions, a layer's input is 8 x 128 x 64."""
    x, q, k, m = (8, 128, 64), (1024, 128), (1024, 64), (1024, 96)
    assert kept(replace(CFG, remat='block')) == [x]
    assert kept(replace(CFG, remat='attn')) == sorted([x, (8, 4, 128), (8, 4, 128, 32)])  # and logsumexp, attention
    # and what the matmuls make: q, k, v, what attention adds to the stream, gate and up; nobody needs what the MLP adds
    assert kept(replace(CFG, remat='dots')) == sorted([x, (8, 4, 128), (8, 4, 128, 32), q, k, k, (1024, 64), m, m])
    assert len(kept(replace(CFG, remat='none'))) > 20


def test_impossible_sequences_are_refused():
    for T in (100, 1100, 1536):
        with pytest.raises(UserError, match=f'seq_len {T}'):
            train_gpt.check(replace(CFG, seq_len=T))
    for T in (128, 896, 1024, 2048):
        train_gpt.check(replace(CFG, seq_len=T))


def test_random_options_are_refused_or_known():
    with pytest.raises(UserError, match='--remat'):
        train_gpt.check(replace(CFG, remat='some'))
    with pytest.raises(UserError, match='--remat'):
        train_gpt.check(replace(CFG, scan=False, remat='block'))
    with pytest.raises(UserError, match='--attention'):
        train_gpt.check(replace(CFG, attention='flash'))
