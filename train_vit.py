"""Trains a vision transformer to classify images, with PyTorch/XLA SPMD on 1 to 256 TPU chips, or on a CPU.

    bash launch.sh train_vit.py                               # ten minutes on 2 CPU cores: Fashion-MNIST, 88% top-1
    python train_vit.py --preset s16 --data FOLDER --out out/s16
    python train_vit.py --out out/s16 --export FOLDER         # its weights in timm's names
    python train_vit.py --help                                # every option, its default, and the presets

The preset s16 is ViT-S/16 on ImageNet-1k as in "Better plain ViT baselines for ImageNet-1k" (Beyer et al. 2022): 90
epochs, where its authors report 76.5% top-1, or 80% with --steps 375000 (300 epochs). Predicted by --plan, and not run:
1.1 hours on v5e-8 and 0.7 on v6e-8 (300 epochs: 3.8 and 2.4), evaluation and saving left out.

Read it top to bottom, or by its differences to train_gpt.py: options, model, sharding, optimizer, training step with
augmentation, evaluation, the loop.

Letters in names are dimensions: B images, H and W their pixels, C their channels, T patches (one more with --pool cls),
R = B * T rows, E pixels of a patch times channels, D width, F hidden width of the MLP, L layers, N heads, A size of a
head, X = N * A, K classes.
"""
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from launch import fetch
from nano import (UserError, attend, augment, checkpoint, config, hf, hf_vit, images, pallas, picture, plan,
                  resume, runtime, say)
from nano.loader import Loader, eval_batches, eval_examples
from nano.run import Run


@dataclass
class Config:
    preset: str = 'nano'  # the values to start from; options given beside it win
    out: str = 'out/vit'  # folder of this run, or gs://BUCKET/NAME; a run there goes on from its newest checkpoint
    data: str = 'data/shards/images'  # folder of image shards with a manifest.json (data/images.py), or gs://...
    device: str = 'tpu'  # tpu or cpu; never chosen silently
    mesh: str = '1,-1,1'  # devices along data,fsdp,tensor; -1 is the rest
    seed: int = 1  # of the weights' first values, the order of the data, and what is drawn at random
    init_from: str = ''  # run, checkpoint or folder with timm's weights that this new run starts from
    export: str = ''  # folder to write the newest weights of --out to, in timm's names
    reset_data: bool = False  # go on with other data, or another order of them, from their beginning
    strict: bool = False  # a compile after the first step is an error, not a warning

    layers: int = 4  # L
    width: int = 64  # D
    heads: int = 2  # N
    mlp_width: int = 256  # F
    patch: int = 7  # pixels of a patch's side
    image_size: int = 0  # pixels of the square that the model sees, see `seen`; 0 is that of the data
    stored_size: int = 0  # pixels of the stored images' shorter side; 0 is that of the data. Kept for --export
    channels: int = 0  # C; 0 is those of the data
    classes: int = 0  # K; 0 is those of the data
    pool: str = 'gap'  # what the head sees: gap, the mean of all patches, or cls, a token of its own
    positions: str = 'sincos2d'  # fixed waves, or learned
    grid: int = 0  # patches along a side that positions are counted in; 0 is those of the image. It stays that of the
                   # first training when --init_from goes on at another --image_size: positions in between are new
    mean: str = ''  # of the pixels of each channel, black 0 and white 1, such as 0.5,0.5,0.5; empty is that of the data
    std: str = ''  # standard deviation of the same
    norm_eps: float = 1e-6  # added to the variance
    drop_path: float = 0.0  # stochastic depth: the chance to leave out the last layer's outputs; 0 at the first
    dtype: str = 'auto'  # of the matmuls: bfloat16, float32, or auto = bfloat16 on TPU and float32 on CPU
    attention: str = 'auto'  # kernel (nano/attend.py), plain, or auto = on TPU the kernel where it can, else plain
    remat: str = 'none'  # what the backward pass computes again to save memory: none, dots or block, see REMAT
    scan: bool = True  # one compiled layer run L times; false unrolls the layers: slow to compile, for comparison

    crop: str = 'none'  # of training images: resized (a random part, see --min_area), shift (by --pad pixels), or none
    min_area: float = 0.05  # of crop resized: the smallest part of an image
    pad: int = 2  # of crop shift: at most this many pixels to each side
    flip: bool = False  # left and right, half of the time
    randaugment: str = ''  # OPERATIONS,MAGNITUDE such as 2,10; empty is none
    mixup: float = 0.0  # Beta(a, a) of the share of another image; 0 is none
    label_smoothing: float = 0.0  # share of the target that is spread over all classes

    steps: int = 4500  # updates in all
    stop_at: int = 0  # end after this step, with a checkpoint and the schedule of all steps; 0 is at the last
    global_batch: int = 128  # images for each update, over all devices
    accumulate: int = 1  # micro-batches that a global batch is cut into, to save memory
    lr: float = 2e-3  # the highest learning rate
    warmup: int = 200  # steps until the highest learning rate
    final_lr: float = 0.0  # the last learning rate as a share of the highest
    weight_decay: float = 0.1  # of the matrices, times the learning rate
    layer_decay: float = 1.0  # the learning rate of each layer as a share of the one above it; below 1 for fine-tuning
    beta1: float = 0.9  # AdamW: memory of the mean gradient
    beta2: float = 0.999  # AdamW: memory of the mean squared gradient
    adam_eps: float = 1e-8  # AdamW: added to the root of the mean squared gradient
    clip: float = 1.0  # the largest norm of the gradient; 0 is no limit
    ema: float = 0.0  # memory of the mean of the weights, which is then evaluated and exported; 0 is none
    max_bad: int = 5  # stop after this many steps in a row whose loss or gradient is not finite

    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 1000  # steps between evaluations, 0 only at the end
    eval_images: int = 0  # validation images to evaluate, spread evenly over all; 0 is all
    save_every: int = 500  # steps between checkpoints; the last step is saved too; 0 is only that
    keep: int = 2  # newest checkpoints to keep
    keep_every: int = 0  # and for ever those of every n-th step; 0 is none
    wandb: str = ''  # project to log to; empty does not use wandb


# The recipe of big_vision's configs/vit_s16_i1k.py. Its weight decay of 1e-4 is what a step takes away at the highest
# learning rate; here the learning rate is multiplied in, and 1e-3 * 0.1 is the same. Its head has a hidden tanh layer;
# here it is linear, as the paper has it.
IMAGENET = dict(patch=16, image_size=224, remat='dots', crop='resized', flip=True, randaugment='2,10', mixup=0.2,
                steps=112600, global_batch=1024, lr=1e-3, warmup=10000, weight_decay=0.1, eval_every=2500,
                save_every=2500, log_every=50)
PRESETS = {
    'nano': {},
    's16': dict(IMAGENET, layers=12, width=384, heads=6, mlp_width=1536),
    'b16': dict(IMAGENET, layers=12, width=768, heads=12, mlp_width=3072),
    'l16': dict(IMAGENET, layers=24, width=1024, heads=16, mlp_width=4096),
}


# What makes the model: a run goes on with these as they were, and --init_from brings them.
OF_DATA = 'channels', 'grid', 'mean', 'std', 'classes'  # by default; later they are the model's
SHAPE = 'layers', 'width', 'heads', 'mlp_width', 'patch', 'pool', 'positions', 'norm_eps', *OF_DATA
BROUGHT = SHAPE[:-1]  # the classes are those of the new data: for others the head begins anew
MAY_DIFFER = 'mean', 'std', 'norm_eps', 'classes'


def check(cfg: Config):
    """Refuses what cannot work, before anything is loaded or compiled."""
    for names, least, most in (
            ('layers heads patch accumulate', 1, 10_000),
            ('width mlp_width global_batch', 1, 2**20),
            ('image_size stored_size channels classes grid pad', 0, 2**20),
            ('steps log_every keep max_bad', 1, 2**31 - 1),
            ('warmup stop_at eval_every eval_images save_every keep_every', 0, 2**31 - 1),
            ('lr norm_eps adam_eps', 1e-30, 1e30),
            ('weight_decay', 0.0, 1e3),
            ('clip mixup', 0.0, 1e30),
            ('drop_path label_smoothing beta1 beta2 ema', 0.0, 0.99999),
            ('min_area layer_decay', 0.001, 1.0),
            ('final_lr', 0.0, 1.0)):
        for name in names.split():
            if not least <= getattr(cfg, name) <= most:
                raise UserError(f'--{name} {getattr(cfg, name)}: must be between {least} and {most}')
    for name, values in dict(dtype=('auto', 'float32', 'bfloat16'), pool=('gap', 'cls'),
                             crop=('resized', 'shift', 'none'), positions=('sincos2d', 'learned'),
                             attention=('auto', 'kernel', 'plain'), remat=tuple(REMAT)).items():
        if getattr(cfg, name) not in values:
            raise UserError(f'--{name} {getattr(cfg, name)}: expected one of {", ".join(values)}')
    if cfg.remat != 'none' and not cfg.scan:
        raise UserError(f"--remat {cfg.remat}: without --scan only 'none'")
    if cfg.width % cfg.heads or cfg.positions == 'sincos2d' and cfg.width % 4:
        raise UserError(f'--width {cfg.width} --heads {cfg.heads}: the second must divide the first, and so must 4 '
                        f'with sincos2d: each frequency has a sine and a cosine of x and of y')
    if cfg.image_size % cfg.patch:
        raise UserError(f'--image_size {cfg.image_size} --patch {cfg.patch}: the second must divide the first')
    if cfg.drop_path and cfg.layers == 1:
        raise UserError(f'--drop_path {cfg.drop_path} --layers 1: the first layer is never left out, and it is alone')
    if cfg.global_batch % cfg.accumulate:
        raise UserError(f'--global_batch {cfg.global_batch} --accumulate {cfg.accumulate}: the second must divide the '
                        f'first')
    randaugment_of(cfg)


def randaugment_of(cfg: Config) -> tuple[int, float]:
    """Operations for each image and their magnitude. Raises UserError."""
    n, _, magnitude = (cfg.randaugment or '0,0').partition(',')
    try:
        if 0 <= int(n) <= 16 and 0 <= float(magnitude) <= 10:
            return int(n), float(magnitude)
    except ValueError:
        pass
    raise UserError(f'--randaugment {cfg.randaugment}: expected OPERATIONS,MAGNITUDE such as 2,10 (16 and 10 at most)')


# What the forward pass keeps of each layer besides its input (None: everything), by the names of PyTorch's operators.
# The backward pass computes the rest again. dots keeps the results of the weights' matmuls, and of attention's kernel.
REMAT = {'none': None, 'dots': ('aten.mm.', 'nano.attend_forward.'), 'block': ()}


# ---- Model: weights are stacked over layers, so that one compiled layer serves them all ----

# Every weight and the mesh axes that its dimensions lie along, as in train_gpt.py: matrices along `fsdp` with the
# dimension of width, so that a device holds a part of each layer and gathers the layer when it comes to it; along
# `tensor` with the heads or the hidden width. What has one dimension is small and lies on every device in full.
#
# The names are read elsewhere: their ending gives the shape (weight_shapes); with _L they are stacked, and layer() gets
# its slice; build() chooses the first values, adamw() what decays, layer_rates() and flops_per_image() go by them too;
# and nano/hf_vit.py has a name for each in timm's format.
SHARDING = {
    'embed_ED': (None, 'fsdp'), 'embed_bias_D': (None,), 'cls_D': (None,), 'pos_TD': (None, 'fsdp'),
    'wq_LDX': (None, 'fsdp', 'tensor'), 'wk_LDX': (None, 'fsdp', 'tensor'), 'wv_LDX': (None, 'fsdp', 'tensor'),
    'wo_LXD': (None, 'tensor', 'fsdp'), 'w_up_LDF': (None, 'fsdp', 'tensor'), 'w_down_LFD': (None, 'tensor', 'fsdp'),
    'q_bias_LX': (None, 'tensor'), 'k_bias_LX': (None, 'tensor'), 'v_bias_LX': (None, 'tensor'),
    'o_bias_LD': (None, None), 'up_bias_LF': (None, 'tensor'), 'down_bias_LD': (None, None),
    'attn_norm_LD': (None, None), 'attn_norm_bias_LD': (None, None),
    'mlp_norm_LD': (None, None), 'mlp_norm_bias_LD': (None, None),
    'final_norm_D': (None,), 'final_norm_bias_D': (None,), 'head_DK': ('fsdp', None), 'head_bias_K': (None,),
}
BATCH = ('data', 'fsdp')  # images of a batch lie along both


def weight_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Every weight of the model and its shape."""
    sizes = dict(L=cfg.layers, D=cfg.width, X=cfg.width, F=cfg.mlp_width, K=cfg.classes, E=cfg.patch**2 * cfg.channels,
                 T=cfg.grid**2)
    absent = (set() if cfg.pool == 'cls' else {'cls_D'}) | (set() if cfg.positions == 'learned' else {'pos_TD'})
    return {name: tuple(sizes[letter] for letter in name.split('_')[-1]) for name in SHARDING if name not in absent}


FLOPS_RULE = '(6 P + 12 L D T) T for an image: P weights in matmuls, L layers of width D, T patches that see each other'


def patches(cfg: Config) -> int:
    """T: of an image, and the class token."""
    return (cfg.image_size // cfg.patch) ** 2 + (cfg.pool == 'cls')


def flops_per_image(cfg: Config) -> float:
    """Forward and backward, as FLOPS_RULE says."""
    T = patches(cfg)
    n_matmul = sum(math.prod(shape) for name, shape in weight_shapes(cfg).items() if name.startswith(('w', 'embed_E')))
    return (6 * n_matmul + 12 * cfg.layers * cfg.width * T) * T + 6 * cfg.width * cfg.classes


class ViT:
    """The forward pass, of weights by the names of the table: those that are trained, or their mean. `mesh` None is a
    plain model on one device."""

    def __init__(self, cfg: Config, mesh=None):
        self.cfg, self.mesh = cfg, mesh
        # One object each for ever: scan caches what it traced by them.
        self.run_layer, self.remat = {}, []
        if REMAT[cfg.remat] is not None:
            from nano.trace import keep
            self.remat = [keep(*REMAT[cfg.remat])]

    def __call__(self, weights: dict[str, torch.Tensor], images_BCHW: torch.Tensor,
                 training: bool = False) -> torch.Tensor:
        """Normalized images in float32 -> logits_BK in float32."""
        cfg = self.cfg
        B, C, H, W = images_BCHW.shape
        h, w = H // cfg.patch, W // cfg.patch
        patches_RE = images_BCHW.view(B, C, h, cfg.patch, w, cfg.patch).permute(0, 2, 4, 1, 3, 5).reshape(B * h * w, -1)
        x_RD = linear(patches_RE.to(matmul_dtype(cfg)), weights['embed_ED'], weights['embed_bias_D'])
        x_BTD = x_RD.view(B, h * w, -1) + position_table(cfg, weights.get('pos_TD'), h, x_RD.device).to(x_RD.dtype)
        if cfg.pool == 'cls':
            x_BTD = torch.cat((weights['cls_D'].to(x_BTD.dtype).expand(B, 1, -1), x_BTD), 1)
        T = x_BTD.shape[1]
        x_RD = shard(x_BTD.reshape(B * T, -1), self.mesh, (BATCH, None))
        stacked = {name: t for name, t in weights.items() if '_L' in name}
        if training and cfg.drop_path:
            # Made out here because a mask made in the scanned layer would be the same one in each.
            rate_L1 = torch.arange(cfg.layers, device=x_RD.device)[:, None] * (cfg.drop_path / max(1, cfg.layers - 1))
            for name in ('keep_attn_LR', 'keep_mlp_LR'):
                kept_LB = torch.rand((cfg.layers, B), device=x_RD.device) >= rate_L1
                kept_LR = (kept_LB / (1 - rate_L1)).to(x_RD.dtype).repeat_interleave(T, 1)
                stacked[name] = shard(kept_LR, self.mesh, (None, BATCH))
        run_layer = self.run_layer[T] = self.run_layer.get(T) or partial(layer, cfg, self.mesh, T)
        if cfg.scan:
            from nano.trace import scan
            x_RD = scan(run_layer, x_RD, stacked, *self.remat)
        else:
            for one in zip(*(t.unbind() for t in stacked.values())):
                x_RD = run_layer(x_RD, dict(zip(stacked, one)))
        x_RD = layer_norm(x_RD, weights['final_norm_D'], weights['final_norm_bias_D'], cfg.norm_eps).float()
        x_BTD = x_RD.view(B, T, -1)
        x_BD = x_BTD[:, 0] if cfg.pool == 'cls' else x_BTD.mean(1)
        return linear(x_BD.to(matmul_dtype(cfg)), weights['head_DK'], weights['head_bias_K']).float()


def layer(cfg: Config, mesh, T: int, x_RD: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """One layer: attention and MLP, each added to the stream. `w` holds this layer's slices of the stacked weights.

    The stream is a matrix with a row for each patch of each image, not [B, T, D]: a TPU keeps arrays in tiles of 8 or
    16 rows, which 196 patches do not fill, so between the two shapes it would copy, for each matmul."""
    B, N, A = len(x_RD) // T, cfg.heads, cfg.width // cfg.heads
    # Marked once more, inside the loop over layers: above all for the gradients of these slices.
    w = {name: shard(t, mesh, SHARDING[name][1:]) if name in SHARDING else t for name, t in w.items()}
    h_RD = layer_norm(x_RD, w['attn_norm_LD'], w['attn_norm_bias_LD'], cfg.norm_eps)
    q_RX, k_RX, v_RX = (linear(h_RD, w[f'w{x}_LDX'], w[f'{x}_bias_LX']) for x in 'qkv')
    if why_plain(cfg, mesh, B, T):
        q_BNTA, k_BNTA, v_BNTA = (x_RX.view(B, T, N, A).transpose(1, 2) for x_RX in (q_RX, k_RX, v_RX))
        att_BNTT = ((q_BNTA * A ** -0.5) @ k_BNTA.transpose(2, 3)).float().softmax(-1).to(x_RD.dtype)
        a_RX = (att_BNTT @ v_BNTA).transpose(1, 2).reshape(B * T, -1)
    else:
        a_RX = attend.attention(q_RX, k_RX, v_RX, T, A, mesh, (BATCH, 'tensor'))
    a_RD = linear(a_RX, w['wo_LXD'], w['o_bias_LD'])
    x_RD = x_RD + (a_RD * w['keep_attn_LR'][:, None] if 'keep_attn_LR' in w else a_RD)
    h_RD = layer_norm(x_RD, w['mlp_norm_LD'], w['mlp_norm_bias_LD'], cfg.norm_eps)
    m_RD = linear(F.gelu(linear(h_RD, w['w_up_LDF'], w['up_bias_LF'])), w['w_down_LFD'], w['down_bias_LD'])
    x_RD = x_RD + (m_RD * w['keep_mlp_LR'][:, None] if 'keep_mlp_LR' in w else m_RD)
    return shard(x_RD, mesh, (BATCH, None))


def why_plain(cfg: Config, mesh, B: int, T: int) -> str:
    """Why attention among B images is plain PyTorch; empty if it is the kernel. Raises UserError where --attention
    kernel is not possible."""
    if cfg.attention == 'plain' or cfg.attention == 'auto' and cfg.device != 'tpu' or mesh is None:
        return 'chosen'
    data, fsdp, tensor = mesh.mesh_shape
    try:
        if cfg.device != 'tpu' and not pallas.INTERPRET:
            raise UserError('it runs on a TPU only')
        attend.blocks(B // (data * fsdp), T, cfg.heads // tensor, cfg.width // cfg.heads, matmul_dtype(cfg).itemsize)
    except UserError as e:
        if cfg.attention == 'kernel':
            raise UserError(f'--attention kernel: {e}; or take --attention plain') from e
        return str(e)
    return ''


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x @ w + bias in x's type: weights are kept in float32 and cast where they are used."""
    return x @ w.to(x.dtype) + bias.to(x.dtype)


def layer_norm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32 (Ba et al. 2016)."""
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * w + bias).to(x.dtype)


def position_table(cfg: Config, learned_TD: torch.Tensor | None, side: int, device) -> torch.Tensor:
    """What is added to the patches of an image of side x side of them, [T, D] in float32.

    Waves: sines and cosines of x and of y at width / 4 frequencies from 1 to 1e-4, as in MoCo v3 (Chen et al. 2021).
    On another grid than that of the first training, patches lie between the places that the model knows: waves are
    taken there, and a learned table is read there by bilinear interpolation."""
    if learned_TD is not None:
        if side == cfg.grid:
            return learned_TD
        read = torch.from_numpy(interpolation(cfg.grid, side)).to(device)
        grid = learned_TD.view(cfg.grid, cfg.grid, -1)
        return (read @ (read @ grid.reshape(cfg.grid, -1)).view(side, cfg.grid, -1)).reshape(side * side, -1)
    where = dict(device=device, dtype=torch.float32)
    omega = 1e-4 ** (torch.arange(cfg.width // 4, **where) / max(1, cfg.width // 4 - 1))
    at = ((torch.arange(side, **where) + 0.5) * (cfg.grid / side) - 0.5)[:, None] * omega
    x, y = at.repeat(side, 1), at.repeat_interleave(side, 0)
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), 1)


def interpolation(n_from: int, n_to: int) -> np.ndarray:
    """Weights [n_to, n_from] of a linear interpolation between pixels' centers, the edges repeated."""
    at = np.clip((np.arange(n_to) + 0.5) * n_from / n_to - 0.5, 0, n_from - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n_from))).astype(np.float32)


def matmul_dtype(cfg: Config) -> torch.dtype:
    return getattr(torch, cfg.dtype if cfg.dtype != 'auto' else 'bfloat16' if cfg.device == 'tpu' else 'float32')


# ---- Sharding: weights by the table, activations over (data, fsdp) by images ----

def shard(t: torch.Tensor, mesh, spec: tuple) -> torch.Tensor:
    """Marks an activation, and its gradient, as lying along the mesh by `spec`."""
    if mesh is None:
        return t
    import torch_xla.distributed.spmd as xs
    return xs.mark_sharding_with_gradients(t, mesh, spec)


def build(cfg: Config, mesh, device) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """The weights and the optimizer's state, sharded over the mesh.

    One weight at a time passes through the host; its first values depend on the seed and its name alone, so every host
    makes the same. As big_vision's: norms at 1, biases and the head at 0, the patches' matrix with variance 1 / E,
    those of the layers by Glorot and Bengio 2010, learned positions and the class token with deviation 0.02.
    """
    import torch_xla.distributed.spmd as xs
    weights, state = {}, {'adam_t': torch.zeros((), device=device)}
    for name, shape in weight_shapes(cfg).items():
        generator = torch.Generator().manual_seed(runtime.seed_of(cfg.seed, name))
        if 'bias' in name or name == 'head_DK':
            w = torch.zeros(shape)
        elif 'norm' in name:
            w = torch.ones(shape)
        elif name.startswith('w'):
            bound = math.sqrt(6 / (shape[1] + shape[2]))
            w = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        else:
            w = torch.empty(shape).normal_(0, shape[0] ** -0.5 if name == 'embed_ED' else 0.02, generator=generator)
        weights[name] = torch.nn.Parameter(w.to(device))
        parts = dict(adam_m=torch.zeros(shape, device=device), adam_v=torch.zeros(shape, device=device))
        if cfg.ema:
            parts['ema'] = w.to(device)
        for kind, t in [('', weights[name]), *parts.items()]:
            xs.mark_sharding(t, mesh, SHARDING[name])
            if kind:
                state[f'{kind}.{name}'] = t
    return weights, state


def check_mesh(cfg: Config, mesh) -> int:
    """Refuses what the mesh cannot divide; returns how many parts the images of a batch are in."""
    row_shards, tensor = mesh.mesh_shape[0] * mesh.mesh_shape[1], mesh.mesh_shape[2]
    if cfg.heads % tensor:
        raise UserError(f'--heads {cfg.heads} --mesh {cfg.mesh}: {tensor} devices along tensor must divide the heads')
    if cfg.global_batch % (row_shards * cfg.accumulate):
        least = row_shards * cfg.accumulate
        raise UserError(f'--global_batch {cfg.global_batch}: must be a multiple of {least} = {row_shards} (data x '
                        f'fsdp) x {cfg.accumulate} (--accumulate), such as {-(-cfg.global_batch // least) * least}')
    on_device = cfg.global_batch // row_shards // cfg.accumulate
    if cfg.mixup and augment.group_of(on_device) == 1:
        raise UserError(f'--mixup {cfg.mixup}: it mixes images of one device and micro-batch, which has {on_device}; a '
                        f'divisor of that must be from 2 to {augment.GROUP}: take another --global_batch, --accumulate '
                        f'or --mesh')
    why = why_plain(cfg, mesh, cfg.global_batch // cfg.accumulate, patches(cfg))
    if why and cfg.attention == 'auto' and cfg.device == 'tpu':
        say(f'attention is plain PyTorch, slower than the kernel: {why}')
    group = augment.group_of(on_device)
    if cfg.randaugment and group < augment.N_OPERATIONS:
        say(f'--randaugment is slow with {on_device} images on a device: of their divisors up to {augment.GROUP} the '
            f'largest is {group}, and so many are filled up to {augment.N_OPERATIONS}; a multiple of 16 is best')
    return row_shards


# ---- Optimizer: AdamW, decoupled decay on matrices only, a schedule, and a mean of the weights ----

def lr_at(cfg: Config, step: int) -> float:
    """The learning rate of `step` (from 0): a warm-up, then a cosine (Loshchilov and Hutter 2017)."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / (cfg.warmup + 1)
    done = min(1.0, (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup))
    return cfg.lr * (cfg.final_lr + (1 - cfg.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def layer_rates(cfg: Config, name: str, device) -> float | torch.Tensor:
    """The share of the learning rate that a weight has (Clark et al. 2020, as in BEiT): 1 for the head, --layer_decay
    for the last layer, its square for the one below, and so on to the patches' matrix."""
    if cfg.layer_decay == 1.0 or name.startswith(('head', 'final')):
        return 1.0
    if '_L' not in name:
        return cfg.layer_decay ** (cfg.layers + 1)
    below_L = torch.arange(cfg.layers, 0, -1, device=device, dtype=torch.float32)
    return (cfg.layer_decay ** below_L).view(-1, *[1] * (len(name.split('_')[-1]) - 1))


def adamw(cfg: Config, weights: dict[str, torch.Tensor], state: dict, grads: dict[str, torch.Tensor], lr: torch.Tensor,
          scale: torch.Tensor, ok: torch.Tensor):
    """One update (Loshchilov and Hutter 2019, as torch.optim.AdamW), of gradients times `scale`; where `ok` is false
    nothing changes. In place, so that the compiled step writes over its inputs and needs no second copy."""
    state['adam_t'].add_(ok)
    t = state['adam_t']
    bias1, bias2 = 1 - cfg.beta1 ** t, 1 - cfg.beta2 ** t
    ema = ((1 + t) / (10 + t)).clamp(max=cfg.ema)  # the first steps are not remembered for long
    for name, w in weights.items():
        m, v, g = state[f'adam_m.{name}'], state[f'adam_v.{name}'], grads[name] * scale
        new_m, new_v = m.lerp(g, 1 - cfg.beta1), v.lerp(g.square(), 1 - cfg.beta2)
        rate = lr * layer_rates(cfg, name, w.device)
        decay = cfg.weight_decay if len(w.shape) > 1 + ('_L' in name) and name != 'pos_TD' else 0.0
        new_w = w * (1 - rate * decay) - rate * (new_m / bias1) / ((new_v / bias2).sqrt() + cfg.adam_eps)
        changed = [(m, new_m), (v, new_v), (w, new_w)]
        if cfg.ema:
            changed.append((state[f'ema.{name}'], new_w + ema * (state[f'ema.{name}'] - new_w)))
        for old, new in changed:
            old.copy_(torch.where(ok, new, old))


# ---- One training step and evaluation: each is one graph, compiled once ----

def augmented(cfg: Config, mesh, images_BHWC: torch.Tensor, targets_BK: torch.Tensor,
              share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 images and what they show, changed at random on the device: what the model is trained on, [B, C, H, W]."""
    B, H, W, _ = images_BHWC.shape
    x_BCHW, device, size = images_BHWC.permute(0, 3, 1, 2), images_BHWC.device, (cfg.image_size, cfg.image_size)
    dtype = matmul_dtype(cfg)
    # What mixes images does so within groups that lie on one device: nothing is sent.
    group = augment.group_of(B // (mesh.mesh_shape[0] * mesh.mesh_shape[1]) if mesh else B)
    flip_B = augment.coin(B, device) if cfg.flip else torch.zeros(B, dtype=torch.bool, device=device)
    if cfg.crop == 'resized':
        boxes_B4 = augment.random_boxes(B, H, W, device, (cfg.min_area, 1.0))
        x_BCHW = augment.crop(x_BCHW, boxes_B4, flip_B, size, dtype=dtype)
    elif cfg.crop == 'shift':
        x_BCHW = augment.pad_crop(seen(cfg, x_BCHW), augment.random_shifts(B, cfg.pad, device),
                                  augment.random_shifts(B, cfg.pad, device), flip_B)
    else:
        x_BCHW = seen(cfg, x_BCHW)
        x_BCHW = torch.where(flip_B[:, None, None, None], x_BCHW.flip(-1), x_BCHW)
    if cfg.randaugment:
        n, magnitude = randaugment_of(cfg)
        x_BCHW = augment.randaugment(x_BCHW, n, magnitude, group, dtype)
    if cfg.mixup:
        x_BCHW, targets_BK = augment.mixup(share, x_BCHW, targets_BK, group=group)
    return augment.normalize(x_BCHW, *pixel_scale(cfg), dtype), targets_BK


SEEN = 0.875  # of an image's side: 224 of 256 pixels, as is usual for ImageNet


def seen(cfg: Config, x_BCHW: torch.Tensor) -> torch.Tensor:
    """What the model sees of an image if nothing is drawn at random: --image_size pixels in its middle. If that is less
    than SEEN of its side, then so much of it, resized. uint8, as is x."""
    (H, W), size = x_BCHW.shape[2:], cfg.image_size
    if size >= SEEN * min(H, W):
        top, left = round((H - size) / 2), round((W - size) / 2)  # as torchvision's CenterCrop
        return x_BCHW[:, :, top:top + size, left:left + size]
    half, device = SEEN * min(H, W) / 2, x_BCHW.device
    box_4 = torch.tensor([W / 2 - half, H / 2 - half, W / 2 + half, H / 2 + half], device=device)
    boxes_B4, flip_B = box_4.expand(len(x_BCHW), 4), torch.zeros(len(x_BCHW), dtype=torch.bool, device=device)
    return augment.crop(x_BCHW, boxes_B4, flip_B, (size, size), dtype=matmul_dtype(cfg))


def train_step(cfg: Config, model: ViT, weights: dict[str, torch.Tensor], state: dict, images_BHWC: torch.Tensor,
               labels_B1: torch.Tensor, lr: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Makes an update; `share` is mixup's. Returns [loss, norm of the gradient, 1 if it was made] on the device.

    The loss is the mean over the global batch, whatever the number of micro-batches. Micro-batch a takes images a,
    a + A, ...: so it has images of each device.
    """
    from nano.trace import Loop
    B, A = len(images_BHWC), cfg.accumulate

    def micro_batch(carry, batch):
        weights, share, grads, loss = carry
        images_BHWC, labels_B1 = (shard(t, model.mesh, (BATCH, *[None] * (t.dim() - 1))) for t in batch)
        targets_BK = F.one_hot(labels_B1[:, 0].long(), cfg.classes).float()
        x_BCHW, targets_BK = augmented(cfg, model.mesh, images_BHWC, targets_BK, share)
        targets_BK = targets_BK * (1 - cfg.label_smoothing) + cfg.label_smoothing / cfg.classes
        with torch.enable_grad():
            trained = {name: w.detach().requires_grad_() for name, w in weights.items()}
            part = -(targets_BK * model(trained, x_BCHW, training=True).log_softmax(-1)).sum() / B
            new = torch.autograd.grad(part, list(trained.values()))
        grads = {name: g + g_new for (name, g), g_new in zip(grads.items(), new)}
        return (weights, share, grads, loss + part.detach()), None

    with torch.no_grad():
        grads = {name: shard(torch.zeros_like(w), model.mesh, SHARDING[name]) for name, w in weights.items()}
        carry = weights, share, grads, torch.zeros((), device=images_BHWC.device)
        batches = [shard(t.view(B // A, A, *t.shape[1:]).transpose(0, 1), model.mesh,
                         (None, BATCH, *[None] * (t.dim() - 1))) for t in (images_BHWC, labels_B1)]
        (_, _, grads, loss), _ = Loop(micro_batch, name='micro_batches')(carry, batches)
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        # Decided in the graph: the loss is read a step late, when the host could no longer stop a bad update.
        ok = torch.isfinite(norm) & torch.isfinite(loss)
        scale = (cfg.clip / (norm + 1e-6)).clamp(max=1.0) if cfg.clip else torch.ones_like(norm)
        adamw(cfg, weights, state, grads, lr, scale, ok)
    return torch.stack([loss, norm, ok.float()])


@torch.no_grad()
def answers(cfg: Config, model: ViT, weights: dict[str, torch.Tensor], images_BHWC: torch.Tensor,
            labels_B1: torch.Tensor) -> torch.Tensor:
    """For each image [4, B] in float32: -log p(label), the number of classes that are likelier than the label, the
    likeliest class, and its probability. For the blank images that fill up the last batch they mean nothing."""
    x_BCHW = seen(cfg, images_BHWC.permute(0, 3, 1, 2))
    log_p_BK = model(weights, augment.normalize(x_BCHW, *pixel_scale(cfg), matmul_dtype(cfg))).log_softmax(-1)
    labels_B1 = labels_B1.clamp(min=0).long()
    at_label_B1 = log_p_BK.gather(-1, labels_B1)
    best_B, class_B = log_p_BK.max(-1)
    # Among equally likely classes the first wins: else a new head, whose answers are all equal, would always be right.
    # With NaN no class is behind another, so the label is last.
    after_BK = torch.arange(cfg.classes, device=log_p_BK.device) > labels_B1
    behind_BK = (log_p_BK < at_label_B1) | (log_p_BK == at_label_B1) & after_BK
    rank_B = cfg.classes - 1 - behind_BK.sum(-1)
    found_4B = torch.stack([-at_label_B1[:, 0], rank_B.float(), class_B.float(), best_B.exp()])
    return shard(found_4B, model.mesh, (None, None))


def evaluate(cfg: Config, answer, weights: dict[str, torch.Tensor], source: images.Images, rows: np.ndarray,
             to_device, asked_to_stop=lambda: False) -> dict[str, np.ndarray] | None:
    """The answers to a fixed set of images, each once on any number of devices and hosts, as arrays: nll, rank,
    predicted, confidence and label. `answer` is `answers` of a model. None if stopped."""
    import torch_xla
    found, size = [], cfg.global_batch // cfg.accumulate
    for images_BHWC, labels_B1 in eval_batches(source, cfg.eval_images, size, rows, to_device):
        if asked_to_stop():
            return None
        found.append(answer(weights, images_BHWC, labels_B1))
        torch_xla.sync()
    chosen = eval_examples(len(source), cfg.eval_images)
    got = np.concatenate([f.cpu().numpy() for f in found], 1)[:, :len(chosen)]  # behind them the last batch is blank
    return dict(zip(('nll', 'rank', 'predicted', 'confidence'), got), label=source.labels_N[chosen])


def scores(found: dict[str, np.ndarray]) -> dict[str, float]:
    """Loss, top-1 and top-5 accuracy, and the expected calibration error: the mean distance of confidence and accuracy
    over 15 bins of confidence (Guo et al. 2017)."""
    right = found['rank'] == 0
    bins = np.minimum((np.nan_to_num(found['confidence']) * 15).astype(int), 14)
    off = sum(abs(right[bins == b].sum() - found['confidence'][bins == b].sum()) for b in range(15))
    return dict(val_loss=float(found['nll'].mean(dtype=np.float64)), val_top1=float(right.mean()),
                val_top5=float((found['rank'] < 5).mean()), val_calibration=float(off / len(right)),
                val_images=len(right))


# ---- The run ----

def their_weights(cfg: Config, _tokenizer) -> hf.Weights:
    return hf.Held(hf_vit.read(cfg.init_from)[1])


THEIRS = resume.Foreign(hf_vit.is_folder, lambda folder, o: hf_vit.read(folder)[0], their_weights)


def main(argv: list[str] | None = None):
    try:
        brought = partial(resume.options_of_source, shape=BROUGHT, foreign=THEIRS, of_data=OF_DATA)
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


def pixel_scale(cfg: Config) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel. Raises UserError."""
    try:
        mean, std = (tuple(float(x) for x in text.split(',')) for text in (cfg.mean, cfg.std))
    except ValueError:
        mean = std = ()
    if (len(mean) != cfg.channels or len(std) != cfg.channels or not all(-1e3 < x < 1e3 for x in mean)
            or not all(1e-6 < x < 1e3 for x in std)):
        raise UserError(f'--mean {cfg.mean} --std {cfg.std}: expected a number for each of {cfg.channels} channels, '
                        f'such as 0.5,0.5,0.5, and deviations above 0')
    return mean, std


def fitted(cfg: Config, height: int, width: int, channels: int, classes: int, mean: list[float],
           std: list[float]) -> Config:
    """What is 0 in the options is that of the data. Raises UserError for what does not fit them."""
    size = cfg.image_size or min(height, width) // cfg.patch * cfg.patch
    # Where all pixels of a channel are equal, any deviation will do.
    cfg = replace(cfg, image_size=size, stored_size=cfg.stored_size or min(height, width),
                  channels=cfg.channels or channels, classes=cfg.classes or classes, grid=cfg.grid or size // cfg.patch,
                  mean=cfg.mean or ','.join(f'{x:.6g}' for x in mean),
                  std=cfg.std or ','.join(f'{x or 1:.6g}' for x in std))
    if size < cfg.patch or size > min(height, width):
        wanted = f'--image_size {cfg.image_size}' if cfg.image_size else f'--patch {cfg.patch}'
        raise UserError(f'{wanted}: the images of {cfg.data} have {height} x {width} pixels, store larger ones '
                        f'(data/images.py --size) or take a smaller value')
    if cfg.channels != channels:
        raise UserError(f'the model takes images of {cfg.channels} channels (--channels), those of {cfg.data} have '
                        f'{channels}: data/images.py makes shards with 3, or with 1 (--grey)')
    if cfg.classes < classes:
        raise UserError(f'the model has {cfg.classes} classes (--classes), {cfg.data} has {classes}')
    pixel_scale(cfg)
    return cfg


def train(cfg: Config, stop: runtime.StopSignal):
    # What can be refused is refused first: before the devices are asked for, before a compile, before the run's folder
    # is touched.
    manifest = images.load_manifest(cfg.data)
    names = manifest['classes']
    cfg = fitted(cfg, *manifest['image'], len(names), manifest['mean'], manifest['std'])
    data = dict(data=images.fingerprint(manifest), separator=None, tokenizer=None, labels=names)
    start = resume.find(cfg, data, SHAPE, MAY_DIFFER, THEIRS)
    if start.goes_on and bool(then := start.meta['config'].get('ema')) != bool(cfg.ema):
        raise UserError(f'--ema {cfg.ema}: the run in {cfg.out} has {then}, and a mean of the weights begins with the '
                        f'run: give the same, or begin another --out (--init_from takes the weights)')
    if start.complete(cfg):
        return

    rt = runtime.start(cfg.device)
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    from nano.trace import Once
    mesh = runtime.make_mesh(cfg.mesh, rt.n_devices)
    row_shards = check_mesh(cfg, mesh)
    flops = flops_per_image(cfg) * cfg.global_batch
    with Run(cfg, rt, mesh, start, stop, data, 'images', cfg.global_batch, flops) as run:
        splits = {s['split'] for s in manifest['shards']}
        images.verify(cfg.data, manifest, sorted(splits & {'train', 'val'}), run.say)
        source = images.Images(cfg.data, 'train')
        val = images.Images(cfg.data, 'val') if 'val' in splits else None

        run.meet()
        weights, state = build(cfg, mesh, run.device)
        model = ViT(cfg, mesh)
        # Python runs once through each of them: see nano/trace.py.
        update, answer = Once(partial(train_step, cfg, model), changes=2), Once(partial(answers, cfg, model))
        torch_xla.sync()
        runtime.check_sharding(weights, {name: SHARDING.get(name) for name in weight_shapes(cfg)}, mesh, run.say)
        labels = hf_vit.labels(start.path) if start.reader else start.labels
        new_head = bool(start.then) and (start.then['classes'] != cfg.classes or (labels or names) != names)
        if start.then:
            run.say('the head begins anew: for other classes' if new_head else
                    f'the head is kept: {"the same classes" if labels else "as many classes; their names are unknown"}')
        run.load(weights, state, leave_out={'head_DK', 'head_bias_K'} if new_head else set())
        evaluated = {name: state[f'ema.{name}'] for name in weights} if cfg.ema else weights
        if cfg.ema and start.path and not start.goes_on:
            with torch.no_grad():
                for name, mean in evaluated.items():
                    mean.copy_(weights[name])
            torch_xla.sync()
        run.say(f'{sum(w.numel() for w in weights.values()):,} parameters on a mesh (data, fsdp, tensor) = '
                f'{mesh.mesh_shape}; images of {cfg.image_size} pixels in {patches(cfg)} patches of {cfg.patch}; '
                f'{cfg.global_batch} images a step = {row_shards} (data x fsdp) x {cfg.accumulate} (micro-batches) x '
                f'{cfg.global_batch // row_shards // cfg.accumulate}; {cfg.steps:,} steps are '
                f'{cfg.steps * cfg.global_batch / len(source):.2f} epochs of {len(source):,} images')
        if cfg.warmup >= cfg.steps:
            run.say(f'the warm-up of {cfg.warmup} steps is longer than the run, which never reaches the rate {cfg.lr}')
        if val is None:
            run.say(f'{cfg.data} has no validation images: nothing is evaluated')

        def to_device(images_BHWC, labels_B):
            # As a column: torch_xla 2.9 cannot lay what has one dimension along two axes.
            return [xm.send_cpu_data_to_device([torch.from_numpy(a)], run.device, xs.ShardingSpec(mesh, spec))[0]
                    for a, spec in ((images_BHWC, (BATCH, None, None, None)), (labels_B[:, None], (BATCH, None)))]

        def evaluate_and_draw(step: int, record: bool = True) -> bool:
            """Returns False if it was stopped, and then nothing of it is on record: it is owed."""
            if val is None:
                return True
            found = evaluate(cfg, answer, evaluated, val, run.rows(cfg.global_batch // cfg.accumulate), to_device,
                             stop.asked)
            if found is None or stop.asked():
                return False
            s = scores(found)
            top5 = f', top-5 {s["val_top5"]:.2%}' if cfg.classes > 5 else ''
            what = (f'step {step}: validation loss {s["val_loss"]:.4f}, top-1 {s["val_top1"]:.2%}{top5} of '
                    f'{s["val_images"]:,} images')
            if not record:
                run.say(what + ' (to compile; not on record)')
                return True
            run.best = min(run.best, s['val_loss'])
            run.evaluated(step, **s)
            run.say(what)
            if step:
                confusion_KK = None
                if cfg.classes <= 100:  # more are not readable
                    confusion_KK = np.zeros((cfg.classes, cfg.classes), np.int64)
                    np.add.at(confusion_KK, (found['label'], found['predicted'].astype(int)), 1)
                evaluated_N = eval_examples(len(val), cfg.eval_images)
                some = eval_examples(len(evaluated_N), 64)  # spread evenly: shards may be in the order of the classes
                run.track.write(f'samples/step_{step:08d}.svg', picture.report(
                    what, val.read(evaluated_N[some])[0], found['label'][some], found['predicted'][some].astype(int),
                    found['confidence'][some], [*names, *(f'class {k}' for k in range(len(names), cfg.classes))],
                    confusion_KK))
            return True

        with Loader(source, cfg.global_batch, cfg.seed, run.meta['consumed'], run.rows(cfg.global_batch), to_device,
                    give_up=run.give_up) as loader:
            run.evaluate_first(evaluate_and_draw)
            for step, (images_BHWC, labels_B1) in run.steps(loader):
                lr = lr_at(cfg, step - 1)
                began = time.perf_counter()
                # The device's random numbers depend on seed and step alone: nothing in between can shift them.
                xm.set_rng_state(runtime.seed_of(cfg.seed, step))
                share = augment.mixup_share(cfg.mixup, runtime.seed_of(cfg.seed, step, 'mixup'))
                metrics = update(weights, state, images_BHWC, labels_B1,
                                 *(torch.tensor([x]).to(run.device) for x in (lr, share)))
                traced = time.perf_counter() - began
                torch_xla.sync()  # here the graph ends, and the device starts on it as soon as it is free
                run.stepped(metrics, lr=lr, trace_ms=traced * 1e3, data_wait_s=loader.wait_s)
                with run.aside():
                    if run.evaluates:
                        run.owed = not evaluate_and_draw(step)
                    if run.saves:
                        run.save()
        run.finish()


# ---- A plan, an export, and the default data ----

def step_to_plan(cfg: Config, mesh, device) -> plan.Step:
    """What --plan compiles: the step that a run makes, on weights that hold nothing."""
    import torch_xla.distributed.spmd as xs

    from nano.trace import Once
    check(cfg)  # once more: --search varies what was checked
    side, channels, classes = cfg.image_size or 28, cfg.channels or 3, cfg.classes or 1000
    cfg = fitted(cfg, side, side, channels, classes, [0.5] * channels, [0.5] * channels)
    check_mesh(cfg, mesh)
    weights, state = build(cfg, mesh, device)
    batch = dict(images_BHWC=torch.zeros((cfg.global_batch, side, side, channels), dtype=torch.uint8, device=device),
                 labels_B1=torch.zeros((cfg.global_batch, 1), dtype=torch.int32, device=device))
    for t, spec in zip(batch.values(), ((BATCH, None, None, None), (BATCH, None))):
        xs.mark_sharding(t, mesh, spec)
    batch |= dict(zip(('lr', 'share'), torch.zeros(2, 1, device=device)))
    update = Once(partial(train_step, cfg, ViT(cfg, mesh)), changes=2)
    return plan.Step(weights, state, batch, lambda: update(weights, state, *batch.values()), 'images',
                     cfg.global_batch, cfg.steps, flops_per_image(cfg) * cfg.global_batch, FLOPS_RULE)


def export(cfg: Config):
    """Writes the newest weights of a run, for which no device is asked: their mean, if there is one."""
    source = resume.source(resume.Folder(cfg.out).out, '--out')
    meta = checkpoint.read_meta(source, resume.META)
    then = resume.options_of(Config, source, meta, SHAPE)
    check(then)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half-written is left
    found = {name: torch.empty(shape) for name, shape in weight_shapes(then).items()}
    prefix = 'ema.' if then.ema else ''
    checkpoint.load(source, {prefix + name: w for name, w in found.items()})
    with torch.no_grad():
        found['pos_TD'] = position_table(then, found.get('pos_TD'), then.image_size // then.patch, torch.device('cpu'))
    dtype = torch.float32 if cfg.dtype == 'auto' else matmul_dtype(cfg)
    hf_vit.write(cfg.export, asdict(then), found, meta.get('labels'), SEEN, dtype)
    print(f'wrote {cfg.export}: the weights of {source} in timm\'s names, {dtype}')


def find_data(cfg: Config) -> Config:
    """The default data are made when they are missing; with any other --data that is the user's to do."""
    if cfg.data != Config.data:
        return replace(cfg, data=fetch.fetch(cfg.data))  # of gs://..., a copy on this host's disk
    here = Path(__file__).resolve().parent
    if not (here / cfg.data / 'manifest.json').exists():
        if checkpoint.newest(resume.Folder(cfg.out).ckpt):
            raise UserError(f'{cfg.out} holds a run, and --data is missing: start it with the same options, which are '
                            f'in {cfg.out}/config.json')
        print('no image shards yet: making them of the default images (data/images.py)', flush=True)
        if code := subprocess.run([sys.executable, here / 'data' / 'images.py', '--out', here / cfg.data]).returncode:
            raise UserError(f'data/images.py ended with {code}, see above; others: python data/images.py FOLDER')
    return replace(cfg, data=str(here / cfg.data))


if __name__ == '__main__':
    main()
