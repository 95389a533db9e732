"""One layer run over stacked weights as a compiled loop, traced once in the life of the process.

`torch_xla.experimental.scan` traces the layer (with AOTAutograd, forward and backward) and lowers it to an XLA While.
It does the lowering at every step, in Python, and it makes the backward loop hold all weights once more only to copy
their sharding. Here the While of the first call is kept and called again, and sharding is left to the layer, which says
it itself (`mark_sharding_with_gradients`). Host time for a step is then the same at any depth.
"""
import operator
from typing import Callable

import torch
import torch_xla
from functorch.compile import default_partition
from torch._functorch import partitioners
from torch_xla.experimental.scan import _scan_impl_pytree, tree_flatten_none, value_and_grad_partitioned

_traced = {}  # (layer, partition_fn, shapes and types) -> the forward and the backward loop


def keep(*ops: str) -> Callable:
    """A rule of rematerialization: of each layer the forward loop saves its input and the results of these operators
    (such as 'aten.mm'), and the backward loop computes the rest again. Without operators that is all of the layer."""

    def partition(joint: torch.fx.GraphModule, _inputs, *, num_fwd_outputs: int, **_):
        inputs = [n for n in joint.graph.nodes if n.op == 'placeholder' and n.name.startswith('primals')]
        outputs, _, described, _ = partitioners._extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)
        forward = partitioners._extract_graph_with_inputs_outputs(joint.graph, inputs, outputs, described, 'forward')
        names = {n.name for n in forward.nodes}
        # Of an operator with several results the forward pass may use one and the backward pass another.
        saved = [n for n in joint.graph.nodes if any(op in source(n) for op in ops)
                 and (n.name in names or n.target is operator.getitem and n.args[0].name in names)]
        return partitioners._extract_fwd_bwd_modules(joint, inputs + saved, saved_sym_nodes=[],
                                                     num_fwd_outputs=num_fwd_outputs)

    def source(node: torch.fx.Node) -> str:
        """The operator that made the tensor; one with several results is seen through the picking of one of them."""
        if node.op != 'call_function':
            return ''
        picks = node.target is operator.getitem
        several = not picks and all(user.target is operator.getitem for user in node.users) and node.users
        return '' if several else f'{node.args[0].target if picks else node.target}.'

    return partition


def scan(layer: Callable, x: torch.Tensor, stacked: dict[str, torch.Tensor],
         partition_fn: Callable = default_partition) -> torch.Tensor:
    """x = layer(x, {name: w[i] for name, w in stacked.items()}) for i = 0, 1, ..., differentiable.

    `layer` must be the same object at each call, keep x's shape, and do nothing but compute from its arguments: random
    numbers inside would be the same ones in each layer. `partition_fn` decides what the forward loop saves for the
    backward loop and what is computed again: the default saves all, about 45 tensors a layer, see `keep` for others.
    """
    key = (layer, partition_fn, x.shape, x.dtype, torch.is_grad_enabled(),
           *((name, w.shape, w.dtype, w.requires_grad) for name, w in stacked.items()))
    if key not in _traced:
        def body(carry, w):
            return layer(carry, w), None
        forward, alias_input, backward = value_and_grad_partitioned(body, x, stacked, partition_fn, is_fn_pure=False)
        _traced[key] = _Loop(forward), alias_input, _Loop(backward, reverse=True)
    return _Scan.apply(_traced[key], list(stacked), x, *stacked.values())


class _Scan(torch.autograd.Function):

    @staticmethod
    def forward(ctx, traced, names, x, *stacked):
        forward, alias_input, ctx.backward_loop = traced
        ctx.names, xs = names, dict(zip(names, stacked))
        out, (_, saved) = forward(x, xs)
        ctx.save_for_backward(*alias_input(saved, xs))  # what the forward loop saved, and those weights that are needed
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grad_x, grads = ctx.backward_loop(grad_out, (None, ctx.saved_tensors))
        return None, None, grad_x, *(grads[name] for name in ctx.names)


class _Loop:
    """`body(carry, slices) -> (carry, results)` along the first dimension; the first call lowers it."""

    def __init__(self, body: Callable, reverse: bool = False):
        self.body, self.reverse, self.computation = body, reverse, None

    @torch.no_grad()
    def __call__(self, carry, xs):
        if self.computation is None:
            return self._first_call(carry, xs)
        carry, _ = tree_flatten_none(carry)
        xs, _ = tree_flatten_none(xs)
        results = [torch.zeros(shape, dtype=dtype, device=xs[0].device) for shape, dtype in self.results]
        start = torch.tensor(0, device=xs[0].device)
        out = torch_xla._XLAC._xla_user_computation('xla::scan', (start, *carry, *xs, *results, *self.constants),
                                                    self.computation)
        carry, results = out[1:1 + len(carry)], out[1 + len(carry) + len(xs):][:len(results)]
        return self.unflatten_carry(carry), self.unflatten_results(results)

    def _first_call(self, carry, xs):
        make = torch_xla._XLAC._xla_user_computation

        def keep(name, inputs, computation):
            self.computation, self.inputs = computation, inputs
            return make(name, inputs, computation)

        torch_xla._XLAC._xla_user_computation = keep
        try:
            out_carry, out_results = _scan_impl_pytree(self.body, carry, xs, reverse=self.reverse)
        finally:
            torch_xla._XLAC._xla_user_computation = make
        carry, self.unflatten_carry = tree_flatten_none(out_carry)
        results, self.unflatten_results = tree_flatten_none(out_results)
        self.results = [(r.shape, r.dtype) for r in results]
        # Constants of the body, such as the elements of a mask, are inputs of the While behind all others.
        self.constants = self.inputs[1 + len(carry) + len(tree_flatten_none(xs)[0]) + len(results):]
        del self.inputs
        return out_carry, out_results
