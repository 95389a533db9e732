"""Figures of train_gpt.py on this machine's CPU, each against something else in the same run:

    python tests/bench/gpt.py          tokens/s of the default model against eager PyTorch, then host time of a step
    python tests/bench/gpt.py speed    only the first
    python tests/bench/gpt.py trace    only the second: milliseconds to trace a micro-step, at 12 and at 32 layers
"""
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.update(PJRT_DEVICE='CPU', CPU_NUM_DEVICES='1', JAX_PLATFORMS='cpu', TF_CPP_MIN_LOG_LEVEL='3')
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt  # noqa: E402
from nano import runtime  # noqa: E402
from nano.trace import Once  # noqa: E402

VOCAB = 3968  # the default text's


def eager_step(cfg, weights):
    """The same step as a user would write it in eager PyTorch: fused attention and loss, torch.optim.AdamW."""
    w = {name: t.detach().cpu().clone().requires_grad_() for name, t in weights.items()}
    H, K, C, L = cfg.heads, cfg.kv_heads, cfg.head_size, cfg.layers
    angle = torch.arange(cfg.seq_len)[:, None] * cfg.rope_theta ** (torch.arange(0, C, 2) / -C)
    cos, sin = angle.cos(), angle.sin()
    optimizer = torch.optim.AdamW([
        dict(params=[t for n, t in w.items() if 'norm' not in n], weight_decay=cfg.weight_decay),
        dict(params=[t for n, t in w.items() if 'norm' in n], weight_decay=0.0)],
        lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)

    def rope(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def step(ids, targets):
        B, T = ids.shape
        x = F.embedding(ids, w['embed_VD'])
        for i in range(L):
            h = F.rms_norm(x, (cfg.width,), w['attn_norm_LD'][i], cfg.norm_eps)
            q, k, v = ((h @ w[n][i]).view(B, T, n_heads, C).transpose(1, 2)
                       for n, n_heads in (('wq_LDX', H), ('wk_LDY', K), ('wv_LDY', K)))
            a = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True, enable_gqa=True)
            x = x + a.transpose(1, 2).reshape(B, T, H * C) @ w['wo_LXD'][i]
            h = F.rms_norm(x, (cfg.width,), w['mlp_norm_LD'][i], cfg.norm_eps)
            x = x + (F.silu(h @ w['w_gate_LDF'][i]) * (h @ w['w_up_LDF'][i])) @ w['w_down_LFD'][i]
        x = F.rms_norm(x, (cfg.width,), w['final_norm_D'], cfg.norm_eps)
        loss = F.cross_entropy((x @ w['embed_VD'].t()).flatten(0, 1), targets.flatten().long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), cfg.clip)
        optimizer.step()
        return loss.item()
    return step


def xla_step(cfg, mesh):
    """(step, weights): train_gpt.py's own step on one CPU device; step.trace_ms is the host's part of the last one."""
    import torch_xla
    device = torch_xla.device()
    weights, state = train_gpt.build(cfg, mesh, device)
    update = Once(partial(train_gpt.train_step, cfg, train_gpt.GPT(cfg, mesh)), changes=2)
    torch_xla.sync(wait=True)

    def step(ids, targets):
        ids, targets = ids.to(device), targets.to(device)
        t = time.perf_counter()
        metrics = update(weights, state, ids, targets, torch.tensor([cfg.lr]).to(device))
        torch_xla.sync()
        step.trace_ms = (time.perf_counter() - t) * 1e3
        return metrics.cpu()[0].item()
    return step, weights


def random_batch(cfg):
    tokens = torch.randint(0, VOCAB, (cfg.global_batch, cfg.seq_len + 1), dtype=torch.int32)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def speed(mesh, rounds=15):
    cfg = train_gpt.Config(device='cpu', vocab_size=VOCAB)
    step, weights = xla_step(cfg, mesh)
    steps = {'eager PyTorch': eager_step(cfg, weights), 'train_gpt.py': step}
    batch = random_batch(cfg)
    for _ in range(2):
        losses = {name: s(*batch) for name, s in steps.items()}
    seconds = {name: [] for name in steps}
    for _ in range(rounds):  # in turn, so that whatever else the machine does meets both
        for name, s in steps.items():
            s(*batch)  # in training a step follows one of its kind, not one with other threads, which spin for a while
            t = time.perf_counter()
            losses[name] = s(*batch)
            seconds[name].append(time.perf_counter() - t)
    print(f'default model, {cfg.global_batch} x {cfg.seq_len} tokens, {torch.get_num_threads()} threads, {rounds} rounds')
    for name, s in seconds.items():
        tokens = cfg.global_batch * cfg.seq_len
        print(f'  {name:<14} {tokens / statistics.median(s):7.0f} tokens/s at the median, {tokens / min(s):7.0f} at best, '
              f'loss {losses[name]:.4f}')
    pairs = [e / x for e, x in zip(*seconds.values())]
    print(f'  train_gpt.py / eager: {statistics.median(pairs):.2f} (median of the ratios of each round; '
          f'{min(seconds["eager PyTorch"]) / min(seconds["train_gpt.py"]):.2f} of the best)')


def trace(mesh, rounds=25):
    print(f'host time of a training step with one micro-batch, {rounds} rounds, device idle before each')
    small = dict(device='cpu', width=64, heads=2, kv_heads=1, head_size=32, mlp_width=128, seq_len=64, global_batch=2)
    for layers in (12, 32):
        cfg = replace(train_gpt.Config(), vocab_size=VOCAB, layers=layers, **small)
        step, _ = xla_step(cfg, mesh)
        batch = random_batch(cfg)
        times = []
        for _ in range(rounds + 3):
            step(*batch)
            times.append(step.trace_ms)
        times = times[3:]
        print(f'  {layers} layers: {statistics.median(times):5.1f} ms at the median, {min(times):5.1f} at best')


if __name__ == '__main__':
    which = sys.argv[1:] or ['speed', 'trace']
    rt = runtime.start('cpu')
    mesh = runtime.make_mesh('1,-1,1', rt.n_devices)
    for name in which:
        {'speed': speed, 'trace': trace}[name](mesh)
