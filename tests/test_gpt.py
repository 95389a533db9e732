"""train_gpt.py's parts on 8 virtual devices and on one, against a plain PyTorch decoder written here."""
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from nano import UserError, runtime, shards
from nano.tokenizer import load_tokenizer
from nano.trace import Once

torch.set_num_threads(1)  # for tiny products threads only wait for one another
ROOT = Path(__file__).resolve().parent.parent
VOCAB = 350  # of 384 rows: the table is padded to full tiles
SMALL = train_gpt.Config(device='cpu', layers=3, width=64, heads=8, kv_heads=4, head_size=8, mlp_width=96, seq_len=32,
                         vocab_size=VOCAB, global_batch=16, adam_eps=1e-4, clip=0.5, weight_decay=0.3)
# name: options, mesh (data, fsdp, tensor) of 8 devices. Together: every axis and every option.
CASES = {
    'fsdp': (dict(remat='block'), '1,8,1'),
    'all axes and options': (dict(qk_norm=True, tied=False, z_loss=0.01, accumulate=2, remat='dots'), '2,2,2'),
    'tensor': (dict(heads=4, head_size=16, kv_heads=2, rope_theta=500., qkv_bias=True, rope_scaling='8,1,4,96'),
               '1,1,8'),
    'data, unrolled': (dict(scan=False, layers=2, tied=False, beta1=0.8, beta2=0.99), '8,1,1'),
}
ON_ONE = {
    'scanned': dict(accumulate=4, qk_norm=True),
    'unrolled': dict(scan=False, layers=2, tied=False, z_loss=0.01, rope_scaling='3'),
}
LRS = 3e-3, 1e-2, 0.0, 1e-4  # among them 0 and those that equal z_loss and adam_eps: torch_xla treats such apart


# A plain decoder: one sequence of nn.Linear-like products for each layer, in float64

def plain_logits(cfg, weights, ids_BT):
    """Llama's logits [B, T, V], from the stacked weights."""
    B, T = ids_BT.shape
    H, K, C = cfg.heads, cfg.kv_heads, cfg.head_size

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * w

    turn = [[t * plain_speed(cfg, i) for i in range(C // 2)] for t in range(T)]
    turn = torch.polar(torch.ones(T, C // 2, dtype=torch.float64), torch.tensor(turn, dtype=torch.float64))

    def rotate(x):  # dimension i and i + C / 2 are the real and the imaginary part
        z = torch.complex(x[..., :C // 2], x[..., C // 2:]) * turn[:, None]
        return torch.cat((z.real, z.imag), -1)

    x = weights['embed_VD'][ids_BT.long()]
    for n in range(cfg.layers):
        w = {name.rsplit('_', 1)[0]: v[n] for name, v in weights.items() if '_L' in name}
        h = norm(x, w['attn_norm'])
        q, k, v = ((h @ w[f'w{x}'] + (w[f'{x}_bias'] if cfg.qkv_bias else 0)).view(B, T, -1, C) for x in 'qkv')
        if cfg.qk_norm:
            q, k = norm(q, w['q_norm']), norm(k, w['k_norm'])
        q, k = rotate(q), rotate(k)
        k, v = k.repeat_interleave(H // K, 2), v.repeat_interleave(H // K, 2)
        score = torch.einsum('bthc,bshc->bhts', q, k) / math.sqrt(C)
        score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + torch.einsum('bhts,bshc->bthc', score.softmax(-1), v).reshape(B, T, H * C) @ w['wo']
        h = norm(x, w['mlp_norm'])
        x = x + (F.silu(h @ w['w_gate']) * (h @ w['w_up'])) @ w['w_down']
    return norm(x, weights['final_norm_D']) @ weights['embed_VD' if cfg.tied else 'head_VD'][:VOCAB].T


def plain_speed(cfg, i):
    """How fast dimension i turns; with Llama 3.1's scaling by the length of its wave."""
    speed = cfg.rope_theta ** (-2 * i / cfg.head_size)
    factor, *rest = [float(x) for x in (cfg.rope_scaling or '1').split(',')]
    if not rest:
        return speed / factor
    wave, (low, high, length) = 2 * math.pi / speed, rest
    if wave < length / high:
        return speed
    if wave > length / low:
        return speed / factor
    kept = (length / wave - low) / (high - low)
    return (1 - kept) * speed / factor + kept * speed


def plain_steps(cfg, weights, batches, lrs):
    """Full-batch training with torch.optim.AdamW: [(loss, norm of the gradient, clipped gradients)], weights after."""
    params = {n: w.double().requires_grad_() for n, w in weights.items()}
    groups = [dict(params=[p for n, p in params.items() if ('norm' in n or 'bias' in n) == norms], weight_decay=decay)
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
            for name, shape in train_gpt.weight_shapes(cfg).items()}


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
    """Model, weights, optimizer state, and a function that sends batches, as in a run."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    device = torch_xla.device()
    first, state = train_gpt.build(cfg, mesh, device)
    torch_xla.sync()
    if weights:
        weights = {name: torch.nn.Parameter(w.to(device)) for name, w in weights.items()}
        for name, w in weights.items():
            xs.mark_sharding(w, mesh, train_gpt.SHARDING[name])
        torch_xla.sync()
    rows = xs.ShardingSpec(mesh, (train_gpt.BATCH, None))

    def to_device(*arrays_BT):
        return xm.send_cpu_data_to_device([torch.as_tensor(a) for a in arrays_BT], device, rows)
    return train_gpt.GPT(cfg, mesh), weights or first, state, to_device


def device_steps(cfg, mesh, weights, batches, lrs):
    """The same as plain_steps does, by train_gpt. The first gradients are read from Adam's first moment."""
    import torch_xla
    model, weights, state, to_device = on_device(cfg, mesh, weights)
    update = Once(partial(train_gpt.train_step, cfg, model), changes=2)
    out = []
    compiled = runtime.n_compiles()
    for batch, lr in zip(batches, lrs):
        metrics = update(weights, state, *to_device(*batch), torch.tensor([lr]).to(torch_xla.device()))
        torch_xla.sync()
        loss, norm, ok = metrics.cpu().tolist()
        assert ok == 1
        grads = {n: whole(state[f'adam_m.{n}']) / (1 - cfg.beta1) for n in weights} if not out else None
        out.append((loss, norm, grads))
    assert runtime.n_compiles() == compiled + 1
    return out, {n: whole(w) for n, w in weights.items()}


def whole(t):
    """A device tensor on the host, put together from its shards: .cpu() would leave it replicated, to compile anew."""
    import torch_xla.distributed.spmd as xs
    sharded = xs.wrap_if_sharded(t.detach())
    if sharded is t or not isinstance(sharded, xs.XLAShardedTensor):
        return t.detach().cpu()
    out = torch.empty(t.shape)
    for part in sharded.local_shards:
        out[tuple(part.indices) if isinstance(part.indices, list) else part.indices] = part.unpadded_data
    return out


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


TEXT = replace(SMALL, layers=2)
TEXTS = (0.9, 'Return the', 100), (0.0, 'Return the', 100), (0.9, '', 1), (0.9, 'x' * 200, 3)  # temperature, prompt, n


def evaluation_and_text(corpus, mesh):
    """Losses over all and over 21 windows; then 100 tokens sampled and 100 greedy, which is past seq_len."""
    model, weights, _, to_device = on_device(TEXT, mesh, make_weights(TEXT, 2))
    measure, logits = Once(partial(train_gpt.nll_and_count, model)), Once(partial(train_gpt.next_logits, model))
    windows = shards.Windows(corpus, 'val', TEXT.seq_len)
    tokenizer = load_tokenizer(f'{corpus}/tokenizer.model')
    losses = [train_gpt.evaluate(replace(TEXT, eval_windows=n), measure, weights, windows, None, to_device)
              for n in (0, 21)]
    before = runtime.n_compiles()
    groups = mesh.mesh_shape[0] * mesh.mesh_shape[1]
    texts = [train_gpt.sample(replace(TEXT, temperature=t, prompt=prompt), logits, weights, tokenizer, VOCAB,
                              tokenizer.separator, to_device, groups, n) for t, prompt, n in TEXTS]
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
    compare_steps(device_steps(cfg, runtime.make_mesh(mesh, 8), *args), plain_steps(cfg, *args))


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
    T, n_full = TEXT.seq_len, (len(tokens) - 1) // TEXT.seq_len  # each window is a context
    parts = [tokens[:n_full * T].reshape(-1, T), tokens[1:n_full * T + 1].reshape(-1, T)], \
        [tokens[n_full * T:-1][None], tokens[n_full * T + 1:][None]]
    nats = [row for ids, targets in parts for row in F.cross_entropy(
        plain_logits(TEXT, weights, torch.tensor(ids)).transpose(1, 2), torch.tensor(targets), reduction='none')]
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
        context = [tokenizer.separator, *text][-TEXT.seq_len:]
        for _ in range(n):
            if len(context) > TEXT.seq_len:
                context = context[-(TEXT.seq_len // 2):]
            logits = plain_logits(TEXT, weights, torch.tensor([context]))[0, -1, :VOCAB].float()
            logits[tokenizer.separator] = -math.inf
            text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
                            if temperature else logits.argmax()))
            context.append(text[-1])
        return tokenizer.decode(text)

    expected = [plain_text(*args) for args in TEXTS]
    assert expected[0].startswith('Return the') and expected[0] != expected[1]
    for _, texts, compiles in (model_222, one_device['evaluation and text']):
        assert texts == expected
        assert compiles <= 2


@pytest.mark.parametrize('family', ['Llama', 'Qwen3'])
def test_logits_are_huggingfaces(devices, family):
    """The same weights in transformers' LlamaForCausalLM (tied) and Qwen3ForCausalLM (qk_norm, a head of its own)."""
    import torch_xla
    import transformers
    qwen = family == 'Qwen3'
    cfg = replace(SMALL, qk_norm=qwen, tied=not qwen, rope_theta=700.0, norm_eps=1e-3)
    weights = make_weights(cfg, 4)
    theirs = getattr(transformers, f'{family}ForCausalLM')(getattr(transformers, f'{family}Config')(
        vocab_size=384, hidden_size=cfg.width, intermediate_size=cfg.mlp_width, num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads, num_key_value_heads=cfg.kv_heads, head_dim=cfg.head_size, hidden_act='silu',
        rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tied, max_position_embeddings=cfg.seq_len,
        rope_parameters={'rope_type': 'default', 'rope_theta': cfg.rope_theta}))
    names = {'wq': 'self_attn.q_proj', 'wk': 'self_attn.k_proj', 'wv': 'self_attn.v_proj', 'wo': 'self_attn.o_proj',
             'w_gate': 'mlp.gate_proj', 'w_up': 'mlp.up_proj', 'w_down': 'mlp.down_proj', 'q_norm': 'self_attn.q_norm',
             'k_norm': 'self_attn.k_norm', 'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm'}
    moved = {'model.embed_tokens.weight': weights['embed_VD'], 'model.norm.weight': weights['final_norm_D'],
             'lm_head.weight': weights['embed_VD' if cfg.tied else 'head_VD']}
    for name, w in weights.items():
        if '_L' in name:
            for n in range(cfg.layers):
                moved[f'model.layers.{n}.{names[name.rsplit("_", 1)[0]]}.weight'] = w[n].T if w.dim() == 3 else w[n]
    theirs.load_state_dict(moved)
    ids = next(make_batches(cfg, 4))[0]
    with torch.no_grad():
        expected = theirs(ids.long()).logits
        if not qwen:  # compiling twice is not worth the 8 seconds
            model, placed, _, to_device = on_device(cfg, runtime.make_mesh('1,4,2', 8), weights)
            mine = model(placed, *to_device(ids)) @ model.head_VD(placed).t()
            torch_xla.sync()
            close(mine.cpu(), expected, 'logits')
        # The same class without a mesh is a plain model.
        mine = train_gpt.GPT(replace(cfg, scan=False))
        close(mine(weights, ids) @ mine.head_VD(weights).t(), expected, 'logits without a mesh')


def test_schedules():
    cfg = replace(SMALL, lr=2.0, steps=100, warmup=10, final_lr=0.25, decay=0.3)
    cosine, wsd = ([train_gpt.lr_at(replace(cfg, schedule=s), n) for n in range(100)] for s in ('cosine', 'wsd'))
    for lrs in (cosine, wsd):
        assert lrs[:11] == pytest.approx([2.0 * (n + 1) / 11 for n in range(11)])  # above 0 at once, then the highest
        assert min(lrs) > 0 and max(lrs) == 2.0
    half = [math.cos(math.pi * n / 90) / 2 + 0.5 for n in range(90)]
    assert cosine[10:] == pytest.approx([0.5 + 1.5 * h for h in half])
    assert wsd[10:71] == [2.0] * 61
    assert wsd[70:] == pytest.approx([2.0 - 1.5 * (n - 70) / 30 for n in range(70, 100)])
    for schedule in ('cosine', 'wsd'):
        for steps in range(1, 6):  # no division by zero, nothing negative, in the shortest runs
            for warmup in (0, 1, 5, 50):
                for decay in (0.0, 0.5, 1.0):
                    short = replace(cfg, schedule=schedule, steps=steps, warmup=warmup, decay=decay, final_lr=0.0)
                    assert all(0 < train_gpt.lr_at(short, n) <= 2.0 for n in range(steps)), short


def test_a_step_that_is_not_finite_changes_nothing(devices):
    """A weight that is infinite or NaN: the update is left out, and each weight and moment keeps its bits."""
    import torch_xla
    cfg = replace(SMALL, **CASES['fsdp'][0])
    batch = next(make_batches(cfg, 0))
    for bad in (math.inf, math.nan, 0.0):
        weights = make_weights(cfg, 0)
        weights['w_up_LDF'][1, 2, 3] = bad
        model, weights, state, to_device = on_device(cfg, runtime.make_mesh('1,8,1', 8), weights)
        before = {n: whole(t) for n, t in (weights | state).items()}
        lr = torch.tensor([0.1]).to(torch_xla.device())
        metrics = train_gpt.train_step(cfg, model, weights, state, *to_device(*batch), lr)
        torch_xla.sync()
        loss, _, ok = metrics.cpu().tolist()
        after = {n: whole(t) for n, t in (weights | state).items()}
        assert ok == math.isfinite(loss) == (bad == 0)
        same = [torch.equal(before[n].view(torch.int32), after[n].view(torch.int32)) for n in before]
        assert all(same) if bad else not any(same)


def test_dropout_masks(devices):
    """Weights are chosen so that output o of the network's 6 (2 a layer) writes a constant to 8 channels of its own;
    the constants that arrive show the masks that the scanned layers used."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    cfg = replace(SMALL, dropout=0.25)
    weights = {n: torch.zeros(w.shape) for n, w in make_weights(cfg, 0).items()}
    weights['embed_VD'][:, 63] = 1  # the last channel is never written: all others are measured against it
    for name in ('attn_norm_LD', 'mlp_norm_LD'):
        weights[name][:, 63] = 1 / 8  # so that the layers see 1 in the last channel and 0 elsewhere
    for name in ('wv_LDY', 'w_gate_LDF', 'w_up_LDF'):
        weights[name][:, 63] = 1
    weights['final_norm_D'] += 1
    small = 1e-3
    for n in range(3):
        weights['wo_LXD'][n, 0, 16 * n:16 * n + 8] = small
        weights['w_down_LFD'][n, 0, 16 * n + 8:16 * n + 16] = small / F.silu(torch.tensor(1.0))
    model, weights, _, to_device = on_device(cfg, runtime.make_mesh('2,4,1', 8), weights)
    ids = to_device(next(make_batches(cfg, 0))[0])

    @torch.no_grad()
    def masks(*seed, training=True):  # [B, T, 6, 8]
        xm.set_rng_state(runtime.seed_of(*seed))
        x_BTD = model(weights, *ids, training)
        torch_xla.sync()
        x_BTD = x_BTD.cpu()
        return (x_BTD[..., :48] / x_BTD[..., 63:] / small).unflatten(-1, (6, 8))

    one, again, other_step, other_seed = masks(1, 1), masks(1, 1), masks(1, 2), masks(2, 1)
    kept = one > 0.5
    torch.testing.assert_close(one, kept / 0.75, rtol=1e-3, atol=1e-4)
    assert abs(kept.float().mean() - 0.75) < 0.02 and abs(one.mean() - 1) < 0.02
    assert torch.equal(one, again)

    def alike(a, b):  # 0.75 ** 2 + 0.25 ** 2 if they have nothing to do with each other
        return abs(((a > 0.5) == (b > 0.5)).float().mean() - 0.625) < 0.06

    assert alike(one, other_step) and alike(one, other_seed)
    assert all(alike(one[:, :, i], one[:, :, j]) for i in range(6) for j in range(i))  # layers, and their two outputs
    assert all(alike(one[i], one[j]) for i in range(16) for j in range(i))  # rows: within a device, and across
    assert all(alike(one[:, i], one[:, i + 1]) for i in range(31))  # positions
    torch.testing.assert_close(masks(1, 1, training=False), torch.ones(16, 32, 6, 8), rtol=1e-3, atol=1e-4)


def test_dropout_with_accumulation(devices):
    """Each micro-batch has masks of its own, and a step is the same at each call with the same seed: the loss of A
    equal micro-batches is that of one, but for the masks."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    losses = {}
    for dropout in (0.0, 0.5):
        cfg = replace(SMALL, layers=2, dropout=dropout, accumulate=2, global_batch=16)
        ids, targets = next(make_batches(cfg, 0, 1))
        ids[1::2], targets[1::2] = ids[0::2], ids[0::2].roll(-1, 1)  # rows of the second micro-batch are the first's
        targets[0::2] = targets[1::2]
        model, weights, state, to_device = on_device(cfg, runtime.make_mesh('1,8,1', 8), make_weights(cfg, 0))
        update = Once(partial(train_gpt.train_step, cfg, model), changes=2)
        lr = torch.tensor([0.0]).to(torch_xla.device())
        before = runtime.n_compiles()

        def loss(seed, ignored=None):
            some = targets.clone()
            if ignored is not None:
                some[ignored::2] = shards.IGNORE
            xm.set_rng_state(runtime.seed_of(seed, 1))
            metrics = update(weights, state, *to_device(ids, some), lr)
            torch_xla.sync()
            return metrics.cpu().tolist()[0]

        losses[dropout] = [loss(seed) for seed in (1, 1, 2)]
        first, second = loss(1, ignored=1), loss(1, ignored=0)
        assert runtime.n_compiles() == before + 1
        # The micro-batches differ by their masks, and only by these.
        assert (first == pytest.approx(second, rel=1e-6)) == (dropout == 0)
        assert losses[dropout][0] == pytest.approx((first + second) / 2, rel=1e-5)
    assert losses[0.0][0] == losses[0.0][1] == losses[0.0][2]
    assert losses[0.5][0] == losses[0.5][1] != losses[0.5][2]


def test_bfloat16_matmuls_train_float32_weights(devices):
    """The loss follows float32's within bfloat16's 3 digits, and updates far below bfloat16's step arrive."""
    cfg = replace(SMALL, dtype='bfloat16')
    weights = make_weights(cfg, 0)
    batches, lrs = list(make_batches(cfg, 0, 3)), (1e-5, 1e-5, 1e-5)
    mesh = runtime.make_mesh('1,8,1', 8)
    found, after = device_steps(cfg, mesh, weights, batches, lrs)
    expected, plain = plain_steps(cfg, weights, batches, lrs)
    for mine, theirs in zip(found, expected):
        assert mine[0] == pytest.approx(theirs[0], rel=0.01) and mine[1] == pytest.approx(theirs[1], rel=0.05)
    assert found[0][0] != pytest.approx(expected[0][0], rel=1e-6)  # it is bfloat16
    for name, w in after.items():
        assert w.dtype == torch.float32
        moved, should = w - weights[name], plain[name] - weights[name]
        cosine = F.cosine_similarity(moved.double().flatten(), should.flatten(), dim=0)
        assert cosine > 0.95 and moved.abs().max() < 5e-5, (name, cosine)


def test_guards_of_a_model(devices, monkeypatch, capsys):
    import torch_xla
    import torch_xla.distributed.spmd as xs
    mesh = runtime.make_mesh('1,4,2', 8)

    def check(change=None):
        _, weights, state, _ = on_device(SMALL, mesh)
        if change:
            change(weights, state)
        train_gpt.check_model(SMALL, weights, state, mesh, print)

    check()
    table = capsys.readouterr().out
    # name, shape, axes, and bytes of a device: 3 * 64 * 96 float32 over 8 devices
    assert any(line.split() == ['w_up_LDF', '(3,', '64,', '96)', '(None,', "'fsdp',", "'tensor')", '0.01']
               for line in table.splitlines()), table
    assert all(name in table for name in train_gpt.weight_shapes(SMALL))

    def lose_a_moment(weights, state):
        del state['adam_v.wq_LDX']

    def another_weight(weights, state):
        weights['bias_D'] = torch.nn.Parameter(torch.zeros(64).to(torch_xla.device()))
        state.update({'adam_m.bias_D': None, 'adam_v.bias_D': None})

    def not_marked(weights, state):
        weights['w_up_LDF'] = torch.nn.Parameter(torch.zeros(3, 64, 96).to(torch_xla.device()))

    def half_precision(weights, state):
        weights['w_up_LDF'] = torch.nn.Parameter(weights['w_up_LDF'].detach().bfloat16())

    for change, message in ((lose_a_moment, 'optimizer'), (another_weight, 'bias_D'), (not_marked, 'w_up_LDF is not sharded'), (half_precision, 'float32')):
        with pytest.raises(UserError, match=message):
            check(change)
    monkeypatch.setitem(train_gpt.SHARDING, 'w_up_LDF', (None, None, None))
    with pytest.raises(UserError, match='on every device in full'):
        check()


def test_first_weights_depend_on_seed_and_name_alone(devices, monkeypatch):
    mesh = runtime.make_mesh('1,-1,1', 8)

    def first(host, seed=1, **options):
        monkeypatch.setattr(runtime, 'process_index_and_count', lambda: (host, 4))
        torch.manual_seed(host)
        np.random.seed(host)
        _, weights, _, _ = on_device(replace(SMALL, seed=seed, **options), mesh)
        return {n: whole(w) for n, w in weights.items()}

    a, b, other, untied = first(0), first(3), first(0, seed=2), first(0, tied=False)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert all(torch.equal(a[n], untied[n]) for n in a)  # another weight beside it changes none
    matrices = [n for n in a if 'norm' not in n]
    assert not any(torch.equal(a[n], other[n]) for n in matrices)
    for n in matrices:
        expected = 0.02 / math.sqrt(6) if n in ('wo_LXD', 'w_down_LFD') else 0.02
        assert a[n].std().item() == pytest.approx(expected, rel=0.05) and abs(a[n].mean()) < expected / 20, n
    assert not torch.equal(a['wq_LDX'][0], a['wq_LDX'][1])  # nor are two layers the same


def test_rows_of_hosts(devices):
    """Each device finds its rows among those that its host reads, however hosts are cut and devices numbered."""
    import torch_xla
    order = np.random.default_rng(5).permutation(8)
    for sizes in ('1,8,1', '8,1,1', '4,2,1', '2,2,2', '1,2,4', '1,1,8'):
        for numbering in (np.arange(8), order):
            shape = runtime.mesh_shape(sizes, 8)
            mesh = SimpleNamespace(device_ids=numbering, mesh_shape=shape)
            coordinates = {d: np.unravel_index(i, shape) for i, d in enumerate(numbering)}
            per_group = 16 // (shape[0] * shape[1])
            for n_hosts in (1, 2, 4, 8):
                read = []
                for host in range(n_hosts):
                    mine = tuple(range(host * 8 // n_hosts, (host + 1) * 8 // n_hosts))
                    rt = runtime.Runtime('cpu', 8, host, n_hosts, '', mine)
                    rows = runtime.rows_of_host(16, mesh, rt)
                    needed = {(coordinates[d][0] * shape[1] + coordinates[d][1]) * per_group + r
                              for d in mine for r in range(per_group)}
                    assert sorted(rows) == sorted(needed), (sizes, n_hosts, host)
                    read += list(rows)
                assert set(read) == set(range(16))
                if numbering is not order and shape[2] <= 8 // n_hosts:
                    assert len(read) == 16  # nothing twice, when the devices of a tensor axis share a host
    # What torch_xla puts on each device is what is computed above.
    for sizes in ('2,2,2', '1,8,1'):
        mesh = runtime.make_mesh(sizes, 8)
        _, _, _, to_device = on_device(SMALL, mesh)
        ids, _ = to_device(np.arange(16, dtype=np.int32)[:, None].repeat(32, 1), np.zeros((16, 32), np.int32))
        shards_, = torch_xla._XLAC._get_local_shards([ids])
        for device, (part, name) in enumerate(shards_):
            assert name.endswith(f':{device}')
            rt = runtime.Runtime('cpu', 8, device, 8, '', (device,))
            assert part[:, 0].tolist() == runtime.rows_of_host(16, mesh, rt).tolist()


def test_mesh_sizes():
    assert runtime.mesh_shape('1,-1,1', 8) == (1, 8, 1) and runtime.mesh_shape('-1,2,2', 8) == (2, 2, 2)
    assert runtime.mesh_shape('1,1,1', 1) == (1, 1, 1)
    for sizes in ('', '8', '1,8', '2,2,1', '-1,-1,1', '3,-1,1', '0,8,1', '-2,-4,1', '1,8,1,1', 'a,b,c', '1,16,1'):
        with pytest.raises(UserError, match='--mesh'):
            runtime.mesh_shape(sizes, 8)
