"""Trains a GPT (a Llama-family decoder) on token shards, with PyTorch/XLA SPMD on 1 to 256 TPU chips, or on a CPU.

    bash launch.sh                                            # 10 minutes on 2 CPU cores: Shakespeare
    python train_gpt.py --preset 124m --data FOLDER --out out/124m
    python train_gpt.py --out out/124m --export FOLDER        # its weights in HuggingFace's format
    python train_gpt.py --help                                # every option, its default, and the presets

Read it top to bottom: options, model, sharding, optimizer, training step, evaluation, sampling, the loop.

Letters in names are dimensions: B sequences, T positions, S positions attended to, D width, F hidden width of the MLP,
V vocabulary, L layers, H query heads, K key/value heads, G = H / K query heads for each of these, C size of a head,
X = H * C, Y = K * C, Q queries in a block, R = G * Q rows.
"""
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from launch import fetch
from nano import UserError, checkpoint, config, hf, plan, resume, runtime, say, shards, splash
from nano.loader import Loader, eval_batches
from nano.run import Run
from nano.tokenizer import load_tokenizer


@dataclass
class Config:
    preset: str = 'nano'  # the values to start from; options given beside it win
    out: str = 'out/gpt'  # folder of this run, or gs://BUCKET/NAME; a run there goes on from its newest checkpoint
    data: str = 'data/shards/text'  # folder of token shards with a manifest.json (data/text.py), or gs://BUCKET/FOLDER
    device: str = 'tpu'  # tpu or cpu; never chosen silently
    mesh: str = '1,-1,1'  # devices along data,fsdp,tensor; -1 is the rest
    seed: int = 1  # of weights, order of the data, dropout and samples
    init_from: str = ''  # run, checkpoint or HuggingFace folder whose model and weights this new run starts from
    export: str = ''  # folder to write the newest weights of --out to, in HuggingFace's format
    reset_data: bool = False  # go on with other data, or another order of them, from their beginning
    strict: bool = False  # a compile after the first step is an error, not a warning

    layers: int = 4  # L
    width: int = 192  # D
    heads: int = 3  # H, query heads
    kv_heads: int = 1  # K, key/value heads; must divide heads
    head_size: int = 64  # C; 128 fills the matrix unit of a TPU
    mlp_width: int = 512  # F
    seq_len: int = 256  # T
    vocab_size: int = 0  # token ids; 0 is those of the data
    tied: bool = True  # the head is the embedding table
    qk_norm: bool = False  # RMSNorm on queries and keys, as in Qwen 3
    qkv_bias: bool = False  # biases of queries, keys and values, as in Qwen 2
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: str = ''  # slower rotation: FACTOR, or Llama 3.1's FACTOR,LOW,HIGH,LENGTH such as 8,1,4,8192
    norm_eps: float = 1e-5  # added to the mean square
    dropout: float = 0.0  # of each layer's two outputs; 0 for pre-training: masks cost memory
    z_loss: float = 0.0  # weight of log(sum(exp(logits)))^2, which keeps logits small; 1e-4 is usual
    dtype: str = 'auto'  # of the matmuls: bfloat16, float32, or auto = bfloat16 on TPU and float32 on CPU
    attention: str = 'auto'  # splash (a TPU's kernel), plain, or auto = splash on TPU and plain on CPU
    remat: str = 'none'  # what the backward pass computes again to save memory: none, dots, attn or block, see REMAT
    scan: bool = True  # one compiled layer run L times; false unrolls the layers: slow to compile, for comparison

    steps: int = 1000  # updates in all
    stop_at: int = 0  # end after this step, with a checkpoint and the schedule of all steps; 0 is at the last
    global_batch: int = 8  # sequences for each update, over all devices
    accumulate: int = 1  # micro-batches that a global batch is cut into, to save memory
    lr: float = 3e-3  # the highest learning rate
    schedule: str = 'cosine'  # cosine, or wsd: warm-up, stable, linear decay
    warmup: int = 50  # steps until the highest learning rate
    final_lr: float = 0.1  # the last learning rate as a share of the highest
    decay: float = 0.2  # wsd: the share of all steps that the decay takes
    weight_decay: float = 0.1  # of the matrices, times the learning rate
    beta1: float = 0.9  # AdamW: memory of the mean gradient
    beta2: float = 0.95  # AdamW: memory of the mean squared gradient
    adam_eps: float = 1e-8  # AdamW: added to the root of the mean squared gradient
    clip: float = 1.0  # the largest norm of the gradient; 0 is no limit
    max_bad: int = 5  # stop after this many steps in a row whose loss or gradient is not finite

    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 250  # steps between evaluations, 0 only at the end
    eval_windows: int = 128  # validation windows to evaluate, spread evenly over all; 0 is all
    save_every: int = 250  # steps between checkpoints; the last step is saved too; 0 is only that
    keep: int = 2  # newest checkpoints to keep
    keep_every: int = 0  # and for ever those of every n-th step; 0 is none
    sample_tokens: int = 200  # length of the text written at evaluations; 0 is none
    prompt: str = ''  # what the text goes on from
    temperature: float = 0.8  # of the sampled text; 0 takes the likeliest token
    wandb: str = ''  # project to log to; empty does not use wandb


GPT2_SIZE = dict(seq_len=1024, head_size=128, steps=19000, global_batch=512, accumulate=8, lr=6e-4, warmup=700,
                 eval_every=500, save_every=500, eval_windows=10240)
LLAMA_SIZE = dict(GPT2_SIZE, seq_len=2048, rope_theta=500000.0, lr=3e-4, warmup=2000, steps=50000, z_loss=1e-4,
                  remat='attn')
PRESETS = {
    'nano': {},
    '124m': dict(GPT2_SIZE, layers=12, width=768, heads=6, kv_heads=6, mlp_width=2048),
    '350m': dict(GPT2_SIZE, layers=24, width=1024, heads=8, kv_heads=8, mlp_width=2816, lr=4e-4),
    '1b': dict(LLAMA_SIZE, layers=16, width=2048, heads=16, kv_heads=8, mlp_width=8192),
    '3b': dict(LLAMA_SIZE, layers=28, width=3072, heads=24, kv_heads=8, mlp_width=8192),
    '8b': dict(LLAMA_SIZE, layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, tied=False, seq_len=8192,
               global_batch=128, accumulate=2),  # the shape of Llama 3
}


# What makes the model: a run goes on with these as they were, and --init_from brings them.
SHAPE = ('layers', 'width', 'heads', 'kv_heads', 'head_size', 'mlp_width', 'vocab_size', 'tied', 'qk_norm', 'qkv_bias',
         'rope_theta', 'rope_scaling', 'norm_eps')
MAY_DIFFER = 'rope_theta', 'rope_scaling', 'norm_eps'  # from those of --init_from, as for longer sequences than before


def check(cfg: Config):
    """Refuses what cannot work, before anything is loaded or compiled."""
    for names, least, most in (
            ('layers width heads kv_heads head_size mlp_width seq_len steps global_batch accumulate log_every keep '
             'max_bad', 1, 2**31 - 1),
            ('warmup stop_at eval_every eval_windows save_every keep_every sample_tokens vocab_size', 0, 2**31 - 1),
            ('lr norm_eps adam_eps rope_theta', 1e-30, 1e30),
            ('weight_decay clip z_loss temperature', 0.0, 1e30),
            ('dropout beta1 beta2', 0.0, 0.99999),
            ('final_lr decay', 0.0, 1.0)):
        for name in names.split():
            if not least <= getattr(cfg, name) <= most:
                raise UserError(f'--{name} {getattr(cfg, name)}: must be between {least} and {most}')
    if cfg.schedule not in ('cosine', 'wsd'):
        raise UserError(f"--schedule {cfg.schedule}: expected 'cosine' or 'wsd'")
    if cfg.dtype not in ('auto', 'float32', 'bfloat16'):
        raise UserError(f"--dtype {cfg.dtype}: expected 'auto', 'float32' or 'bfloat16'")
    if cfg.attention not in ('auto', 'splash', 'plain'):
        raise UserError(f"--attention {cfg.attention}: expected 'auto', 'splash' or 'plain'")
    if uses_splash(cfg):
        splash.check_length(cfg.seq_len)
    if cfg.remat not in REMAT or cfg.remat != 'none' and not cfg.scan:
        raise UserError(f"--remat {cfg.remat}: expected one of {', '.join(REMAT)}; without --scan only 'none'")
    if cfg.heads % cfg.kv_heads:
        raise UserError(f'--heads {cfg.heads} --kv_heads {cfg.kv_heads}: each key/value head serves the same number of '
                        f'query heads, so the second must divide the first')
    if cfg.head_size % 2:
        raise UserError(f'--head_size {cfg.head_size}: must be even, rotary positions turn pairs')
    try:
        scaling = [float(x) for x in cfg.rope_scaling.split(',')] if cfg.rope_scaling else [1.0]
        good = all(0 < x < 1e30 for x in scaling) and (len(scaling) == 1 or len(scaling) == 4 and
                                                       scaling[1] < scaling[2] and scaling[3] % 1 == 0)
    except ValueError:
        good = False
    if not good:
        raise UserError(f"--rope_scaling {cfg.rope_scaling}: expected FACTOR or FACTOR,LOW,HIGH,LENGTH, such as "
                        f"8,1,4,8192 (Llama 3.1), all above 0 and LOW below HIGH")
    if any('\ud800' <= c <= '\udfff' for c in cfg.prompt):
        raise UserError(f'--prompt {ascii(cfg.prompt)}: is not UTF-8')
    if cfg.global_batch % cfg.accumulate:
        raise UserError(f'--global_batch {cfg.global_batch} --accumulate {cfg.accumulate}: the second must divide the '
                        f'first')


# What the forward pass keeps of each layer besides its input (None: everything), by the names of PyTorch's operators.
# The backward pass computes the rest again. dots: the results of the weights' matmuls, and of splash attention.
REMAT = {'none': None, 'dots': ('aten.mm.', 'nano.splash_forward.'), 'attn': ('nano.splash_forward.',), 'block': ()}


# ---- Model: weights are stacked over layers, so that one compiled layer serves them all ----

# Every weight: the mesh axes that its dimensions lie along, and its name in HuggingFace's format ({} is the layer).
# Matrices lie along `fsdp` with the dimension of width, so that a device holds a part of each layer and gathers the
# layer when it comes to it; along `tensor` with the heads or the hidden width, so that a layer's two pairs of matmuls
# need one sum over `tensor` each. Norms are small and lie on every device in full. `data` holds copies.
WEIGHTS = {
    'embed_VD': (('tensor', 'fsdp'), 'model.embed_tokens.weight'),
    'head_VD': (('tensor', 'fsdp'), 'lm_head.weight'),
    'wq_LDX': ((None, 'fsdp', 'tensor'), 'model.layers.{}.self_attn.q_proj.weight'),
    'wk_LDY': ((None, 'fsdp', 'tensor'), 'model.layers.{}.self_attn.k_proj.weight'),
    'wv_LDY': ((None, 'fsdp', 'tensor'), 'model.layers.{}.self_attn.v_proj.weight'),
    'wo_LXD': ((None, 'tensor', 'fsdp'), 'model.layers.{}.self_attn.o_proj.weight'),
    'w_gate_LDF': ((None, 'fsdp', 'tensor'), 'model.layers.{}.mlp.gate_proj.weight'),
    'w_up_LDF': ((None, 'fsdp', 'tensor'), 'model.layers.{}.mlp.up_proj.weight'),
    'w_down_LFD': ((None, 'tensor', 'fsdp'), 'model.layers.{}.mlp.down_proj.weight'),
    'q_bias_LX': ((None, 'tensor'), 'model.layers.{}.self_attn.q_proj.bias'),
    'k_bias_LY': ((None, 'tensor'), 'model.layers.{}.self_attn.k_proj.bias'),
    'v_bias_LY': ((None, 'tensor'), 'model.layers.{}.self_attn.v_proj.bias'),
    'attn_norm_LD': ((None, None), 'model.layers.{}.input_layernorm.weight'),
    'mlp_norm_LD': ((None, None), 'model.layers.{}.post_attention_layernorm.weight'),
    'q_norm_LC': ((None, None), 'model.layers.{}.self_attn.q_norm.weight'),
    'k_norm_LC': ((None, None), 'model.layers.{}.self_attn.k_norm.weight'),
    'final_norm_D': ((None,), 'model.norm.weight'),
}
SHARDING = {name: axes for name, (axes, _) in WEIGHTS.items()}
HF_NAMES = {name: theirs for name, (_, theirs) in WEIGHTS.items()}
BATCH = ('data', 'fsdp')  # rows of a batch lie along both


def weight_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of the model and its shape."""
    V = -(-cfg.vocab_size // 128) * 128  # full tiles for the matrix unit, and divisible by most meshes
    sizes = dict(V=V, L=cfg.layers, D=cfg.width, F=cfg.mlp_width, C=cfg.head_size, X=cfg.heads * cfg.head_size,
                 Y=cfg.kv_heads * cfg.head_size)
    absent = {'head_VD'} if cfg.tied else set()
    absent |= set() if cfg.qk_norm else {'q_norm_LC', 'k_norm_LC'}
    absent |= set() if cfg.qkv_bias else {'q_bias_LX', 'k_bias_LY', 'v_bias_LY'}
    return {name: tuple(sizes[letter] for letter in name.split('_')[-1]) for name in SHARDING if name not in absent}


FLOPS_RULE = '6 P + 6 L H C T for a token: P weights in matmuls, L layers of H heads of C, T positions, causal'


def flops_per_token(cfg: Config) -> float:
    """Forward and backward, as FLOPS_RULE says: half of attention counts, as it is causal (PaLM's appendix B: all)."""
    n_matmul = sum(math.prod(shape) for name, shape in weight_shapes(cfg).items() if cfg.tied or name != 'embed_VD')
    return 6 * n_matmul + 6 * cfg.layers * cfg.heads * cfg.head_size * cfg.seq_len


class GPT:
    """The forward pass, of weights by the names of the table. `mesh` None is a plain model on one device."""

    def __init__(self, cfg: Config, mesh=None):
        self.cfg, self.mesh = cfg, mesh
        # One object each for ever: scan caches what it traced by them.
        self.run_layer, self.remat = partial(layer, cfg, mesh), []
        if REMAT[cfg.remat] is not None:
            from nano.trace import keep
            self.remat = [keep(*REMAT[cfg.remat])]

    def __call__(self, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor, training: bool = False) -> torch.Tensor:
        """Token ids -> the vectors x_BTD before the head."""
        cfg = self.cfg
        x_BTD = F.embedding(ids_BT, weights['embed_VD']).to(matmul_dtype(cfg))
        x_BTD = shard(x_BTD, self.mesh, (BATCH, None, None))
        stacked = {name: w for name, w in weights.items() if '_L' in name}
        if training and cfg.dropout:
            # Made out here because a mask made in the scanned layer would be the same one in each.
            for name in ('drop_attn_LBTD', 'drop_mlp_LBTD'):
                kept = torch.rand((cfg.layers, *x_BTD.shape), device=x_BTD.device) >= cfg.dropout
                stacked[name] = shard(kept.to(x_BTD.dtype) / (1 - cfg.dropout), self.mesh,
                                      (None, BATCH, None, None))
        if cfg.scan:
            from nano.trace import scan
            x_BTD = scan(self.run_layer, x_BTD, stacked, *self.remat)
        else:
            for one in zip(*(w.unbind() for w in stacked.values())):
                x_BTD = self.run_layer(x_BTD, dict(zip(stacked, one)))
        return rms_norm(x_BTD, weights['final_norm_D'], cfg.norm_eps)

    def head_VD(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights['embed_VD' if self.cfg.tied else 'head_VD']


def layer(cfg: Config, mesh, x_BTD: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """One layer: attention and MLP, each added to the stream. `w` holds this layer's slices of the stacked weights."""
    B, T, _ = x_BTD.shape
    K, C = cfg.kv_heads, cfg.head_size
    # Said here, inside the loop over layers, for the slices and above all for their gradients.
    w = {name: shard(t, mesh, SHARDING[name][1:]) if name in SHARDING else t for name, t in w.items()}
    h_BTD = rms_norm(x_BTD, w['attn_norm_LD'], cfg.norm_eps)
    q_BTX, k_BTY, v_BTY = matmul(h_BTD, w['wq_LDX']), matmul(h_BTD, w['wk_LDY']), matmul(h_BTD, w['wv_LDY'])
    if cfg.qkv_bias:
        q_BTX, k_BTY, v_BTY = (x + w[name].to(x.dtype) for x, name in (
            (q_BTX, 'q_bias_LX'), (k_BTY, 'k_bias_LY'), (v_BTY, 'v_bias_LY')))
    q_BTHC, k_BTKC, v_BTKC = q_BTX.view(B, T, cfg.heads, C), k_BTY.view(B, T, K, C), v_BTY.view(B, T, K, C)
    if cfg.qk_norm:
        q_BTHC = rms_norm(q_BTHC, w['q_norm_LC'], cfg.norm_eps)
        k_BTKC = rms_norm(k_BTKC, w['k_norm_LC'], cfg.norm_eps)
    q_BTHC, k_BTKC = rope(cfg, q_BTHC), rope(cfg, k_BTKC)
    if uses_splash(cfg):
        a_BHTC = splash.attention(q_BTHC.transpose(1, 2) * C ** -0.5, k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2),
                                  mesh, (BATCH, 'tensor'))
        a_BTX = a_BHTC.transpose(1, 2).reshape(B, T, cfg.heads * C)
    else:
        a_BTX = attention(q_BTHC, k_BTKC, v_BTKC)
    a_BTD = matmul(a_BTX, w['wo_LXD'])
    x_BTD = x_BTD + (a_BTD * w['drop_attn_LBTD'] if 'drop_attn_LBTD' in w else a_BTD)
    h_BTD = rms_norm(x_BTD, w['mlp_norm_LD'], cfg.norm_eps)
    m_BTD = matmul(F.silu(matmul(h_BTD, w['w_gate_LDF'])) * matmul(h_BTD, w['w_up_LDF']), w['w_down_LFD'])
    x_BTD = x_BTD + (m_BTD * w['drop_mlp_LBTD'] if 'drop_mlp_LBTD' in w else m_BTD)
    return shard(x_BTD, mesh, (BATCH, None, None))


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w in x's type: weights are kept in float32 and cast where they are used."""
    return x @ w.to(x.dtype)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * w over the last dimension, in float32 (Zhang and Sennrich 2019)."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def rope(cfg: Config, x_BTHC: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021). Dimension i turns with i + C/2, as in Llama's weights in HuggingFace's format.
    The angles are computed in each layer: they cost little, and scan would carry gradients for a table.

    --rope_scaling lets the dimensions turn slower by a factor: all of them (Chen et al. 2023), or, as Llama 3.1's
    model card and code have it, those that turn less than LOW times in LENGTH positions, and not those above HIGH."""
    _, T, _, C = x_BTHC.shape
    where = dict(device=x_BTHC.device, dtype=torch.float32)
    angle_C = cfg.rope_theta ** (torch.arange(0, C, 2, **where) / -C)
    if cfg.rope_scaling:
        factor, *rest = map(float, cfg.rope_scaling.split(','))
        kept_C = torch.zeros_like(angle_C)
        if rest:
            low, high, length = rest
            kept_C = ((angle_C * (length / (2 * math.pi)) - low) / (high - low)).clamp(0, 1)
        angle_C = angle_C * (kept_C + (1 - kept_C) / factor)
    angle_TC = torch.arange(T, **where)[:, None] * angle_C
    cos, sin = angle_TC.cos()[:, None], angle_TC.sin()[:, None]
    a, b = x_BTHC.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BTHC.dtype)


def attention(q_BTHC: torch.Tensor, k_BTKC: torch.Tensor, v_BTKC: torch.Tensor) -> torch.Tensor:
    """Causal attention; query head h uses key/value head h // G. Returns a_BTX."""
    B, T, H, C = q_BTHC.shape
    K = k_BTKC.shape[2]
    G = H // K
    # The G query heads of a key/value head are rows of one matmul: larger ones, and no copies of keys and values.
    q_BKGTC = (q_BTHC * C ** -0.5).view(B, T, K, G, C).permute(0, 2, 3, 1, 4)
    k_BKCS, v_BKSC = k_BTKC.permute(0, 2, 3, 1), v_BTKC.transpose(1, 2)
    at = torch.arange(T, device=q_BTHC.device)
    # A quarter of the queries at a time, against the keys up to its end: 5/8 of the work of all against all.
    Q = T // 4 if T % 4 == 0 else T
    out = []
    for start in range(0, T, Q):
        end = start + Q
        q_BKRC = q_BKGTC[:, :, :, start:end].reshape(B, K, G * Q, C)
        att_BKGQS = (q_BKRC @ k_BKCS[..., :end]).view(B, K, G, Q, end).float()
        att_BKGQS = torch.where(at[start:end, None] >= at[:end], att_BKGQS, -1e30).softmax(-1).to(v_BKSC.dtype)
        out.append((att_BKGQS.view(B, K, G * Q, end) @ v_BKSC[:, :, :end]).view(B, K, G, Q, C))
    return torch.cat(out, 3).permute(0, 3, 1, 2, 4).reshape(B, T, H * C)


def uses_splash(cfg: Config) -> bool:
    return cfg.attention == 'splash' or cfg.attention == 'auto' and cfg.device == 'tpu'


def matmul_dtype(cfg: Config) -> torch.dtype:
    return getattr(torch, cfg.dtype if cfg.dtype != 'auto' else 'bfloat16' if cfg.device == 'tpu' else 'float32')


def loss_sums(model: GPT, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor, targets_BT: torch.Tensor,
              training: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(-log p(target), the same plus z_loss * log(Z)^2), each summed over the targets that are not IGNORE, in float32.
    The second is what training makes small; the z-loss is PaLM's (Chowdhery et al. 2022, section 5)."""
    x_BTD = model(weights, ids_BT, training)
    logits_BTV = matmul(x_BTD, model.head_VD(weights).t()).float()
    V = logits_BTV.shape[-1]
    if V > model.cfg.vocab_size:  # rows that only fill up the table are no tokens
        logits_BTV = torch.where(torch.arange(V, device=x_BTD.device) < model.cfg.vocab_size, logits_BTV, -1e30)
    log_z_BT = logits_BTV.logsumexp(-1)
    at_target_BT = logits_BTV.gather(-1, targets_BT.clamp(min=0).long()[..., None])[..., 0]
    counts_BT = targets_BT != shards.IGNORE
    nll = ((log_z_BT - at_target_BT) * counts_BT).sum()
    z_loss = model.cfg.z_loss
    return nll, nll + z_loss * (log_z_BT.square() * counts_BT).sum() if z_loss else nll


# ---- Sharding: weights by the table, activations over (data, fsdp) by rows ----

def shard(t: torch.Tensor, mesh, spec: tuple) -> torch.Tensor:
    """Marks an activation, and its gradient, as lying along the mesh by `spec`."""
    if mesh is None:
        return t
    import torch_xla.distributed.spmd as xs
    return xs.mark_sharding_with_gradients(t, mesh, spec)


def build(cfg: Config, mesh, device) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """The weights and the optimizer's state, sharded over the mesh.

    One weight at a time passes through the host; its first values depend on the seed and its name alone, so every host
    makes the same. Norms start at 1, biases at 0, matrices with deviation 0.02, smaller where a layer adds to the
    stream, as GPT-2's (Radford et al. 2019, section 2.3).
    """
    import torch_xla.distributed.spmd as xs
    weights, state = {}, {'adam_t': torch.zeros((), device=device)}
    for name, shape in weight_shapes(cfg).items():
        spec = SHARDING[name]
        std = 0.02 / math.sqrt(2 * cfg.layers) if name in ('wo_LXD', 'w_down_LFD') else 0.02
        generator = torch.Generator().manual_seed(runtime.seed_of(cfg.seed, name))
        w = (torch.ones(shape) if 'norm' in name else torch.zeros(shape) if 'bias' in name else
             torch.empty(shape).normal_(0, std, generator=generator))
        weights[name] = torch.nn.Parameter(w.to(device))
        xs.mark_sharding(weights[name], mesh, spec)
        for moment in ('adam_m', 'adam_v'):
            state[f'{moment}.{name}'] = torch.zeros(shape, device=device)
            xs.mark_sharding(state[f'{moment}.{name}'], mesh, spec)
    return weights, state


def check_mesh(cfg: Config, mesh) -> int:
    """Refuses what the mesh cannot divide; returns how many parts the rows of a batch are in."""
    row_shards, tensor = mesh.mesh_shape[0] * mesh.mesh_shape[1], mesh.mesh_shape[2]
    if uses_splash(cfg) and (cfg.heads % tensor or cfg.kv_heads % tensor):
        raise UserError(f'--heads {cfg.heads} --kv_heads {cfg.kv_heads} --mesh {cfg.mesh}: splash attention needs '
                        f'whole heads on each of {tensor} devices along tensor; or take --attention plain')
    if cfg.global_batch % (row_shards * cfg.accumulate):
        least = row_shards * cfg.accumulate
        raise UserError(f'--global_batch {cfg.global_batch}: must be a multiple of {least} = {row_shards} (data x '
                        f'fsdp) x {cfg.accumulate} (--accumulate), such as {-(-cfg.global_batch // least) * least}')
    return row_shards


def check_model(cfg: Config, weights: dict[str, torch.Tensor], state: dict, mesh, say):
    """Guards against training that goes wrong without an error: each has cost somebody a run."""
    for moment in ('adam_m', 'adam_v'):
        if {n for n in state if n.startswith(moment)} != {f'{moment}.{n}' for n in weights}:
            raise UserError(f'the optimizer\'s {moment} does not belong to the model\'s weights, one for one')
    if not all(w.device.type == 'xla' and w.dtype == torch.float32 for w in weights.values()):
        raise UserError('weights must be float32 on the device: in bfloat16 small updates are lost (64 of 64 scales '
                        'stayed at 1.0 after 50 steps at 3e-4)')
    runtime.check_sharding(weights, {name: SHARDING.get(name) for name in weight_shapes(cfg)}, mesh, say)


# ---- Optimizer: AdamW, decoupled decay on matrices only, and a schedule ----

def lr_at(cfg: Config, step: int) -> float:
    """The learning rate of `step` (from 0): above 0 from the first step on. cosine: Loshchilov and Hutter 2017;
    wsd: Hu et al. 2024, with a linear decay."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / (cfg.warmup + 1)
    if cfg.schedule == 'cosine':
        done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
        share = cfg.final_lr + (1 - cfg.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        left = (cfg.steps - step) / max(1.0, cfg.decay * cfg.steps)
        share = cfg.final_lr + (1 - cfg.final_lr) * min(1.0, left)
    return cfg.lr * share


def adamw(cfg: Config, weights: dict[str, torch.Tensor], state: dict, grads: dict[str, torch.Tensor], lr: torch.Tensor,
          scale: torch.Tensor, ok: torch.Tensor):
    """One update (Loshchilov and Hutter 2019, as torch.optim.AdamW), of gradients times `scale`; where `ok` is false
    nothing changes. In place, so that the compiled step writes over its inputs and needs no second copy."""
    state['adam_t'].add_(ok)
    bias1, bias2 = 1 - cfg.beta1 ** state['adam_t'], 1 - cfg.beta2 ** state['adam_t']
    for name, w in weights.items():
        m, v, g = state[f'adam_m.{name}'], state[f'adam_v.{name}'], grads[name] * scale
        new_m, new_v = m.lerp(g, 1 - cfg.beta1), v.lerp(g.square(), 1 - cfg.beta2)
        decay = 0.0 if 'norm' in name or 'bias' in name else cfg.weight_decay
        new_w = w * (1 - lr * decay) - lr * (new_m / bias1) / ((new_v / bias2).sqrt() + cfg.adam_eps)
        for old, new in ((m, new_m), (v, new_v), (w, new_w)):
            old.copy_(torch.where(ok, new, old))


# ---- One training step, evaluation, sampling: each is one graph, compiled once ----

def train_step(cfg: Config, model: GPT, weights: dict[str, torch.Tensor], state: dict, ids_BT: torch.Tensor,
               targets_BT: torch.Tensor, lr: torch.Tensor) -> torch.Tensor:
    """Makes an update. Returns [loss, norm of the gradient, 1 if it was made] on the device.

    The loss is the mean over all targets of the global batch, whatever the number of micro-batches: each micro-batch's
    sum is divided by the count of the whole. Micro-batch a takes rows a, a + A, ...: so it has rows of each device.
    """
    from nano.trace import Loop
    B, T = ids_BT.shape
    A = cfg.accumulate

    def micro_batch(carry, batch):
        weights, n_targets, grads, nll = carry
        ids_BT, targets_BT = (shard(t, model.mesh, (BATCH, None)) for t in batch)
        with torch.enable_grad():
            trained = {name: w.detach().requires_grad_() for name, w in weights.items()}
            nll_sum, objective = loss_sums(model, trained, ids_BT, targets_BT, training=True)
            new = torch.autograd.grad(objective / n_targets, list(trained.values()))
        grads = {name: g + g_new for (name, g), g_new in zip(grads.items(), new)}
        return (weights, n_targets, grads, nll + nll_sum.detach()), None

    with torch.no_grad():
        n_targets = (targets_BT != shards.IGNORE).sum().clamp(min=1)
        grads = {name: shard(torch.zeros_like(w), model.mesh, SHARDING[name]) for name, w in weights.items()}
        carry = weights, n_targets, grads, torch.zeros((), device=ids_BT.device)
        batches = [shard(t.view(B // A, A, T).transpose(0, 1), model.mesh, (None, BATCH, None))
                   for t in (ids_BT, targets_BT)]
        (_, _, grads, nll), _ = Loop(micro_batch, name='micro_batches')(carry, batches)
        loss = nll / n_targets
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        # Decided in the graph: the loss is read a step late, when the host could no longer stop a bad update.
        ok = torch.isfinite(norm) & torch.isfinite(loss)
        scale = (cfg.clip / (norm + 1e-6)).clamp(max=1.0) if cfg.clip else torch.ones_like(norm)
        adamw(cfg, weights, state, grads, lr, scale, ok)
    return torch.stack([loss, norm, ok.float()])


@torch.no_grad()
def nll_and_count(model: GPT, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor,
                  targets_BT: torch.Tensor) -> torch.Tensor:
    """Sum of -log p(target) and the number of targets, [2] in float32."""
    nll, _ = loss_sums(model, weights, ids_BT, targets_BT)
    return torch.stack([nll, (targets_BT != shards.IGNORE).sum().float()])


def evaluate(cfg: Config, measure, weights: dict[str, torch.Tensor], windows: shards.Windows, rows: np.ndarray,
             to_device, asked_to_stop=lambda: False) -> float | None:
    """Mean loss in nats over a fixed set of windows: the same on any number of devices and hosts. `measure` is
    `nll_and_count` of a model. None if stopped."""
    import torch_xla
    sums = []
    for ids_BT, targets_BT in eval_batches(windows, cfg.eval_windows, cfg.global_batch // cfg.accumulate, rows,
                                           to_device):
        if asked_to_stop():
            return None
        sums.append(measure(weights, ids_BT, targets_BT))
        torch_xla.sync()
    nll, n = torch.stack([s.cpu() for s in sums]).double().sum(0).tolist()
    return nll / n


@torch.no_grad()
def next_logits(model: GPT, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor,
                position: torch.Tensor) -> torch.Tensor:
    """Logits of the token after `position`, [B, V] in float32."""
    x_BD = model(weights, ids_BT).index_select(1, position)[:, 0]
    return shard(matmul(x_BD, model.head_VD(weights).t()).float(), model.mesh, (None, None))


def sample(cfg: Config, logits, weights: dict[str, torch.Tensor], tokenizer, vocab_size: int, separator: int, to_device,
           rows: int, n_tokens: int, asked_to_stop=lambda: False) -> str:
    """Text after cfg.prompt; `logits` is `next_logits` of a model. The ids stay in a buffer of fixed length on the
    host, so any length is the same graph; past seq_len the oldest half of them makes room. The tokens are drawn on the
    host: the same text on any device."""
    import torch_xla
    T = cfg.seq_len
    generator = torch.Generator().manual_seed(runtime.seed_of(cfg.seed, 'sample'))
    prompt = tokenizer.encode(cfg.prompt) if cfg.prompt else []
    text, context = list(prompt), [separator, *prompt][-T:]
    for _ in range(n_tokens):
        if asked_to_stop():
            break
        context_BT = np.zeros((rows, T), np.int32)
        context_BT[:, :len(context)] = context
        ids_BT, _ = to_device(context_BT, context_BT)
        position = torch.tensor([len(context) - 1]).to(ids_BT.device)
        logits_BV = logits(weights, ids_BT, position)
        torch_xla.sync()
        logits_V = logits_BV.cpu()[0, :vocab_size]
        logits_V[separator] = -torch.inf  # one text, not several
        if cfg.temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / cfg.temperature).softmax(-1), 1, generator=generator))
        text.append(token)
        context.append(token)
        if len(context) > T:
            context = context[-max(1, T // 2):]
    return tokenizer.decode(text)


# ---- The run ----

def huggingface_reader(cfg: Config, tokenizer: str | None) -> hf.Reader:
    hf.check_tokenizer(cfg.init_from, cfg.data, tokenizer)
    return hf.Reader(cfg.init_from, HF_NAMES, weight_shapes(cfg), cfg.vocab_size)


HUGGINGFACE = resume.Foreign(hf.is_folder, lambda folder, o: hf.options(folder, o['seq_len']), huggingface_reader)


def main(argv: list[str] | None = None):
    try:
        brought = partial(resume.options_of_source, shape=SHAPE, foreign=HUGGINGFACE)
        cfg, planning = config.parse(Config, PRESETS, argv, __doc__, brought,
                                     ('out', 'data', 'init_from', 'export'), plan.Options)
        check(cfg)
        if plan.asked(planning):
            return plan.run(planning, cfg, step_to_plan, dict(remat=list(REMAT)))
        if cfg.export:
            return export(cfg)
        cfg = find_data(cfg)
        with runtime.StopSignal() as stop:
            train(cfg, stop)
    except (UserError, OSError) as e:  # OSError: a folder that cannot be made or written
        print(f'error: {e}', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while the data were made
        sys.exit(130)


def train(cfg: Config, stop: runtime.StopSignal):
    # What can be refused is refused first: before the devices are asked for, before a compile, before the run's folder
    # is touched.
    manifest = shards.load_manifest(cfg.data)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or manifest['vocab_size'])
    if cfg.vocab_size < manifest['vocab_size']:
        raise UserError(f'--vocab_size {cfg.vocab_size}: {cfg.data} has token ids up to {manifest["vocab_size"] - 1}')
    tokenizer_file = manifest['tokenizer'] and os.path.join(cfg.data, manifest['tokenizer']['file'])
    data = dict(data=shards.fingerprint(manifest), separator=manifest['separator'],
                tokenizer=manifest['tokenizer'] and manifest['tokenizer']['sha256'])
    start = resume.find(cfg, data, SHAPE, MAY_DIFFER, HUGGINGFACE)
    if start.complete(cfg):
        return

    rt = runtime.start(cfg.device)
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    from nano.trace import Once
    mesh = runtime.make_mesh(cfg.mesh, rt.n_devices)
    row_shards = check_mesh(cfg, mesh)
    tokens_per_step = cfg.global_batch * cfg.seq_len
    flops = flops_per_token(cfg) * tokens_per_step
    with Run(cfg, rt, mesh, start, stop, data, 'tokens', tokens_per_step, flops) as run:
        splits = {s['split'] for s in manifest['shards'] if s['tokens'] > 1}
        shards.verify(cfg.data, manifest, sorted(splits & {'train', 'val'}), run.say)
        if rt.main and tokenizer_file:  # for --export
            shutil.copy(tokenizer_file, run.folder.local / ('tokenizer' + Path(tokenizer_file).suffix))
        windows = shards.Windows(cfg.data, 'train', cfg.seq_len, cfg.vocab_size)
        val = shards.Windows(cfg.data, 'val', cfg.seq_len, cfg.vocab_size) if 'val' in splits else None
        tokenizer = None
        if cfg.sample_tokens and tokenizer_file and manifest['separator'] is not None:
            tokenizer = load_tokenizer(tokenizer_file)
            if any(i >= cfg.vocab_size for i in tokenizer.encode(cfg.prompt)):
                raise UserError(f'--prompt {cfg.prompt}: its token ids go beyond the vocabulary of {cfg.vocab_size}')

        run.meet()
        weights, state = build(cfg, mesh, run.device)
        model = GPT(cfg, mesh)
        # Python runs once through each of them: see nano/trace.py.
        update = Once(partial(train_step, cfg, model), changes=2)
        measure, logits = Once(partial(nll_and_count, model)), Once(partial(next_logits, model))
        torch_xla.sync()
        check_model(cfg, weights, state, mesh, run.say)
        run.load(weights, state)
        run.say(f'{sum(w.numel() for w in weights.values()):,} parameters on a mesh (data, fsdp, tensor) = '
                f'{mesh.mesh_shape}; {tokens_per_step:,} tokens a step: {cfg.global_batch} sequences = {row_shards} '
                f'(data x fsdp) x {cfg.accumulate} (micro-batches) x '
                f'{cfg.global_batch // row_shards // cfg.accumulate}; {cfg.steps:,} steps are '
                f'{cfg.steps * tokens_per_step / windows.n_tokens:.2f} epochs of {windows.n_tokens:,} tokens')
        if cfg.warmup >= cfg.steps:
            run.say(f'the warm-up of {cfg.warmup} steps is longer than the run, which never reaches the rate {cfg.lr}')
        if val is None:
            run.say(f'{cfg.data} has no validation tokens: nothing is evaluated')

        row_sharding = xs.ShardingSpec(mesh, (BATCH, None))

        def to_device(*arrays_BT):
            return xm.send_cpu_data_to_device([torch.from_numpy(a) for a in arrays_BT], run.device, row_sharding)

        bytes_per_token, text = shards.bytes_per_token(manifest, 'val'), ''

        def evaluate_and_sample(step: int, record: bool = True) -> bool:
            """Returns False if it was stopped, and then nothing of it is on record: it is owed."""
            nonlocal text
            loss, new_text = None, ''
            if val is not None:
                loss = evaluate(cfg, measure, weights, val, run.rows(cfg.global_batch // cfg.accumulate), to_device,
                                stop.asked)
            if tokenizer is not None:
                n_ids = min(cfg.vocab_size, tokenizer.vocab_size)  # a vocabulary may be padded: GPT-2's to 50,304
                n_tokens = cfg.sample_tokens if record and step else 1
                new_text = sample(cfg, logits, weights, tokenizer, n_ids, manifest['separator'], to_device, row_shards,
                                  n_tokens, stop.asked)
            if stop.asked():
                return False
            text = new_text if record else ''
            if loss is not None:
                bpb = loss / math.log(2) / bytes_per_token if bytes_per_token else None
                if record:
                    run.best = min(run.best, loss)
                    run.evaluated(step, val_loss=loss, val_bpb=bpb)
                run.say(f'step {step}: validation loss {loss:.4f}' + (f', {bpb:.4f} bits per byte' if bpb else '') +
                        (f' (best {run.best:.4f})' if record else ' (to compile; not on record)'))
            if record and step and text:
                run.track.write(f'samples/step_{step:08d}.txt', text)
            return True

        with Loader(windows, cfg.global_batch, cfg.seed, run.meta['consumed'], run.rows(cfg.global_batch), to_device,
                    give_up=run.give_up) as loader:
            run.evaluate_first(evaluate_and_sample)
            for step, (ids_BT, targets_BT) in run.steps(loader):
                lr = lr_at(cfg, step - 1)
                began = time.perf_counter()
                # The device's random numbers depend on seed and step alone: nothing in between can shift them.
                xm.set_rng_state(runtime.seed_of(cfg.seed, step))
                # Not a scalar: torch_xla merges equal scalars (lr and --z_loss both 1e-4) and compiles 0 and 1 in.
                metrics = update(weights, state, ids_BT, targets_BT, torch.tensor([lr]).to(run.device))
                traced = time.perf_counter() - began
                torch_xla.sync()  # here the graph ends, and the device starts on it as soon as it is free
                run.stepped(metrics, lr=lr, trace_ms=traced * 1e3, data_wait_s=loader.wait_s)
                with run.aside():
                    if run.evaluates:
                        run.owed = not evaluate_and_sample(step)
                    if run.saves:
                        run.save()
        run.finish()
        if text:
            run.say(f'\nA sample after {run.step} steps:\n\n{text}')


# ---- A plan, an export, and the default data ----

def step_to_plan(cfg: Config, mesh, device) -> plan.Step:
    """What --plan compiles: the step that a run makes, on weights that hold nothing."""
    import torch_xla.distributed.spmd as xs

    from nano.trace import Once
    check(cfg)  # once more: --search varies what was checked
    cfg = replace(cfg, vocab_size=cfg.vocab_size or vocabulary_to_plan(cfg.data))
    check_mesh(cfg, mesh)
    weights, state = build(cfg, mesh, device)
    batch = {name: torch.zeros((cfg.global_batch, cfg.seq_len), dtype=torch.int32, device=device)
             for name in ('ids_BT', 'targets_BT')}
    for t in batch.values():
        xs.mark_sharding(t, mesh, (BATCH, None))
    batch['lr'] = torch.zeros(1, device=device)
    update, tokens = Once(partial(train_step, cfg, GPT(cfg, mesh)), changes=2), cfg.global_batch * cfg.seq_len
    return plan.Step(weights, state, batch, lambda: update(weights, state, *batch.values()), 'tokens', tokens,
                     cfg.steps, flops_per_token(cfg) * tokens, FLOPS_RULE)


@cache
def vocabulary_to_plan(data: str) -> int:
    """A plan needs no data: the size of the vocabulary of those that are there, else of GPT-2's."""
    size, whose = 50257, f'GPT-2\'s, since {data} is not there'
    if os.path.exists(os.path.join(data, 'manifest.json')):
        size, whose = shards.load_manifest(data)['vocab_size'], f'that of {data}'
    say(f'vocabulary of {size:,}, {whose} (--vocab_size for another)')
    return size


def export(cfg: Config):
    """Writes the newest weights of a run, for which no device is asked, one stacked weight at a time."""
    source = resume.source(resume.Folder(cfg.out).out, '--out')
    meta = checkpoint.read_meta(source, resume.META)
    then = resume.options_of(Config, source, meta, SHAPE)
    check(then)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-written is left
    shapes = weight_shapes(then)
    dtype = torch.float32 if cfg.dtype == 'auto' else matmul_dtype(cfg)

    def weights():
        for name, shape in shapes.items():
            w = torch.empty(shape)
            checkpoint.load(source, {name: w})
            yield name, w
            del w  # before the next is made

    hf.write(cfg.export, hf.config_of(asdict(then), dtype, meta['separator']), weights(), HF_NAMES, dtype,
             then.vocab_size, lambda to: resume.copy_tokenizer(source, to, meta['tokenizer']))
    if then.qkv_bias and os.path.exists(f'{cfg.export}/tokenizer.model'):
        print('transformers.AutoTokenizer takes any tokenizer beside a Qwen 2 model for Qwen\'s, and this is none: load '
              'it with transformers.PreTrainedTokenizerFast.from_pretrained')
    print(f'wrote {cfg.export}: the weights of {source} in HuggingFace\'s format, {dtype}')


def find_data(cfg: Config) -> Config:
    """The default data are made when they are missing; with any other --data that is the user's to do."""
    if cfg.data != Config.data:
        return replace(cfg, data=fetch.fetch(cfg.data))  # of gs://..., a copy on this host's disk
    here = Path(__file__).resolve().parent
    if not (here / cfg.data / 'manifest.json').exists():
        if checkpoint.newest(resume.Folder(cfg.out).ckpt):
            raise UserError(f'{cfg.out} holds a run, and --data is missing: start it with the same options, which are '
                            f'in {cfg.out}/config.json')
        print('no token shards yet: making them of the default text (data/text.py)', flush=True)
        if code := subprocess.run([sys.executable, here / 'data' / 'text.py', '--out', here / cfg.data]).returncode:
            raise UserError(f'data/text.py ended with {code}, see above; another text: python data/text.py FILE...')
    return replace(cfg, data=str(here / cfg.data))


if __name__ == '__main__':
    main()
