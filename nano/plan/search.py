"""--search: which mesh, micro-batches and rematerialization are fastest on a slice; and what makes a plan fit.

An attempt is a real compile of a minute or more, so most variants are never compiled: memory and work are ordered. More
rematerialization takes less memory and more work; so do smaller micro-batches, each of which gathers the weights again.

- What fits rules out what does more work on its mesh: as much rematerialization and as many micro-batches, or more;
  but not what only fits because the compiler itself computes parts again.
- What does not fit rules out what takes more memory, also on meshes that spread the weights over fewer chips.

The first attempt is what the user asked for, the first on each mesh the one with the least work: if it fits, only a little more rematerialization is tried
beside it, which saves memory traffic and can be faster. Else the search walks along
the border of what fits, from its other end: the most rematerialization in the largest micro-batches. If that fits,
less of it is tried, which is faster if it fits too; if not, smaller micro-batches. Each attempt settles a row or a
column: R policies and A sizes take at most R + A compiles in place of R x A, and the first that fits comes early.
"""
import dataclasses
import math
import os
import shlex
import sys
import time
from typing import Any, NamedTuple, get_type_hints

from nano import UserError, chips, config, plan, runtime, say
from nano.plan.report import GIB, duration, gib

SMALL = 1 / 4  # of a chip's memory: weights and optimizer state up to this may be held in several copies
# Micro-batches of 1/k need at least 1/k of the program's memory, and rather more: gradients do not shrink with them.
# Less is counted on, because the compiler's figure for what does not fit is no exact one.
SHRINKS = 3 / 4


class Variant(NamedTuple):
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    accumulate: int
    level: int  # of rematerialization: the number of the script's policy


def meshes(slice_: chips.Slice) -> list[tuple[int, int, int]]:
    """The meshes worth a try, the likeliest first.

    `data` is the number of slices: no weights are gathered over the data center's network. More copies of the weights
    only pay if they are gathered over less of the torus, or not at all, so there are two such meshes: with a copy in
    each line of the torus, and on each chip. `tensor` sends activations in every layer: it comes last, for batches with
    fewer sequences than chips, and for memory.
    """
    found = []
    for tensor in (t for t in (1, 2, 4, 8) if slice_.chips_per_slice % t == 0):
        n = slice_.chips_per_slice // tensor
        found += [(slice_.n_chips // (fsdp * tensor), fsdp, tensor)
                  for fsdp in dict.fromkeys((n, slice_.shape[-1], 1)) if n % fsdp == 0]
    return found


def micro_batches(cfg: Any, mesh: tuple[int, int, int], least: int = 1) -> list[int]:
    """Values of --accumulate, from `least` to one sequence at a time, each at least twice the one before."""
    found, rows = [], max(1, cfg.global_batch // (mesh[0] * mesh[1]))
    for n in range(least, rows + 1):
        if rows % n == 0 and (not found or n >= 2 * found[-1]):
            found.append(n)
    return found


class Trials:
    """What was tried, and what follows from it for the rest. Sizes are bytes on each chip."""

    def __init__(self, planner: plan.Planner, cfg: Any, vary: dict[str, list], budget_s: float, small: float = 1.0):
        self.planner, self.cfg, self.remats, self.small = planner, cfg, vary.get('remat', []), small
        self.levels = range(max(1, len(self.remats)))
        self.limit = planner.slice.chip.usable_gib * GIB
        self.ends = time.perf_counter() + budget_s
        self.rows: list[dict] = []  # each attempt, for JSON
        self.fits: dict[Variant, float] = {}  # and their predicted step in seconds
        self.strained: set[Variant] = set()  # those that fit because the compiler itself computes parts again
        self.misfits: list[tuple[Variant, float, float]] = []  # variant, what its program takes, what there is for it
        self.held: dict[tuple, int] = {}  # mesh -> weights and optimizer state
        self.reserved = 0  # by the runtime; known after the first compile
        self.refused, self.refusal = 0, ''
        self.asked = self._asked()

    def options(self, v: Variant) -> dict[str, Any]:
        remat = {'remat': self.remats[v.level]} if self.remats else {}
        return dict(mesh=','.join(map(str, v.mesh)), accumulate=v.accumulate, **remat)

    def _asked(self) -> list[Variant]:
        """What the user's own command says, if its mesh is one of this slice."""
        try:
            mesh = runtime.mesh_shape(self.cfg.mesh, self.planner.slice.n_chips)
        except UserError:
            return []
        return [Variant(mesh, self.cfg.accumulate, self.remats.index(self.cfg.remat) if self.remats else 0)]

    def pointless(self, v: Variant) -> bool:
        """Whether v cannot fit, or cannot be faster than one that does, or makes copies of what is not small."""
        held, copies = self.held.get(v.mesh, 0), v.mesh[0] > self.planner.slice.n_slices
        if held + self.reserved > self.limit or copies and held > self.small * self.limit and v not in self.asked:
            return True
        if self.more_work(v):
            # What is kept has to be written and read: computing some of it again can be faster. One level more is tried,
            # and another, for as long as it is.
            here = {f: seconds for f, seconds in self.fits.items() if f.mesh == v.mesh}
            best = min(here, key=here.get)
            if v.accumulate != best.accumulate or v.level < best.level or any(
                    f.accumulate == best.accumulate and f.level > best.level for f in here):
                return True
        return any(m.mesh[2] == v.mesh[2] and m.mesh[1] >= v.mesh[1] and m.level >= v.level and (
            m.accumulate >= v.accumulate or SHRINKS * program * m.accumulate / v.accumulate > room)
            for m, program, room in self.misfits)

    def more_work(self, v: Variant) -> bool:
        """Whether one fits that computes nothing again that v does not."""
        return any(f.mesh == v.mesh and f.level <= v.level and f.accumulate <= v.accumulate
                   for f in self.fits.keys() - self.strained)

    def turn(self, todo: list[Variant]) -> Variant:
        """Whose turn it is: on a mesh where something fits, the next level of rematerialization."""
        return min((v for v in todo if self.more_work(v)), key=lambda v: v.level, default=todo[0])

    def learn(self, v: Variant, p: dict):
        """Takes the figures of a compiled variant into account."""
        m, self.reserved = p['memory'], p['memory']['reserved']
        self.held[v.mesh] = m['weights'] + m['optimizer']
        taken = self.held[v.mesh] + m['batch'] + m['reserved']
        if p['fits']:
            self.fits[v] = p['step_s']
            if m['rematerialized_by_compiler'][0]:
                self.strained.add(v)
        else:
            self.misfits.append((v, m['total'] - taken, m['limit'] - taken))

    def attempt(self, v: Variant, left: list[Variant]) -> dict | None:
        """The figures of v if it fits. What the script refuses is only counted; a failure is a row as others are."""
        row, began = dict(options=self.options(v)), time.perf_counter()
        cfg, words = dataclasses.replace(self.cfg, **row['options']), as_words(row['options'])
        try:
            try:
                traced = self.planner.trace(cfg)
            except UserError as e:  # a batch that does not divide, say
                self.refused, self.refusal = self.refused + 1, self.refusal or str(e)
                return None
            parts = {group: sum(tensors.values()) for group, tensors in traced.local_bytes.items()}
            self.held[v.mesh] = parts['weights'] + parts['state']
            if self.pointless(v) or sum(parts.values()) + self.reserved > self.limit:
                return None
            of = len(self.rows) + most_compiles(left)
            row['figures'] = self.planner.plan(cfg, traced, f'{len(self.rows) + 1} of about {of}: {words}')
            self.learn(v, row['figures'])
            result = verdict(row['figures'])
        except Exception as e:  # the compiler's, a kernel's that takes no such shape, no more memory on the host
            text = str(e) if isinstance(e, UserError) else f'failed, {type(e).__name__}: {e}'
            row['error'] = text.splitlines()[0][:200]
            result = f'{words}: {row["error"]}'  # there may have been no line before this one
        row['seconds'] = time.perf_counter() - began
        self.rows.append(row)
        say(f'  {row["seconds"]:.0f} s: {result}')
        return row['figures'] if v in self.fits else None


def most_compiles(left: list[Variant]) -> int:
    """How many compiles the rest can take: one for each row and column of what is left of a mesh."""
    sides = {}
    for v in left:
        sides.setdefault(v.mesh, set()).update({('accumulate', v.accumulate), ('level', v.level)})
    return sum(len(side) - 1 for side in sides.values())


def as_words(options: dict[str, Any]) -> str:
    return ' '.join(f'--{name} {value}' for name, value in options.items())


def verdict(p: dict) -> str:
    total, limit = p['memory']['total'], p['memory']['limit']
    return f'fits, {gib(total)} of {gib(limit)}, step {p["step_s"] * 1e3:,.1f} ms' if p['fits'] else \
        f'does not fit, {gib(total - limit)} too much'


# ---- --search ----

def search(planner: plan.Planner, cfg: Any, vary: dict[str, list], budget_s: float) -> dict:
    """Prints the ranked variants and the command of the best. Returns all attempts, and the best or None, for JSON."""
    trials = Trials(planner, cfg, vary, budget_s, SMALL)
    order = list(trials.asked)
    for mesh in meshes(planner.slice):
        least_work, *rest = [Variant(mesh, n, level) for n in micro_batches(cfg, mesh) for level in trials.levels]
        order += [least_work, *sorted(rest, key=lambda v: (v.accumulate, -v.level))]
    todo = order = list(dict.fromkeys(order))
    stopped = ''
    say(f'searching {len(order)} variants, most of them by ruling them out; Ctrl-C ends it')
    try:
        while todo and not stopped:
            one = trials.turn(todo)
            trials.attempt(one, todo)
            todo = [v for v in todo if v != one and not trials.pointless(v)]
            if todo and trials.rows and time.perf_counter() >= trials.ends:
                stopped = 'after --search_minutes'
    except KeyboardInterrupt:
        stopped = 'by Ctrl-C'
    rows = sorted(trials.rows, key=rank)
    planned = [row for row in rows if 'figures' in row]
    best = planned[0] if planned and planned[0]['figures']['fits'] else None
    for row in planned:  # for less than a hundredth of the time the user's own options are not changed
        if best and row['figures']['fits'] and row['figures']['step_s'] <= 1.01 * best['figures']['step_s'] and \
                row['options'] in [trials.options(v) for v in trials.asked]:
            best = row
    ruled_out = len(order) - len(todo) - len(rows) - trials.refused
    if rows:
        say(table(planner.slice, rows))
    say(f'\n{len(rows)} tried, {ruled_out} ruled out, {trials.refused} refused by the script' + (
        f'; stopped {stopped}: {len(todo)} left untried' if stopped else ''))
    if best:
        best['command'] = command(planner, cfg, best['options'])
        say(f'\nThe fastest of these, as predicted{cost(best["figures"])}:\n\n  {best["command"]}')
    elif planned:
        say(f'\nNothing that was tried fits {planner.slice.name}. The closest: {as_words(planned[0]["options"])} '
              f'{verdict(planned[0]["figures"])}. {alone(trials)}')
    elif trials.held and not rows:
        say(f'\nNothing fits {planner.slice.name}. {alone(trials)}')
    else:
        say(f'\nNothing could be planned for {planner.slice.name}: {trials.refusal or "see above"}')
    return dict(search=rows, best=best, ruled_out=ruled_out, refused=trials.refused, untried=len(todo))


def cost(p: dict) -> str:
    """, 2.7 days and $1,226 for 5.24e+10 tokens'."""
    if 'budget' not in p:
        return ''
    b = p['budget']
    usd = f' and ${b["usd"]:,.0f}' if 'usd' in b else ''
    return f', {duration(b["hours"])}{usd} for {b["units"]:.3g} {p["unit"]}'


def rank(row: dict) -> tuple:
    """What fits by its time, then the rest by what is too much, then failures."""
    p = row.get('figures')
    return (2, 0) if p is None else (0, p['step_s']) if p['fits'] else (1, p['memory']['total'])


def table(slice_: chips.Slice, rows: list[dict]) -> str:
    unit = next((row['figures']['unit'] for row in rows if 'figures' in row), 'units')
    lines = ['', f'PREDICTED for {slice_.name}. Compiled by libtpu, not run.', '',
             f'{"step":>14}{"MFU":>8}{unit + "/s":>14}{"peak":>12}{"to spare":>12}  options']
    for row in rows:
        p = row.get('figures')
        if p and p['fits']:
            total, spare = p['memory']['total'], p['memory']['limit'] - p['memory']['total']
            lines.append(f'{p["step_s"] * 1e3:>11,.1f} ms{p["mfu"]:>8.1%}{p["units_per_s"]:>14,.0f}'
                         f'{gib(total):>12}{gib(spare):>12}  {as_words(row["options"])}' + (
                             ' (the host may limit)' if p['host_trace_s'] > p['step_s'] else '') + (
                             ' (without a kernel that no rule knows)' if p.get('uncosted_kernels') else '') + (
                             ' (the compiler computes parts again to fit)'
                             if p['memory']['rematerialized_by_compiler'][0] else ''))
        else:
            lines.append(f'  {as_words(row["options"])}: {verdict(p) if p else row["error"]}')
    return '\n'.join(lines)


def command(planner: plan.Planner, cfg: Any, options: dict[str, Any]) -> str:
    """The user's own command line with these options, without those of a plan and --device: it is for a TPU."""
    changed = {name: value for name, value in options.items() if value != getattr(cfg, name)}
    script = ['bash', 'launch.sh', sys.argv[0]] if os.path.exists('launch.sh') else ['python', sys.argv[0]]
    try:
        if runtime.mesh_shape(cfg.mesh, planner.slice.n_chips) == tuple(map(int, options['mesh'].split(','))):
            changed.pop('mesh', None)  # written otherwise, with a -1
    except UserError:
        pass  # the user's mesh is for another slice
    kinds = get_type_hints(type(cfg)) | get_type_hints(plan.Options)
    drop = {f.name for f in dataclasses.fields(plan.Options)} | {'device'} | changed.keys()
    args, words = sys.argv[1:], script
    while args:  # as config.parse reads them
        taken = [args.pop(0)]
        name, equals, _ = taken[0].removeprefix('--').partition('=')
        name = name.replace('-', '_')
        if args and not equals and (kinds.get(name) is not bool or args[0].lower() in config.BOOLS):
            taken.append(args.pop(0))
        words += [] if name in drop else taken
    return shlex.join(words + [word for name, value in changed.items() for word in (f'--{name}', str(value))])


# ---- After a plan that does not fit ----

def advice(planner: plan.Planner, cfg: Any, vary: dict[str, list], found: dict,
           budget_s: float) -> tuple[str, list[dict]]:
    """The first change with which it fits: more rematerialization, smaller micro-batches, both, or these with weights
    spread over all chips. Returns it as text, and all attempts for JSON."""
    trials = Trials(planner, cfg, vary, budget_s)
    (mine, _, level), = trials.asked
    trials.learn(trials.asked[0], found)
    (_, program, room), = trials.misfits
    far = 0 < 2 * room < program  # then the strongest first: each attempt takes minutes
    todo = []
    for mesh in dict.fromkeys((mine, meshes(planner.slice)[0])):
        levels = list(trials.levels[level + (mesh == mine):])
        todo += [Variant(mesh, cfg.accumulate, n) for n in (levels[-1:] if far else levels)]
        todo += [Variant(mesh, n, at) for at in dict.fromkeys((trials.levels[-1],) if far else (level, trials.levels[-1]))
                 for n in micro_batches(cfg, mesh, 2 * cfg.accumulate)]
    say('\nlooking for what makes it fit; Ctrl-C ends this')
    stopped = ''
    try:
        while todo := [v for v in todo if not trials.pointless(v)]:
            if time.perf_counter() >= trials.ends:
                break
            if fits := trials.attempt(todo[0], todo):
                return (f'\nPredicted: it {verdict(fits)}, with\n\n'
                        f'  {command(planner, cfg, trials.options(todo[0]))}\n\n'
                        f'This is the first that was found; --search looks for the fastest.'), trials.rows
            todo.pop(0)
    except KeyboardInterrupt:
        stopped = 'Stopped. '
    near = min((row for row in trials.rows if 'figures' in row), key=rank, default=None)
    n = len(trials.rows)
    return (f'\n{stopped}Tried {n} change{"s" * (n != 1)}: none of them makes it fit' + (
        f', {len(todo)} are untried' if todo else '') + (
        f'. The closest: {as_words(near["options"])} {verdict(near["figures"])}' if near else '') + f'. {alone(trials)}'), trials.rows


def alone(trials: Trials) -> str:
    """What weights and optimizer state take by themselves, on the mesh where they take least."""
    mesh, held = min(trials.held.items(), key=lambda item: item[1])
    n = math.ceil(held * mesh[1] * mesh[2] / (trials.limit - trials.reserved))
    more = f': they need {n} chips at least' if held + trials.reserved > trials.limit else ''
    return f'Weights and optimizer alone take {gib(held)} of a chip\'s {gib(trials.limit)}{more}'
