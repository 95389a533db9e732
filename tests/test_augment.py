"""nano/augment.py against Pillow, against loops written here, and on 8 virtual devices against plain torch."""
import math
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from nano import augment, runtime

ROOT = Path(__file__).resolve().parent.parent
SIZES = [(33, 37), (32, 32), (17, 50)]  # H, W
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC


def pictures(seed, n, H, W, channels=3):
    """Noise, shades, a narrow range, few values, one value: what histograms and rounding are sensitive to."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, channels, H, W))
    shades = np.linspace(0, 255, W)[None, None] * rng.random((n, channels, 1, 1)) + rng.integers(0, 9, x.shape)
    for i in range(n):
        x[i] = [x[i], shades[i], 90 + x[i] // 8, x[i] // 100 * 100, np.full_like(x[i], 7)][i % 5]
    return torch.tensor(x.clip(0, 255), dtype=torch.uint8)


def to_pillow(x_CHW):
    return Image.fromarray(x_CHW.permute(1, 2, 0).squeeze(-1).numpy())


def from_pillow(image):
    x = torch.tensor(np.array(image))
    return (x[..., None] if x.ndim == 2 else x).permute(2, 0, 1)


def difference(found, expected):
    assert found.dtype == expected.dtype == torch.uint8 and found.shape == expected.shape
    return (found.int() - expected.int()).abs()


def check_each(op, x, pillows, tolerance, share=0.):
    """op on the batch is `pillows` on each image, up to `tolerance` grey levels, in at most `share` of the values."""
    expected = torch.stack([from_pillow(pillows(to_pillow(one))) for one in x])
    off = difference(op(x), expected)
    assert off.max() <= tolerance and (off > 0).float().mean() <= share, (off.max(), (off > 0).float().mean())


# ---- Crops ----

@pytest.mark.parametrize('kernel, resample', [(augment.triangle, BILINEAR), (augment.cubic, BICUBIC)])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize('H, W', SIZES)
def test_crop_is_pillows_resize_of_a_box(seed, kernel, resample, dtype, tolerance, H, W):
    """1 grey level: Pillow rounds after the first direction too. 2: weights of 8 bits. In cubic's case of greys that it
    does not take beyond black and white, for Pillow cuts off there after the first direction too, whichever that is."""
    rng = np.random.default_rng(seed)
    n = 15
    x = pictures(seed, n, H, W)
    if kernel == augment.cubic:
        x = x // 3 + 85
    corners = np.sort(rng.random((n, 2, 2)), 1) * [W, H]  # n, which corner, x and y: not in whole pixels
    corners[:, 1] = np.maximum(corners[:, 1], corners[:, 0] + 0.9)
    boxes = np.minimum(corners, [W, H]).reshape(n, 4).astype(np.float32)
    boxes[0] = 0, 0, W, H
    flip = rng.random(n) < 0.5
    for h, w in ((24, 31), (5, 40), (H, W)):
        found = augment.crop(x, torch.tensor(boxes), torch.tensor(flip), (h, w), kernel, dtype)
        for i in range(n):
            image = to_pillow(x[i]).resize((w, h), resample, tuple(map(float, boxes[i])))
            expected = from_pillow(ImageOps.mirror(image) if flip[i] else image)
            assert difference(found[i], expected).max() <= tolerance


def torchvision_box(rng, H, W, area, ratio):
    """RandomResizedCrop.get_params, as its documentation and code describe it."""
    for _ in range(10):
        target, aspect = H * W * rng.uniform(*area), math.exp(rng.uniform(*map(math.log, ratio)))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= W and 0 < h <= H:
            y, x = rng.randint(0, H - h), rng.randint(0, W - w)
            return x, y, x + w, y + h
    if W / H < ratio[0]:
        w, h = W, round(W / ratio[0])
    elif W / H > ratio[1]:
        w, h = round(H * ratio[1]), H
    else:
        w, h = W, H
    y, x = (H - h) // 2, (W - w) // 2
    return x, y, x + w, y + h


@pytest.mark.parametrize('H, W, area', [(64, 64, (0.08, 1.)), (40, 90, (0.25, 1.)), (97, 30, (0.5, 1.))])
def test_boxes_are_distributed_like_torchvisions(seed, H, W, area):
    """Area, ratio of the sides, and place: the same quantiles within 5 deviations of the difference of two samples. The
    last two shapes often need the fallback."""
    n, ratio = 20000, (3 / 4, 4 / 3)
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    found = augment.random_boxes(n, H, W, 'cpu', area).double().numpy()
    expected = np.array([torchvision_box(random_, H, W, area, ratio) for _ in range(n)], float)
    assert (found == found.round()).all() and (found[:, :2] >= 0).all() and (found[:, 2:] <= [W, H]).all()

    def figures(boxes):
        x0, y0, x1, y1 = boxes.T
        return (x1 - x0) * (y1 - y0) / (H * W), np.log((x1 - x0) / (y1 - y0)), x0, y0, x0 + y1

    for one, other in zip(figures(found), figures(expected)):
        at = np.sort(one)[n // 20::n // 10]
        share, theirs = ((v[:, None] <= at).mean(0) for v in (one, other))
        assert np.abs(share - theirs).max() < 5 * math.sqrt(2 * 0.25 / n)


def test_without_a_valid_draw_the_box_is_in_the_middle():
    for H, W, box in ((10, 100, (43, 0, 56, 10)), (100, 10, (0, 43, 10, 56))):
        assert augment.random_boxes(3, H, W, 'cpu', (1., 1.)).tolist() == [list(box)] * 3


def test_pad_crop_and_its_draws(seed):
    torch.manual_seed(seed)
    x = pictures(seed, 200, 9, 12, 1)
    dy, dx, flip = augment.random_shifts(200, 4, 'cpu'), augment.random_shifts(200, 4, 'cpu'), augment.coin(200, 'cpu')
    found = augment.pad_crop(x, dy, dx, flip)
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    for i, (b, a) in enumerate(zip(4 + dy.int(), 4 + dx.int())):
        cut = padded[i, :, b:b + 9, a:a + 12]
        assert (found[i].numpy() == (cut[..., ::-1] if flip[i] else cut)).all()
    counts = torch.bincount(augment.random_shifts(90000, 4, 'cpu').long() + 4, minlength=9)
    assert len(counts) == 9 and (counts - 10000).abs().max() < 5 * 100
    assert abs(augment.coin(90000, 'cpu').float().mean() - 0.5) < 5 * 0.5 / 300


# ---- RandAugment's operations ----

@pytest.mark.parametrize('H, W', SIZES)
@pytest.mark.parametrize('channels', [3, 1])
def test_operations_on_values_are_pillows(seed, H, W, channels):
    x = pictures(seed, 20, H, W, channels)
    check_each(augment.equalize, x, ImageOps.equalize, 0)
    check_each(augment.invert, x, ImageOps.invert, 0)
    # Pillow computes value * scale + offset in float64, and may miss the whole number that the quotient is.
    check_each(augment.autocontrast, x, ImageOps.autocontrast, 1, 0.05)
    for bits in (1, 4, 7):
        check_each(lambda x: augment.posterize(x, bits), x, lambda p: ImageOps.posterize(p, bits), 0)
    for threshold in (0, 77, 256):
        check_each(lambda x: augment.solarize(x, threshold), x, lambda p: ImageOps.solarize(p, threshold), 0)
    for name in 'color contrast brightness sharpness'.split():
        for factor in (0.1, 0.7, 1.9):  # 1: sums in another order, cut off at a whole number
            check_each(lambda x: getattr(augment, name)(x, factor), x,
                       lambda p: getattr(ImageEnhance, name.title())(p).enhance(factor), 1, 0.01)


def test_solarize_add_and_cutout(seed):
    x = pictures(seed, 10, 33, 37)
    values = x.numpy().astype(int)
    expected = np.where(values < 128, (values + 110).clip(0, 255), values)
    assert (augment.solarize_add(x, 110).numpy() == expected).all()
    expected = values.copy()
    at = np.random.default_rng(seed).integers(0, 33, (10, 2))
    for one, (b, a) in zip(expected, at):
        one[:, max(0, b - 6):b + 6, max(0, a - 6):a + 6] = 128
    assert (augment.cutout(x, *torch.tensor(at).T, 6).numpy() == expected).all()


@pytest.mark.parametrize('H, W', SIZES)
def test_shears_and_translations_are_pillows(seed, H, W):
    """1 grey level, where Pillow cuts off the fraction; only one direction is interpolated."""
    x = pictures(seed, 10, H, W)
    for matrix in ((1, 0.3, 0, 0, 1, 0), (1, -0.3, 0, 0, 1, 0), (1, 0, 0, 0.3, 1, 0), (1, 0, 0, -0.3, 1, 0),
                   (1, 0, 7.25, 0, 1, 0), (1, 0, 0, 0, 1, -9.5)):
        check_each(lambda x: augment.affine(x, *matrix), x, lambda p: p.transform(
            p.size, Image.Transform.AFFINE, matrix, BILINEAR, fillcolor=(128,) * 3), 1, 1.)


def test_rotation_is_like_pillows(seed):
    """Of a smooth picture, but for the edge: there the corners of a pixel's square are inside or outside."""
    H, W = 60, 71
    y, x = np.mgrid[:H, :W]
    phase = np.random.default_rng(seed).random((4, 3, 1, 1)) * 6
    waves = torch.tensor(128 + 100 * np.sin(x / 9 + y / 13 + phase)).to(torch.uint8)
    for degrees in (30, -30, 11):
        def rotated(p, fill):
            return from_pillow(p.rotate(degrees, BILINEAR, fillcolor=(fill,) * 3))
        found = augment.rotate(waves, degrees)
        for i in range(4):
            expected = rotated(to_pillow(waves[i]), 128)
            white = rotated(Image.new('RGB', (W, H), (255,) * 3), 0)[0].float()
            edge = torch.nn.functional.max_pool2d(torch.stack([white, -white])[None], 3, 1, 1)[0].sum(0) > 0
            off = difference(found[i], expected)
            assert off[:, ~edge].max() <= 3 and off.float().mean() < 2
            assert (found[i][:, (white == 0) & ~edge] == 128).all() and (white == 0).any()


def test_bfloat16_warps_are_as_good(seed):
    """Weights of 8 bits on values around grey: 1 grey level in each of two passes."""
    x = pictures(seed, 10, 33, 37)
    for matrix in ((1, 0.3, 0, 0, 1, 0), (0.87, -0.5, 4, 0.5, 0.87, -3)):
        off = difference(augment.affine(x, *matrix, dtype=torch.bfloat16), augment.affine(x, *matrix))
        assert off.max() <= 2


def test_each_operation_has_its_sixteenth_of_images_and_all_pairs_are_equally_likely(seed, monkeypatch):
    """Operations that write their number behind those before: what an image has been through can be read off it."""
    monkeypatch.setattr(augment, 'operations', lambda m, dtype: [lambda x, u, k=k: x * 16 + k for k in range(16)])
    torch.manual_seed(seed)
    x = torch.arange(96, dtype=torch.int32)[:, None, None, None]
    pairs = torch.zeros(96, 256)
    for _ in range(1000):
        out = augment.randaugment(x, 2, group=32).flatten()
        assert (out // 256 == x.flatten()).all(), 'an image is not in its place'
        pair = out % 256
        for half in (pair // 16, pair % 16):
            assert (torch.bincount(half.view(3, 32)[0], minlength=16) == 2).all()
        pairs[torch.arange(96), pair] += 1
    for one in (pairs[0], pairs[77], pairs[:32].sum(0) / 32):  # 3.9 of each pair expected
        assert (one - 1000 / 256).abs().max() < 8 * math.sqrt(1000 / 256)
    counts = torch.zeros(16)  # fewer images than operations
    for _ in range(800):
        counts += torch.bincount(augment.randaugment(x[:3], 1, group=3).flatten() % 16, minlength=16)
    assert (counts - 150).abs().max() < 6 * math.sqrt(150)
    with pytest.raises(ValueError, match='96 images cannot be divided into groups of 64'):
        augment.randaugment(x)


def test_the_operations_are_those_of_magnitude_10(seed):
    """Each in its place in the list, with both signs; and at magnitude 0 most do nothing."""
    x = pictures(seed, 40, 56, 56)
    torch.manual_seed(seed)
    warps = {3: [augment.rotate(x, a) for a in (30, -30)],
             10: [augment.affine(x, 1, s, 0, 0, 1, 0) for s in (0.3, -0.3)],
             11: [augment.affine(x, 1, 0, 0, s, 1, 0) for s in (0.3, -0.3)],
             12: [augment.affine(x, 1, 0, s, 0, 1, 0) for s in (25, -25)],
             13: [augment.affine(x, 1, 0, 0, 0, 1, s) for s in (25, -25)]}
    plain = {0: augment.autocontrast, 1: augment.equalize, 2: augment.invert, 4: lambda x: augment.posterize(x, 4),
             5: lambda x: x, 6: lambda x: augment.color(x, 1.9), 7: lambda x: augment.contrast(x, 1.9),
             8: lambda x: augment.brightness(x, 1.9), 9: lambda x: augment.sharpness(x, 1.9),
             15: lambda x: augment.solarize_add(x, 110)}
    ops = [partial(op, u_B2=torch.rand(40, 2)) for op in augment.operations(10)]
    assert len(ops) == 16
    for k, op in plain.items():
        assert torch.equal(ops[k](x), op(x)), k
    for k, (one, other) in warps.items():
        found = ops[k](x)
        is_one, is_other = ((found == y).flatten(1).all(1) for y in (one, other))
        assert (is_one | is_other).all() and is_one.any() and is_other.any(), k
    covered = (ops[14](torch.zeros_like(x)) == 128)[:, 0].sum((1, 2))
    assert covered.max() == 20 * 20 and covered.min() >= 10 * 10 and len(set(covered.tolist())) > 5
    for k in (3, 10, 11, 12, 13, 14, 15):
        assert torch.equal(augment.operations(0)[k](x, torch.rand(40, 2)), x)


# ---- Mixup, normalization ----

def test_a_group_is_the_largest_part_of_a_devices_images():
    assert [augment.group_of(n) for n in (1, 5, 64, 67, 96, 128, 1000)] == [1, 5, 64, 1, 48, 64, 50]


def test_mixup_mixes_neighbors_of_a_group(seed):
    torch.manual_seed(seed)
    x, targets = pictures(seed, 12, 4, 5), torch.eye(12)
    partner = [1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8]
    for share in (torch.tensor([0.8]), torch.rand(12)):
        mixed, labels = augment.mixup(share, x, targets, group=4)
        a = share.view(-1, 1, 1, 1)
        torch.testing.assert_close(mixed, a * x + (1 - a) * x[partner])
        torch.testing.assert_close(labels, a[:, :, 0, 0] * targets + (1 - a[:, :, 0, 0]) * targets[partner])


@pytest.mark.parametrize('a', [0.2, 0.5, 1.0])
def test_shares_of_mixup_are_betas_larger_part(seed, a):
    """Against the distribution integrated here, with s = t^a, in which its density has no pole."""
    n = 20000
    shares = np.array([augment.mixup_share(a, runtime.seed_of(seed, i)) for i in range(n)])
    s = np.linspace(0, 0.5 ** a, 100001)
    density = (1 - s ** (1 / a)) ** (a - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    quantiles = np.linspace(0.05, 0.95, 19)
    expected = 1 - np.interp(1 - quantiles, mass / mass[-1], s) ** (1 / a)
    share = (shares[:, None] <= expected).mean(0)
    assert np.abs(share - quantiles).max() < 5 * 0.5 / math.sqrt(n)
    assert augment.mixup_share(a, 5) == augment.mixup_share(a, 5) and augment.mixup_share(0, 5) == 1


def test_normalize():
    x = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = [(v - m) / s for v, m, s in zip((0, 128 / 255, 1), augment.IMAGENET_MEAN, augment.IMAGENET_STD)]
    torch.testing.assert_close(augment.normalize(x, augment.IMAGENET_MEAN, augment.IMAGENET_STD).flatten(),
                               torch.tensor(expected))
    half = (0.5,) * 3
    assert augment.normalize(x, half, half, torch.bfloat16).flatten().tolist() == [-1, 0.003936767578125, 1]


# ---- On devices ----

@pytest.fixture(scope='module')
def mesh():
    runtime.start('cpu')
    return runtime.make_mesh('4,2,1', 8)


def augmented(x_BHWC, targets, share):
    B, H, W, _ = x_BHWC.shape
    cropped = augment.crop(x_BHWC.permute(0, 3, 1, 2), augment.random_boxes(B, H, W, x_BHWC.device),
                           augment.coin(B, x_BHWC.device), (16, 16))
    varied = augment.randaugment(cropped, group=4)
    mixed, targets = augment.mixup(share, varied, targets, group=4)
    return cropped, varied, augment.normalize(mixed, augment.IMAGENET_MEAN, augment.IMAGENET_STD), targets


def place(mesh, *tensors):
    import torch_xla
    import torch_xla.distributed.spmd as xs
    tensors = [t.to(torch_xla.device()) for t in tensors]
    for t in tensors:
        if mesh and len(t) > 1:
            xs.mark_sharding(t, mesh, (('data', 'fsdp'), *[None] * (t.ndim - 1)))
    return tensors


def test_on_devices_it_is_what_plain_torch_computes(mesh, seed, monkeypatch):
    """First with the device's own draws: one compile, reproducible from seed and step, each image another. Then with
    draws that are the same everywhere: sharded over 8 devices, on one, and in plain torch. XLA may round a half the
    other way, and RandAugment make more of it: in 2 of 1,000 values."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    x_BHWC = pictures(seed, 32, 19, 23).permute(0, 2, 3, 1).contiguous()
    x_BHWC[1:] = x_BHWC[0]
    inputs = x_BHWC, torch.eye(32), torch.tensor([0.7])

    outputs = []
    for step in (1, 2, 3, 2):
        before = runtime.n_compiles()
        placed = place(mesh, *inputs)
        xm.set_rng_state(runtime.seed_of(seed, step))
        out = augmented(*placed)
        torch_xla.sync()
        assert runtime.n_compiles() - before == (not outputs), 'one graph, for all steps'
        outputs.append([t.cpu() for t in out])  # which compiles too
    one, two, three, again = outputs
    for a, b, c in zip(two, again, three):
        assert torch.equal(a, b)
    for k in range(3):
        assert not torch.equal(two[k], three[k])
        assert len(two[k].flatten(1).unique(dim=0)) > 24, 'images are augmented alike'

    def drawn(*shape, device=None):
        values = rng.random(shape[0] if isinstance(shape[0], tuple) else shape, np.float32)
        return torch.tensor(values).to(device)

    monkeypatch.setattr(torch, 'rand', drawn)
    results = []
    for where in ('plain', None, mesh):
        rng = np.random.default_rng(seed)
        out = augmented(*(inputs if where == 'plain' else place(where, *inputs)))
        torch_xla.sync()
        results.append([t.cpu() for t in out])
    for found in results[1:]:
        for k, (a, b) in enumerate(zip(found, results[0])):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert ((a.float() - b.float()).abs() > 1e-5).float().mean() < (5e-4, 2e-3, 2e-3, 0)[k] + 1e-9, k


COMPILE = f'''
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from nano import augment, chips, runtime
from nano.plan import aot, compiler_flags, report
where = chips.find_slice('v5e-4')
aot.start(where.n_chips)
import torch_xla.distributed.spmd as xs
mesh = runtime.make_mesh('2,2,1', where.n_chips)

def make(device):
    w, share = torch.nn.Parameter(torch.empty(1, device=device)), torch.zeros(1, device=device)
    x = torch.zeros(64, 40, 40, 3, dtype=torch.uint8, device=device)
    xs.mark_sharding(w, mesh, (None,))
    xs.mark_sharding(x, mesh, (('data', 'fsdp'), None, None, None))

    def run():
        boxes, flip = augment.random_boxes(64, 40, 40, device), augment.coin(64, device)
        y = augment.crop(x.permute(0, 3, 1, 2), boxes, flip, (32, 32), dtype=torch.bfloat16)
        y, = augment.mixup(share, augment.randaugment(y, group=16, dtype=torch.bfloat16), group=16)
        with torch.no_grad():
            w.add_(augment.normalize(y, augment.IMAGENET_MEAN, augment.IMAGENET_STD).square().sum())
        return w
    return aot.Step(dict(w=w), dict(), dict(x=x, share=share), run, 'images', 64, 1, 1., '')

traced = aot.trace(make, where.n_chips)
compiled = aot.compile_step(traced, where, compiler_flags('v5e'), None)
found = report.figures(traced, compiled, where, (2, 2, 1))
print('sent', sum(c['bytes'] for c in found['collectives']), len(compiled.warnings))
'''


@pytest.mark.slow
def test_nothing_is_sent_between_chips(tmp_path):
    """Compiled for 4 chips of a TPU: only the sum that stands for the training step, 4 bytes around a ring."""
    script = tmp_path / 'compile.py'
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k not in ('PJRT_DEVICE', 'CPU_NUM_DEVICES', 'XLA_FLAGS')}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    sent, n_bytes, warnings = done.stdout.split()[-3:]
    assert sent == 'sent' and 0 < float(n_bytes) <= 16 and warnings == '0', done.stdout
