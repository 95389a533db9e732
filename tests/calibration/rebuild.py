"""Builds the training step of a published run again, compiles it for its slice and predicts its time.

    python tests/calibration/rebuild.py X7 M2 --out results.json     # or: fitted

What a run has in common with train_gpt.py is train_gpt.py's own; replaced is what rows.py says of the row. A compiled row
is kept in --cache and is only read again from there (--again traces it anew). Letters in names as in train_gpt.py.
"""
import argparse
import dataclasses
import gzip
import json
import pickle
import re
import shutil
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt  # noqa: E402
from nano import chips, plan, runtime  # noqa: E402
from nano.plan import aot, report  # noqa: E402
import kernels  # noqa: E402
from rows import FITTED, ROWS, Row  # noqa: E402
from train_gpt import BATCH, matmul, rms_norm, shard  # noqa: E402

# Mesh axes of the weights' dimensions. torchprime: sharding/llama-fsdp.yaml and llama-fsdp-tp.yaml; MaxText's logical
# rules come to train_gpt.py's own, and for M12 (fsdp_transpose) the MLP lies along its hidden width.
FSDP = dict.fromkeys(('wq_LDX', 'w_gate_LDF', 'w_up_LDF'), (None, None, 'fsdp'))
SHARDING = {
    'torchprime': FSDP | dict(
        embed_VD=('fsdp', None), head_VD=('fsdp', None), wk_LDY=(None, 'fsdp', None), wv_LDY=(None, 'fsdp', None),
        wo_LXD=(None, None, 'fsdp'), w_down_LFD=(None, 'fsdp', None), attn_norm_LD=(None, 'fsdp'),
        mlp_norm_LD=(None, 'fsdp'), final_norm_D=('fsdp',)),
    'torchprime-2d': dict(
        embed_VD=('fsdp', 'tensor'), attn_norm_LD=(None, 'fsdp'), mlp_norm_LD=(None, 'fsdp'), final_norm_D=('fsdp',)),
    'maxtext': dict(v_norm_LC=(None, None)),
    'maxtext-transpose': dict(w_gate_LDF=(None, None, 'fsdp'), w_up_LDF=(None, None, 'fsdp'),
                              w_down_LFD=(None, 'fsdp', None)),
}


# ---- The model ----

@torch.library.custom_op('calibration::named', mutates_args=())
def name_it(t: torch.Tensor, name: str) -> torch.Tensor:
    """Marks a tensor of a layer for `moved`, as jax's checkpoint_name and torchprime's offload_name do."""
    return t.clone()


name_it.register_fake(lambda t, name: torch.empty_like(t))
name_it.register_autograd(lambda ctx, grad: (grad, None))


def moved(names: tuple[str, ...]):
    """A rule of rematerialization as in nano/trace.py: the named tensors wait for the backward pass on the host, and all
    else but the layer's input, if that is not named, is computed again."""
    from torch._functorch import partitioners
    from torch_xla.experimental import stablehlo_custom_call  # noqa: F401, defines the two operators

    def partition(joint, _inputs, *, num_fwd_outputs, **_):
        inputs = [n for n in joint.graph.nodes if n.op == 'placeholder' and n.name.startswith('primals')]
        named = [n for n in joint.graph.nodes if 'calibration.named' in str(n.target) and n.args[1] in names]
        kept = inputs[1:] if 'input' in names else inputs  # the first is the layer's input
        forward, backward = partitioners._extract_fwd_bwd_modules(joint, kept + named, saved_sym_nodes=[],
                                                                  num_fwd_outputs=num_fwd_outputs)
        waiting = {n.name for n in named}
        results = next(n for n in forward.graph.nodes if n.op == 'output')
        with forward.graph.inserting_before(results):
            results.args = ([forward.graph.call_function(torch.ops.xla.place_to_host.default, (n,))
                             if at >= num_fwd_outputs and n.name in waiting else n
                             for at, n in enumerate(results.args[0])],)
        for n in [n for n in backward.graph.nodes if n.op == 'placeholder' and n.name in waiting]:
            last = [m for m in backward.graph.nodes if m.op == 'placeholder'][-1]
            with backward.graph.inserting_after(last):
                back = backward.graph.call_function(torch.ops.xla.place_to_device.default, (n,))
            n.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        forward.recompile(), backward.recompile()
        return forward, backward

    return partition


def rope(row: Row, cfg, x_BTHC: torch.Tensor) -> torch.Tensor:
    """torchprime turns in bfloat16, MaxText's Llama neighboring dimensions in float32, by shifts of the whole tensor."""
    if row.style == 'old':
        return train_gpt.rope(cfg, x_BTHC)
    _, T, _, C = x_BTHC.shape
    where = dict(device=x_BTHC.device, dtype=torch.float32)
    angle_TC = torch.arange(T, **where)[:, None] * cfg.rope_theta ** (torch.arange(0, C, 2, **where) / -C)
    if row.style == 'torchprime':
        angle_TC = torch.cat((angle_TC, angle_TC), -1)[:, None]
        a, b = x_BTHC.chunk(2, -1)
        return x_BTHC * angle_TC.cos().to(x_BTHC.dtype) + torch.cat((-b, a), -1) * angle_TC.sin().to(x_BTHC.dtype)
    angle_TC = angle_TC.repeat_interleave(2, -1)[:, None]
    even_C = torch.arange(C, device=x_BTHC.device) % 2 == 0
    x = x_BTHC.float()
    turned = torch.where(even_C, -torch.cat((x[..., 1:], x[..., :1]), -1), torch.cat((x[..., -1:], x[..., :-1]), -1))
    return (x * angle_TC.cos() + turned * angle_TC.sin()).to(x_BTHC.dtype)


def layer(row: Row, cfg, mesh, x_BTD: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """train_gpt.layer with what the frameworks do differently."""
    from nano import splash
    B, T, _ = x_BTD.shape
    H, K, C = cfg.heads, cfg.kv_heads, cfg.head_size
    stream = (BATCH, None, 'tensor')  # these runs cut the stream along `tensor` too
    act = (lambda t: shard(t, mesh, stream)) if row.sharding == 'torchprime-2d' else lambda t: t
    keep = (lambda t, name: name_it(t, name)) if row.offload else lambda t, name: t
    w = {name: shard(t, mesh, train_gpt.SHARDING[name][1:]) for name, t in w.items()}
    x_BTD = keep(x_BTD, 'input')
    h_BTD = act(rms_norm(x_BTD, w['attn_norm_LD'], cfg.norm_eps))
    q, k, v = (act(matmul(h_BTD, w[name])) for name in ('wq_LDX', 'wk_LDY', 'wv_LDY'))
    q, k, v = q.view(B, T, H, C), k.view(B, T, K, C), v.view(B, T, K, C)
    if cfg.qk_norm:
        q, k, v = (rms_norm(t, w[f'{name}_norm_LC'], cfg.norm_eps) for t, name in ((q, 'q'), (k, 'k'), (v, 'v')))
    if row.id != 'M15':  # which has no positions at all
        q, k = rope(row, cfg, q), rope(row, cfg, k)
    q, k, v = keep(q, 'q'), keep(k, 'k'), keep(v, 'v')
    if row.kernel['kind'] == 'flash' and K < H:
        k, v = (t[:, :, :, None].expand(B, T, K, H // K, C).reshape(B, T, H, C) for t in (k, v))
    a_BHTC = splash.attention(q.transpose(1, 2) * C ** -0.5, k.transpose(1, 2), v.transpose(1, 2), mesh,
                              (BATCH, 'tensor'))
    a_BTD = keep(act(matmul(a_BHTC.transpose(1, 2).reshape(B, T, H * C), w['wo_LXD'])), 'out')
    if row.style == 'old':
        m_BTD = matmul(F.relu(matmul(h_BTD, w['w_up_LDF'])), w['w_down_LFD'])
    else:
        x_BTD, a_BTD = x_BTD + a_BTD, 0
        h_BTD = act(rms_norm(x_BTD, w['mlp_norm_LD'], cfg.norm_eps))
        m_BTD = act(matmul(F.silu(act(matmul(h_BTD, w['w_gate_LDF']))) * act(matmul(h_BTD, w['w_up_LDF'])),
                           w['w_down_LFD']))
    return shard(x_BTD + a_BTD + m_BTD, mesh, stream)


class Model(train_gpt.GPT):
    """train_gpt.GPT, with MaxText's embedding by a matmul."""

    def __init__(self, row: Row, cfg, mesh):
        super().__init__(cfg, mesh)
        self.row, self.run_layer = row, partial(layer, row, cfg, mesh)
        if row.offload:
            self.remat = [moved(row.offload)]

    def __call__(self, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor, training: bool = False) -> torch.Tensor:
        from nano.trace import scan
        if self.row.style == 'torchprime':
            x_BTD = F.embedding(ids_BT, weights['embed_VD'])
        else:
            V_ids = torch.arange(weights['embed_VD'].shape[0], device=ids_BT.device, dtype=ids_BT.dtype)
            one_hot_BTV = shard((ids_BT[..., None] == V_ids).bfloat16(), self.mesh, (BATCH, None, 'tensor'))
            x_BTD = matmul(one_hot_BTV, weights['embed_VD'])
        x_BTD = shard(x_BTD, self.mesh, (BATCH, None, 'tensor'))
        x_BTD = scan(self.run_layer, x_BTD, {name: w for name, w in weights.items() if '_L' in name}, *self.remat)
        return rms_norm(x_BTD, weights['final_norm_D'], self.cfg.norm_eps)


def torchprime_loss(model: Model, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor,
                    labels_BT: torch.Tensor) -> torch.Tensor:
    """All logits in float32, then shifted (loss.py)."""
    logits_BTV = matmul(model(weights, ids_BT), model.head_VD(weights).t())
    if model.row.sharding == 'torchprime':
        logits_BTV = shard(logits_BTV, model.mesh, (BATCH, None, None))
    shifted = logits_BTV.float()[:, :-1].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels_BT[:, 1:].reshape(-1).long())


def maxtext_loss(model: Model, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor, targets_BT: torch.Tensor,
                 training: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of train_gpt.loss_sums: the target's logit by a one-hot product."""
    x_BTD = model(weights, ids_BT)
    if model.row.style == 'old':  # the head is a product of float32, which the matrix unit does in bfloat16
        logits_BTV = matmul(x_BTD.float(), model.head_VD(weights).t()) * model.cfg.width ** -0.5
    else:
        logits_BTV = matmul(x_BTD, model.head_VD(weights).t()).float()
    logits_BTV = shard(logits_BTV, model.mesh, (BATCH, None, 'tensor'))
    V_ids = torch.arange(logits_BTV.shape[-1], device=x_BTD.device, dtype=targets_BT.dtype)
    at_target_BT = torch.where(targets_BT[..., None] == V_ids, logits_BTV, 0.).sum(-1)
    nll = (logits_BTV.logsumexp(-1) - at_target_BT).sum()
    return nll, nll


# ---- The step ----

def adafactor(weights: dict[str, torch.Tensor], state: dict, lr: torch.Tensor):
    """HuggingFace's Adafactor as torchprime calls it: without momentum, relative steps and scaling by the weight's size.
    The root mean squares are of each layer, as theirs."""
    state['step'].add_(1)
    beta = 1 - state['step'] ** -0.8
    for name, w in weights.items():
        g, dims = w.grad.float(), tuple(range(1 if '_L' in name else 0, w.dim()))
        squared = g.square() + 1e-30
        if len(dims) == 2:
            row, col = state[f'row.{name}'], state[f'col.{name}']
            row.copy_(row * beta + squared.mean(-1) * (1 - beta))
            col.copy_(col * beta + squared.mean(-2) * (1 - beta))
            update = g * (row / row.mean(-1, keepdim=True)).rsqrt()[..., None] * col.rsqrt()[..., None, :]
        else:
            state[f'sq.{name}'].copy_(state[f'sq.{name}'] * beta + squared * (1 - beta))
            update = g * state[f'sq.{name}'].rsqrt()
        update = update / update.square().mean(dims, keepdim=True).sqrt().clamp(min=1.0) * lr
        p = w.float()
        state[f'rms.{name}'].copy_(p.square().mean(dims).sqrt())
        w.copy_(p - update)
        w.grad = None


def torchprime_step(model: Model, weights: dict[str, torch.Tensor], state: dict, ids_BT, labels_BT, lr) -> torch.Tensor:
    loss = torchprime_loss(model, weights, ids_BT, labels_BT)
    loss.backward()
    with torch.no_grad():
        adafactor(weights, state, lr)
    return loss.detach()[None]


def make_step(row: Row, mesh, device) -> aot.Step:
    """The row's step, by train_gpt.py's functions with those above in their place."""
    import torch_xla.distributed.spmd as xs
    from nano import splash
    cfg = train_gpt.Config(device='tpu', seq_len=row.seq_len, global_batch=row.batch,
                           remat=dict(full='block', dots='dots')[row.remat], steps=1000, **row.shape)
    shapes = train_gpt.weight_shapes(cfg)
    if row.style == 'old':
        del shapes['w_gate_LDF'], shapes['mlp_norm_LD']
        if cfg.qk_norm:
            shapes['v_norm_LC'] = shapes['k_norm_LC']
    table = {**train_gpt.SHARDING, **SHARDING[row.sharding]}
    train_gpt.weight_shapes, train_gpt.SHARDING, train_gpt.loss_sums = lambda _: shapes, table, maxtext_loss
    splash._lower = partial(kernels.lower, tuple(row.kernel.items()))
    dtype, weights, state = getattr(torch, row.dtype), {}, {}

    def make(shape, spec, dtype=torch.float32):
        t = torch.zeros(shape, device=device, dtype=dtype)
        if shape:
            xs.mark_sharding(t, mesh, spec)
        return t

    for name, shape in shapes.items():
        spec = table[name]
        weights[name] = torch.nn.Parameter(make(shape, spec, dtype))
        if row.style != 'torchprime':
            state |= {f'adam_{moment}.{name}': make(shape, spec, dtype) for moment in 'mv'}
            continue
        n_dims = len(shape) - ('_L' in name)
        state[f'rms.{name}'] = make(shape[:-n_dims], spec[:-n_dims])
        if n_dims == 2:
            state[f'row.{name}'] = make(shape[:-1], spec[:-1])
            state[f'col.{name}'] = make((*shape[:-2], shape[-1]), (*spec[:-2], spec[-1]))
        else:
            state[f'sq.{name}'] = make(shape, spec)
    state['step' if row.style == 'torchprime' else 'adam_t'] = make((), ())
    from nano.trace import Once
    model = Model(row, cfg, mesh)
    batch = {name: make((row.batch, row.seq_len), (BATCH, None), torch.int32) for name in ('ids_BT', 'targets_BT')}
    lr = torch.zeros(1, device=device)
    step = partial(torchprime_step, model) if row.style == 'torchprime' else partial(train_gpt.train_step, cfg, model)
    update, tokens = Once(step, changes=2), row.batch * row.seq_len
    return aot.Step(weights, state, batch | dict(lr=lr), lambda: update(weights, state, *batch.values(), lr), 'tokens', tokens, 1000,
                    train_gpt.flops_per_token(cfg) * tokens, train_gpt.FLOPS_RULE)


def device_order(row: Row) -> list[int] | None:
    """Which chips the mesh's devices are. X10's custom mesh: rings of four in 2 x 2 blocks of the 16 x 16 torus."""
    if row.id == 'X10':
        return [16 * (y + dy) + x + dx for y in range(0, 16, 2) for x in range(0, 16, 2)
                for dy, dx in ((0, 0), (0, 1), (1, 1), (1, 0))]


# ---- Command line ----

class Kept:
    """In place of a temporary folder: what the compiler writes stays there."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> str:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return str(self.folder)

    def __exit__(self, *_):
        pass


def stop_early(folder: Path):
    if list(folder.glob('dump/*buffer-assignment.txt')) and list(folder.glob('dump/*after_buffer_assignment.txt')):
        time.sleep(2)
        raise StopIteration


def in_hbm(report: str) -> list[str]:
    """Sizes of what lies in HBM (color 0, which is not written)."""
    found = re.findall(r'; allocation \d+: size ([^,]+), ([^:]*):', report)
    return [size for size, rest in found if 'color' not in rest]


def scheduled(folder: Path, slice_: chips.Slice) -> aot.Compiled:
    """The program as it was scheduled, before code was made of it, which takes the compiler minutes: all but the numbers
    of cycles, and the code's size."""
    text = sorted(folder.glob('dump/*after_buffer_assignment.txt'))[-1].read_text()
    report = sorted(folder.glob('dump/*memory-usage-report.txt'))[-1].read_text()
    limit = round(slice_.chip.usable_gib * 2**30)
    total = 2**28 + sum(aot._size(size) for size in in_hbm(report))
    remat = [tuple(map(aot._size, pair)) for pair in re.findall(
        r'rematerialization hbm reduction: +([0-9.]+[BKMGT]?) => ([0-9.]+[BKMGT]?)', (folder / 'log').read_text())]
    return aot.Compiled(True, total, limit, 2**28, 0, 0, 0., text, json.loads((folder / 'coords.json').read_text()),
                        aot._largest(folder, text), max(remat, default=(0, 0)))


def compiled(row: Row, cache_folder: Path, again: bool, early: bool) -> tuple[aot.Traced, aot.Compiled]:
    for end in ['', '.early'][:1 + early]:
        kept = cache_folder / f'{row.id}{end}.pickle.gz'
        if kept.exists() and not again:
            stamp, traced, result = pickle.loads(gzip.decompress(kept.read_bytes()))
            if stamp == repr(row):
                return traced, result
    slice_ = chips.find_slice(row.slice)
    n = slice_.n_chips
    aot.start(n)
    mesh = runtime.make_mesh(row.mesh, n)
    traced = aot.trace(lambda device: make_step(row, mesh, device), n)
    print(f'{row.id}: traced, {len(traced.module) / 1e6:.1f} MB; compiling ...', file=sys.stderr, flush=True)
    flags = ' '.join(f'--{name}={value}' for name, value in row.flags.items())
    folder = cache_folder / f'{row.id}.compile'
    aot.tempfile = types.SimpleNamespace(TemporaryDirectory=partial(Kept, folder))
    try:
        result = aot.compile_step(traced, slice_, flags, cache_folder, 7200,
                                  partial(stop_early, folder) if early else lambda: None, device_order(row))
    except StopIteration:
        result = scheduled(folder, slice_)
    plain = dataclasses.replace(traced.step, weights={}, state={}, batch={}, run=None)
    traced = dataclasses.replace(traced, module=b'', step=plain)  # without what belongs to this process
    kept = cache_folder / f'{row.id}{".early" if early else ""}.pickle.gz'
    kept.write_bytes(gzip.compress(pickle.dumps((repr(row), traced, result)), 6))
    return traced, result


def predict(row: Row, cache_folder: Path, again: bool, early: bool) -> dict:
    traced, result = compiled(row, cache_folder, again, early)
    slice_ = chips.find_slice(row.slice)
    mesh = runtime.mesh_shape(row.mesh, slice_.n_chips)
    found = report.figures(traced, result, slice_, mesh)
    kept = ('slice', 'mesh', 'fits', 'memory', 'model_flops', 'program_flops', 'step_s',
            'device_s_overlapped', 'seconds_by_kind', 'collectives', 'uncosted_kernels', 'compile_s')
    return dict(row=row.id, held_out=row.held_out, published_s=row.seconds, source=row.source, differs=row.differs,
                error=found['step_s'] / row.seconds - 1 if found['fits'] else None,
                **{name: found[name] for name in kept if name in found})


def show(p: dict) -> str:
    gib, m = 2**30, p['memory']
    text = f'{p["row"]:<4}{m["total"] / gib:6.2f} of {m["limit"] / gib:.2f} GiB, compiled in {p["compile_s"]:.0f} s'
    if not p['fits']:
        big = '\n'.join(f'      {b["bytes"] / gib:7.2f} GiB {b["what"]}' for b in p['largest_buffers'])
        return f'{text}: DOES NOT FIT\n{big}'
    text += (f'\n    {p["step_s"]:.3f} s predicted, {p["published_s"]} published: {p["error"]:+.1%}; '
             f'FLOPs {p["program_flops"] / p["model_flops"]:.3f} x model')
    for kind, s in sorted(p['seconds_by_kind'].items(), key=lambda k: -k[1]):
        text += f'\n      {kind:<14}{s:8.3f} s'
    for c in p['collectives']:
        text += f'\n      {c["op"]:<20}{c["axis"]:<12}{c["bytes"] / 1e9:9.2f} GB'
        text += f'{c["seconds"]:8.3f} s{c["times"]:7.0f} x'
    return text + ''.join(f'\n      no rule: {name}' for name in sorted(set(p['uncosted_kernels'])))


def table(found: dict) -> str:
    """The results as a table in Markdown."""
    lines = ['| run | slice | published s | predicted s | error | |', '| --- | --- | --- | --- | --- | --- |']
    whose = dict(torchprime='torchprime', maxtext='MaxText', old='MaxText 2023')
    for p in sorted(found.values(), key=lambda p: (p['held_out'], p['row'][0], int(re.sub(r'\D', '', p['row'])))):
        row = ROWS[p['row']]
        what = (f'{whose[row.style]}: {row.shape["layers"]} layers of {row.shape["width"]}, {row.batch} x {row.seq_len}'
                + (', host offload' if row.offload else ''))
        lines.append(f'| {p["row"]}, {what} | {p["slice"]} | {p["published_s"]:.3f} | {p["step_s"]:.3f} | {p["error"]:+.1%} | '
                     f'{"held out" if p["held_out"] else "fitted"} |')
    return '\n'.join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='*', help='ids of rows.py, or fitted')
    parser.add_argument('--out', help='add the figures to this JSON file')
    parser.add_argument('--cache', type=Path, default=Path('~/.cache/nano-tpu-plan/calibration').expanduser(),
                        help='folder of what was compiled')
    parser.add_argument('--again', action='store_true', help='trace what is in the cache again')
    parser.add_argument('--early', action='store_true', help='stop before code is made: all but the compiler\'s own estimates')
    parser.add_argument('--held_out', action='store_true', help='allow rows that are held out: once, at the end')
    parser.add_argument('--one', help=argparse.SUPPRESS)  # a child's: where to write its figures
    parser.add_argument('--table', action='store_true', help='print what is in --out as a table, and do nothing else')
    args = parser.parse_args()
    if args.table:
        return print(table(json.loads(Path(args.out).read_text())))
    args.cache.mkdir(parents=True, exist_ok=True)
    ids = [id for word in args.rows for id in (FITTED if word == 'fitted' else [word])]
    for id in ids:
        if ROWS[id].held_out and not args.held_out:
            sys.exit(f'{id} is held out, see README.md')
    if args.one:
        Path(args.one).write_text(json.dumps(predict(ROWS[ids[0]], args.cache, args.again, args.early)))
        return
    for id in ids:  # torch_xla starts once in a process, for one slice
        part = args.cache / f'{id}.figures.json'
        words = [id, '--one', part, '--cache', args.cache, *['--again'] * args.again, *['--held_out'] * args.held_out,
                 *['--early'] * args.early]
        if subprocess.run([sys.executable, __file__, *map(str, words)]).returncode:
            print(f'{id}: failed, see above')
            continue
        found = json.loads(part.read_text())
        print(show(found), flush=True)
        if args.out:
            out = Path(args.out)
            all_found = json.loads(out.read_text()) if out.exists() else {}
            lines = [f'{json.dumps(name)}: {json.dumps(p)}' for name, p in (all_found | {id: found}).items()]
            out.write_text('{' + ',\n'.join(lines) + '}\n')


if __name__ == '__main__':
    main()
