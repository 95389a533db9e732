"""Image augmentation on the device: random crops, flips, RandAugment, mixup. Plain torch, one graph for all steps.

    x_BCHW = images_BHWC.permute(0, 3, 1, 2)  # uint8
    boxes_B4, flip_B = augment.random_boxes(B, H, W, x_BCHW.device), augment.coin(B, x_BCHW.device)
    x_BCHW = augment.randaugment(augment.crop(x_BCHW, boxes_B4, flip_B, (224, 224)), n=2, m=10)
    x_BCHW, targets_BV = augment.mixup(share, x_BCHW, F.one_hot(labels_B, V).float())
    x_BCHW = augment.normalize(x_BCHW, augment.IMAGENET_MEAN, augment.IMAGENET_STD)

with `share`, one number on the device, from `mixup_share(0.2, seed)` on the host. Operations on images take and return
uint8, as Pillow's do, and are what Pillow computes but for differences that they name. `random_boxes`, `random_shifts`,
`coin` and `randaugment` draw by torch.rand on the device. `dtype` is that of matmuls and of what `normalize` returns:
with bfloat16 a TPU moves less memory, and its matrix unit takes nothing finer by default.

Where the first dimension lies along a mesh nothing is sent between chips, if the images on each chip are a multiple of
`group`: what mixes images or deals out operations does so within groups of images that follow one another.

128 images of 256 pixels, with RandAugment and mixup at 224, take a v5e 0.4 ms by the plan's rules, which know of memory
traffic and matmuls, and 6.5 ms by the compiler's own estimates, 0.7 of these for what is done without augmentation too.
Training ViT-S/16 on them is 3.5 TFLOP, 36 ms at half of the peak. By the estimates the largest parts are the warps (2.0
ms), shuffling (1.1) and equalizing (0.9).

Letters: B images, G groups, R images in a group, C channels, H rows, W columns, h and w those of the result, P = H * W
pixels, K pixels that an interpolation reads, V values of a pixel, D and E its two digits, n draws, T attempts.
"""
import math
from functools import partial
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's models/_meta, for 0 to 1
GROUP = 64
GREY = 128  # what a warp or a cutout leaves empty, as in big_vision


def group_of(n: int) -> int:
    """The largest group that n images on a device can be cut into."""
    return max(g for g in range(1, min(n, GROUP) + 1) if n % g == 0)


def normalize(x_BCHW: torch.Tensor, mean: tuple, std: tuple, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(x / 255 - mean) / std for each channel; mean = std = (0.5,) * C is big_vision's value_range(-1, 1). Computed in
    `dtype`, for the compiler moves the images to another layout before it would round the result."""
    mean_C11, std_C11 = (torch.tensor(v, device=x_BCHW.device)[:, None, None] * 255 for v in (mean, std))
    return (x_BCHW.to(dtype) - mean_C11.to(dtype)) / std_C11.to(dtype)


def coin(n: int, device) -> torch.Tensor:
    """n draws of true or false."""
    return torch.rand(n, device=device) < 0.5


# ---- Crops: two small matmuls for each image, which interpolate along rows and along columns ----

def random_boxes(n: int, H: int, W: int, device, area: tuple = (0.08, 1.0),
                 ratio: tuple = (3 / 4, 4 / 3)) -> torch.Tensor:
    """Boxes [n, 4] for Inception's crops (Szegedy et al. 2015): left, upper, right, lower, in whole pixels. As
    torchvision's RandomResizedCrop draws them: the share of the area uniform, the ratio of width to height log-uniform,
    ten attempts, else the largest box in the middle whose ratio is allowed. big_vision takes area from 0.05."""
    share_nT, turn_nT = torch.rand(n, 10, device=device), torch.rand(n, 10, device=device)
    y_n, x_n = torch.rand(n, device=device), torch.rand(n, device=device)
    area_nT = H * W * (area[0] + (area[1] - area[0]) * share_nT)
    ratio_nT = ratio[0] * (ratio[1] / ratio[0]) ** turn_nT
    w_nT, h_nT = (area_nT * ratio_nT).sqrt().round(), (area_nT / ratio_nT).sqrt().round()
    good_nT = (0 < w_nT) & (w_nT <= W) & (0 < h_nT) & (h_nT <= H)
    first_nT = good_nT & (good_nT.cumsum(1) == 1)
    w0, h0 = min(W, round(H * ratio[1])), min(H, round(W / ratio[0]))
    found_n = good_nT.any(1)
    w_n = torch.where(found_n, (w_nT * first_nT).sum(1), w0)
    h_n = torch.where(found_n, (h_nT * first_nT).sum(1), h0)
    left_n = torch.where(found_n, (x_n * (W - w_n + 1)).floor().clamp(max=W - w_n), (W - w0) // 2)
    upper_n = torch.where(found_n, (y_n * (H - h_n + 1)).floor().clamp(max=H - h_n), (H - h0) // 2)
    return torch.stack([left_n, upper_n, left_n + w_n, upper_n + h_n], 1)


def triangle(t: torch.Tensor) -> torch.Tensor:
    return (1 - t.abs()).clamp(min=0)


def cubic(t: torch.Tensor) -> torch.Tensor:
    """Keys 1981 with a = -1/2, as Pillow's BICUBIC."""
    t = t.abs()
    return torch.where(t < 1, (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2) * (t < 2)


def crop(x_BCHW: torch.Tensor, boxes_B4: torch.Tensor, flip_B: torch.Tensor, size: tuple[int, int],
         kernel: Callable = triangle, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Resizes the box of each image to size (h, w), mirrored where `flip_B`; what shrinks is antialiased. As Pillow's
    `image.resize((w, h), BILINEAR, box)`, or BICUBIC with `kernel=cubic`, up to 1 grey level: Pillow rounds after each
    of the two directions (and cuts off what cubic takes beyond black and white, here that is done once). In bfloat16,
    in which a TPU multiplies anyway, up to 2."""
    (h, w), (H, W) = size, x_BCHW.shape[2:]
    left_B, upper_B, right_B, lower_B = boxes_B4.unbind(1)
    rows_BhK = resize_weights(upper_B, lower_B, h, H, kernel)
    from_B, to_B = torch.where(flip_B, right_B, left_B), torch.where(flip_B, left_B, right_B)
    columns_BwK = resize_weights(from_B, to_B, w, W, kernel)
    return interpolate(x_BCHW, rows_BhK, columns_BwK, dtype)


def resize_weights(start_B: torch.Tensor, end_B: torch.Tensor, n: int, K: int, kernel: Callable) -> torch.Tensor:
    """[B, n, K]: what each of K pixels counts for in each of n that span start to end; end < start runs backwards."""
    step_B1 = ((end_B - start_B) / n)[:, None]
    at_Bn = start_B[:, None] + step_B1 * (torch.arange(n, device=start_B.device) + 0.5)
    pixels_K = torch.arange(K, device=start_B.device) + 0.5
    weights_BnK = kernel((pixels_K - at_Bn[..., None]) / step_B1.abs().clamp(min=1)[..., None])
    return weights_BnK / weights_BnK.sum(-1, keepdim=True)


def pad_crop(x_BCHW: torch.Tensor, dy_B: torch.Tensor, dx_B: torch.Tensor, flip_B: torch.Tensor) -> torch.Tensor:
    """Moves each image by whole pixels, up and to the left, then mirrors it where `flip_B`; what comes in is 0. With dy
    and dx from `random_shifts` it is the crop of CIFAR's images out of a border of zeros (He et al. 2016, section 4.2).
    """
    H, W = x_BCHW.shape[2:]
    y_H, x_W = torch.arange(H, device=x_BCHW.device), torch.arange(W, device=x_BCHW.device)
    rows_BHK = (y_H == (y_H + dy_B[:, None])[..., None]).float()
    from_BW = torch.where(flip_B[:, None], W - 1 - x_W, x_W) + dx_B[:, None]
    return interpolate(x_BCHW, rows_BHK, (x_W == from_BW[..., None]).float(), empty=0)


def random_shifts(n: int, pad: int, device) -> torch.Tensor:
    """n whole numbers from -pad to pad."""
    return (torch.rand(n, device=device) * (2 * pad + 1)).floor().clamp(max=2 * pad) - pad


def interpolate(x_BCHW: torch.Tensor, rows_BhH: torch.Tensor, columns_BwW: torch.Tensor,
                dtype: torch.dtype = torch.float32, empty: int = GREY) -> torch.Tensor:
    """rows @ x @ columns^T for each image; where weights sum to less than 1 the rest is `empty`."""
    x = (x_BCHW.float() - empty).to(dtype)  # whole numbers up to 256 are exact in bfloat16
    x_BCHw = torch.einsum('bchk,bwk->bchw', x, columns_BwW.to(dtype))
    x_BChw = torch.einsum('bckw,bhk->bchw', x_BCHw, rows_BhH.to(dtype))
    return to_uint8(x_BChw.float() + empty)


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp(0, 255).to(torch.uint8)


# ---- RandAugment's operations, each uint8 to uint8: Pillow's ImageOps, ImageEnhance and Image.transform ----

def autocontrast(x_BCHW: torch.Tensor) -> torch.Tensor:
    x = x_BCHW.float()
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    # 1e-3 is less than 1/255, the least distance of another ratio from a whole number, and more than a TPU's error.
    stretched = ((x - low) * 255 / (high - low).clamp(min=1) + 1e-3).floor()
    return torch.where(high > low, stretched, x).to(torch.uint8)


def equalize(x_BCHW: torch.Tensor) -> torch.Tensor:
    """Counting values and looking them up in a table, for which a TPU has no fast way, by matmuls of one-hot vectors. A
    value is two digits of base 16: 2 x 16 comparisons will do, in place of 256 (8 images of 224 pixels on a v5e: 0.5 ms
    in place of 4.1, by the compiler's estimate)."""
    B, C, H, W = x_BCHW.shape
    x_BC1P = x_BCHW.reshape(B, C, 1, H * W).int()
    digits_D1 = torch.arange(16, device=x_BCHW.device, dtype=torch.int32)[:, None]
    high_BCDP, low_BCEP = (x_BC1P >> 4 == digits_D1).float(), (x_BC1P & 15 == digits_D1).float()
    counts_BCDE = torch.einsum('bcdp,bcep->bcde', high_BCDP, low_BCEP)  # sums of ones: exact
    counts_BCV = counts_BCDE.flatten(2)
    below_BCV = counts_BCV.cumsum(2) - counts_BCV  # pixels that are darker than V
    below_highest_BC1 = (below_BCV * (counts_BCV > 0)).amax(2, keepdim=True)
    step_BC1 = ((below_highest_BC1 + 0.5) / 255).floor()  # halves so that no quotient is close to a whole number
    table_BCV = ((below_BCV + (step_BC1 / 2).floor() + 0.5) / step_BC1.clamp(min=1)).floor().clamp(max=255)
    y_BCDP = torch.einsum('bcde,bcep->bcdp', table_BCV.view(B, C, 16, 16), low_BCEP)
    y_BCP = (y_BCDP * high_BCDP).sum(2)
    return torch.where(step_BC1 > 0, y_BCP, x_BC1P[:, :, 0]).reshape(B, C, H, W).to(torch.uint8)


def invert(x_BCHW: torch.Tensor) -> torch.Tensor:
    return 255 - x_BCHW


def posterize(x_BCHW: torch.Tensor, bits: int) -> torch.Tensor:
    return x_BCHW & (256 - 2 ** (8 - bits))


def solarize(x_BCHW: torch.Tensor, threshold: int) -> torch.Tensor:
    return torch.where(x_BCHW.int() < threshold, x_BCHW, 255 - x_BCHW)


def solarize_add(x_BCHW: torch.Tensor, addition: int) -> torch.Tensor:
    return torch.where(x_BCHW < 128, (x_BCHW.int() + addition).clamp(0, 255).to(torch.uint8), x_BCHW)


def blend(from_BCHW: torch.Tensor, x_BCHW: torch.Tensor, factor: float) -> torch.Tensor:
    """Pillow's Image.blend: above 1 it goes on beyond x. What is behind the point is cut off."""
    return (from_BCHW + factor * (x_BCHW - from_BCHW)).clamp(0, 255).floor().to(torch.uint8)


def grey(x: torch.Tensor) -> torch.Tensor:
    """Pillow's convert('L') of float pixels, ITU-R 601 in units of 2^-16: exact in float32. Of one channel, itself."""
    if x.shape[1] == 1:
        return x
    r, g, b = x.split(1, 1)
    return ((r * 19595 + g * 38470 + b * 7471 + 32768) / 65536).floor()


def color(x_BCHW: torch.Tensor, factor: float) -> torch.Tensor:
    x = x_BCHW.float()
    return blend(grey(x), x, factor)


def contrast(x_BCHW: torch.Tensor, factor: float) -> torch.Tensor:
    x = x_BCHW.float()
    return blend((grey(x).mean((2, 3), keepdim=True) + 0.5).floor(), x, factor)


def brightness(x_BCHW: torch.Tensor, factor: float) -> torch.Tensor:
    return blend(torch.zeros(1, device=x_BCHW.device), x_BCHW.float(), factor)


def sharpness(x_BCHW: torch.Tensor, factor: float) -> torch.Tensor:
    """Away from (or to) the mean of 3 x 3 pixels, the middle one of weight 5; the border stays."""
    if min(x_BCHW.shape[2:]) < 3:
        return x_BCHW  # all border
    x = x_BCHW.float()
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[:, :, 1:-1, 1:-1]
    inside = F.pad(torch.ones_like(sums), (1, 1, 1, 1)) > 0
    return blend(torch.where(inside, F.pad((sums / 13 + 0.5).floor(), (1, 1, 1, 1)), x), x, factor)


def affine(x_BCHW: torch.Tensor, a: float, b: float, c: float, d: float, e: float, f: float,
           dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Pixel (x, y) of the result is the image at (a x + b y + c, d x + e y + f), as in Pillow's
    `image.transform(size, AFFINE, (a, ..., f), BILINEAR)`, grey outside of the image.

    First along rows, then along columns (Catmull and Smith 1980), by matmuls whose weights are the same for all images,
    for a TPU's gather takes one pixel after the other. Like Pillow's up to 1 grey level if only rows or only columns
    move; else interpolation in two passes is not quite that in one."""
    H, W = x_BCHW.shape[2:]
    y_H, x_W = torch.arange(H, device=x_BCHW.device) + 0.5, torch.arange(W, device=x_BCHW.device) + 0.5
    # Row v of the image holds pixel (x, y) of the result where v = d x + e y + f: solved for y.
    from_HW = (a - b * d / e) * x_W + b / e * y_H[:, None] + c - b * f / e
    from_WH = d * x_W[:, None] + e * y_H + f

    def weights(at: torch.Tensor, K: int) -> torch.Tensor:
        pixels_K = torch.arange(K, device=at.device)
        inside = (at >= 0) & (at < K)
        return (triangle((at - 0.5).clamp(0, K - 1)[..., None] - pixels_K) * inside[..., None]).to(dtype)

    x = (x_BCHW.float() - GREY).to(dtype)
    if (a, b, c) != (1, 0, 0):
        x = torch.einsum('bchk,hwk->bchw', x, weights(from_HW, W))
    if (d, e, f) != (0, 1, 0):
        x = torch.einsum('bckw,whk->bchw', x, weights(from_WH, H))
    return to_uint8(x.float() + GREY)


def rotate(x_BCHW: torch.Tensor, degrees: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Around the middle, counterclockwise, as Pillow's `image.rotate(degrees, BILINEAR)`."""
    H, W = x_BCHW.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = W / 2, H / 2
    return affine(x_BCHW, cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos, dtype)


def cutout(x_BCHW: torch.Tensor, y_B: torch.Tensor, x_B: torch.Tensor, half: int) -> torch.Tensor:
    """A grey square of 2 * half pixels around (y, x), less what is outside (DeVries and Taylor 2017)."""
    H, W = x_BCHW.shape[2:]

    def covered(at_B: torch.Tensor, n: int) -> torch.Tensor:
        pixels = torch.arange(n, device=at_B.device) - at_B[:, None]
        return (pixels >= -half) & (pixels < half)

    square_BHW = covered(y_B, H)[:, :, None] & covered(x_B, W)[:, None]
    return torch.where(square_BHW[:, None], GREY, x_BCHW)


def operations(m: float, dtype: torch.dtype = torch.float32) -> list[Callable]:
    """RandAugment's operations at magnitude m of 10, those of big_vision/pp/autoaugment.py with its arguments. Each
    takes images and two draws between 0 and 1 for each image.

    Not as there: warps interpolate, where big_vision takes the nearest pixel; contrast is away from the mean, as in
    Pillow, where big_vision has the number of pixels / 256; translations by 100 pixels and cutouts of 2 * 40 are meant
    for 224, and in proportion for other sizes. At 10 solarize does nothing (its threshold is 256), posterize keeps 4
    bits, and color, contrast, brightness and sharpness are 1.9 times what they were.

    To add one, write a function from uint8 to uint8 [B, C, H, W] and put it into the list: each is drawn as often as
    any other."""
    share = m / 10
    enhance = 0.1 + 1.8 * share

    def sure(op: Callable, *args) -> Callable:
        return lambda x, u_B2: op(x, *args)

    def either_way(op: Callable) -> Callable:
        return lambda x, u_B2: torch.where(u_B2[:, 0, None, None, None] < 0.5, op(x, share), op(x, -share))

    def move(along: str, x: torch.Tensor, by: float) -> torch.Tensor:
        H, W = x.shape[2:]
        return affine(x, 1, 0, by * 100 / 224 * W * (along == 'x'), 0, 1, by * 100 / 224 * H * (along == 'y'), dtype)

    def cut(x: torch.Tensor, u_B2: torch.Tensor) -> torch.Tensor:
        H, W = x.shape[2:]
        return cutout(x, (u_B2[:, 0] * H).floor(), (u_B2[:, 1] * W).floor(), int(share * 40 / 224 * min(H, W)))

    return [sure(autocontrast), sure(equalize), sure(invert),
            either_way(lambda x, by: rotate(x, 30 * by, dtype)),
            sure(posterize, int(4 * share)), sure(solarize, int(256 * share)),
            sure(color, enhance), sure(contrast, enhance), sure(brightness, enhance), sure(sharpness, enhance),
            either_way(lambda x, by: affine(x, 1, 0.3 * by, 0, 0, 1, 0, dtype)),
            either_way(lambda x, by: affine(x, 1, 0, 0, 0.3 * by, 1, 0, dtype)),
            either_way(partial(move, 'x')), either_way(partial(move, 'y')),
            cut, sure(solarize_add, int(110 * share))]


N_OPERATIONS = len(operations(0.0))


def randaugment(x_BCHW: torch.Tensor, n: int = 2, m: float = 10, group: int = GROUP,
                dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """n operations on each image, one after the other, each drawn from all (Cubuk et al. 2020): there are 16.

    Drawn without replacement: the images of a group are shuffled, the first sixteenth of them gets the first operation,
    and so on. So an operation is computed for those images only that get it, and not for all to choose from, 16 times
    as many. To each image it is RandAugment: every sequence of operations is equally likely. The shuffle is the same in
    all groups of a batch. Raises ValueError if `group` does not divide the batch."""
    if len(x_BCHW) % group:
        raise ValueError(f'{len(x_BCHW)} images cannot be divided into groups of {group}')
    R = -(-group // N_OPERATIONS) * N_OPERATIONS
    x_GRCHW = F.pad(x_BCHW.unflatten(0, (-1, group)), (0,) * 7 + (R - group,))
    order_R = torch.arange(R, device=x_BCHW.device, dtype=torch.int32)
    for _ in range(n):
        shuffle_R = ranks(torch.rand(R, device=x_BCHW.device))
        u_GR2 = torch.rand(*x_GRCHW.shape[:2], 2, device=x_BCHW.device)
        x_GRCHW = one_each(m, dtype, x_GRCHW.index_select(1, shuffle_R), u_GR2)
        order_R = order_R.index_select(0, shuffle_R)
    return x_GRCHW.index_select(1, ranks(order_R))[:, :group].flatten(0, 1)


def one_each(m: float, dtype: torch.dtype, x_GRCHW: torch.Tensor, u_GR2: torch.Tensor) -> torch.Tensor:
    """Of each group the first images go through the first operation, the next through the second, ..."""
    parts = zip(operations(m, dtype), x_GRCHW.chunk(N_OPERATIONS, 1), u_GR2.chunk(N_OPERATIONS, 1))
    return torch.cat([op(x.flatten(0, 1), u.flatten(0, 1)).unflatten(0, x.shape[:2]) for op, x, u in parts], 1)


def ranks(x: torch.Tensor) -> torch.Tensor:
    return x.argsort().int()  # torch_xla 2.9's index_select ends the process if it gets a sort's second result itself


# ---- Mixup ----

def mixup(share: torch.Tensor, *things: torch.Tensor, group: int = GROUP) -> list[torch.Tensor]:
    """share * thing + (1 - share) * the next image's, of images and of targets alike (Zhang et al. 2018). `share` [1]
    is for all, [B] for each. The last image of a group is mixed with the group's first: in a batch in random order a
    neighbor is any image, and none has to go to another chip. Before `normalize`, for uint8 images move faster."""
    mixed = []
    for thing in things:
        next_one = thing.unflatten(0, (-1, group)).roll(-1, 1).flatten(0, 1)
        a = share.reshape(-1, *[1] * (thing.ndim - 1))
        mixed.append(a * thing + (1 - a) * next_one)
    return mixed


def mixup_share(a: float, seed: int) -> float:
    """From Beta(a, a), and the larger part, as in big_vision's utils.py: an image is mostly itself. 1 if a is 0. Drawn
    on the host, for torch_xla has no Beta in the graph, and one number is all that a batch needs."""
    share = np.random.default_rng(seed).beta(a, a) if a else 1.0
    return max(share, 1 - share)
