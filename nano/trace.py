"""Functions that are traced once in the life of the process, as parts of a compiled program: a whole step, and loops.

PyTorch/XLA runs a step's Python each time, only to find the graph that it has compiled already. `Once` keeps what the
first run traced and calls it as one operator: the host needs some milliseconds for a step of any depth. `Loop` is a
function along the first dimension of its inputs, compiled once for all turns (an XLA While), such as micro-batches.
`scan` is a loop of a layer over its stacked weights, with gradients. As in torch_xla's own, AOTAutograd traces the
layer forward and backward; but that one's loop holds all weights once more to copy their sharding, which here the layer
says itself (`mark_sharding_with_gradients`).
"""
import contextlib
import operator
import random
from typing import Any, Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from functorch.compile import default_partition
from torch._functorch import partitioners
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla.experimental.scan import (dynamic_slice, dynamic_update_slice, tree_flatten_none,
                                         value_and_grad_partitioned)


class Once:
    """`f(*args)` of tensors, and of dicts of tensors, all on the device. The first `changes` arguments f may change in
    place. It is traced once for each set of shapes; so it must compute from its arguments alone, and depend on nothing
    else that changes. What it draws at random is new at each call, and depends on the device's seed then."""

    def __init__(self, f: Callable, changes: int = 0):
        self.f, self.changes, self._traced = f, changes, {}

    def __call__(self, *args: Any) -> Any:
        tensors, form = tree_flatten(args)
        changed, _ = tree_flatten(args[:self.changes])
        key = tuple((t.shape, t.dtype) for t in tensors)
        if key not in self._traced:
            def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
                inputs = [x.detach().requires_grad_(t.requires_grad) for x, t in zip(inputs, tensors)]
                results, form_of_results = tree_flatten(self.f(*tree_unflatten(inputs, form)))
                self._traced[key] = form_of_results
                return [t.detach() for t in (*results, *inputs[:len(changed)])]
            traced = _Traced(flat, key)
            self._traced[key] = traced, self._traced[key]
        traced, form_of_results = self._traced[key]
        with torch.no_grad():
            results = traced(tensors)
            n = len(results) - len(changed)
            for old, new in zip(changed, results[n:]):
                old.copy_(new)
        return tree_unflatten(results[:n], form_of_results)


class Loop:
    """`carry, results = body(carry, slices)` along the first dimension of `xs`, from its end with `reverse`: all of
    these are tensors, or nests of lists and dicts of tensors and None. The results are stacked. It is traced at the first
    call, for its shapes. Not differentiable: it is the body that may compute gradients."""

    def __init__(self, body: Callable, reverse: bool = False, name: str = 'loop'):
        self.body, self.reverse, self.name, self.computation, self._traced = body, reverse, name, None, None

    @torch.no_grad()
    def __call__(self, carry: Any, xs: Any) -> tuple[Any, Any]:
        carry, form_of_carry = tree_flatten_none(carry)
        xs, form_of_xs = tree_flatten_none(xs)
        n, device = len(xs[0]), xs[0].device
        if n == 1:  # no loop: the TPU compiler would make two copies of it
            carry, results = self.body(form_of_carry(carry), form_of_xs([x[0] for x in xs]))
            results, form_of_results = tree_flatten_none(results)
            return carry, form_of_results([r[None] for r in results])
        if self.computation is None:
            def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
                out, results = self.body(form_of_carry(inputs[:len(carry)]), form_of_xs(inputs[len(carry):]))
                out, self._form_of_carry = tree_flatten_none(out)
                results, self._form_of_results = tree_flatten_none(results)
                return [*out, *results]
            self._traced = _Traced(flat, [*((t.shape, t.dtype) for t in carry), *((t.shape[1:], t.dtype) for t in xs)])
            for t, (shape, dtype) in zip(carry, self._traced.results):
                if (t.shape, t.dtype) != (shape, dtype):
                    raise TypeError(f'a loop\'s carry begins as {t.dtype} {list(t.shape)} and goes on as {dtype} '
                                    f'{list(shape)}')
        results = [torch.zeros((n, *shape), dtype=dtype, device=device)
                   for shape, dtype in self._traced.results[len(carry):]]
        inputs = [torch.tensor(0, dtype=torch.int32, device=device), *carry, *xs, *results, *self._traced.draw(n),
                  *self._traced.constants]
        sizes = len(carry), len(xs), len(results), len(self._traced.seeds), len(self._traced.constants)
        if self.computation is None:
            self.computation = self._lower(inputs, sizes, n)
        _, out, _, results, _, _ = _split(torch_xla._XLAC._xla_user_computation(f'xla::{self.name}', inputs,
                                                                               self.computation), 1, *sizes)
        return self._form_of_carry(out), self._form_of_results(results)

    def _lower(self, inputs: list[torch.Tensor], sizes: tuple[int, ...], n: int):
        def whole(i, value):  # of 32 bits: a TPU makes two of one of 64, and then its compiler cannot count the turns
            return xb.Op.scalar(i.builder(), value, dtype=xb.Type.S32)

        def turn(i, *rest):
            carry, xs, results, seeds, constants = _split(rest, *sizes)
            at = whole(i, n - 1) - i if self.reverse else i
            slices, seed = ([dynamic_slice(x, at) for x in some] for some in (xs, seeds))
            out = xb.Op.call(self._traced.computation, self._traced.ordered([*carry, *slices], seed, constants))
            out = [out.get_tuple_element(k) for k in range(len(carry) + len(results))]
            results = [dynamic_update_slice(all_, one, at) for all_, one in zip(results, out[len(carry):])]
            return (i + whole(i, 1), *out[:len(carry)], *xs, *results, *seeds, *constants)

        builder = xb.create_builder(self.name)
        parameters = [xb.mkparam(builder, k, xb.tensor_shape(t)) for k, t in enumerate(inputs)]
        loop = xb.Op.mkwhile(parameters, lambda i, *_: i < whole(i, n), turn)
        return loop.build(self.name)


class _Traced:
    """f(*inputs) -> list of tensors, as an XLA computation for inputs of these shapes and types."""

    def __init__(self, f: Callable, inputs: Sequence[tuple[torch.Size, torch.dtype]]):
        stand_ins = [xb.create_placeholder_tensor(shape, dtype) for shape, dtype in inputs]
        with _drawing() as sentinels:
            outputs = f(*(t * 1 for t in stand_ins))  # a tensor that holds data would be replaced by mark_sharding
        context = torch_xla._XLAC.lowering.LoweringContext('traced')
        context.build(outputs)
        self.computation = xb.computation_from_module_proto('traced', context.hlo())
        self.results = [(t.shape, t.dtype) for t in outputs]
        # What holds data has become an input with a number: the stand-ins (-1 is one that is not used), numbers that
        # stood in f, and seeds.
        self._numbers = [context.tensor_parameter_id(t) for t in stand_ins]
        others = {n: t for n, t in context.device_parameter_id_tensor_mapping().items() if n not in self._numbers}
        self.seeds = [n for n, t in others.items() if t.dtype == torch.int64 and not t.dim() and t.item() in sentinels]
        self._constants = {n: t for n, t in others.items() if n not in self.seeds}
        self.constants = list(self._constants.values())

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = self.ordered(inputs, [s[0] for s in self.draw(1)], self.constants)
        return torch_xla._XLAC._xla_user_computation('xla::traced', inputs, self.computation)

    def draw(self, n: int) -> list[torch.Tensor]:
        """For each seed n numbers, int64 [n]."""
        device = torch_xla.device()
        return [torch.randint(0, 2**62, (n,), dtype=torch.int64, device=device) for _ in self.seeds]

    def ordered(self, inputs: Sequence, seeds: Sequence, constants: Sequence) -> list:
        """As the computation wants them."""
        at = dict(zip(self._numbers, inputs)) | dict(zip(self.seeds, seeds)) | dict(zip(self._constants, constants))
        at.pop(-1, None)
        return [at[n] for n in range(len(at))]


_sentinels: list[list[int]] = []  # of the traces that go on, the innermost last


@contextlib.contextmanager
def _drawing():
    """While something is traced: what it draws begins at seeds of its own, by which its inputs are told apart."""
    def set_seed():
        _sentinels[-1].append(random.SystemRandom().randrange(2**62))
        xm.set_rng_state(_sentinels[-1][-1])

    state = xm.get_rng_state()
    _sentinels.append([])
    try:
        set_seed()
        yield _sentinels[-1]
    finally:
        _sentinels.pop()
        set_seed() if _sentinels else xm.set_rng_state(state)


def _split(items: Sequence, *sizes: int) -> list[list]:
    found, at = [], 0
    for n in sizes:
        found.append(list(items[at:at + n]))
        at += n
    return found


# ---- Layers ----

_layers = {}  # (layer, partition_fn, shapes and types) -> the forward and the backward loop


def scan(layer: Callable, x: torch.Tensor, stacked: dict[str, torch.Tensor],
         partition_fn: Callable = default_partition) -> torch.Tensor:
    """x = layer(x, {name: w[i] for name, w in stacked.items()}) for i = 0, 1, ..., differentiable.

    `layer` must be the same object at each call, keep x's shape, and do nothing but compute from its arguments: it must
    draw nothing, for the backward pass would draw other numbers. `partition_fn` decides what the forward loop saves for
    the backward loop and what is computed again: the default saves all, about 45 tensors a layer; see also `keep`.
    """
    key = (layer, partition_fn, x.shape, x.dtype, torch.is_grad_enabled(),
           *((name, w.shape, w.dtype, w.requires_grad) for name, w in stacked.items()))
    if key not in _layers:
        def body(carry, w):
            return layer(carry, w), None
        forward, alias_input, backward = value_and_grad_partitioned(body, x, stacked, partition_fn, is_fn_pure=False)
        _layers[key] = Loop(forward, name='scan'), alias_input, Loop(backward, reverse=True, name='scan')
    return _Scan.apply(_layers[key], list(stacked), x, *stacked.values())


class _Scan(torch.autograd.Function):

    @staticmethod
    def forward(ctx, loops, names, x, *stacked):
        forward, alias_input, ctx.backward_loop = loops
        ctx.names, xs = names, dict(zip(names, stacked))
        out, (_, saved) = forward(x, xs)
        if forward._traced and forward._traced.seeds:
            raise RuntimeError('a layer in scan draws random numbers: draw them outside and pass them with the weights')
        ctx.save_for_backward(*alias_input(saved, xs))  # what the forward loop saved, and those weights that are needed
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grad_x, grads = ctx.backward_loop(grad_out, (None, ctx.saved_tensors))
        return None, None, grad_x, *(grads[name] for name in ctx.names)


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
