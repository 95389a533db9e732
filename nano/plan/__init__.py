"""--plan: does a run fit on a slice, how fast is it, what does it cost? Asked of the real TPU compiler; nothing is run.

A script offers it with `plan.Options` beside its own options and one function that makes its training step:

    @dataclass
    class Config:
        device: str = 'tpu'  # a plan sets it to tpu
        mesh: str = '1,-1,1'  # data,fsdp,tensor
        ...  # --search also needs global_batch and accumulate, and varies remat if it is told of its values

    def step_to_plan(cfg, mesh, device) -> plan.Step:
        w = torch.nn.Parameter(torch.empty(1024, 1024, device=device))  # made on the device, or moved there
        x = torch.zeros(256, 1024, device=device)
        xs.mark_sharding(w, mesh, ('fsdp', None))
        xs.mark_sharding(x, mesh, ('fsdp', None))
        return plan.Step({'w': w}, {}, {'x': x}, lambda: train_step(w, x), 'rows', 256, cfg.steps, 4 * 1024**2 * 256,
                         '4 P for a row')

    try:
        cfg, planning = config.parse(Config, PRESETS, argv, beside=plan.Options)
        if plan.asked(planning):
            return plan.run(planning, cfg, step_to_plan, {'remat': list(REMAT)})  # or {} without such an option
    except UserError as e:
        sys.exit(f'error: {e}')

`train_step` traces one step, as in a run: forward, backward, and the weights and the state updated in place. See `Step`.
"""
import dataclasses
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from nano import UserError, chips, runtime, say
from nano.plan import aot
from nano.plan.aot import Step
from nano.plan.report import as_text, figures


@dataclass
class Options:
    plan: str = None  # a slice, such as v5e-16 or 2xv5e-256: say whether this run fits there, how fast it would be and what
                    # it would cost, by the real TPU compiler; needs no TPU, and nothing is run
    plan_json: str = ''  # with --plan: write all its figures to this file
    search: bool = False  # with --plan: try meshes, micro-batches and rematerialization, and rank them
    # with --search, and after a plan that does not fit: begin no other attempt after this time
    search_minutes: float = 30.0
    tokens: float = 0.0  # with --plan: what to train on, for time and cost; 0 is that of --steps. Images count as tokens
    price: float = 0.0  # with --plan: USD for a chip for an hour; 0 is the list price


def asked(options: Options) -> bool:
    """Raises UserError if an option of a plan was given without --plan."""
    given = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
    if given and options.plan is None:
        raise UserError(f'--{given[0]} goes with --plan SLICE, such as --plan v5e-16')
    return options.plan is not None


def run(options: Options, cfg: Any, make_step: Callable[[Any, Any, Any], Step], vary: dict[str, list]) -> None:
    """Plans `cfg` on the slice. `make_step(cfg, mesh, device)` makes the script's training step; `vary` may have the
    policies of --remat for --search, the one that keeps most first. Raises UserError."""
    from nano.plan.search import advice, search  # which imports this module
    slice_ = chips.find_slice(options.plan)
    wanted = {'device', 'mesh'} | ({'global_batch', 'accumulate'} if options.search else set()) | vary.keys()
    if missing := sorted(wanted - {f.name for f in dataclasses.fields(cfg)}):
        raise UserError(f'{type(cfg).__name__} has no option {missing[0]}, which a plan needs, see nano/plan/__init__.py')
    for name, most in (('price', 1e6), ('tokens', 1e18), ('search_minutes', 1e6)):
        if not 0 <= getattr(options, name) <= most:
            raise UserError(f'--{name} {getattr(options, name)}: must be between 0 and {most:g}')
    json_file = Path(options.plan_json).resolve()
    part = json_file.with_name(f'{json_file.name}.{os.getpid()}') if options.plan_json else None
    if part:
        try:
            if options.plan_json.endswith('/') or json_file.exists() and not json_file.is_file():
                raise OSError
            part.touch()
            part.unlink()
        except OSError as e:
            raise UserError(f'--plan_json {options.plan_json}: no file can be written there') from e
    if not options.search:
        runtime.mesh_shape(cfg.mesh, slice_.n_chips)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # so that the compiler and its files go too
        signal.signal(signum, _signaled)
    cfg = dataclasses.replace(cfg, device='tpu')
    runtime.check_environment()
    aot.start(slice_.n_chips)
    planner = Planner(slice_, make_step, options)
    if options.search:
        found = search(planner, cfg, vary, options.search_minutes * 60)
    else:
        found = planner.plan(cfg)
        say(as_text(found))
        if not found['fits'] and hasattr(cfg, 'accumulate') and hasattr(cfg, 'global_batch'):
            text, found['advice'] = advice(planner, cfg, vary, found, options.search_minutes * 60)
            say(text)
    if part:
        part.write_text(json.dumps(found, indent=1))
        part.replace(json_file)
        say(f'wrote {options.plan_json}')
    if options.search and not found['best']:
        sys.exit(1)


_asked_to_end = 0  # by this signal


def _signaled(signum: int, _frame):
    global _asked_to_end
    _asked_to_end = signum
    _end_if_asked()


def _end_if_asked():
    """Once more where something has swallowed the exception, as callbacks of the garbage collector do."""
    if _asked_to_end == signal.SIGINT:
        raise KeyboardInterrupt
    if _asked_to_end:
        sys.exit(128 + _asked_to_end)


class Planner:
    """Plans variants of a run for one slice."""

    def __init__(self, slice_: chips.Slice, make_step, options: Options):
        self.slice, self.make_step, self.options = slice_, make_step, options
        home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')  # stays ~ where there is no home
        self.cache = None if home.startswith('~') else Path(home) / 'nano-tpu-plan'

    def trace(self, cfg: Any) -> aot.Traced:
        mesh = runtime.make_mesh(cfg.mesh, self.slice.n_chips)
        traced = aot.trace(lambda device: self.make_step(cfg, mesh, device), self.slice.n_chips)
        _end_if_asked()
        return traced

    def plan(self, cfg: Any, traced: aot.Traced | None = None, what: str = '') -> dict:
        """The figures of `cfg`; `what` is said of the compile in place of the usual words."""
        mesh = runtime.mesh_shape(cfg.mesh, self.slice.n_chips)
        if traced is None:
            say(f'tracing the training step for {self.slice.n_chips} chips ...')
            traced = self.trace(cfg)
        flags = compiler_flags(self.slice.chip.name)
        with _Progress(what or f'compiling it with libtpu for {self.slice.name}') as progress:
            compiled = aot.compile_step(traced, self.slice, flags, self.cache, tick=progress.tick)
        if compiled.cached and not what:
            say('compiled before: from the cache in ' + str(self.cache))
        found = figures(traced, compiled, self.slice, mesh, self.options.tokens, self.options.price)
        return found | dict(options=dataclasses.asdict(cfg))


def compiler_flags(chip: str) -> str:
    """What a run has: runtime's, and what torch_xla 2.9 adds on a TPU (its __init__.py, _setup_libtpu_flags)."""
    theirs = {'xla_tpu_use_enhanced_launch_barrier': 'false', 'xla_latency_hiding_scheduler_rerun': '1',
              'xla_tpu_prefer_async_allgather_to_allreduce': 'true', 'xla_tpu_enable_flash_attention': 'false'}
    if chip in ('v5e', 'v5p'):
        theirs |= {'xla_enable_async_all_gather': 'true', 'xla_enable_async_collective_permute': 'true'}
    return runtime.tpu_flags(theirs)


class _Progress:
    """Says how many seconds have gone by: on a terminal's line all the time, else every minute."""

    def __init__(self, what: str):
        self.what = what
        self.began = self.said = time.perf_counter()

    def __enter__(self) -> '_Progress':
        say(self.what + ' ...')
        return self

    def tick(self):
        _end_if_asked()
        now = time.perf_counter()
        if sys.stderr.isatty():
            print(f'\r{now - self.began:5.0f} s ', end='', file=sys.stderr, flush=True)
        elif now - self.said >= 60:
            self.said = now
            say(f'  {now - self.began:.0f} s ...')

    def __exit__(self, *_):
        if sys.stderr.isatty():
            print('\r\033[K', end='', file=sys.stderr, flush=True)
