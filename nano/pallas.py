"""Pallas kernels, which jax writes for TPUs, as parts of a PyTorch/XLA program: under SPMD and inside scan.

jax only writes the program, for a mesh without devices: so it needs none of its own.
"""
import json
from typing import Callable

import torch

INTERPRET = False  # compute what the kernels would, on a CPU: for tests


def place(mesh, spec: tuple) -> str:
    """Where tensors lie, as text, which an operator takes: a torch_xla mesh and the mesh axes of first dimensions."""
    return json.dumps([mesh.axis_names, mesh.mesh_shape, spec])


def describe(*tensors: torch.Tensor) -> tuple:
    """(shape, type) of each, which can be the key of a cache."""
    return tuple((tuple(t.shape), str(t.dtype)[6:]) for t in tensors)


def run(name: str, computation, *tensors: torch.Tensor) -> list[torch.Tensor]:
    import torch_xla
    return torch_xla._XLAC._xla_user_computation(f'xla::{name}', tensors, computation)


def lower(name: str, one_device: Callable, where: str, inputs: tuple):
    """An XLA computation of the whole tensors; `one_device` is jax's function of the parts that lie on a device."""
    from torch_xla._internal.jax_workarounds import maybe_get_jax
    from torch_xla.core import xla_builder
    jax = maybe_get_jax()
    axes, sizes, spec = json.loads(where)
    spec = jax.sharding.PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in spec))
    mesh = jax.sharding.AbstractMesh(tuple(sizes), tuple(axes))
    program = jax.shard_map(one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    traced = jax.jit(program).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs))
    lowered = traced.lower(lowering_platforms=('cpu' if INTERPRET else 'tpu',))
    proto = lowered.compiler_ir('hlo').as_serialized_hlo_module_proto()
    return xla_builder.computation_from_module_proto(name, proto)
