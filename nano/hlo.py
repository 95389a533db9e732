"""Reads what the TPU compiler made of a program (the scheduled HLO of one chip, as text): operations, bytes, time.

The compiler writes how many cycles it expects of each fusion; collectives and Pallas kernels carry no such figure and
are costed here, by the rules of `Costs`.
"""
import json
import math
import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

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
