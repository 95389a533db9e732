"""What stands around a script's training loop: the run's folder, its record, its checkpoints, and how it stops.

    rt = runtime.start(cfg.device)
    mesh = runtime.make_mesh(cfg.mesh, rt.n_devices)
    with Run(cfg, rt, mesh, start, stop, data, 'tokens', cfg.global_batch * cfg.seq_len, flops) as run:
        model, state = build(cfg, mesh, run.device)
        run.load(weights, state)
        with Loader(...) as loader:
            run.evaluate_first(evaluate)
            for step, batch in run.steps(loader):
                metrics = train_step(...)  # [loss, norm of the gradient, whether the update was made], on the device
                torch_xla.sync()
                run.stepped(metrics)
                with run.aside():
                    if run.evaluates: run.owed = not evaluate(step)
                    if run.saves: run.save()
        run.finish()
"""
import contextlib
import math
import sys
import time
from dataclasses import asdict
from typing import Any, Callable, Iterator

import torch

from nano import UserError, checkpoint, config, resume, runtime
from nano.loader import Loader
from nano.track import Meter, Tracker


class Run:
    """Of one process; use it in `with`. `cfg` has the options that are read here. `data`: what a checkpoint says of its
    data, the names data, tokenizer and separator of resume.META, and perhaps labels. `unit` is what throughput counts,
    such as 'tokens'; `units` of it, and `flops`, are in a step."""

    def __init__(self, cfg: Any, rt: runtime.Runtime, mesh, start: resume.Start, stop: runtime.StopSignal,
                 data: dict[str, Any], unit: str, units: int, flops: float):
        self.cfg, self.rt, self.mesh, self.start, self.stop = cfg, rt, mesh, start, stop
        self.data, self.unit, self.units, self.flops = data, unit, units, flops
        self.meta, self.folder = start.meta, resume.Folder(cfg.out)
        self.step = self.start_step = self.meta['step']
        self.end = min(cfg.stop_at or cfg.steps, cfg.steps)  # of this process
        self.best, self.owed = self.meta['best'], self.meta['owed']  # of evaluations; one that is yet to come
        self.tensors: dict[str, torch.Tensor] = {}
        self._bad_in_row = 0
        self._unread = None  # the step before, whose metrics are read while the device works on this one

    def __enter__(self) -> 'Run':
        import torch_xla
        cfg, rt = self.cfg, self.rt
        self.stop.group = checkpoint.process_group(rt.process_count)
        save_group = checkpoint.process_group(rt.process_count)  # another one: it is used by the thread that writes
        checkpoint.check_shared(self.folder.out, save_group, self.start.path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.folder.held(rt.main, self.start.path if self.start.goes_on else None))
            self.track = Tracker(self.folder.local, cfg.steps, self.start_step, rt.main, asdict(cfg), cfg.wandb,
                                 rt.process_index, self.owed, self.unit)
            self.say = self.track.print
            if rt.main:
                config.save_config(cfg, self.folder.local / 'config.json')
            self.saver = checkpoint.Saver(self.folder.ckpt, cfg.keep, cfg.keep_every, self.say, save_group,
                                          self.folder.push)
            stack.enter_context(self.saver)
            self._at_end = stack.pop_all()
        self.watch, self.device = runtime.CompileWatch(cfg.strict, self.say), torch_xla.device()
        self._began = time.perf_counter()
        self._started = self._began - self.meta['wall_s']  # as if the run had never stopped
        self.meter = Meter(self.step)
        return self

    def __exit__(self, *error):
        return self._at_end.__exit__(*error)

    def meet(self):
        """Waits for the other hosts. One that has refused something is not waited for on the devices."""
        checkpoint.meet(self.stop.group)

    def load(self, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], leave_out: set[str] = set()):
        """Fills them if the run does not start from nothing, and remembers them for checkpoints. Of weights that are
        taken from elsewhere some may be left out, which keep their first values."""
        import torch_xla
        self.tensors = weights | state
        self.folder.check_space(sum(t.numel() * t.element_size() for t in self.tensors.values()))
        if self.start.path:
            self.say(self.start.load({n: w for n, w in weights.items() if n not in leave_out}, state))
        self.meet()
        torch_xla.sync()  # what was loaded is on the devices before the first graph that reads it
        every = self.cfg.save_every or self.end
        self.say(f'next checkpoint after step {min((self.step // every + 1) * every, self.end)}')

    def rows(self, batch: int):
        """Which rows of a batch this host's devices need."""
        return runtime.rows_of_host(batch, self.mesh, self.rt)

    def give_up(self) -> bool:
        """Whether to wait no longer for data."""
        return self.rt.process_count == 1 and self.stop.signum > 0

    # ---- The loop ----

    def evaluate_first(self, evaluate: Callable[[int, bool], bool]):
        """Compiles the evaluation before the first step; it is on record if it is owed, as at the start of a run."""
        self.say('compiling the evaluation ...')
        was_owed, self.owed = self.owed, not evaluate(self.step, self.owed)
        if self.start.goes_on and self.rt.main and was_owed and not self.owed:
            try:
                checkpoint.amend(self.start.path, owed=False)
            except Exception as e:  # a full disk, or what a client of an object store raises
                self.say(f'warning: {self.start.path} still says that its evaluation is owed ({e})')

    def steps(self, loader: Loader) -> Iterator[tuple[int, Any]]:
        """(step, batch) until the run ends or is stopped."""
        self.meter = Meter(self.step)
        self.say('compiling the training step ... (after it nothing is compiled)')
        while self.step < self.end and not self.stop.asked():
            if (batch := next(loader, None)) is None:
                break
            self.step += 1
            yield self.step, batch
        if self._unread:
            self._report(*self._unread)

    def stepped(self, metrics: torch.Tensor, **more: Any):
        """After a step's torch_xla.sync(): records the step before it, and this one too if something waits for it.
        `more` goes on record. Raises UserError after too many steps in a row that were not finite."""
        step, first = self.step, self.step == self.start_step + 1
        more['compiles'] = self.watch.check(step, 'training step')
        logged = self._unread[0] if self._unread and self._report(*self._unread) else 0
        self._unread = step, metrics, more
        if first or self.evaluates or self.saves or self._bad_in_row or step == self.end:
            logged = step if self._report(*self._unread) else logged
            self._unread = None
        if logged:
            self.meter.restart(logged)
        if first:
            self.watch.all_compiled()
            self.stop.nothing_to_save = False
            self.say(f'compiled {more["compiles"]} graphs, {time.perf_counter() - self._began:.0f} s after the start')
            self.meter.restart(step)  # throughput leaves compiling out
        if self._bad_in_row >= self.cfg.max_bad:
            bad = f'step {step}: {self._bad_in_row} steps in a row without a finite loss and gradient'
            if not all(torch.isfinite(t).all() for t in self.tensors.values()):
                raise UserError(f'{bad}. The update before them made weights that are not finite either: nothing is '
                                f'saved, the same command goes on from the checkpoint before. Lower --lr')
            self.save()
            raise UserError(f'{bad}. The weights are those before them. Look at the data, or lower --lr')

    @property
    def evaluates(self) -> bool:
        return self.step == self.cfg.steps or bool(self.cfg.eval_every) and self.step % self.cfg.eval_every == 0

    @property
    def saves(self) -> bool:
        return bool(self.cfg.save_every) and self.step % self.cfg.save_every == 0

    @contextlib.contextmanager
    def aside(self):
        """What is no training: it does not count for throughput, and nothing may be compiled by now."""
        with self.meter.pause():
            yield
            self.watch.check(self.step, 'evaluating or saving')

    def units_at(self, step: int) -> int:
        return self.meta['units'] + (step - self.start_step) * self.units

    def evaluated(self, step: int, **values: Any):
        """Puts an evaluation on record."""
        self.track.log(step, **values, **{self.unit: self.units_at(step)}, wall_s=time.perf_counter() - self._started)

    def save(self):
        self.saver.save(self.step, self.tensors, dict(
            consumed=self.meta['consumed'] + (self.step - self.start_step) * self.cfg.global_batch,
            units=self.units_at(self.step), best=self.best, wall_s=time.perf_counter() - self._started, owed=self.owed,
            config=asdict(self.cfg), **self.data))

    def finish(self):
        """Saves the last step if it is not saved yet. Ends the process if the run is not complete."""
        if self.step > self.start_step:
            self.save()
        self.saver.wait()
        self.track.close()
        if self.saver.failed_last:
            raise UserError(f'step {self.step} is not saved, see above: make room in {self.folder.out} and start again')
        if self.step < self.end or self.owed:
            self.say(f'stopped after step {self.step}: the same command goes on')
            sys.exit(self.stop.exit_code)

    def _report(self, step: int, metrics: torch.Tensor, more: dict[str, Any]) -> bool:
        """Reads the metrics of a step, which waits until the device has done it. Returns whether they are on record."""
        cfg = self.cfg
        loss, norm, ok = metrics.cpu().tolist()
        self._bad_in_row = 0 if ok else self._bad_in_row + 1
        if not ok:
            self.say(f'step {step}: loss {loss}, gradient norm {norm}: this update was left out '
                     f'({self._bad_in_row} in a row)')
        rate = self.meter.rate(step) if step > self.start_step + 1 else math.nan  # that one compiled
        self.track.progress(step, loss, rate * self.units)
        if logs := step % cfg.log_every == 0 or step in (self.start_step + 1, cfg.steps):
            self.track.log(step, loss=loss, grad_norm=norm, **{
                self.unit: self.units_at(step), f'{self.unit}_per_s': rate * self.units},
                mfu=rate * self.flops / self.rt.peak_flops if self.rt.peak_flops else None,
                wall_s=time.perf_counter() - self._started, skipped=not ok, rss_gb=runtime.rss_gb(), **more)
        return logs
