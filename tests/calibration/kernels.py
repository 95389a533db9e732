"""The attention kernels of the published runs, in place of nano.splash._lower."""
import json
import types
from functools import cache, partial

SMALL = 512  # see `lower`


@cache
def lower(kernel: tuple, direction: str, where: str, inputs: tuple):
    """Kernels of large blocks compile for many minutes, and what the compiler makes of them is not looked at. So they are
    cut into blocks of SMALL queries (and keys, where that changes nothing around the kernel), under a name with the
    published sizes, by which nano/hlo.py counts the blocks that are computed."""
    import jax
    import jax.numpy as jnp
    from torch_xla.core import xla_builder
    axes, sizes, (rows, heads) = json.loads(where)
    spec = jax.sharding.PartitionSpec(tuple(rows), heads)
    one_device = partial(dict(splash=_splash, flash=_flash)[dict(kernel)['kind']], jax, jnp, dict(kernel), direction)
    mesh = jax.sharding.AbstractMesh(tuple(sizes), tuple(axes))
    program = jax.shard_map(one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    traced = jax.jit(program, keep_unused=True).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs))
    proto = traced.lower(lowering_platforms=('tpu',)).compiler_ir('hlo').as_serialized_hlo_module_proto()
    return xla_builder.computation_from_module_proto(f'{dict(kernel)["kind"]}_{direction}', proto)


def _splash(jax, jnp, kernel, direction, q, k, v, *rest):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as lib
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    _, H, T, _ = q.shape
    b = {key: min(T, n) for key, n in kernel.items() if type(n) is int}
    b = dict(q_dkv=b['q'], kv_dkv=b['kv'], q_dq=b['q'], kv_dq=b['kv']) | b
    small = {key: min(n, SMALL) for key, n in b.items()}
    fused = kernel['fused']
    blocks = lib.BlockSizes(  # dkv's keys are not cut: its partial sums, one for each block of them, go through HBM
        block_q=small['q'], block_kv=small['kv'], block_kv_compute=small['compute'], block_q_dkv=small['q_dkv'],
        block_kv_dkv=b['kv_dkv'], block_kv_dkv_compute=small['compute'], use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else small['q_dq'], block_kv_dq=None if fused else small['kv_dq'])

    def name(*_, is_segmented, phase, **__):
        suffix = '' if phase == 'fwd' else f'_{phase}'
        return (f'splash_mha_{phase}{"_segmented" * is_segmented}_block_q{suffix}={b["q" + suffix]}_'
                f'block_kv{suffix}={b["kv" + suffix]}_use_fused_bwd_kernel={fused}')

    lib.get_kernel_name = name
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
    again = kernel.get('again')
    run = lib.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=blocks,
                              save_residuals=direction == 'backward' or not again)
    ids = lib.SegmentIds(*[jnp.ones(T, jnp.int32)] * 2) if kernel['segments'] else None

    def forward(q, k, v):
        out = run(q, k, v, ids)
        return (out, jnp.zeros(q.shape[:2])) if direction == 'forward' and again else (out[0], out[1][0])

    def backward(q, k, v, out, logsumexp, grad):
        out, logsumexp = forward(q, k, v) if again else (out, logsumexp)
        saved = q, k, v, ids, None, out, logsumexp, run.dq_mask_info, run.dkv_mask_info
        return lib._splash_attention_bwd(**run.kwargs, res=saved, do=grad)[3:6]

    return jax.vmap(forward if direction == 'forward' else backward)(q, k, v, *rest)


def _flash(jax, jnp, kernel, direction, q, k, v, *rest):
    from jax.experimental.pallas.ops.tpu import flash_attention as lib
    B, _, T, _ = q.shape
    causal = kernel.get('causal', True)
    b = {key: min(n, T) for key, n in kernel.items() if key.startswith('block')}
    sizes = lib.BlockSizes(**{key: min(n, SMALL) for key, n in b.items()} | dict(block_b=1))

    def name(phase):
        end = '' if phase == 'fwd' else f'_{phase}'
        q, k = f'block_q{end}', f'block_k{end}'
        return f'flash_attention_{phase}_{q}_{b[q]}_{k.replace("_k", "_kv")}_{b[k]}_causal_{causal}'

    scopes = iter(['dkv', 'dq'])
    lib.jax = types.SimpleNamespace(**vars(jax) | dict(named_scope=lambda _: jax.named_scope(name(next(scopes)))))
    ids = lib.SegmentIds(*[jnp.ones((B, T), jnp.int32)] * 2) if kernel.get('segments') else None
    if direction == 'forward':
        with jax.named_scope(name('fwd')):
            out, l, m = lib._flash_attention_impl(q, k, v, None, ids, True, causal, 1.0, sizes.block_b, sizes.block_q,
                                                  sizes.block_k_major, sizes.block_k, False)
        return out, m + jnp.log(l)  # exp(x - m) / l of the backward pass, said with one array
    out, logsumexp, grad = rest
    saved = q, k, v, None, ids, out, jnp.ones_like(logsumexp), logsumexp
    return lib._flash_attention_bwd(False, causal, 1.0, sizes, False, saved, grad)[:3]
