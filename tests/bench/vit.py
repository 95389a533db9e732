"""Accuracy of train_vit.py's default on Fashion-MNIST after some epochs, against a plain PyTorch ViT with the same recipe
and against timm's ViT, trained by the same plain loop; several seeds each.

    OMP_NUM_THREADS=1 python tests/bench/vit.py --epochs 5 --seeds 3 --data data/shards/images --out tests/bench/vit.json

About 6 minutes for each run; what is in --out is not run again. (One thread: with two, and other jobs on the machine,
PyTorch's threads wait for one another, and it is 6 to 9 times slower.)
"""
import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
ALIKE = 'timm with our beginning'
sys.path.insert(0, str(ROOT))
import train_vit  # noqa: E402
from nano import images  # noqa: E402
from nano.loader import example_at  # noqa: E402


def ours(cfg, data: str, seed: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, ROOT / 'train_vit.py', '--device', 'cpu', '--data', data, '--out', out, '--seed',
                        str(seed), '--steps', str(steps), '--eval_every', '0', '--save_every', '0'], check=True,
                       stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(out, 'metrics.jsonl').read_text().splitlines()]
    return [line['val_top1'] for line in lines if 'val_top1' in line][-1]


def give_first_values(model: torch.nn.Module):
    """Those of train_vit.py, by their rules."""
    for name, p in model.named_parameters():
        if 'bias' in name or name.startswith('head'):
            torch.nn.init.zeros_(p)
        elif 'in_proj_weight' in name or 'qkv.weight' in name:
            for third in p.data.chunk(3):
                torch.nn.init.xavier_uniform_(third)
        elif p.dim() == 2:
            torch.nn.init.xavier_uniform_(p)
        elif p.dim() == 4:
            torch.nn.init.normal_(p, 0, p[0].numel() ** -0.5)


class Plain(torch.nn.Module):
    """PyTorch's own encoder layers, with the first values that train_vit.py gives."""

    def __init__(self, cfg):
        super().__init__()
        self.patches = torch.nn.Conv2d(cfg.channels, cfg.width, cfg.patch, cfg.patch)
        layer = torch.nn.TransformerEncoderLayer(cfg.width, cfg.heads, cfg.mlp_width, 0.0, 'gelu', cfg.norm_eps, True, True)
        self.layers = torch.nn.TransformerEncoder(layer, cfg.layers, torch.nn.LayerNorm(cfg.width, cfg.norm_eps),
                                                  enable_nested_tensor=False)
        self.head = torch.nn.Linear(cfg.width, cfg.classes)
        self.register_buffer('positions', train_vit.position_table(cfg, None, cfg.grid, torch.device('cpu')))
        give_first_values(self)

    def forward(self, x_BCHW):
        x_BTD = self.patches(x_BCHW).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(x_BTD).mean(1))


def timms(cfg):
    from timm.models.vision_transformer import VisionTransformer
    return VisionTransformer(cfg.image_size, cfg.patch, cfg.channels, cfg.classes, 'avg', cfg.width, cfg.layers, cfg.heads,
                             cfg.mlp_width / cfg.width, class_token=False, fc_norm=False)


def timms_begun_alike(cfg):
    """timm's model with the first values and the fixed positions of train_vit.py: its own are learned, and smaller."""
    model = timms(cfg)
    give_first_values(model)
    model.pos_embed.data.copy_(train_vit.position_table(cfg, None, cfg.grid, torch.device('cpu'))[None])
    model.pos_embed.requires_grad_(False)
    return model


def plainly(model, cfg, data: str, seed: int, steps: int) -> float:
    """The recipe of train_vit.py's default by torch.optim: AdamW, a warm-up and a cosine; images as they are."""
    train, val = images.Images(data, 'train'), images.Images(data, 'val')
    (mean,), (std,) = train_vit.pixel_scale(cfg)
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and 'pos' not in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() > 1 and 'pos' not in n)]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=cfg.weight_decay), dict(params=rest, weight_decay=0.)],
                                  betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    B = cfg.global_batch
    for step in range(steps):
        pictures, labels = train.read(example_at(np.arange(step * B, (step + 1) * B), len(train), seed))
        x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
        loss = F.cross_entropy(model((x / 255 - mean) / std), torch.from_numpy(labels).long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for group in optimizer.param_groups:
            group['lr'] = train_vit.lr_at(cfg, step)
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for i in range(0, len(val), 500):
            pictures, labels = val.read(np.arange(i, min(i + 500, len(val))))
            x = (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - mean) / std
            right += int((model(x).argmax(-1) == torch.from_numpy(labels)).sum())
    return right / len(val)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--epochs', type=float, default=5)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--data', default='data/shards/images')
    parser.add_argument('--out', default='results.json')
    args = parser.parse_args()
    manifest = images.load_manifest(args.data)
    cfg = train_vit.fitted(train_vit.Config(device='cpu'), *manifest['image'], len(manifest['classes']), manifest['mean'],
                           manifest['std'])
    n = sum(s['count'] for s in manifest['shards'] if s['split'] == 'train')
    cfg.steps = steps = round(args.epochs * n / cfg.global_batch)
    out = Path(args.out)
    found = json.loads(out.read_text()) if out.exists() else {}
    for seed in range(1, args.seeds + 1):
        for name, train in (('train_vit.py', lambda: ours(cfg, args.data, seed, steps)),
                            ('plain PyTorch', lambda: plainly(Plain(cfg), cfg, args.data, seed, steps)),
                            ('timm', lambda: plainly(timms(cfg), cfg, args.data, seed, steps)),
                            (ALIKE, lambda: plainly(timms_begun_alike(cfg), cfg, args.data, seed, steps))):
            key = f'{name}, {steps} steps, seed {seed}'
            if key not in found:
                torch.manual_seed(seed)
                found[key] = train()
                out.write_text(json.dumps(found, indent=1))
                print(f'{key}: {found[key]:.2%}', flush=True)
    for name in ('train_vit.py', 'plain PyTorch', 'timm', ALIKE):
        top1 = [found[f'{name}, {steps} steps, seed {seed}'] for seed in range(1, args.seeds + 1)]
        error = np.std(top1, ddof=1) / math.sqrt(len(top1)) if len(top1) > 1 else math.nan
        print(f'{name:<24} {np.mean(top1):.2%}, standard error {error:.2%}')


if __name__ == '__main__':
    main()
