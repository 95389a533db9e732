"""train_gpt.py's parts on 8 virtual devices and on one, against a plain PyTorch decoder written here."""
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from nano import UserError, runtime, shards
from nano.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 350  # of 384 rows: the table is padded to full tiles
SMALL = train_gpt.Config(device='cpu', layers=3, width=64, heads=8, kv_heads=4, head_size=8, mlp_width=96, seq_len=32,
                         global_batch=16, adam_eps=1e-4, clip=0.5, weight_decay=0.3)
# name: options, mesh (data, fsdp, tensor) of 8 devices. Together: every axis and every option.
CASES = {
    'fsdp': (dict(), '1,8,1'),
    'all axes and options': (dict(qk_norm=True, tied=False, z_loss=0.01, accumulate=2), '2,2,2'),
    'tensor': (dict(heads=4, head_size=16, kv_heads=2, rope_theta=500.), '1,1,8'),
    'data, unrolled': (dict(scan=False, layers=2, tied=False, beta1=0.8, beta2=0.99), '8,1,1'),
}
ON_ONE = {
    'scanned': dict(accumulate=4, qk_norm=True),
    'unrolled': dict(scan=False, layers=2, tied=False, z_loss=0.01),
}
LRS = 3e-3, 1e-2, 0.0, 4e-3


# A plain decoder: one sequence of nn.Linear-like products for each layer, in float64

def plain_logits(cfg, weights, ids_BT):
    """Llama's logits [B, T, V], from the stacked weights."""
    B, T = ids_BT.shape
    H, K, C = cfg.heads, cfg.kv_heads, cfg.head_size

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * w

    turn = [[t * cfg.rope_theta ** (-2 * i / C) for i in range(C // 2)] for t in range(T)]
    turn = torch.polar(torch.ones(T, C // 2, dtype=torch.float64), torch.tensor(turn, dtype=torch.float64))

    def rotate(x):  # dimension i and i + C / 2 are the real and the imaginary part
        z = torch.complex(x[..., :C // 2], x[..., C // 2:]) * turn[:, None]
        return torch.cat((z.real, z.imag), -1)

    x = weights['embed_VD'][ids_BT.long()]
    for n in range(cfg.layers):
        w = {name.rsplit('_', 1)[0]: v[n] for name, v in weights.items() if '_L' in name}
        h = norm(x, w['attn_norm'])
        q, k, v = ((h @ w[name]).view(B, T, -1, C) for name in ('wq', 'wk', 'wv'))
        if cfg.qk_norm:
            q, k = norm(q, w['q_norm']), norm(k, w['k_norm'])
        q, k = rotate(q), rotate(k)
        k, v = k.repeat_interleave(H // K, 2), v.repeat_interleave(H // K, 2)
        score = torch.einsum('bthc,bshc->bhts', q, k) / math.sqrt(C)
        score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + torch.einsum('bhts,bshc->bthc', score.softmax(-1), v).reshape(B, T, H * C) @ w['wo']
        h = norm(x, w['mlp_norm'])
        x = x + (F.silu(h @ w['w_gate']) * (h @ w['w_up'])) @ w['w_down']
    return norm(x, weights['final_norm_D']) @ weights['embed_VD' if cfg.tied else 'head_VD'].T


def plain_steps(cfg, weights, batches, lrs):
    """Full-batch training with torch.optim.AdamW: [(loss, norm of the gradient, clipped gradients)], weights after."""
    params = {n: w.double().requires_grad_() for n, w in weights.items()}
    groups = [dict(params=[p for n, p in params.items() if ('norm' in n) == norms], weight_decay=decay)
              for norms, decay in ((False, cfg.weight_decay), (True, 0.0))]
    optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    out = []
    for (ids, targets), lr in zip(batches, lrs):
        optimizer.zero_grad()
        logits = plain_logits(cfg, params, ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=-1)
        z_loss = logits.logsumexp(-1)[targets != -1].square().mean()
        (loss + cfg.z_loss * z_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), cfg.clip)
        out.append((loss.item(), norm.item(), {n: p.grad.clone() for n, p in params.items()}))
        for group in optimizer.param_groups:
            group['lr'] = lr
        optimizer.step()
    return out, {n: p.detach() for n, p in params.items()}


# What is compared with it

def make_weights(cfg, seed):
    """Weights far from their first values, so that attention is not flat and each norm matters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.15 + ('norm' in name)
            for name, shape in train_gpt.weight_shapes(cfg, VOCAB).items()}


def make_batches(cfg, seed, n=len(LRS)):
    """Random ids; some targets are ignored, and of every second row all but one in the whole batch."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        ids = rng.integers(VOCAB, size=(cfg.global_batch, cfg.seq_len + 1)).astype(np.int32)
        ids, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        targets[rng.random(targets.shape) < 0.2] = -1
        targets[0::2] = -1
        targets[2, 5] = 7
        yield torch.from_numpy(ids), torch.from_numpy(targets)


def on_device(cfg, mesh, weights=None):
    """Model, optimizer state, and a function that sends batches, as in a run."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    device = torch_xla.device()
    model, state = train_gpt.build(cfg, VOCAB, mesh, device)
    torch_xla.sync()
    if weights:
        weights = {name: torch.nn.Parameter(w.to(device)) for name, w in weights.items()}
        for name, w in weights.items():
            xs.mark_sharding(w, mesh, train_gpt.SHARDING[name])
        model = train_gpt.GPT(cfg, weights, mesh)
        torch_xla.sync()
    rows = xs.ShardingSpec(mesh, (train_gpt.BATCH, None))

    def to_device(*arrays_BT):
        return xm.send_cpu_data_to_device([torch.as_tensor(a) for a in arrays_BT], device, rows)
    return model, state, to_device


def device_steps(cfg, mesh, weights, batches, lrs):
    """The same as plain_steps does, by train_gpt. The first gradients are read from Adam's first moment."""
    import torch_xla
    model, state, to_device = on_device(cfg, mesh, weights)
    out = []
    for batch, lr in zip(batches, lrs):
        metrics = train_gpt.train_step(cfg, model, state, *to_device(*batch), torch.tensor(lr).to(torch_xla.device()))
        torch_xla.sync()
        loss, norm, ok = metrics.cpu().tolist()
        assert ok == 1
        grads = {n: state[f'adam_m.{n}'].cpu() / (1 - cfg.beta1) for n in weights} if not out else None
        out.append((loss, norm, grads))
    return out, {n: w.detach().cpu() for n, w in model.named_parameters()}


def close(found, expected, what, tolerance=3e-5):
    """Within a share of the largest element: sums of float32 in another order."""
    assert found.shape == expected.shape, what
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f'{what}: differs by {error:.1e} of the largest'


def compare_steps(found, expected):
    for step, (mine, plain) in enumerate(zip(found[0], expected[0], strict=True)):
        assert mine[0] == pytest.approx(plain[0], rel=1e-5), f'loss of step {step}'
        assert mine[1] == pytest.approx(plain[1], rel=3e-5), f'gradient norm of step {step}'
    assert expected[0][0][2].keys() == found[0][0][2].keys()
    for name, g in expected[0][0][2].items():
        close(found[0][0][2][name], g, f'gradient of {name}')
    for name, w in expected[1].items():
        close(found[1][name], w, f'{name} after {len(found[0])} steps')


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


@pytest.fixture(scope='module')
def one_device(corpus, tmp_path_factory):
    """What `on_one_device` below finds in a process that has one device."""
    path = tmp_path_factory.mktemp('one') / 'found.pt'
    code = f'import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]; import test_gpt; ' \
           f'test_gpt.on_one_device({corpus!r}, {str(path)!r})'
    subprocess.run([sys.executable, '-c', code], env=dict(os.environ, CPU_NUM_DEVICES='1'), check=True, timeout=300)
    return torch.load(path)


def on_one_device(corpus, path):
    rt = runtime.start('cpu')
    assert rt.n_devices == 1
    mesh = runtime.make_mesh('1,-1,1', 1)
    found = {}
    for name, options in ON_ONE.items():
        cfg = replace(SMALL, **options)
        found[name] = device_steps(cfg, mesh, make_weights(cfg, 1), make_batches(cfg, 1), LRS)
    found['evaluation and text'] = evaluation_and_text(corpus, mesh)
    torch.save(found, path)


TEXT = replace(SMALL, temperature=0.9, prompt='Return the', layers=2)


def evaluation_and_text(corpus, mesh):
    """Losses over all and over 21 windows; then 100 tokens sampled and 100 greedy, which is past seq_len."""
    model, _, to_device = on_device(TEXT, mesh, make_weights(TEXT, 2))
    windows = shards.Windows(corpus, 'val', TEXT.seq_len)
    tokenizer = load_tokenizer(f'{corpus}/tokenizer.model')
    losses = [train_gpt.evaluate(replace(TEXT, eval_windows=n), model, windows, None, to_device) for n in (0, 21)]
    before = runtime.n_compiles()
    groups = mesh.mesh_shape[0] * mesh.mesh_shape[1]
    texts = [train_gpt.sample(replace(TEXT, temperature=t, prompt=prompt), model, tokenizer, VOCAB, tokenizer.separator,
                              to_device, groups, n)
             for t, prompt, n in ((0.9, TEXT.prompt, 100), (0.0, TEXT.prompt, 100), (0.9, '', 1), (0.9, TEXT.prompt, 3))]
    return losses, texts, runtime.n_compiles() - before


# Tests

def test_there_are_8_devices(devices):
    import torch_xla.runtime as xr
    assert devices.n_devices == xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 8
    assert xr.is_spmd() and (devices.process_index, devices.process_count) == (0, 1)


@pytest.mark.parametrize('case', CASES)
def test_training_on_8_devices_is_plain_pytorchs(devices, case):
    """Loss, gradient norm, every gradient, and the weights after 4 steps of AdamW."""
    options, mesh = CASES[case]
    cfg = replace(SMALL, **options)
    args = make_weights(cfg, 0), list(make_batches(cfg, 0)), LRS
    compiled = runtime.n_compiles()
    found = device_steps(cfg, runtime.make_mesh(mesh, 8), *args)
    print('compiles', runtime.n_compiles() - compiled)
    compare_steps(found, plain_steps(cfg, *args))


@pytest.mark.parametrize('case', ON_ONE)
def test_training_on_one_device_is_plain_pytorchs(one_device, case):
    cfg = replace(SMALL, **ON_ONE[case])
    expected = plain_steps(cfg, make_weights(cfg, 1), make_batches(cfg, 1), LRS)
    compare_steps(one_device[case], expected)


@pytest.fixture(scope='module')
def model_222(devices, corpus):
    mesh = runtime.make_mesh('2,2,2', 8)
    return evaluation_and_text(corpus, mesh)


def test_evaluation_is_the_plain_mean_over_the_validation_tokens(model_222, one_device, corpus):
    weights = {n: w.double() for n, w in make_weights(TEXT, 2).items()}
    tokens = read_shard(f'{corpus}/val_000000.bin')
    nats = []
    for start in range(0, len(tokens) - 1, TEXT.seq_len):  # a new context each, the last one shorter
        part = torch.tensor(tokens[start:start + TEXT.seq_len + 1])
        nats.append(F.cross_entropy(plain_logits(TEXT, weights, part[None, :-1])[0], part[1:], reduction='none'))
    chosen = [nats[i * len(nats) // 21] for i in range(21)]
    assert len(nats[-1]) < TEXT.seq_len and len(nats) % TEXT.global_batch, 'padding in both directions is not tested'
    for found in (model_222, one_device['evaluation and text']):
        assert found[0][0] == pytest.approx(torch.cat(nats).mean().item(), rel=1e-6)
        assert found[0][1] == pytest.approx(torch.cat(chosen).mean().item(), rel=1e-6)


def read_shard(path):
    with open(path, 'rb') as f:
        return np.frombuffer(f.read()[1024:], '<u2').astype(np.int64)


def test_sampled_text_is_the_plain_models(model_222, one_device, corpus):
    tokenizer = load_tokenizer(f'{corpus}/tokenizer.model')
    weights = {n: w.double() for n, w in make_weights(TEXT, 2).items()}

    def plain_text(temperature, prompt, n):
        generator = torch.Generator().manual_seed(runtime.seed_of(TEXT.seed, 'sample'))
        text = tokenizer.encode(prompt)
        context = [tokenizer.separator, *text]
        for _ in range(n):
            if len(context) == TEXT.seq_len:
                context = context[TEXT.seq_len // 2:]
            logits = plain_logits(TEXT, weights, torch.tensor([context]))[0, -1, :VOCAB].float()
            logits[tokenizer.separator] = -math.inf
            text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
                            if temperature else logits.argmax()))
            context.append(text[-1])
        return tokenizer.decode(text)

    expected = [plain_text(*args) for args in ((0.9, TEXT.prompt, 100), (0.0, TEXT.prompt, 100), (0.9, '', 1),
                                               (0.9, TEXT.prompt, 3))]
    assert expected[0].startswith(TEXT.prompt) and expected[0] != expected[1]
    for _, texts, compiles in (model_222, one_device['evaluation and text']):
        assert texts == expected
        assert compiles <= 2
