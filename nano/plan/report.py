"""From a compiled step to the figures of a plan, and these as text."""
import math
import re
from collections import Counter, defaultdict
from typing import Callable

from nano import chips, runtime
from nano.plan import aot, hlo

GIB = 2**30


def figures(traced: aot.Traced, compiled: aot.Compiled, slice_: chips.Slice, mesh: tuple[int, ...],
            units: float = 0, price: float = 0) -> dict:
    """All figures of a plan, ready for JSON: bytes, seconds, FLOPs, USD. `units` (0: of the whole run) are what time and
    cost are told for, at `price` USD for a chip and an hour (0: the list price)."""
    chip, step = slice_.chip, traced.step
    names = {'weights': 'weights', 'state': 'optimizer', 'batch': 'batch'}
    parts = {names[group]: sum(tensors.values()) for group, tensors in traced.local_bytes.items()}
    buffers = [(n, f'{names[group]}: {name}') for group, tensors in traced.local_bytes.items()
               for name, n in tensors.items()]
    for n, shape, origin in compiled.largest:
        array = re.search(r'\w+\[[0-9,]*\]', shape)  # of several, the first
        buffers.append((n, f'temporary {array[0] if array else shape}' + (f': {origin}' if origin else '')))
    largest = sorted(Counter(buffers).items(), key=lambda b: -b[0][0])[:10]
    total = compiled.total
    if not compiled.fits and not compiled.arguments:  # then the compiler tells of the program alone
        total += sum(parts.values())
    result = dict(
        slice=slice_.name, chip=chip.name, chips=slice_.n_chips, topology=slice_.topology, slices=slice_.n_slices,
        mesh=dict(zip(runtime.AXES, mesh)), parameters=traced.n_weights, unit=step.unit, units_per_step=step.units,
        fits=compiled.fits,
        memory=dict(total=total, limit=compiled.limit, reserved=compiled.reserved, **parts,
                    program=compiled.program, arguments=compiled.arguments,
                    rematerialized_by_compiler=list(compiled.rematerialized)),
        largest_buffers=[dict(bytes=n, what=what, count=count) for (n, what), count in largest],
        model_flops=step.model_flops, flops_rule=step.flops_rule, host_trace_s=traced.trace_s,
        compile_s=compiled.seconds, cached=compiled.cached, compiler_warnings=compiled.warnings, predicted=True)
    if not compiled.fits:
        return result
    program = hlo.Program(compiled.hlo, chip, network(slice_, compiled.coords))
    cost = program.cost(classifier(program, traced.parameters))
    # Collectives count in full, also those that run beside other work: they slow it down. That was found by fitting.
    by_kind = cost.seconds | {'collectives': program.links_seconds()}
    if slice_.n_slices > 1:
        by_kind['between slices'] = cost.waits.get('slices', 0.)
    device = sum(by_kind.values())
    limits = cost.limits | {'links between chips': by_kind['collectives']}
    if slice_.n_slices > 1:
        limits['network between slices'] = by_kind['between slices']
    compiler = device + sum(cost.compiler.values()) - sum(cost.seconds.values())
    rate = step.units / device
    result.update(
        program_flops=cost.flops * slice_.n_chips, hbm_traffic=cost.hbm_bytes, uncosted_kernels=program.uncosted,
        step_s=device, device_s_overlapped=cost.total, device_s_compiler=compiler,
        seconds_by_kind=by_kind,
        seconds_by_limit=limits, mfu=step.model_flops / device / (chip.peak_tflops * 1e12 * slice_.n_chips),
        units_per_s=rate, collectives=collectives(program, mesh))
    units = units or step.units * step.steps
    result['budget'] = dict(units=units, hours=units / rate / 3600)
    listed = chip.price
    prices = [('usd', price, 'the price given')] if price else [
        ('usd', listed.on_demand, f'on demand, list price in {listed.region}, read {listed.read}'),
        ('usd_spot', listed.spot, 'spot, the same: it changes daily, look it up')]
    for name, per_chip, what in prices:
        if per_chip is not None:
            usd = per_chip * slice_.n_chips * units / rate / 3600
            result['budget'] |= {name: usd, f'{name}_rule': f'${per_chip:.2f} for a chip and an hour: {what}'}
    return result


def network(slice_: chips.Slice, coords: list[list[int]]) -> hlo.Network:
    return hlo.Network([tuple(c[1:1 + len(slice_.shape)]) for c in coords], slice_.wrap, slice_.chip.link_gbs,
                       slice_.n_slices, slice_.chip.dcn_gbs)


def axes_of(group: tuple[int, ...], mesh: tuple[int, ...]) -> str:
    """The mesh axes along which the devices of a group differ: 'fsdp', or 'data,fsdp'."""
    at = list(zip(*(_unravel(i, mesh) for i in group)))
    return ','.join(axis for axis, places in zip(runtime.AXES, at) if len(set(places)) > 1) or 'none'


def _unravel(i: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    at = []
    for size in reversed(mesh):
        i, rest = divmod(i, size)
        at.insert(0, rest)
    return tuple(at)


def collectives(program: hlo.Program, mesh: tuple[int, ...]) -> list[dict]:
    """Bytes that a chip sends in a step, by operation and mesh axis, the most first."""
    rows = defaultdict(lambda: dict(times=0., bytes=0., seconds=0.))
    for c in program.collectives:
        row = rows[c.op, axes_of(c.group, mesh)]
        row['times'] += c.times
        row['bytes'] += c.times * c.n_bytes
        row['seconds'] += c.times * c.seconds
    return [dict(op=op, axis=axis, **row) for (op, axis), row in sorted(rows.items(), key=lambda r: -r[1]['bytes'])]


def classifier(program: hlo.Program, parameters: dict[int, str]) -> Callable:
    """instruction -> matmul, attention, elementwise or optimizer. The optimizer is what reads its state; attention is
    its kernels, and the batched matmuls and the softmax of plain attention."""
    entry = program.computations[program.entry]
    through = ('copy', 'copy-start', 'copy-done', 'bitcast', 'get-tuple-element', 'slice-start', 'slice-done', 'reshape')

    def is_state(name: str) -> bool:
        i = entry.by_name.get(name)
        while i is not None and (i.op in through or 'ConcatBitcast' in i.attributes) and i.operands:
            i = entry.by_name.get(i.operands[0])
        return i is not None and i.op == 'parameter' and parameters.get(int(i.operands[0]), '').startswith('state ')

    def classify(i: hlo.Instruction, flops: float, computation: hlo.Computation) -> str:
        if any(word in i.op_name for word in ('splash', 'flash', 'attend_', 'bmm', 'softmax')):
            return 'attention'
        if flops:
            return 'matmul'
        if computation is entry and any(is_state(name) for name in i.operands):
            return 'optimizer'
        return 'elementwise'

    return classify


# ---- What is printed ----

TOLD = 'global_batch', 'accumulate', 'seq_len', 'image_size', 'dtype', 'attention', 'remat'  # options, where there are such


def gib(n: float) -> str:
    return f'{n / GIB:.2f} GiB' if n >= GIB / 100 else f'{n / 2**20:.2f} MiB'


def duration(hours: float) -> str:
    for most, per_hour, unit in ((1 / 20, 3600, 'seconds'), (2, 60, 'minutes'), (48, 1, 'hours'), (math.inf, 1 / 24, 'days')):
        if hours < most:
            return f'{hours * per_hour:.{1 if per_hour <= 1 else 0}f} {unit}'
    return 'for ever'


def as_text(p: dict) -> str:
    """A plan as text."""
    m, mesh = p['memory'], ', '.join(f'{axis} {n}' for axis, n in p['mesh'].items())
    slices = f'{p["slices"]} slices of ' if p['slices'] > 1 else ''
    lines = ['', f'PREDICTED for {p["slice"]}: {p["chips"]} {p["chip"]} chips, {slices}{p["topology"]}; mesh {mesh}. '
             f'Compiled by libtpu, not run.', '']

    def row(name: str, value: str, note: str = ''):
        lines.append(f'  {name:<22}{value:>14}  {note}'.rstrip())

    row('parameters', f'{p["parameters"] / 1e6:,.1f} M')
    row(p['unit'] + ' per step', f'{p["units_per_step"]:,}')
    told = {name: p['options'][name] for name in TOLD if name in p['options']}
    lines.append('  ' + ', '.join(f'{name} {value}' for name, value in told.items()))
    lines += ['', 'Memory of a chip']
    for name, note in (('weights', ''), ('optimizer', 'its state'), ('batch', ''),
                       ('program', 'gradients, activations, code'), ('reserved', 'by the runtime')):
        row(name, gib(m[name]), note)
    spare = m['limit'] - m['total']
    row('peak', ('' if p['fits'] else '>= ') + gib(m['total']), f'of {gib(m["limit"])}: ' + (
        f'fits, {gib(spare)} ({spare / m["limit"]:.0%}) to spare' if p['fits'] else
        f'DOES NOT FIT, {gib(-spare)} too much'))
    if m['rematerialized_by_compiler'][0] and p['fits']:
        before, after = m['rematerialized_by_compiler']
        lines.append(f'  It fits only because the compiler itself computes parts again: {gib(before)} became {gib(after)}.')
    lines += ['', 'Largest buffers of a chip']
    lines += [f'  {gib(b["bytes"]):>12}  {b["what"]}' + (f' ({b["count"]} times)' if b['count'] > 1 else '')
              for b in p['largest_buffers']]
    if not p['fits']:
        return '\n'.join(lines)
    lines += ['', 'Arithmetic of a step, all chips together']
    row('model', f'{p["model_flops"] / 1e12:,.1f} TFLOP', p['flops_rule'])
    ratio = p['program_flops'] / p['model_flops']
    row('program', f'{p["program_flops"] / 1e12:,.1f} TFLOP', f'{ratio:.2f} times the model: ' + (
        'what is computed again, and what has no use' if ratio >= 1 else
        'the convention counts what this step does not compute, or a kernel is not counted'))
    lines += ['', 'Collectives of a step: what each chip sends']
    lines += [f'  {c["op"]:<20}{c["axis"]:<12}{c["bytes"] / 1e9:>9.3f} GB{c["seconds"] * 1e3:>10.1f} ms'
              f'{c["times"]:>9,.0f} times' for c in p['collectives']] or ['  none']
    lines += ['', 'Time of a step']
    for kind, seconds in sorted(p['seconds_by_kind'].items(), key=lambda k: -k[1]):
        row(kind, f'{seconds * 1e3:,.1f} ms')
    row('step', f'{p["step_s"] * 1e3:,.1f} ms')
    row('  at best', f'{p["device_s_overlapped"] * 1e3:,.1f} ms', 'if collectives slow nothing down that they run beside')
    row('  by libtpu', f'{p["device_s_compiler"] * 1e3:,.1f} ms', 'with the compiler\'s own estimates, mostly too high')
    limits = sorted(p['seconds_by_limit'].items(), key=lambda k: -k[1])
    lines.append('  limited by ' + ', '.join(f'{name} {s / p["step_s"]:.0%}' for name, s in limits if s > 0.005 * p['step_s']))
    row('host', f'{p["host_trace_s"] * 1e3:,.1f} ms', 'to trace the next step meanwhile, on this machine')
    if p['host_trace_s'] > p['step_s']:
        lines.append('  The chips may have to WAIT FOR THE HOST. What follows is if they do not.')
    for name in p['uncosted_kernels'][:3]:
        lines.append(f'  Not in the time, for want of a rule: the kernel {name}')
    lines += ['', 'Result']
    row(p['unit'] + ' per second', f'{p["units_per_s"]:,.0f}', f'{p["units_per_s"] / p["chips"]:,.0f} per chip')
    row('MFU', f'{p["mfu"]:.1%}', f'the model\'s arithmetic, of {chips.CHIPS[p["chip"]].peak_tflops:g} TFLOP/s a chip')
    b = p['budget']
    row(f'{b["units"]:.3g} {p["unit"]}', duration(b['hours']))
    for name, key in (('cost', 'usd'), ('cost, spot', 'usd_spot')):
        if key in b:
            row(name, f'${b[key]:,.0f}' if b[key] >= 10 else f'${b[key]:.2f}', b[f'{key}_rule'])
    row('compile', f'{p["compile_s"]:.0f} s', 'on this machine' + (', when it was compiled first' if p['cached'] else ''))
    lines += [f'  The compiler warns: {w}' for w in p['compiler_warnings'][:3]]
    return '\n'.join(lines)
