"""Attention among the few hundred patches of an image, a Pallas kernel for TPUs, as a differentiable PyTorch function:
under SPMD and inside scan.

It reads queries, keys and values as the matmuls before it leave them, a matrix of all patches of all images by all
heads, and so it writes its result: nothing is transposed. The scores of an image and a head are small enough to stay in
VMEM, a chip's fast memory; the backward pass computes them again, and is handed only queries, keys and values.

Letters in names: B images, T patches of each, R = B * T, N heads, A size of a head, X = N * A; in the kernel W rows of
a window and L lanes, those of a block.
"""
import math
from functools import cache, partial
from typing import NamedTuple

import torch

from nano import UserError, pallas

# The vector unit holds 128 numbers in a row, its lanes, and a matrix is kept in tiles of 8 rows, or 16 of bfloat16. An
# image of 196 patches begins in the middle of one: its window is whole tiles, and so has rows of others.
LANES = 128
VMEM_BYTES = 14 * 2**20  # for blocks and scores, of the 16 MiB that XLA gives a kernel; 2 are left to the compiler
TENSORS = {'forward': 4, 'backward': 7}  # that a kernel reads and writes: q, k, v, result; the gradients of all besides
SCORE_MATRICES = 4  # of one image, in float32, that are alive at once: scores, probabilities, and their gradients


class Blocks(NamedTuple):
    """What a step of the kernel works on: whole images and whole heads."""
    images: int
    lanes: int  # heads of 64 come in pairs
    tile: int  # rows
    window: int  # rows of whole tiles that hold any of the images
    at_once: int  # images that the compiler may work on at the same time


def blocks(B: int, T: int, N: int, A: int, bytes_: int) -> Blocks:
    """For what lies on one device, of numbers with `bytes_`. Raises UserError for what the kernel cannot take."""
    tile = 32 // bytes_
    least = tile // math.gcd(T, tile)
    X, lanes = N * A, max(A, LANES)
    if X % lanes:
        lanes = X
    size = TENSORS['backward'] * 2 * bytes_ * T * -(-lanes // LANES) * LANES  # of an image; 2: one comes as one is used
    if A % LANES and LANES % A:
        raise UserError(f'it wants heads whose size divides {LANES}, or is a multiple, not {A}')
    if B % least:
        raise UserError(f'with {T} patches it wants a multiple of {least} images on each device, not {B}: only so many '
                        f'fill whole tiles')
    first_rows = max(i * T % tile for i in range(least))  # of the window, that are of the image before
    window = -(-(first_rows + T) // tile) * tile
    room = VMEM_BYTES - SCORE_MATRICES * 4 * window * -(-window // LANES) * LANES
    if least * size > room:
        raise UserError(f'{least} images of {T} patches are too much for the fast memory that it works in')
    images = least
    while images * 2 * size <= room and B % (images * 2) == 0:
        images *= 2
    # Several images give the compiler something to do while one waits; beyond 1024 rows their scores would not fit.
    at_once = max(n for n in (1, 2, 4) if images % n == 0 and (n == 1 or n * window <= 1024))
    return Blocks(images, lanes, tile, min(window, images * T), at_once)


def attention(q_RX: torch.Tensor, k_RX: torch.Tensor, v_RX: torch.Tensor, T: int, A: int, mesh,
              spec: tuple) -> torch.Tensor:
    """Every patch of an image sees every other -> a_RX: softmax(q @ k / sqrt(A)) @ v for each image and head.

    `spec`: the mesh axes of R and X, such as (('data', 'fsdp'), 'tensor'), which must divide images and heads; `mesh`
    may be any torch_xla mesh. What lies on a device must be what `blocks` accepts.
    """
    return _forward(q_RX, k_RX, v_RX, T, A, pallas.place(mesh, spec))


@torch.library.custom_op('nano::attend_forward', mutates_args=())
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, T: int, A: int, where: str) -> torch.Tensor:
    return _program('forward', T, A, where, q, k, v)[0]


@_forward.register_fake
def _(q, k, v, T, A, where):
    return torch.empty_like(q)


@torch.library.custom_op('nano::attend_backward', mutates_args=())
def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, T: int, A: int,
              where: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(_program('backward', T, A, where, q, k, v, grad))


@_backward.register_fake
def _(q, k, v, grad, T, A, where):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output):
    q, k, v, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v)


def _gradients(ctx, grad):
    return *_backward(*ctx.saved_tensors, grad.contiguous(), *ctx.rest), None, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _program(direction: str, T: int, A: int, where: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    computation = _lower(direction, T, A, where, pallas.describe(*tensors))
    return pallas.run(f'attend_{direction}', computation, *tensors)


@cache
def _lower(direction: str, T: int, A: int, where: str, inputs: tuple):
    """The kernel of one direction as an XLA computation; `inputs`: (shape, type) of each."""
    from torch_xla._internal.jax_workarounds import maybe_get_jax
    jax = maybe_get_jax()
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def one_device(*tensors):
        (R, X), dtype = tensors[0].shape, tensors[0].dtype
        B, N = R // T, X // A
        b = blocks(B, T, N, A, dtype.itemsize)
        n_out = TENSORS[direction] - len(tensors)
        # What is computed, zeros that fill up lanes and columns included: the plan goes by it, see nano/plan/hlo.py.
        columns, lanes = (-(-n // LANES) * LANES for n in (b.window, b.lanes))
        matmuls = dict(forward=2, backward=5)[direction]
        cost = pl.CostEstimate(flops=B * N * matmuls * 2 * b.window * columns * lanes,
                               transcendentals=B * N * b.window * columns,
                               bytes_accessed=TENSORS[direction] * R * X * dtype.itemsize)
        block = pl.BlockSpec((b.images * T, b.lanes), lambda i, j: (i, j))
        kernel = partial(dict(forward=_forward_kernel, backward=_backward_kernel)[direction], jax, pl, T, A, b)
        name = f'attend_{direction}_block_{b.images * T}x{b.lanes}'
        with jax.named_scope(name):
            return pl.pallas_call(
                kernel, grid=(B // b.images, X // b.lanes), in_specs=[block] * len(tensors), out_specs=[block] * n_out,
                out_shape=[jax.ShapeDtypeStruct((R, X), dtype)] * n_out, name=name, cost_estimate=cost,
                compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel')),
                interpret=pallas.INTERPRET)(*tensors)

    return pallas.lower(f'attend_{direction}', one_device, where, inputs)


# ---- The kernels. All heads of a block lie side by side in its lanes. The matrix unit takes 128 lanes at once: so a
# head is not cut out, but the others are made 0, or left out of the result, which costs and moves nothing. ----

def _forward_kernel(jax, pl, T: int, A: int, b: Blocks, q_ref, k_ref, v_ref, a_ref):
    jnp = jax.numpy

    def image(at, inside):
        q_WL, k_WL, v_WL = q_ref[at].astype('float32') * A ** -0.5, k_ref[at], v_ref[at]
        other_1W = jnp.where(inside((1, b.window)), 0, -1e30)  # the keys of other images
        a_WL = jnp.zeros(q_WL.shape, 'float32')
        for mine_1L in _heads(jax, A, b.lanes):
            s_WW = _dot(jax, jnp.where(mine_1L, q_WL, 0).astype(k_WL.dtype), k_WL, 1, 1) + other_1W
            p_WW = jnp.exp(s_WW - s_WW.max(1, keepdims=True))
            one_WL = _dot(jax, p_WW.astype(v_WL.dtype), v_WL, 1, 0) * pl.reciprocal(p_WW.sum(1, keepdims=True))
            a_WL = jnp.where(mine_1L, one_WL, a_WL)
        _write(jnp, at, inside, b, (a_ref, a_WL))

    _each_image(jax, pl, T, b, image)


def _backward_kernel(jax, pl, T: int, A: int, b: Blocks, q_ref, k_ref, v_ref, grad_ref, dq_ref, dk_ref, dv_ref):
    """With scores transposed, keys by queries: then only one of five matmuls has to transpose what it is given, and
    sums over the keys are sums of rows."""
    jnp = jax.numpy

    def image(at, inside):
        q_WL, k_WL, v_WL = q_ref[at].astype('float32') * A ** -0.5, k_ref[at], v_ref[at]
        # What queries of other images would add to the gradients of keys and values.
        g_WL = jnp.where(inside((b.window, 1)), grad_ref[at].astype('float32'), 0)
        other_W1 = jnp.where(inside((b.window, 1)), 0, -1e30)
        low = k_WL.dtype
        dq_WL = dk_WL = dv_WL = jnp.zeros(q_WL.shape, 'float32')
        for mine_1L in _heads(jax, A, b.lanes):
            s_WW = _dot(jax, k_WL, jnp.where(mine_1L, q_WL, 0).astype(low), 1, 1) + other_W1
            p_WW = jnp.exp(s_WW - s_WW.max(0, keepdims=True))
            p_WW = p_WW * pl.reciprocal(p_WW.sum(0, keepdims=True))
            dp_WW = _dot(jax, v_WL, jnp.where(mine_1L, g_WL, 0).astype(low), 1, 1)
            ds_WW = (p_WW * (dp_WW - (p_WW * dp_WW).sum(0, keepdims=True))).astype(low)
            dq_WL = jnp.where(mine_1L, _dot(jax, ds_WW, k_WL, 0, 0), dq_WL)
            dk_WL = jnp.where(mine_1L, _dot(jax, ds_WW, q_WL.astype(low), 1, 0), dk_WL)
            dv_WL = jnp.where(mine_1L, _dot(jax, p_WW.astype(low), g_WL.astype(low), 1, 0), dv_WL)
        _write(jnp, at, inside, b, (dq_ref, dq_WL * A ** -0.5), (dk_ref, dk_WL), (dv_ref, dv_WL))

    _each_image(jax, pl, T, b, image)


def _each_image(jax, pl, T, b, image):
    """Calls image(where its window is, shape -> which numbers along it are of the image)."""
    def some(i, _):
        for j in range(b.at_once):
            first = (i * b.at_once + j) * T
            start = jax.numpy.minimum(first // b.tile * b.tile, b.images * T - b.window)

            def inside(shape, first=first, start=start):
                row = start + jax.lax.broadcasted_iota('int32', shape, shape.index(b.window))
                return (row >= first) & (row < first + T)

            image(pl.ds(pl.multiple_of(start, b.tile), b.window), inside)
        return 0

    jax.lax.fori_loop(0, b.images // b.at_once, some, 0)


def _heads(jax, A: int, lanes: int):
    """Of each head, which lanes are its."""
    lane_1L = jax.lax.broadcasted_iota('int32', (1, lanes), 1)
    return [(lane_1L >= first) & (lane_1L < first + A) for first in range(0, lanes, A)]


def _dot(jax, a, b, a_axis: int, b_axis: int):
    """A matmul that sums over one axis of each, in float32."""
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type='float32')


def _write(jnp, at, inside, b, *results):
    """The rows of one image: what its window has of others stays."""
    for ref, x_WL in results:
        ref[at] = jnp.where(inside((b.window, 1)), x_WL, ref[at].astype('float32')).astype(ref.dtype)
