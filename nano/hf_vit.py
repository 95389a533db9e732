"""Vision transformers in the folders of timm and of HuggingFace's transformers: config.json beside model.safetensors.

The largest (ViT-L) is 1.2 GB, so weights are held whole, by the names of train_vit.py, whose matrices are [in, out] and
stacked over layers. A class token's own position is added to the token, as big_vision does: the sum is all that counts.
"""
import math
from pathlib import Path
from typing import Any

import torch

from nano import UserError, hf

# Ours: (timm's, transformers'). timm has queries, keys and values in one matrix: its third is named behind a colon.
LAYER = {
    'wq_LDX': ('blocks.{}.attn.qkv.weight:0', 'vit.encoder.layer.{}.attention.attention.query.weight'),
    'wk_LDX': ('blocks.{}.attn.qkv.weight:1', 'vit.encoder.layer.{}.attention.attention.key.weight'),
    'wv_LDX': ('blocks.{}.attn.qkv.weight:2', 'vit.encoder.layer.{}.attention.attention.value.weight'),
    'q_bias_LX': ('blocks.{}.attn.qkv.bias:0', 'vit.encoder.layer.{}.attention.attention.query.bias'),
    'k_bias_LX': ('blocks.{}.attn.qkv.bias:1', 'vit.encoder.layer.{}.attention.attention.key.bias'),
    'v_bias_LX': ('blocks.{}.attn.qkv.bias:2', 'vit.encoder.layer.{}.attention.attention.value.bias'),
    'wo_LXD': ('blocks.{}.attn.proj.weight', 'vit.encoder.layer.{}.attention.output.dense.weight'),
    'o_bias_LD': ('blocks.{}.attn.proj.bias', 'vit.encoder.layer.{}.attention.output.dense.bias'),
    'w_up_LDF': ('blocks.{}.mlp.fc1.weight', 'vit.encoder.layer.{}.intermediate.dense.weight'),
    'up_bias_LF': ('blocks.{}.mlp.fc1.bias', 'vit.encoder.layer.{}.intermediate.dense.bias'),
    'w_down_LFD': ('blocks.{}.mlp.fc2.weight', 'vit.encoder.layer.{}.output.dense.weight'),
    'down_bias_LD': ('blocks.{}.mlp.fc2.bias', 'vit.encoder.layer.{}.output.dense.bias'),
    'attn_norm_LD': ('blocks.{}.norm1.weight', 'vit.encoder.layer.{}.layernorm_before.weight'),
    'attn_norm_bias_LD': ('blocks.{}.norm1.bias', 'vit.encoder.layer.{}.layernorm_before.bias'),
    'mlp_norm_LD': ('blocks.{}.norm2.weight', 'vit.encoder.layer.{}.layernorm_after.weight'),
    'mlp_norm_bias_LD': ('blocks.{}.norm2.bias', 'vit.encoder.layer.{}.layernorm_after.bias'),
}
OTHER = {
    'embed_ED': ('patch_embed.proj.weight', 'vit.embeddings.patch_embeddings.projection.weight'),
    'embed_bias_D': ('patch_embed.proj.bias', 'vit.embeddings.patch_embeddings.projection.bias'),
    'cls_D': ('cls_token', 'vit.embeddings.cls_token'),
    'pos_TD': ('pos_embed', 'vit.embeddings.position_embeddings'),
    'final_norm_D': ('norm.weight', 'vit.layernorm.weight'),
    'final_norm_bias_D': ('norm.bias', 'vit.layernorm.bias'),
    'head_DK': ('head.weight', 'classifier.weight'),
    'head_bias_K': ('head.bias', 'classifier.bias'),
}
HALF = '0.5,0.5,0.5'


def is_folder(folder: str | Path) -> bool:
    """Whether `folder` looks like one of timm's or of transformers'."""
    path = Path(folder, 'config.json')
    return path.is_file() and bool({'architecture', 'model_type'} & hf._json(path).keys())


def read(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The model's options of train_vit.py, and its weights in float32. Raises UserError naming what such a model cannot
    be, and every tensor that is missing or has no place."""
    path = f'{folder}/config.json'
    config = hf._json(path)
    timm = 'architecture' in config
    files = hf._open(folder)
    given = {name: file.get_tensor(name).float() for name, file in files.items() if not name.endswith('.position_ids')}

    def theirs(name: str) -> str:
        return (LAYER | OTHER)[name][not timm]

    try:
        D, C, P, _ = given[theirs('embed_ED')].shape
        L = next(n for n in range(10_000) if theirs('attn_norm_LD').format(n) not in given)
        cls = theirs('cls_D') in given
        side = math.isqrt(given[theirs('pos_TD')].shape[1] - cls)
        args = {**config, **config.get('model_args', {}), **config.get('pretrained_cfg', {})}
        if not timm and Path(folder, 'preprocessor_config.json').is_file():
            how = hf._json(f'{folder}/preprocessor_config.json')
            args |= dict(mean=how.get('image_mean', ()), std=how.get('image_std', ()))
        found = dict(
            layers=L, width=D, heads=args.get('num_heads', D // 64) if timm else config['num_attention_heads'],
            mlp_width=given[theirs('up_bias_LF').format(0)].shape[0], patch=P, channels=C,
            classes=given[theirs('head_bias_K')].shape[0], pool='cls' if cls else 'gap', positions='learned', grid=side,
            norm_eps=1e-6 if timm else float(config.get('layer_norm_eps', 1e-12)),
            mean=','.join(map(str, args.get('mean', ()))) or HALF, std=','.join(map(str, args.get('std', ()))) or HALF)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as e:
        raise UserError(f'{path}: not a model that train_vit.py can be: no usable {e}') from e
    sizes = dict(L=L, D=D, X=D, F=found['mlp_width'], K=found['classes'], E=P * P * C, T=side * side)
    wrong = [] if timm or config['model_type'] == 'vit' else [f'model_type {config["model_type"]!r} (known: vit)']
    wrong += [f'hidden_act {config["hidden_act"]!r}'] if config.get('hidden_act', 'gelu') != 'gelu' else []
    if timm and config.get('global_pool', 'token') != ('token' if cls else 'avg'):
        wrong.append(f'global_pool {config["global_pool"]!r}')
    if wrong:
        raise UserError(f'{path}: not a model that train_vit.py can be: {"; ".join(wrong)}')
    weights, used = {}, set()

    def take(name: str) -> torch.Tensor:
        base, _, third = name.partition(':')
        if base not in given:
            raise UserError(f'{folder}: no {base}')
        used.add(base)
        t = given[base]
        return t.chunk(3)[int(third)] if third else t

    if not isinstance(found['heads'], int) or D % max(1, found['heads']):
        raise UserError(f'{path}: num_heads is {found["heads"]!r}, with a width of {D}')
    try:
        for name in LAYER:
            layers = [take(theirs(name).format(n)) for n in range(L)]
            weights[name] = torch.stack([t.t() if t.dim() == 2 else t for t in layers])
        for name in OTHER:
            if name != 'cls_D' or cls:
                weights[name] = take(theirs(name))
        weights['embed_ED'] = weights['embed_ED'].reshape(D, -1).t()
        weights['head_DK'] = weights['head_DK'].t()
        weights['pos_TD'] = weights['pos_TD'][0]
        if cls:
            weights['cls_D'] = weights['cls_D'].view(D) + weights['pos_TD'][0]
            weights['pos_TD'] = weights['pos_TD'][1:]
        bad = [name for name, w in weights.items()
               if w.shape != tuple(sizes[letter] for letter in name.split('_')[-1]) or not w.isfinite().all()]
    except (RuntimeError, IndexError):  # shapes that do not even stack
        bad = [name]
    if bad:
        raise UserError(f'{folder}: {theirs(bad[0]).partition(":")[0].format("N")} has not the shape that goes with '
                        f'the others, or numbers that are not finite')
    if left := sorted(given.keys() - used):
        raise UserError(f'{folder}: {left[0]}, for which the model has no place' +
                        (f', and {len(left) - 1} more' if len(left) > 1 else ''))
    return found, {name: w.contiguous() for name, w in weights.items()}


def labels(folder: str | Path) -> list[str] | None:
    """What the classes are called, if the folder says so: timm's label_names, or transformers' id2label."""
    config = hf._json(f'{folder}/config.json')
    found = config.get('label_names') or config.get('pretrained_cfg', {}).get('label_names')
    by_id = config.get('id2label')
    if not found and isinstance(by_id, dict) and by_id != {str(k): f'LABEL_{k}' for k in range(len(by_id))}:
        found = [by_id.get(str(k)) for k in range(len(by_id))]
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


def write(folder: str, o: dict[str, Any], weights: dict[str, torch.Tensor], labels: list[str] | None, seen: float,
          dtype: torch.dtype):
    """Fills `folder`, which must be empty or missing, with timm's names; `weights` with pos_TD, whatever the model has,
    and `o` the options. Loads with timm.create_model('local-dir:FOLDER', pretrained=True), and timm's transform for it
    (resolve_model_data_config) sees of a picture what the evaluation saw: `seen` of its side, or more. Raises UserError
    for what timm's model has not."""
    if o['norm_eps'] != 1e-6:
        raise UserError(f'--norm_eps {o["norm_eps"]}: timm\'s model has 1e-6, and its config.json cannot say another')
    if unknown := sorted(weights.keys() - (LAYER | OTHER).keys()):
        raise UserError(f'{unknown[0]} has no name in timm\'s format: give it one in nano/hf_vit.py')
    D, P, C, size = o['width'], o['patch'], o['channels'], o['image_size']
    cls = o['pool'] == 'cls'
    ours, out = dict(weights), {}
    ours['pos_TD'] = torch.cat((torch.zeros(int(cls), D), ours['pos_TD']))[None]
    if cls:
        ours['cls_D'] = ours['cls_D'].view(1, 1, D)
    ours['embed_ED'] = ours['embed_ED'].t().reshape(D, C, P, P)
    ours['head_DK'] = ours['head_DK'].t()
    for name, (theirs, _) in (LAYER | OTHER).items():
        if name in ours:
            for n, w in enumerate(ours[name]) if name in LAYER else [(0, ours[name])]:
                out[theirs.format(n)] = w.t() if name in LAYER and w.dim() == 2 else w
    for base in {name.partition(':')[0] for name in out if ':' in name}:
        out[base] = torch.cat([out.pop(f'{base}:{third}') for third in range(3)])
    # timm rounds both down again, so that the quotient itself may end up one too low.
    ratio, stored = o['mlp_width'] / D, max(size, o['stored_size'])
    while int(D * ratio) < o['mlp_width']:
        ratio = math.nextafter(ratio, math.inf)
    crop = size / stored
    while crop >= seen and math.floor(size / crop) < stored:
        crop = math.nextafter(crop, 0)
    crop = max(crop, seen)
    args = dict(img_size=size, patch_size=P, in_chans=C, embed_dim=D, depth=o['layers'], num_heads=o['heads'],
                mlp_ratio=ratio, class_token=cls, fc_norm=False, global_pool='token' if cls else 'avg')
    config = dict(
        architecture='vit_base_patch16_224', num_classes=o['classes'], num_features=D, global_pool=args['global_pool'],
        model_args=args, pretrained_cfg=dict(
            input_size=[C, size, size], interpolation='bicubic', crop_pct=crop,
            num_classes=o['classes'],
            mean=[float(x) for x in o['mean'].split(',')], std=[float(x) for x in o['std'].split(',')],
            first_conv='patch_embed.proj', classifier='head'))
    if labels and len(labels) == o['classes']:
        config['label_names'] = labels
    hf.write(folder, config, out.items(), {name: name for name in out}, dtype, 2**62, lambda to: None)

