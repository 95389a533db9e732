"""Published training runs on TPUs whose configuration is known well enough to be built again.

Sources, read at the commits named in the notes of the project: TP is AI-Hypercomputer/torchprime (PyTorch/XLA), TR
AI-Hypercomputer/tpu-recipes and MT AI-Hypercomputer/maxtext (JAX). Seconds marked (derived) follow from a published
share of the peak.
"""
from dataclasses import dataclass

LLAMA = dict(head_size=128, tied=False, rope_theta=500000.0, vocab_size=128256)
LLAMA_8B = dict(LLAMA, layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336)
LLAMA_70B = dict(LLAMA, layers=80, width=8192, heads=64, kv_heads=8, mlp_width=28672)
LLAMA_405B = dict(LLAMA, layers=126, width=16384, heads=128, kv_heads=8, mlp_width=53248)
LLAMA2_70B = dict(LLAMA_70B, rope_theta=10000.0, vocab_size=32000)
MISTRAL_7B = dict(LLAMA_8B, vocab_size=32000)
# MaxText's "16b" and "32b" before 2024-02: attention and MLP side by side behind one norm, relu without a gate.
OLD = dict(layers=32, heads=32, kv_heads=32, head_size=256, mlp_width=32768, vocab_size=32768, tied=True)
OLD_16B, OLD_32B = dict(OLD, width=5120), dict(OLD, width=10240, qk_norm=True)

# Pallas kernels. splash: queries and keys in VMEM at a time, keys computed at a time; `again`: the backward pass runs the
# forward kernel once more. flash: jax's BlockSizes, keys and values copied to all heads first.
SPLASH_MT = dict(kind='splash', q=2048, kv=2048, compute=2048, fused=True, segments=True)
SPLASH_TP = dict(SPLASH_MT, segments=False, again=True)
SPLASH_M12 = dict(kind='splash', q=1024, kv=512, compute=512, q_dkv=2048, kv_dkv=512, q_dq=2048, kv_dq=512, fused=False,
                  segments=True)
FLASH_PX = dict(kind='flash', block_b=2, block_q=512, block_k_major=512, block_k=512, block_q_major_dkv=512,
                block_k_major_dkv=512, block_q_dkv=512, block_k_dkv=512, block_q_dq=1024, block_k_major_dq=512,
                block_k_dq=256)
FLASH_TP = dict(FLASH_PX, block_q=2048, block_q_major_dkv=2048, block_q_dkv=2048, block_q_dq=2048)
FLASH_M15 = dict(FLASH_PX, block_b=1, block_q_dq=512, block_k_dq=512, causal=False)
FLASH_M17 = dict(FLASH_PX, segments=True)


def _flags(text: str) -> dict[str, str]:
    return dict(word.lstrip('-').split('=', 1) for word in text.split())


VMEM = _flags('--xla_tpu_scoped_vmem_limit_kib=98304')  # D
LAYOUT = _flags('''--xla_tpu_use_minor_sharding_for_major_trivial_input=true
    --xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 --xla_tpu_assign_all_reduce_scatter_layout=true''')  # L
DATA_PARALLEL = _flags('''--xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true''')  # P
CONTINUATION = _flags('''--xla_tpu_enable_async_collective_fusion=true
    --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
    --xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true
    --xla_enable_async_all_gather=true''')  # C
SPARSE_CORE = _flags('''--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false
    --xla_tpu_enable_sparse_core_collective_offload_all_reduce=true --xla_tpu_enable_all_reduce_offload_tracing=true
    --xla_tpu_use_tc_device_shape_on_sc=true --xla_sc_enable_instruction_fusion=false --xla_sc_disjoint_spmem=false
    --xla_sc_disable_megacore_partitioning=true --2a886c8_chip_config_name=megachip_tccontrol''')  # S
HOST = _flags('''--xla_tpu_enable_all_experimental_scheduler_features=true
    --xla_tpu_enable_scheduler_memory_pressure_tracking=true --xla_tpu_host_transfer_overlap_limit=24
    --xla_tpu_aggressive_opt_barrier_removal=ENABLED --xla_lhs_prioritize_async_depth_over_stall=ENABLED
    --xla_tpu_enable_ag_backward_pipelining=true --xla_should_allow_loop_variant_parameter_in_chain=ENABLED
    --xla_should_add_loop_invariant_op_in_chain=ENABLED --xla_max_concurrent_host_send_recv=100
    --xla_tpu_scheduler_percent_shared_memory_limit=100 --xla_latency_hiding_scheduler_rerun=2''')  # H
NO_WINDOWED = _flags('--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000')  # W
RNG = _flags('--xla_tpu_spmd_rng_bit_generator_unsafe=true')
TORCH_XLA = _flags('''--xla_latency_hiding_scheduler_rerun=1 --xla_tpu_prefer_async_allgather_to_allreduce=true
    --xla_tpu_enable_flash_attention=false''')  # what torch_xla adds where it is missing

X_IMAGE = TORCH_XLA | VMEM | CONTINUATION
X_RECIPE = {**TORCH_XLA, **VMEM, **LAYOUT, **DATA_PARALLEL, **CONTINUATION, **SPARSE_CORE}
del X_RECIPE['xla_tpu_enable_all_reduce_offload_tracing']
X_405B = TORCH_XLA | VMEM | CONTINUATION | HOST | RNG
M_COMMON = VMEM | LAYOUT | DATA_PARALLEL | CONTINUATION | RNG
M_8B = M_COMMON | SPARSE_CORE | HOST
M_70B = M_COMMON | HOST
M15 = DATA_PARALLEL | CONTINUATION | RNG
M17 = {**M15, **_flags('''--xla_tpu_megacore_fusion_allow_ags=false --xla_enable_async_collective_permute=true
    --xla_tpu_enable_ag_backward_pipelining=true''')}
del M17['xla_tpu_enable_async_collective_fusion_fuse_all_gather']


@dataclass(frozen=True)
class Row:
    id: str
    slice: str
    shape: dict  # of train_gpt.Config
    seq_len: int
    batch: int  # sequences, over all chips
    seconds: float  # published
    source: str
    flags: dict
    kernel: dict
    style: str  # 'torchprime', 'maxtext', or 'old' (MaxText before 2024-02)
    sharding: str  # a table of rebuild.SHARDING
    mesh: str = '1,-1,1'
    dtype: str = 'float32'  # of weights, gradients and moments
    remat: str = 'full'  # 'full', or 'dots': the weights' matmuls are kept
    offload: tuple[str, ...] = ()  # named tensors of a layer that wait on the host for the backward pass
    differs: str = ''  # what of the run is not built again

    @property
    def held_out(self) -> bool:
        return self.id in HELD_OUT


FITTED = 'X1 X3 X7 X10 X14 M1 M2 M4 M8 M15 M17'.split()
HELD_OUT = 'X2 X4 X9 X12 X13 M3 M5 M6 M7 M9 M10 M11 M12 M12b'.split()
OFF_5, OFF_4 = ('input', 'q', 'k', 'v', 'out'), ('input', 'q', 'k', 'v')
STACKED = 'weights lie stacked (theirs are stacked anew in each step)'
UNSCANNED = f'scanned: the layers of this run are unrolled; {STACKED}'


def _torchprime(id, slice_, shape, batch, seconds, source, flags, kernel, differs, seq_len=8192, sharding='torchprime',
                **more) -> Row:
    return Row(id, slice_, shape, seq_len, batch, seconds, source, flags, kernel, 'torchprime', sharding,
               dtype='bfloat16', differs=differs, **more)


def _maxtext(id, slice_, shape, per_chip, chips, seconds, flags, offload, seq_len=8192, source='TR trillium',
             kernel=SPLASH_MT, sharding='maxtext', differs='weights are stacked along the first dimension', **more) -> Row:
    return Row(id, slice_, shape, seq_len, per_chip * chips, seconds, source, flags, kernel, 'maxtext', sharding,
               offload=offload, differs=differs, **more)


CI, RECIPES, ISSUE = 'TP step_time_bounds.yaml@029ef4c', 'TP results.csv@7796cc5', 'TP issue 16'
ROWS = {row.id: row for row in (
    _torchprime('X1', 'v6e-4', LLAMA_8B, 8, 2.7352, CI, X_IMAGE, FLASH_TP, UNSCANNED),
    _torchprime('X2', 'v6e-4', LLAMA_8B, 8, 2.4068, CI, X_IMAGE, SPLASH_TP, UNSCANNED),
    _torchprime('X3', 'v6e-4', LLAMA_8B, 8, 2.8006, CI, X_IMAGE, FLASH_TP, STACKED, offload=('input',)),
    _torchprime('X4', 'v6e-4', LLAMA_8B, 8, 3.3384, CI, X_IMAGE, FLASH_TP, UNSCANNED, sharding='torchprime-2d',
                mesh='1,2,2'),
    _torchprime('X7', 'v6e-256', LLAMA_8B, 1024, 4.741, RECIPES, X_RECIPE, SPLASH_TP, STACKED),
    _torchprime('X9', 'v6e-256', LLAMA_70B, 512, 19.277, RECIPES, X_RECIPE, SPLASH_TP, STACKED, offload=('input',)),
    _torchprime('X10', 'v6e-256', LLAMA_405B, 256, 67.212, 'TP f7ab573', X_405B, FLASH_TP, STACKED,
                sharding='torchprime-2d', mesh='1,64,4', offload=('input',)),
    _torchprime('X12', 'v6e-256', LLAMA_8B, 256, 1.625, ISSUE, X_IMAGE, FLASH_PX, UNSCANNED),
    _torchprime('X13', 'v6e-256', LLAMA_8B, 512, 2.991, ISSUE, X_IMAGE, FLASH_PX, UNSCANNED),
    _torchprime('X14', 'v6e-256', LLAMA_70B, 512, 9.480, ISSUE, X_IMAGE, FLASH_PX, UNSCANNED, seq_len=4096),
    _maxtext('M1', 'v6e-8', LLAMA_8B, 3, 8, 3.443, M_8B | NO_WINDOWED, OFF_5),
    _maxtext('M2', 'v6e-16', LLAMA_8B, 3, 16, 3.393, M_8B | NO_WINDOWED, OFF_5),
    _maxtext('M3', 'v6e-32', LLAMA_8B, 3, 32, 3.495, M_8B | NO_WINDOWED, OFF_5),
    _maxtext('M4', 'v6e-64', LLAMA_8B, 5, 64, 5.652, M_8B, OFF_5),
    _maxtext('M5', 'v6e-128', LLAMA_8B, 4, 128, 4.602, M_8B, OFF_5),
    _maxtext('M6', 'v6e-256', LLAMA_8B, 4, 256, 4.546, M_8B, OFF_5),
    _maxtext('M7', 'v6e-8', MISTRAL_7B, 6, 8, 6.320, M_8B | NO_WINDOWED, OFF_5),
    _maxtext('M8', 'v6e-32', LLAMA_70B, 2, 32, 17.790, M_70B | NO_WINDOWED, OFF_4, dtype='bfloat16'),
    _maxtext('M9', 'v6e-64', LLAMA_70B, 2, 64, 18.688, M_70B, OFF_4),
    _maxtext('M10', 'v6e-128', LLAMA_70B, 4, 128, 34.786, M_70B, OFF_4),
    _maxtext('M11', 'v6e-256', LLAMA_70B, 5, 256, 42.656, M_70B, OFF_4),
    _maxtext('M12', 'v6e-256', LLAMA2_70B, 3, 256, 9.052, VMEM | CONTINUATION | SPARSE_CORE | RNG, ('q', 'k', 'v'),
             seq_len=4096, kernel=SPLASH_M12, sharding='maxtext-transpose'),
    # M12 as its log has it: 905 tokens/s x 9.052 s are 8192 tokens of a chip, two sequences, where its page says three.
    _maxtext('M12b', 'v6e-256', LLAMA2_70B, 2, 256, 9.052, VMEM | CONTINUATION | SPARSE_CORE | RNG, ('q', 'k', 'v'),
             seq_len=4096, kernel=SPLASH_M12, sharding='maxtext-transpose'),
    Row('M15', 'v5e-256', OLD_16B, 2048, 1536, 10.63, 'MT 9bc243c95 (derived from 61.10%)', M15, FLASH_M15, 'old',
        'maxtext', differs='libtpu and jax of 2023'),
    Row('M17', 'v5p-128', OLD_32B, 2048, 512, 9.91, 'MT 76bd53b0f (derived from 71.47%)', M17, FLASH_M17, 'old',
        'maxtext', mesh='1,16,4', remat='dots', differs='libtpu and jax of 2023'),
)}
