"""Splash attention, jax's Pallas kernel for TPUs, as a differentiable PyTorch function: under SPMD and inside scan.

The kernel never holds the T x T scores. torch_xla's own wrapper copies keys and values to every query head and runs the
forward kernel once more in the backward pass; here grouped heads are the kernel's own, and the forward pass hands the
backward pass its logsumexp.
"""
from functools import cache

import torch

from nano import UserError, pallas

BLOCK = 1024  # queries and keys that the kernel holds at a time in VMEM, or all of a shorter sequence


def check_length(T: int):
    """Raises UserError for sequences that the kernel cannot cut into blocks."""
    if T % 128 or T > BLOCK and T % BLOCK:
        raise UserError(f'--seq_len {T}: splash attention, the default on TPU, wants a multiple of 128, and of {BLOCK} '
                        f'above that; or take --attention plain')


def attention(q_BHTC: torch.Tensor, k_BKTC: torch.Tensor, v_BKTC: torch.Tensor, mesh, spec: tuple) -> torch.Tensor:
    """Causal attention -> a_BHTC; query head h uses key/value head h // (H / K). Scores are q @ k, not scaled.

    `spec`: the mesh axes of B and H, such as (('data', 'fsdp'), 'tensor'), which must divide B, H and K. `mesh` may be
    any torch_xla mesh. The sequence must be one that `check_length` accepts.
    """
    return _forward(q_BHTC, k_BKTC, v_BKTC, pallas.place(mesh, spec))[0]


@torch.library.custom_op('nano::splash_forward', mutates_args=())
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(_program('forward', where, q, k, v))


@_forward.register_fake
def _(q, k, v, where):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op('nano::splash_backward', mutates_args=())
def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor,
              grad: torch.Tensor, where: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(_program('backward', where, q, k, v, out, logsumexp, grad))


@_backward.register_fake
def _(q, k, v, out, logsumexp, grad, where):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output):
    q, k, v, ctx.where = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx, grad, _):
    return *_backward(*ctx.saved_tensors, grad.contiguous(), ctx.where), None


_forward.register_autograd(_gradients, setup_context=_setup)


def _program(direction: str, where: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return pallas.run(f'splash_{direction}', _lower(direction, where, pallas.describe(*tensors)), *tensors)


@cache
def _lower(direction: str, where: str, inputs: tuple):
    """The kernel of one direction as an XLA computation; `inputs`: (shape, type) of each."""
    from torch_xla._internal.jax_workarounds import maybe_get_jax
    jax = maybe_get_jax()
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    def one_device(q, k, v, *rest):
        _, H, T, _ = q.shape
        b = min(T, BLOCK)
        part = b if b % 512 else 512  # keys of a block that are worked on at a time
        blocks = splash_attention_kernel.BlockSizes(
            block_q=b, block_kv=b, block_kv_compute=part, block_q_dkv=b, block_kv_dkv=b, block_kv_dkv_compute=part,
            use_fused_bwd_kernel=True)
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * H)
        kernel = splash_attention_kernel.make_splash_mha(
            mask=mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, save_residuals=direction == 'forward',
            interpret=pallas.INTERPRET)
        if direction == 'forward':
            out, (logsumexp,) = jax.vmap(kernel)(q, k, v)
            return out, logsumexp

        def gradients(q, k, v, out, logsumexp, grad):
            saved = q, k, v, None, None, out, logsumexp, None, kernel.dkv_mask_info
            return splash_attention_kernel._splash_attention_bwd(**kernel.kwargs, res=saved, do=grad)[3:6]

        return jax.vmap(gradients)(q, k, v, *rest)

    return pallas.lower(f'splash_{direction}', one_device, where, inputs)
