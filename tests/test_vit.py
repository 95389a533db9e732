"""train_vit.py: its model against timm's, transformers' and a plain one, its step against torch.optim, its evaluation
against a plain loop, and whole runs on 8 virtual devices."""
import contextlib
import io
import json
import math
import re
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_vit
from nano import UserError, augment, hf_vit, images, picture, runtime
from nano.trace import Once
from test_gpt import close, whole
from test_runs import stored

K = 7
SMALL = train_vit.Config(device='cpu', layers=3, width=64, heads=4, mlp_width=96, patch=4, image_size=16, channels=3,
                         classes=K, grid=4, mean='0.4,0.5,0.6', std='0.2,0.25,0.3', crop='none', flip=False,
                         global_batch=16, lr=0.01, weight_decay=0.1, clip=1.0)
LRS = 0.01, 0.02, 0.005


@pytest.fixture(scope='module')
def devices():
    return runtime.start('cpu')


def make_weights(cfg, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.15 + ('norm' in name and 'bias' not in name)
            for name, shape in train_vit.weight_shapes(cfg).items()}


def make_batches(cfg, seed, n=len(LRS)):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield (torch.from_numpy(rng.integers(256, size=(cfg.global_batch, 16, 16, 3), dtype=np.uint8)),
               torch.from_numpy(rng.integers(K, size=cfg.global_batch, dtype=np.int32)))


def sent(cfg, mesh, batch):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    spec = (train_vit.BATCH, None, None, None)
    return [xm.send_cpu_data_to_device([t], torch_xla.device(), xs.ShardingSpec(mesh, spec[:t.ndim]))[0]
            for t in (torch.as_tensor(batch[0]), torch.as_tensor(batch[1])[:, None])]


def answers_of(cfg, mesh):
    return Once(partial(train_vit.answers, cfg, train_vit.ViT(cfg, mesh)))


# ---- The model ----

def timm_model(folder):
    import timm
    return timm.create_model(f'local-dir:{folder}', pretrained=True).eval()


@pytest.mark.parametrize('pool,positions', [('cls', 'learned'), ('gap', 'learned'), ('gap', 'sincos2d')])
@torch.no_grad()
def test_logits_are_timms_there_and_back(tmp_path, seed, pool, positions):
    cfg = replace(SMALL, pool=pool, positions=positions, scan=False)
    weights = make_weights(cfg, seed)
    x_BCHW = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    mine = train_vit.ViT(cfg)(weights, x_BCHW)
    table = train_vit.position_table(cfg, weights.get('pos_TD'), 4, torch.device('cpu'))
    hf_vit.write(str(tmp_path / 'x'), asdict(cfg), weights | dict(pos_TD=table), None, 0.875, torch.float32)
    close(mine, timm_model(tmp_path / 'x')(x_BCHW), 'logits', 1e-5)
    found, back = hf_vit.read(tmp_path / 'x')
    assert found == {k: getattr(cfg, k) for k in found} | dict(positions='learned')
    assert torch.equal(train_vit.ViT(replace(cfg, **found))(back, x_BCHW), mine)


@pytest.mark.parametrize('height,width,stored_size', [(36, 72, 18), (48, 32, 16), (51, 51, 17)])
def test_timms_transform_sees_what_the_evaluation_saw(tmp_path, monkeypatch, seed, height, width, stored_size):
    """Of a picture: cut as much and normalized alike, from what an export says."""
    import timm
    from PIL import Image
    monkeypatch.syspath_prepend(Path(train_vit.__file__).parent / 'data')
    import pictures
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))
    image.save(tmp_path / 'x.png')
    cfg = replace(SMALL, stored_size=stored_size, width=28, heads=4, mlp_width=61)  # a ratio that rounds badly
    weights = make_weights(cfg, seed)
    table = train_vit.position_table(cfg, None, 4, torch.device('cpu'))
    hf_vit.write(str(tmp_path / 'x'), asdict(cfg), weights | dict(pos_TD=table), None, 0.875, torch.float32)
    how = timm.data.resolve_model_data_config(timm_model(tmp_path / 'x'))
    theirs_CHW = timm.data.create_transform(**how)(image)
    stored_HWC = pictures.decode((tmp_path / 'x.png').read_bytes(), stored_size, False)
    x_BCHW = train_vit.seen(cfg, torch.from_numpy(stored_HWC.copy()).permute(2, 0, 1)[None])
    mine_CHW = augment.normalize(x_BCHW, *train_vit.pixel_scale(cfg))[0]
    assert mine_CHW.shape == theirs_CHW.shape
    # Two grey levels, of rounding in between; at the edge timm's resizing reads pixels that are not stored.
    assert (mine_CHW - theirs_CHW)[:, 1:-1, 1:-1].abs().max() <= 2 / 255 / 0.2 + 1e-5


@pytest.mark.parametrize('height,width', [(64, 40), (33, 80), (18, 18), (17, 30)])
def test_what_is_seen_is_pillows(seed, height, width):
    """The middle 16 pixels of up to 18, else the middle 7/8 of the shorter side, resized."""
    from PIL import Image
    image_HWC = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    found = train_vit.seen(SMALL, torch.from_numpy(image_HWC).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    if min(height, width) <= 18:
        top, left = round((height - 16) / 2), round((width - 16) / 2)
        assert np.array_equal(found, image_HWC[top:top + 16, left:left + 16])
    else:
        half = 0.875 * min(height, width) / 2
        box = width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half
        expected = np.asarray(Image.fromarray(image_HWC).resize((16, 16), Image.Resampling.BILINEAR, box))
        assert abs(found.astype(int) - expected).max() <= 1


@torch.no_grad()
def test_logits_are_transformers(tmp_path, seed):
    from transformers import ViTConfig, ViTForImageClassification
    torch.manual_seed(seed)
    theirs = ViTForImageClassification(ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=5,
                                                 intermediate_size=96, image_size=16, patch_size=4)).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0, 0.15)
    theirs.save_pretrained(tmp_path)
    (tmp_path / 'preprocessor_config.json').write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}')
    found, weights = hf_vit.read(tmp_path)
    assert (found['mean'], found['std']) == ('0.1,0.2,0.3', '0.4,0.5,0.6')
    x_BCHW = torch.randn(3, 3, 16, 16)
    close(train_vit.ViT(replace(SMALL, scan=False, **found))(weights, x_BCHW), theirs(x_BCHW).logits, 'logits', 1e-5)


def test_other_models_are_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file
    cfg = replace(SMALL, positions='learned')
    hf_vit.write(str(tmp_path / 'x'), asdict(cfg), make_weights(cfg, 0), None, 0.875, torch.float32)
    tensors = load_file(tmp_path / 'x' / 'model.safetensors')
    for change, says in (({'blocks.0.attn.q_norm.weight': torch.ones(16)}, 'q_norm.weight, for which'),
                         ({'blocks.1.mlp.fc1.bias': None}, 'no blocks.1.mlp.fc1.bias'), ({'pos_embed': None}, 'pos_embed'),
                         ({'blocks.1.mlp.fc1.weight': torch.ones(95, 64)}, 'blocks.N.mlp.fc1.weight has not the shape'),
                         ({'pos_embed': torch.ones(1, 15, 64)}, 'pos_embed has not the shape'),
                         ({'head.bias': torch.full((K,), math.nan)}, 'head.bias .* not finite'),
                         ({'head.bias': torch.tensor(1.0)}, 'not a model'), ({'norm.weight': torch.ones(63)}, 'norm.weight')):
        save_file({n: t for n, t in (tensors | change).items() if t is not None}, tmp_path / 'x' / 'model.safetensors')
        with pytest.raises(UserError, match=says):
            hf_vit.read(tmp_path / 'x')
    config = tmp_path / 'x' / 'config.json'
    save_file(tensors, tmp_path / 'x' / 'model.safetensors')
    good = json.loads(config.read_text())
    for change, says in ((dict(norm_eps=1e-5), '--norm_eps 1e-05'), (dict(), 'scale_LD has no name')):
        with pytest.raises(UserError, match=says):
            hf_vit.write(str(tmp_path / 'y'), asdict(replace(cfg, **change)), make_weights(cfg, 0) | dict(
                scale_LD=torch.ones(3, 64)), None, 0.875, torch.float32)
    assert not (tmp_path / 'y').exists()
    for heads in ('3', None, 3, 3.0):
        config.write_text(json.dumps(good | dict(model_args=good['model_args'] | dict(num_heads=heads))))
        with pytest.raises(UserError, match='num_heads is'):
            hf_vit.read(tmp_path / 'x')
    config.write_text(json.dumps(good | dict(global_pool='map')))
    with pytest.raises(UserError, match='global_pool'):
        hf_vit.read(tmp_path / 'x')


def test_sizes_are_the_published_ones():
    """Parameters of ViT-S/16, B/16 and L/16 with a class token and learned positions, as timm lists them."""
    for preset, millions in (('s16', 22.05), ('b16', 86.57), ('l16', 304.33)):
        cfg = replace(train_vit.Config(), **train_vit.PRESETS[preset])
        cfg = replace(cfg, channels=3, classes=1000, pool='cls', positions='learned', grid=14)
        n = sum(math.prod(shape) for shape in train_vit.weight_shapes(cfg).values())
        assert n / 1e6 == pytest.approx(millions, abs=0.006)
    s16 = replace(train_vit.Config(), **train_vit.PRESETS['s16'], channels=3, classes=1000, grid=14)
    assert train_vit.flops_per_image(s16) / 6e9 == pytest.approx(4.6, abs=0.1)  # multiply-adds of the paper, forward


def test_waves_are_mocos():
    """posemb_sincos_2d, written with loops."""
    table = train_vit.position_table(replace(SMALL, grid=3), None, 3, torch.device('cpu'))
    for y in range(3):
        for x in range(3):
            for k in range(16):
                angle = 10000.0 ** (-k / 15)
                for part, (f, v) in enumerate(((math.sin, x), (math.cos, x), (math.sin, y), (math.cos, y))):
                    assert table[y * 3 + x, part * 16 + k] == pytest.approx(f(v * angle), abs=1e-6)


def test_positions_on_another_grid():
    generator = torch.Generator().manual_seed(0)
    cfg, learned = replace(SMALL, grid=5), torch.randn(25, 64, generator=generator)
    for side in (3, 5, 9):
        expected = F.interpolate(learned.view(1, 5, 5, 64).permute(0, 3, 1, 2), (side, side), mode='bilinear')
        close(train_vit.position_table(cfg, learned, side, torch.device('cpu')),
              expected[0].permute(1, 2, 0).reshape(-1, 64), 'learned', 1e-6)
    # Waves of a grid twice as fine: the mean of 2 x 2 places is the coarse one.
    fine = train_vit.position_table(replace(SMALL, grid=4), None, 8, torch.device('cpu'))
    at = (torch.arange(8) + 0.5) / 2 - 0.5
    assert torch.allclose(fine.view(8, 8, 64)[0, :, 0], at.sin(), atol=1e-6)


# ---- The step ----

def plain_steps(cfg, weights, batches, lrs):
    """Training with torch.optim.AdamW in float64 of the unrolled model on one device."""
    params = {n: w.double().requires_grad_() for n, w in weights.items()}
    groups = {}
    for n, p in params.items():
        decays = n.startswith(('w', 'embed_E', 'head_D'))
        rate = 1.0
        if cfg.layer_decay != 1 and not n.startswith(('head', 'final')):
            rate = [cfg.layer_decay ** (cfg.layers - i) for i in range(cfg.layers)] if '_L' in n else \
                cfg.layer_decay ** (cfg.layers + 1)
        groups[n] = decays, rate
    layers = {n: [p.detach()[i].clone().requires_grad_() for i in range(cfg.layers)] if '_L' in n else [p.detach().clone().requires_grad_()]
              for n, p in params.items()}
    optimizer = torch.optim.AdamW([dict(params=[t], weight_decay=cfg.weight_decay * groups[n][0], rate=r)
                                   for n, ts in layers.items()
                                   for t, r in zip(ts, groups[n][1] if isinstance(groups[n][1], list) else [groups[n][1]] * len(ts))],
                                  betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    model, out = train_vit.ViT(replace(cfg, scan=False)), []
    mean = {n: w.double() for n, w in weights.items()}

    def joined():
        return {n: torch.stack(ts) if '_L' in n else ts[0] for n, ts in layers.items()}

    for number, ((x, labels), lr) in enumerate(zip(batches, lrs), 1):
        optimizer.zero_grad()
        scale = [torch.tensor([float(v) for v in text.split(',')]).double()[:, None, None] for text in (cfg.mean, cfg.std)]
        x = (x.permute(0, 3, 1, 2).double() / 255 - scale[0]) / scale[1]
        logits = in_float64(model, joined(), x)
        loss = F.cross_entropy(logits, labels.long(), label_smoothing=cfg.label_smoothing)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([t for ts in layers.values() for t in ts], cfg.clip)
        out.append((loss.item(), norm.item()))
        for group in optimizer.param_groups:
            group['lr'] = lr * group['rate']
        optimizer.step()
        d = min(cfg.ema, (1 + number) / (10 + number))
        mean = {n: d * mean[n] + (1 - d) * w.detach() for n, w in joined().items()}
    return out, {n: w.detach() for n, w in joined().items()}, mean


def in_float64(model, weights, x_BCHW):
    """A plain ViT, written from the paper."""
    cfg = model.cfg
    B, (N, A) = len(x_BCHW), (cfg.heads, cfg.width // cfg.heads)
    kernel = weights['embed_ED'].T.view(cfg.width, 3, cfg.patch, cfg.patch)
    x = F.conv2d(x_BCHW, kernel, weights['embed_bias_D'], stride=cfg.patch).flatten(2).transpose(1, 2)
    x = x + train_vit.position_table(cfg, None, cfg.grid, x.device)
    for i in range(cfg.layers):
        w = {n: t[i] for n, t in weights.items() if '_L' in n}
        h = F.layer_norm(x, (cfg.width,), w['attn_norm_LD'], w['attn_norm_bias_LD'], cfg.norm_eps)
        q, k, v = ((h @ w[f'w{c}_LDX'] + w[f'{c}_bias_LX']).view(B, -1, N, A).transpose(1, 2) for c in 'qkv')
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, -1, cfg.width)
        x = x + a @ w['wo_LXD'] + w['o_bias_LD']
        h = F.layer_norm(x, (cfg.width,), w['mlp_norm_LD'], w['mlp_norm_bias_LD'], cfg.norm_eps)
        x = x + F.gelu(h @ w['w_up_LDF'] + w['up_bias_LF']) @ w['w_down_LFD'] + w['down_bias_LD']
    x = F.layer_norm(x, (cfg.width,), weights['final_norm_D'], weights['final_norm_bias_D'], cfg.norm_eps)
    return x.mean(1) @ weights['head_DK'] + weights['head_bias_K']


def device_steps(cfg, mesh, weights, batches, lrs):
    import torch_xla
    import torch_xla.distributed.spmd as xs
    device = torch_xla.device()
    _, state = train_vit.build(cfg, mesh, device)
    torch_xla.sync()
    weights = {n: torch.nn.Parameter(w.to(device)) for n, w in weights.items()}
    for n, w in weights.items():
        xs.mark_sharding(w, mesh, train_vit.SHARDING[n])
        if cfg.ema:
            with torch.no_grad():
                state[f'ema.{n}'].copy_(w)
    torch_xla.sync()
    update = Once(partial(train_vit.train_step, cfg, train_vit.ViT(cfg, mesh)), changes=2)
    out, compiled = [], runtime.n_compiles()
    for batch, lr in zip(batches, lrs):
        metrics = update(weights, state, *sent(cfg, mesh, batch), *(torch.tensor([x]).to(device) for x in (lr, 1.0)))
        torch_xla.sync()
        loss, norm, ok = metrics.cpu().tolist()
        assert ok == 1
        out.append((loss, norm))
    assert runtime.n_compiles() == compiled + 1
    mean = {n: whole(state[f'ema.{n}']) for n in weights} if cfg.ema else None
    return out, {n: whole(w) for n, w in weights.items()}, mean


@pytest.mark.parametrize('mesh,options', [
    ('1,8,1', {}), ('2,2,2', dict(label_smoothing=0.1, ema=0.5)), ('8,1,1', dict(accumulate=2, layer_decay=0.7)),
    ('1,2,4', dict(remat='block')), ('1,-1,1', dict(scan=False, global_batch=8))])
def test_training_on_8_devices_is_plain_pytorchs(devices, mesh, options):
    cfg = replace(SMALL, **options)
    args = make_weights(cfg, 0), list(make_batches(cfg, 0)), LRS
    mine, plain = device_steps(cfg, runtime.make_mesh(mesh, 8), *args), plain_steps(cfg, *args)
    for step, (a, b) in enumerate(zip(mine[0], plain[0], strict=True)):
        assert a == pytest.approx(b, rel=3e-5), step
    for n, w in plain[1].items():
        if n != 'k_bias_LX':  # its gradient is 0, for it moves all scores alike: Adam makes much of the rounding
            close(mine[1][n], w, f'{n} after {len(LRS)} steps', 5e-4)
            if cfg.ema:
                close(mine[2][n], plain[2][n], f'mean of {n}', 5e-4)


def test_stochastic_depth_leaves_out_by_depth(seed, monkeypatch):
    """Each layer's outputs are left out or made larger, so that their mean stays: of the first layer always in."""
    torch.manual_seed(seed)
    cfg = replace(SMALL, layers=3, drop_path=0.6, scan=False)
    masks = []

    def layer(cfg, mesh, T, x_RD, w):
        kept = [w[f'keep_{name}_LR'].view(-1, T) for name in ('attn', 'mlp')]
        assert all((k == k[:, :1]).all() for k in kept)  # of an image all patches or none
        masks.append([k[:, 0] for k in kept])
        return x_RD
    monkeypatch.setattr(train_vit, 'layer', layer)
    model, weights = train_vit.ViT(cfg), make_weights(cfg, 0)
    for _ in range(60):
        model(weights, torch.zeros(64, 3, 16, 16), training=True)
    for i, rate in enumerate((0, 0.3, 0.6)):
        for which in (0, 1):
            kept_B = torch.cat([m[which] for m in masks[i::3]])
            assert set(np.round(kept_B.tolist(), 4)) <= {0, round(1 / (1 - rate), 4)}
            assert (kept_B == 0).float().mean() == pytest.approx(rate, abs=0.03)
    assert any(not torch.equal(a, b) for a, b in masks)
    masks.clear()
    with pytest.raises(KeyError):
        model(weights, torch.zeros(2, 3, 16, 16))  # none in an evaluation


def test_learning_rates():
    cfg = replace(SMALL, lr=1.0, warmup=4, steps=12, final_lr=0.1)
    assert [train_vit.lr_at(cfg, n) for n in range(5)] == pytest.approx([.2, .4, .6, .8, 1])
    assert train_vit.lr_at(cfg, 8) == pytest.approx(0.55) and train_vit.lr_at(cfg, 12) == pytest.approx(0.1)


# ---- Evaluation ----

def test_each_image_is_counted_once(devices, image_set):
    """77 images in batches of 16 on 8 devices, against a plain loop."""
    import torch_xla
    cfg, mesh = replace(SMALL, mean='0.5', std='0.3', channels=1), runtime.make_mesh('2,4,1', 8)
    weights = make_weights(cfg, 3)
    source = images.Images(str(image_set), 'val')
    on_device = {n: w.to(torch_xla.device()) for n, w in weights.items()}
    rows = np.arange(16)
    found = train_vit.evaluate(cfg, answers_of(cfg, mesh), on_device, source, rows, lambda *batch: sent(cfg, mesh, batch))
    # Each device has the images that its host reads, and all answers, so that each host can read them.
    batch = sent(cfg, mesh, (np.arange(16, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2), np.arange(16)))
    answers = train_vit.answers(cfg, train_vit.ViT(cfg, mesh), on_device, *batch)
    torch_xla.sync(wait=True)
    images_, labels_, answers_ = torch_xla._XLAC._get_local_shards([*batch, answers])
    for device in range(8):
        mine = runtime.rows_of_host(16, mesh, runtime.Runtime('cpu', 8, device, 8, '', (device,))).tolist()
        assert images_[device][0][:, 0, 0, 0].tolist() == labels_[device][0][:, 0].tolist() == mine
        assert torch.equal(answers_[device][0], answers.cpu())
    pictures, labels = source.read(np.arange(len(source)))
    x = (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.3
    with torch.no_grad():
        p = train_vit.ViT(replace(cfg, scan=False))(weights, x).softmax(-1)
    labels_B = torch.from_numpy(labels).long()
    assert found['label'].tolist() == labels.tolist() and len(found['nll']) == 77
    s = train_vit.scores(found)
    assert s['val_images'] == 77
    assert s['val_loss'] == pytest.approx(F.nll_loss(p.log(), labels_B).item(), rel=1e-4)
    assert s['val_top1'] == pytest.approx((p.argmax(-1) == labels_B).float().mean().item())
    assert s['val_top5'] == pytest.approx((p.topk(5).indices == labels_B[:, None]).any(1).float().mean().item())
    error, confidence = 0, p.max(-1).values
    for low in np.arange(15) / 15:
        here = (confidence >= low) & (confidence < low + 1 / 15)
        if here.any():
            error += abs((p.argmax(-1) == labels_B)[here].float().mean() - confidence[here].mean()) * here.float().mean()
    assert s['val_calibration'] == pytest.approx(float(error), abs=1e-5)
    lost = {n: w * math.nan for n, w in on_device.items()}
    s = train_vit.scores(train_vit.evaluate(cfg, answers_of(cfg, mesh), lost, source, rows,
                                            lambda *batch: sent(cfg, mesh, batch)))
    assert math.isnan(s['val_loss']) and s['val_top1'] == s['val_top5'] == 0
    some = train_vit.evaluate(replace(cfg, eval_images=20), answers_of(cfg, mesh), on_device, source, rows,
                              lambda *batch: sent(cfg, mesh, batch))
    assert len(some['nll']) == 20 and set(np.round(some['nll'], 3)) <= set(np.round(found['nll'], 3))


def test_pictures(tmp_path):
    """The PNG files are those that Pillow reads; the text is escaped."""
    import base64
    import xml.etree.ElementTree as xml
    from PIL import Image
    rng = np.random.default_rng(0)
    for C in (1, 3):
        image_HWC = rng.integers(256, size=(5, 7, C), dtype=np.uint8)
        back = np.asarray(Image.open(io.BytesIO(picture.png(image_HWC))))
        assert (back.reshape(5, 7, C) == image_HWC).all()
    pictures = rng.integers(256, size=(11, 8, 8, 3), dtype=np.uint8)
    true, predicted = rng.integers(3, size=(2, 11))
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (true, predicted), 1)
    sure = rng.uniform(size=11)
    svg = picture.report('50% <top>', pictures, true, predicted, sure, ['a&b', '<c>', 'd\x01\ud800'], confusion)
    root = xml.fromstring(svg)
    shown = [e for e in root if e.tag.endswith('image')]
    assert len(shown) == 11
    for e, image in zip(shown, pictures):
        assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(e.attrib['href'].split(',')[1])))) == image).all()
    wrong = [e.text for e in root if e.attrib.get('fill') == '#c00']
    assert wrong == [f'{["a&b", "<c>", "d??"][p]} {s:.0%}' for t, p, s in zip(true, predicted, sure) if t != p]


# ---- Whole runs ----

@pytest.fixture(scope='module')
def image_set(tmp_path_factory):
    """300 to train on and 77 to validate."""
    folder = tmp_path_factory.mktemp('images')
    write_images(folder, train=(200, 100), val=77)
    return folder


def write_images(folder, train, val, brightness=0, classes=[f'row {k}' for k in range(K)]):
    """Grey images of 16 x 16 pixels: a bright bar whose place is the class. `train` is how many are in each shard."""
    rng = np.random.default_rng(0)
    shards, sums = [], []

    def pictures(n):
        for i in range(n):
            label = int(rng.integers(K))
            image = brightness + rng.integers(0, 90, size=(16, 16, 1))
            image[2 * label:2 * label + 2] += 120
            sums.append(image.mean() / 255)
            yield image.astype(np.uint8), label

    for split, index, n in (*(('train', i, n) for i, n in enumerate(train)), ('val', 0, val)):
        shards.append(images.write_shard(str(folder), split, index, (16, 16, 1), pictures(n)))
    images.write_manifest(str(folder), dict(
        format=1, kind='images', image=[16, 16, 1], classes=classes, mean=[float(np.mean(sums))],
        std=[0.2], resize='none', shards=shards, source={}))


OPTIONS = '''--device cpu --layers 2 --width 32 --heads 2 --mlp_width 64 --patch 4 --global_batch 16 --steps 12 --warmup 2
--lr 0.01 --log_every 1 --eval_every 4 --save_every 3 --keep 9 --drop_path 0.1 --mixup 0.2 --ema 0.9 --randaugment 2,5
--crop resized'''.split()


def run(out, data, *options):
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            train_vit.main([*OPTIONS, '--out', str(out), '--data', str(data), *map(str, options)])
        except SystemExit as e:
            code = e.code
    print(stdout.getvalue(), stderr.getvalue())
    return code, stdout.getvalue(), stderr.getvalue()


def metrics(out):
    lines = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    return [x for x in lines if 'loss' in x], [x for x in lines if 'val_loss' in x]


@pytest.fixture(scope='module')
def whole_run(image_set, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')
    code, stdout, stderr = run(out, image_set, '--strict')
    assert code == 0, stderr
    return out, stdout


def test_what_a_run_leaves(whole_run):
    out, stdout = whole_run
    steps, evals = metrics(out)
    assert [x['step'] for x in steps] == list(range(1, 13)) and [x['step'] for x in evals] == [0, 4, 8, 12]
    assert [x['images'] for x in steps] == [16 * n for n in range(1, 13)] and steps[-1]['images_per_s'] > 0
    assert all(x['val_images'] == 77 and 0 <= x['val_top1'] <= x['val_top5'] <= 1 for x in evals)
    assert len({x['compiles'] for x in steps}) == 1 and 'warning' not in stdout
    assert sorted(p.name for p in (out / 'samples').iterdir()) == [f'step_{n:08d}.svg' for n in (4, 8, 12)]
    assert sorted(p.name for p in (out / 'ckpt').iterdir()) == [f'step_{n:08d}' for n in (3, 6, 9, 12)]
    config = json.loads((out / 'config.json').read_text())
    assert (config['classes'], config['channels'], config['image_size'], config['grid']) == (K, 1, 16, 4)


def test_a_run_in_an_object_store_goes_on_bit_for_bit(whole_run, image_set, tmp_path, monkeypatch):
    """As that of train_gpt.py in test_runs.py; on a disk see test_kills.py."""
    import fsspec
    out, fs = f'memory://{tmp_path.name}/run', fsspec.filesystem('memory')
    for n, options in enumerate((['--stop_at', 5], [])):
        (tmp_path / f'machine {n}').mkdir()
        monkeypatch.chdir(tmp_path / f'machine {n}')
        code, stdout, stderr = run(out, image_set, '--strict', *options)
        assert code == 0 and (not n or f'goes on from {out}/ckpt/step_00000005' in stdout), stderr
    copy = tmp_path / 'copy'
    fs.get(f'/{tmp_path.name}/run', str(copy), recursive=True)
    for mine, theirs in zip(metrics(copy), metrics(whole_run[0])):
        assert [x['step'] for x in mine] == [x['step'] for x in theirs]
        for a, b in zip(mine, theirs):
            assert all(a[k] == b[k] for k in a if k in ('loss', 'grad_norm', 'val_loss', 'val_top1', 'lr', 'images'))
    a, b = stored(copy, 12), stored(whole_run[0], 12)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert {p.name for p in (copy / 'samples').iterdir()} == {p.name for p in (whole_run[0] / 'samples').iterdir()}
    assert 'is complete' in run(out, image_set)[1]
    train_vit.main(['--out', out, '--export', 'exported'])
    assert torch.equal(hf_vit.read(Path('exported'))[1]['head_bias_K'], a['ema.head_bias_K'])


@pytest.mark.slow
def test_it_learns(image_set, tmp_path):
    """The place of a bar, without augmentation: each of 7 classes in 400 steps."""
    code, stdout, stderr = run(tmp_path, image_set, '--steps', 400, '--lr', 5e-3, '--crop', 'none', '--flip', 'false', '--randaugment', '',
                               '--mixup', 0, '--drop_path', 0, '--eval_every', 0, '--save_every', 0, '--ema', 0)
    assert code == 0, stderr
    _, evals = metrics(tmp_path)
    assert evals[0]['val_top1'] < 0.4 and evals[-1]['val_top1'] > 0.95


def test_export_and_start_from_it(whole_run, image_set, tmp_path, seed):
    """The export is the mean of the weights; timm computes the same from it; and a run starts from it, with a head for
    other classes and at another size of the images."""
    out, _ = whole_run
    train_vit.main(['--out', str(out), '--export', str(tmp_path / 'timm')])
    found, weights = hf_vit.read(tmp_path / 'timm')
    then = stored(out, 12)
    assert torch.equal(weights['wq_LDX'], then['ema.wq_LDX']) and not torch.equal(then['ema.wq_LDX'], then['wq_LDX'])
    x_BCHW = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        close(train_vit.ViT(replace(SMALL, scan=False, **found))(weights, x_BCHW), timm_model(tmp_path / 'timm')(x_BCHW),
              'logits', 1e-5)
    source = images.Images(str(image_set), 'train')
    assert len(source) == 300
    code, stdout, stderr = run(tmp_path / 'a', image_set, '--init_from', tmp_path / 'timm', '--stop_at', 1, '--lr', 1e-9)
    assert code == 0 and 'starts from the weights of' in stdout, stderr
    first, best = metrics(tmp_path / 'a')[1][0], metrics(out)[1][-1]
    assert first['val_loss'] == pytest.approx(best['val_loss'], rel=1e-4)
    assert 'the head is kept: the same classes' in stdout and hf_vit.labels(tmp_path / 'timm')[2] == 'row 2'
    assert timm_model(tmp_path / 'timm').pretrained_cfg['label_names'][2] == 'row 2'
    write_images(tmp_path / 'others', (40,), 16, classes=[f'row {k}' for k in reversed(range(K))])
    for source in (out, tmp_path / 'timm'):
        code, stdout, stderr = run(tmp_path / f'c {source.name}', tmp_path / 'others', '--init_from', source,
                                   '--stop_at', 1)
        assert code == 0 and 'the head begins anew' in stdout, stderr
        assert metrics(tmp_path / f'c {source.name}')[1][0]['val_loss'] == pytest.approx(math.log(K))
    code, stdout, stderr = run(tmp_path / 'b', image_set, '--init_from', out, '--stop_at', 1, '--image_size', 8,
                               '--classes', 9, '--layer_decay', 0.7)
    assert code == 0, stderr
    config = json.loads((tmp_path / 'b' / 'config.json').read_text())
    assert (config['grid'], config['image_size'], config['classes']) == (4, 8, 9)
    assert stored(tmp_path / 'b', 1)['head_DK'].shape == (32, 9)


def test_other_data_and_another_size_when_a_run_goes_on(whole_run, tmp_path):
    """What the model has of its first data stays: else other pixels would be a reason to refuse."""
    shutil.copytree(whole_run[0], tmp_path / 'run')
    write_images(tmp_path / 'other', train=(40,), val=16, brightness=60)
    before = json.loads((tmp_path / 'run' / 'config.json').read_text())
    code, _, stderr = run(tmp_path / 'run', tmp_path / 'other', '--steps', 13)
    assert code == 2 and 'other data' in stderr and '--mean' not in stderr
    code, stdout, stderr = run(tmp_path / 'run', tmp_path / 'other', '--steps', 13, '--reset_data', '--image_size', 8)
    assert code == 0 and 'goes on from' in stdout and '--image_size 8 (was 16)' in stdout, stderr
    after = json.loads((tmp_path / 'run' / 'config.json').read_text())
    assert all(after[k] == before[k] for k in train_vit.SHAPE) and after['image_size'] == 8
    code, _, stderr = run(tmp_path / 'run', tmp_path / 'other', '--steps', 14, '--width', 64)
    assert code == 2 and '--width 32, not 64' in stderr


@pytest.mark.parametrize('options,says', [
    (['--patch', '5', '--image_size', '16'], '--patch 5'), (['--heads', '3'], '--heads 3'), (['--classes', '3'], '3 classes'),
    (['--randaugment', 'x'], '--randaugment x'), (['--mean', '1,2', '--std', '1,1'], '--mean 1,2'),
    (['--crop', 'centre'], 'resized, shift, none'), (['--global_batch', '12'], 'multiple of 8'),
    (['--global_batch', '8'], '--mixup 0.2: it mixes'),
    (['--channels', '3'], '3 channels'), (['--image_size', '32', '--crop', 'shift'], '16 x 16'),
    (['--data', 'nowhere'], 'data/images.py'), (['--image_size', '20', '--crop', 'resized'], 'store larger ones'),
    (['--std', 'nan'], '--std nan'), (['--mean', '1e39'], '--mean 1e39'), (['--weight_decay', '1e30'], '--weight_decay')])
def test_refusals(image_set, tmp_path, options, says):
    code, _, stderr = run(tmp_path / 'out', image_set, *options)
    assert code == 2 and says in stderr and len(stderr.splitlines()) == 1
    assert not (tmp_path / 'out' / 'metrics.jsonl').exists()


def test_the_default_data_are_made(whole_run, tmp_path, monkeypatch):
    """Unless there is a run, which had others."""
    made = []

    def make(command):
        made.append(command)
        return type('Done', (), dict(returncode=3))
    monkeypatch.setattr(train_vit.subprocess, 'run', make)
    monkeypatch.setattr(train_vit, '__file__', str(tmp_path / 'train_vit.py'))
    with pytest.raises(UserError, match='ended with 3'):
        train_vit.find_data(train_vit.Config(out=str(tmp_path / 'out')))
    with pytest.raises(UserError, match='holds a run, and --data is missing'):
        train_vit.find_data(train_vit.Config(out=str(whole_run[0])))
    assert len(made) == 1 and re.search('data/images.py$', str(made[0][1])) and not shutil.os.path.exists(tmp_path / 'data')
