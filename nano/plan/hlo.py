"""Reads what the TPU compiler made of a program (the scheduled HLO of one chip, as text): operations, bytes, time.

The compiler writes how many cycles it expects of each fusion; collectives and Pallas kernels carry no such figure and
are costed here, by the rules of `Costs`.
"""
import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nano import UserError
from nano.chips import Chip

BYTES = {'pred': 1, 's4': .5, 'u4': .5, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4,
         'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8}
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')


@dataclass
class Array:
    """One array of an instruction's result. `space`: 0 is HBM, 1 VMEM, 5 the host's memory."""
    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> float:
        return math.prod(self.dims) * BYTES.get(self.dtype, 0)


@dataclass
class Instruction:
    name: str
    op: str
    results: list[Array]
    operands: list[str]
    attributes: str
    root: bool

    def attribute(self, pattern: str) -> str:
        match = re.search(pattern, self.attributes)
        return match[1] if match else ''

    @cached_property
    def calls(self) -> str:
        return self.attribute(r'\b(?:calls|to_apply)=%?([\w.\-]+)')

    @cached_property
    def branches(self) -> list[str]:
        """What a call, or a conditional, may run."""
        listed = self.attribute(r'branch_computations=\{([^}]*)\}') or ','.join(
            re.findall(r'(?:to_apply|(?:true|false)_computation)=%?([\w.\-]+)', self.attributes))
        return [name.strip().lstrip('%') for name in listed.split(',') if name]

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it has none."""
        text = self.attribute(r'"estimated_cycles":"(\d+)"')
        return int(text) if text and int(text) < 2**62 else None

    @cached_property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"')

    @cached_property
    def line(self) -> tuple[str, int]:
        """(source file, line), or ('', 0)."""
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', self.attributes)
        return (match[1], int(match[2])) if match else ('', 0)


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.root)


def _arrays(text: str) -> list[Array]:
    """'(f32[2,3]{1,0:T(8,128)S(1)}, s32[])' -> its arrays."""
    return [Array(m[1], tuple(map(int, m[2].split(','))) if m[2] else (), int(m[3] or 0))
            for m in re.finditer(r'\b([a-z]+[0-9]*)\[([0-9,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?', text)]


def _closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'[()]').finditer(text, start):
        depth += 1 if match[0] == '(' else -1
        if not depth:
            return match.end()
    raise ValueError(f'no closing parenthesis: {text[start:start + 80]}')


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the entry."""
    computations, entry, current = {}, '', None
    head = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
    body = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = ')
    for line in text.splitlines():
        if match := body.match(line):
            at = match.end()
            end = _closing(line, at) if line[at] == '(' else line.index(' ', at)
            shape = line[at:end]
            opening = line.index('(', end)
            closing = _closing(line, opening)
            operands = re.findall(r'%([\w.\-]+)', line[opening:closing])
            if line[end:opening].strip() in ('parameter', 'constant'):
                operands = [line[opening + 1:closing - 1]]  # the number, or the value
            current.instructions.append(Instruction(match[2], line[end:opening].strip(), _arrays(shape), operands,
                                                    line[closing:], bool(match[1])))
        elif match := head.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = match[2] if match[1] else entry
    return computations, entry


def convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """2 x multiply-adds of a matmul; the TPU compiler writes all of them as convolutions, whose windows slide over
    padding that is not counted, as XLA's own HloCostAnalysis does."""
    lhs, rhs = (computation.by_name[name].results[0].dims for name in instruction.operands[:2])
    out = instruction.results[0].dims
    if instruction.op == 'dot':
        contracted = instruction.attribute(r'lhs_contracting_dims=\{([0-9,]*)\}')
        return 2 * math.prod(out) * math.prod(lhs[int(d)] for d in contracted.split(',') if d)
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
    lhs_label, rhs_label, out_label = labels.groups()
    window = {key: value.split('x') for key, value in
              re.findall(r'(\w+)=([\w\-]+)', instruction.attribute(r'window=\{([^}]*)\}'))}
    valid = 1
    for d, size in enumerate(map(int, window.get('size', []))):
        stride = int(window['stride'][d]) if 'stride' in window else 1
        pad = int(window['pad'][d].split('_')[0]) if 'pad' in window else 0
        lhs_dilate = int(window['lhs_dilate'][d]) if 'lhs_dilate' in window else 1
        rhs_dilate = int(window['rhs_dilate'][d]) if 'rhs_dilate' in window else 1
        n_in, n_out = lhs[lhs_label.index(str(d))], out[out_label.index(str(d))]
        at = np.arange(n_out)[:, None] * stride - pad + np.arange(size) * rhs_dilate
        valid *= int(((at >= 0) & (at < (n_in - 1) * lhs_dilate + 1) & (at % lhs_dilate == 0)).sum())
    return 2 * valid * out[out_label.index('b')] * out[out_label.index('f')] * rhs[rhs_label.index('i')]


@dataclass
class Network:
    """A slice's links. `coords`: where each device of the mesh stands in the torus."""
    coords: list[tuple[int, ...]]
    wrap: tuple[bool, ...]
    link_gbs: float  # one way
    n_slices: int = 1
    dcn_gbs: float = 0.  # of a chip, one way, to other slices

    def links(self, group: list[int]) -> int:
        """Links that a chip sends on at once in a collective of the group: one for each dimension of the torus that the
        group extends along, two where it closes to a ring."""
        at = np.array([self.coords[i % len(self.coords)] for i in group])
        return sum(1 + bool(w) for d, w in enumerate(self.wrap) if len(set(at[:, d])) > 1) or 1

    def seconds(self, op: str, n_bytes: float, group: list[int]) -> float:
        """Time of a collective whose largest operand or result has `n_bytes`."""
        n, links, sent = len(group), self.links(group), moved(op, n_bytes, len(group))
        if op == 'collective-permute':
            links = 1  # to one neighbor; those that are further away are passed on
        if op == 'all-to-all':
            # What each chip has for each other one passes all links between them: in a line of n chips the links in its
            # middle carry n/4 times what a chip has, each way, and in a ring half as much.
            extents = [len({self.coords[i % len(self.coords)][d] for i in group}) for d in range(len(self.wrap))]
            sent = n_bytes * max((n / (8 if w else 4) for n, w in zip(extents, self.wrap) if n > 1), default=0)
            links = 1
        return sent / (LINK_SHARE * links * self.link_gbs * 1e9)


def moved(op: str, n_bytes: float, n: int) -> float:
    """Bytes that each of n chips sends in a collective by the ring algorithms (Chan et al. 2007)."""
    if op == 'collective-permute':
        return n_bytes
    return n_bytes * (n - 1) / n * (2 if op == 'all-reduce' else 1)


# What a chip reaches of its peaks. The first two are others' measurements; the rest were fitted to published runs, see
# tests/calibration.
LINK_SHARE = 0.93  # of a link's bandwidth, by collectives: jax-ml.github.io/scaling-book
MXU_SHARE = 0.90  # of the peak, by large matmuls: tpu-recipes' microbenchmarks, 827 of v6e's 918 TFLOP/s
HBM_SHARE = 0.65  # of the bandwidth, by what is bound by memory (a long copy reaches 0.83, but most are no long copies)
# Of the peak, by Pallas attention kernels in the blocks that they compute, with heads as wide as the matrix unit. Smaller
# heads fill a part of it: those of 128 half of v6e's. Each block costs a fixed time on top.
KERNEL_SHARE = {'forward': 0.78, 'backward': 0.70}
KERNEL_STEP_S = 1e-6
# Cycles that nano/attend.py takes for 1024 scores (of an image and a head, padded to tiles) by the schedule that libtpu
# 0.0.22 makes of it for a v5e, 196 patches and heads of 64: 2545 and 6406 bundles of instructions for 8 x 208 x 256
# scores; for a v6e 1688 and 4964. No stall is in them, and none of it was run.
SCORE_CYCLES = {'forward': 6.1, 'backward': 15.4}
FREE = {'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'partition-id', 'replica-id', 'after-all',
        'opt-barrier', 'iota', 'domain'}


@dataclass
class Collective:
    op: str
    n_bytes: float  # each chip sends, at each of the `times`
    group: tuple[int, ...]
    seconds: float
    way: str  # what it keeps busy
    times: float = 1
    op_name: str = ''


@dataclass
class Cost:
    """What a piece of the program takes."""
    seconds: dict[str, float] = field(default_factory=dict)  # by kind, by the rules of this file
    compiler: dict[str, float] = field(default_factory=dict)  # by kind, by the compiler's own estimates where it has one
    limits: dict[str, float] = field(default_factory=dict)  # the same seconds by what they are limited by
    waits: dict[str, float] = field(default_factory=dict)  # by network, for what was not hidden behind other work
    flops: float = 0.
    hbm_bytes: float = 0.

    def add(self, other: 'Cost', times: float = 1):
        for mine, theirs in ((self.seconds, other.seconds), (self.compiler, other.compiler),
                             (self.limits, other.limits), (self.waits, other.waits)):
            for kind, s in theirs.items():
                mine[kind] = mine.get(kind, 0) + s * times
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times

    @property
    def total(self) -> float:
        return sum(self.seconds.values()) + sum(self.waits.values())


class Program:
    """A scheduled program on one chip."""

    def __init__(self, text: str, chip: Chip, network: Network):
        self.computations, self.entry = parse(text)
        self.chip, self.network = chip, network
        self.collectives: list[Collective] = []
        self.uncosted: list[str] = []  # kernels that no rule here knows: they count as nothing
        self._inner = {}

    # ---- What one instruction does ----

    def inner(self, name: str) -> tuple[float, list[tuple[Instruction, Computation]]]:
        """(FLOPs, collectives) inside a fused computation, those that it calls included."""
        if name not in self._inner:
            flops, found = 0., []
            computation = self.computations[name]
            for i in computation.instructions:
                if i.op in ('convolution', 'dot'):
                    flops += convolution_flops(i, computation)
                elif i.op.removesuffix('-start') in COLLECTIVES:
                    found.append((i, computation))
                if i.op in ('fusion', 'call', 'async-start') and i.calls in self.computations:
                    more = self.inner(i.calls)
                    flops, found = flops + more[0], found + more[1]
            self._inner[name] = flops, found
        return self._inner[name]

    def matmul_seconds(self, flops: float, i: Instruction, computation: Computation) -> float:
        """At MXU_SHARE, with the dimensions that lie in the matrix unit filled up to its width."""
        where = self.computations[i.calls] if i.op == 'fusion' else computation
        fill = 1.
        for c in where.instructions:
            if c.op == 'convolution' and all(name in where.by_name for name in c.operands[:2]):
                out, label = c.results[0].dims, c.attribute(r'dim_labels=\w+->(\w+)')
                fill = self._filled(max(1, round(convolution_flops(c, where) / (2 * math.prod(out)))))  # what is contracted
                if 'window' not in c.attributes:  # else dimensions are split in parts that are not told apart here
                    # Of the other two one lies in the unit: the one that fills it better.
                    columns = out[label.index('f')]
                    fill *= max(self._filled(columns), self._filled(math.prod(out) // columns))
        return flops / fill / (MXU_SHARE * self.chip.peak_tflops * 1e12)

    def _filled(self, n: int) -> float:
        """The share of the matrix unit that n rows or columns fill."""
        return n / (-(-n // self.chip.mxu) * self.chip.mxu)

    def attention_kernel(self, i: Instruction, computation: Computation) -> tuple[float, float]:
        """(FLOPs, seconds) of a Pallas attention kernel: jax's splash and flash attention. Causal: whole blocks above the
        diagonal are left out. That of nano/attend.py: see `_attend`. Other kernels: nothing, and noted."""
        if ours := re.search(r'attend_(forward|backward)_block_(\d+)x(\d+)', i.name + ' ' + i.op_name):
            return self._attend(i, computation, ours[1], int(ours[2]), int(ours[3]))
        operands = [computation.by_name[name].results[0] for name in i.operands if name in computation.by_name]
        # B, H, T, C; a batch of one is left out. Before them come the mask's small integers.
        q, k = ([a.dims for a in operands if len(a.dims) >= 3 and a.dtype in ('bf16', 'f32')] + [None, None])[:2]
        known = re.search(r'splash_m[hq]a_(fwd|dkv|dq)|flash_attention_?(dkv|dq)?', i.name + ' ' + i.op_name)
        if not known or not k:
            self.uncosted.append(i.op_name.rsplit('/', 1)[-1] or i.name)
            return 0., 0.
        T, S, C = q[-2], k[-2], q[-1]
        what = known[1] or known[2] or 'fwd'
        fused = sum(a.dims[-2:] in (q[-2:], k[-2:]) for a in i.results) >= 3  # gradients of q, k, v: no name says it
        matmuls = {'fwd': 2, 'dkv': 5 if fused else 4, 'dq': 3}[what]
        suffix = '' if what == 'fwd' else f'_{what}'
        block = [int(m[1]) if (m := re.search(rf'block_{side}{suffix}_(\d+)', i.name)) else 512 for side in ('q', 'kv')]
        # With rows of `a` queries and columns of `b` keys: those below or on the diagonal.
        a, b = min(block[0], T), min(block[1], S)
        whole = 'causal_False' in i.name
        steps = math.prod(q[:-2]) * sum(-(-S // b) if whole else min(-(-S // b), -(-(row + a) // b)) for row in range(0, T, a))
        flops = matmuls * 2 * steps * a * b * C
        share = KERNEL_SHARE['forward' if what == 'fwd' else 'backward'] * min(1, C / self.chip.mxu)
        if 'flash' in known[0] and what == 'fwd':
            steps /= 2  # it takes two heads at a time
        return flops, flops / (share * self.chip.peak_tflops * 1e12) + steps * KERNEL_STEP_S

    def _attend(self, i: Instruction, computation: Computation, way: str, rows: int, lanes: int) -> tuple[float, float]:
        """(FLOPs, seconds): the longest of its matmuls at KERNEL_SHARE, of the compiler's schedule at SCORE_CYCLES, in
        which matrix and vector unit work side by side, and of its operands and results at HBM_SHARE; and a fixed time for
        each block. The kernel itself says how many FLOPs, all that it fills up with zeros to 128 included, and scores."""
        flops, scores = (int(i.attribute(rf'"{what}":"(\d+)"')) for what in ('flops', 'transcendentals'))
        R, X = i.results[0].dims
        share = KERNEL_SHARE[way] * min(1, 128 / self.chip.mxu)
        seconds = max(flops / (share * self.chip.peak_tflops * 1e12),
                      scores / 1024 * SCORE_CYCLES[way] / (self.chip.cores * self.chip.clock_ghz * 1e9),
                      self.hbm_traffic(i, computation) / (HBM_SHARE * self.chip.hbm_gbs * 1e9))
        return flops, seconds + R // rows * (X // lanes) * KERNEL_STEP_S / self.chip.cores

    def hbm_traffic(self, i: Instruction, computation: Computation) -> float:
        """Bytes that the instruction reads from and writes to HBM: of what it only slices or updates, the slice; not those
        of a collective that goes on beside it, which the fusion only hands on."""
        if i.op == 'fusion':
            where = self.computations[i.calls]
            parameters = {int(p.operands[0]): p.name for p in where.instructions if p.op == 'parameter'}
        else:
            where, parameters = computation, {}
        total = 0.
        for number, name in enumerate(i.operands):
            source = computation.by_name.get(name)
            n_bytes = sum(a.bytes for a in source.results if a.space == 0) if source else 0.
            inside = parameters.get(number)
            users = [u for u in where.instructions if inside in u.operands] if inside else [i]
            if users and n_bytes:
                n_bytes = min(n_bytes, sum(self._reads(u, inside or name, n_bytes) for u in users))
            total += n_bytes
        results = [i]  # what makes each of the arrays that are written
        if where is not computation:
            results = [where.by_name[name] for name in where.root.operands] if where.root.op == 'tuple' else [where.root]
        if len(results) != len(i.results):
            return total + sum(a.bytes for a in i.results if a.space == 0)
        for array, maker in zip(i.results, results):
            if array.space or maker.op == 'parameter' or where is not computation and maker.op in COLLECTIVES:
                continue
            update = maker.op == 'dynamic-update-slice'
            total += where.by_name[maker.operands[1]].results[0].bytes if update else array.bytes
        return total

    def _reads(self, user: Instruction, name: str, n_bytes: float) -> float:
        """Bytes of the array `name`, of which it has `n_bytes`, that an instruction within a fusion reads."""
        if user.op in COLLECTIVES or user.op == 'tuple' or user.op == 'dynamic-update-slice' and user.operands[0] == name:
            return 0.  # handed on, or written in place
        if user.op in ('dynamic-slice', 'slice', 'gather'):
            return user.results[0].bytes
        if user.op == 'fusion':
            where = self.computations[user.calls].instructions
            inside = [p.name for p in where if p.op == 'parameter' and user.operands[int(p.operands[0])] == name]
            return sum(self._reads(u, p, n_bytes) for p in inside for u in where if p in u.operands)
        return n_bytes

    def trips(self, i: Instruction, computation: Computation) -> int:
        """How often a loop's body runs: from its condition `counter < limit`, its start and its increment."""
        known = i.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)
        condition = self.computations[i.attribute(r'condition=%?([\w.\-]+)')]
        body = self.computations[i.attribute(r'body=%?([\w.\-]+)')]

        def constant(where: Computation, name: str) -> int | None:
            x = where.by_name.get(name)
            while x is not None and x.op in ('copy', 'bitcast', 'convert'):
                x = where.by_name.get(x.operands[0])
            if x is None or x.op != 'constant':
                return None
            return int(x.operands[0]) if re.fullmatch(r'-?\d+', x.operands[0]) else None

        # A 64-bit counter comes as two halves, and then several comparisons: the one that counts is with the limit.
        while condition.root.op == 'fusion':
            condition = self.computations[condition.root.calls]
        carried = computation.by_name[i.operands[0]]
        at = carried.operands if carried.op == 'tuple' else []  # what the loop carries, as it begins
        best = 0
        for compare in condition.instructions:
            if compare.op != 'compare' or 'direction=LT' not in compare.attributes:
                continue
            counter, other = (condition.by_name[name] for name in compare.operands[:2])
            limit = constant(condition, other.name)
            if limit is None and other.op == 'get-tuple-element':  # the limit is carried too
                index = int(other.attribute(r'index=(\d+)'))
                limit = constant(computation, at[index]) if index < len(at) else None
            if counter.op != 'get-tuple-element' or not limit:
                continue
            index = int(counter.attribute(r'index=(\d+)'))
            start = constant(computation, at[index]) or 0 if index < len(at) else 0
            grown = body.by_name[body.root.operands[index]]
            while grown.op in ('copy', 'bitcast'):
                grown = body.by_name[grown.operands[0]]
            steps = [constant(body, name) for name in grown.operands] if grown.op == 'add' else []
            step = next((c for c in steps if c), 1)
            best = max(best, -(-(limit - start) // step))
        if not best:
            raise UserError(f'the compiled program has a loop whose length is not understood ({i.name}, {i.op_name})')
        return best

    # ---- The schedule, replayed ----

    def cost(self, classify) -> Cost:
        """The whole program. `classify(instruction, flops, computation)` names the kind of each instruction."""
        self.collectives, self.uncosted = [], []
        return self._replay(self.entry, classify, 1.)

    def links_seconds(self) -> float:
        """How long a slice's own links are busy in a step."""
        busy = defaultdict(float)
        for c in self.collectives:
            busy[c.way] += c.seconds * c.times
        return busy[LINKS] + max(busy[LINKS + ' +'], busy[LINKS + ' -'])

    def _replay(self, name: str, classify, times: float) -> Cost:
        """One pass over a computation. Collectives run beside the instructions between their start and their end, one
        after the other on the links; what is not hidden so is waited for."""
        computation, total = self.computations[name], Cost()
        now, ends = 0., {}
        free = defaultdict(float)  # until when each network is busy, and for permutes each of its directions

        def begin(found: list[tuple[Instruction, Computation]]) -> tuple[float, str]:
            end, way = now, ''
            for c, where in found:
                way = _way(c)
                free[way] = end = max(free[way], now) + self._collective(c, where, way, times)
            return end, way

        def wait(end: float, way: str):
            nonlocal now
            if end > now:
                total.waits[way] = total.waits.get(way, 0) + end - now
                now = end

        for i in computation.instructions:
            if i.op in FREE:
                continue
            if i.op == 'while':
                body = i.attribute(r'body=%?([\w.\-]+)')
                trips = self.trips(i, computation)
                inside = self._replay(body, classify, times * trips)
                total.add(inside, trips)
                now += inside.total * trips
                continue
            if i.op in ('call', 'conditional'):
                branches = [self._replay(name, classify, times) for name in i.branches]
                if branches:
                    inside = max(branches, key=lambda b: b.total)  # of a conditional, the one that takes longest
                    total.add(inside)
                    now += inside.total
                continue
            base = i.op.removesuffix('-start').removesuffix('-done')
            if base in COLLECTIVES or i.op in ('async-start', 'async-done'):
                if i.op.endswith('-done'):
                    wait(*ends.pop(i.operands[0], (now, '')))
                    continue
                end = begin([(i, computation)] if base in COLLECTIVES else self.inner(i.calls)[1])
                if i.op.endswith('-start'):
                    ends[i.name] = end
                else:
                    wait(*end)
                continue
            if i.op in ('send', 'recv', 'send-done', 'recv-done'):  # between slices: the send begins, what is received ends
                other = i if i.op in ('send', 'recv') else computation.by_name[i.operands[0]]
                key = other.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')
                if i.op == 'send' and 'megascale' in i.attributes:
                    ends[key] = begin([(i, computation)])
                elif i.op == 'recv-done':
                    wait(*ends.pop(key, (now, '')))
                continue
            flops, found = self.inner(i.calls) if i.op == 'fusion' else (
                convolution_flops(i, computation) if i.op in ('convolution', 'dot') else 0., [])
            fused = self.computations[i.calls].instructions if i.op == 'fusion' else []
            targets = ' '.join(f.attributes for f in fused if f.op == 'custom-call')
            if found and 'AsyncCollectiveStart' in targets:
                ends[found[0][0].attribute(r'channel_id=(\d+)')] = begin(found)
                continue
            if found and 'AsyncCollectiveDone' in targets:
                wait(*ends.pop(found[0][0].attribute(r'channel_id=(\d+)'), (now, '')))
                continue
            if i.op.endswith(('-start', '-done')):
                continue  # copies between HBM and VMEM, beside everything else
            if any('async_collective_fusion_config' not in c.attributes for c, _ in found):
                wait(*begin(found))  # a collective with arithmetic fused to it, and not one that is on its way
            traffic = self.hbm_traffic(i, computation)
            if i.op == 'custom-call' and 'tpu_custom_call' in i.attributes:
                flops, seconds = self.attention_kernel(i, computation)
                limit = 'attention kernels'
            elif i.op == 'custom-call' and i.cycles is None:
                continue
            else:
                arithmetic = self.matmul_seconds(flops, i, computation) if flops else 0.
                seconds = max(arithmetic, traffic / (HBM_SHARE * self.chip.hbm_gbs * 1e9))
                limit = 'matrix unit' if arithmetic == seconds and flops else 'memory bandwidth'
            compiler = seconds if i.cycles is None else i.cycles / (self.chip.clock_ghz * 1e9)
            kind = classify(i, flops, computation)
            total.add(Cost({kind: seconds}, {kind: compiler}, {limit: seconds}, {}, flops, traffic))
            now += seconds
        for way, until in free.items():
            wait(until, way)
        return total

    def _collective(self, c: Instruction, where: Computation, way: str, times: float) -> float:
        if c.op == 'send':
            op, n_bytes = c.attribute(r'megascale_transfer_type="(\w+)"').lower().replace('_', '-'), c.results[0].bytes
            n, per_slice = self.network.n_slices, len(self.network.coords) // self.network.n_slices
            n_bytes *= n if op == 'all-gather' else 1  # what is sent is a part of the result
            seconds = moved(op, n_bytes, n) / (self.network.dcn_gbs * 1e9)
            self.collectives.append(Collective(op, moved(op, n_bytes, n), tuple(range(0, n * per_slice, per_slice)),
                                               seconds, way, times, c.op_name))
            return seconds
        op = c.op.removesuffix('-start')
        if op == 'all-reduce' and where.name.startswith('all-reduce-scatter'):  # fused with the slicing of its result
            op = 'reduce-scatter'
        given = [a.bytes for name in c.operands if name in where.by_name for a in where.by_name[name].results]
        made = [a.bytes for a in c.results]  # of what only begins, with what is given
        n_bytes = sum(made) - (sum(given) if c.op.endswith('-start') and len(made) > len(given) else 0)
        n_bytes = max(n_bytes, sum(given))  # several arrays may go as one
        group = (groups(c.attributes) or [list(range(len(self.network.coords)))])[0]
        seconds = self.network.seconds(op, n_bytes, group)
        self.collectives.append(Collective(op, moved(op, n_bytes, len(group)), tuple(group), seconds, way,
                                           times, c.op_name))
        return seconds


def _way(c: Instruction) -> str:
    """What a collective keeps busy: permutes to the left and to the right pass by each other."""
    if c.op == 'send':
        return 'slices'
    steps = [b - a for a, b in _pairs(c.attributes)]
    return LINKS + (' +' if sum(s > 0 for s in steps) > sum(s < 0 for s in steps) else ' -') if steps else LINKS


def _pairs(attributes: str) -> list[tuple[int, int]]:
    """(source, target) of a permute, without those that keep what they have."""
    listed = re.search(r'source_target_pairs=\{(.*?)\}\}', attributes)
    return [(int(a), int(b)) for a, b in re.findall(r'\{(\d+),(\d+)', listed[0]) if a != b] if listed else []


LINKS = 'links'


def groups(attributes: str) -> list[list[int]]:
    """The groups of devices of a collective; of a permute, one group with all whom it connects."""
    if 'source_target_pairs' in attributes:
        return [sorted(_pairs(attributes)[0])] if _pairs(attributes) else [[0]]
    if listed := re.search(r'replica_groups=\{(\{.*?\})\}', attributes):
        return [list(map(int, g.split(','))) for g in re.findall(r'\{([0-9,]+)\}', listed[1])]
    iota = re.search(r'replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?', attributes)
    if not iota:
        return []  # all devices
    shape, dims = (list(map(int, x.split(','))) for x in iota.groups()[:2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if iota[3]:
        ids = ids.transpose(list(map(int, iota[3].split(','))))
    return ids.reshape(shape).tolist()
