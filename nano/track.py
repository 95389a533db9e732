"""What a run tells: a progress bar or plain lines, metrics.jsonl, log.txt, and Weights & Biases where asked.

metrics.jsonl is the record: one JSON object a line. A resumed run drops the lines of the steps that it does again, so
the file reads as if the run had never stopped. Nothing here asks a question, and a full disk or a closed terminal costs
the record, which is said loudly, but never the training.
"""
import contextlib
import errno
import json
import math
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

PLAIN_EVERY_S = 10  # between the progress lines of a run that has no terminal for a bar


class Tracker:
    """One per process. Only host 0 (`main`) writes metrics, draws, prints and talks to wandb.

    out            the run's folder, made if missing
    total_steps    the step at which the run ends
    start_step     the steps already done, of which the record is kept
    config         the run's settings as plain values, for wandb
    wandb_project  '' leaves wandb out: it is not even imported
    host           this process's index; those above 0 only have their log_{host}.txt
    unit           what throughput counts
    owed           the evaluation of start_step is yet to come: a kill may have left its line
    """

    def __init__(self, out: str | Path, total_steps: int, start_step: int = 0, main: bool = True,
                 config: dict[str, Any] | None = None, wandb_project: str = '', host: int = 0,
                 owed: bool = False, unit: str = 'tokens') -> None:
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        self.main, self.total_steps, self.unit = main, total_steps, unit
        self._log_path, self._metrics_path = out / (f'log_{host}.txt' if host else 'log.txt'), out / 'metrics.jsonl'
        self._unwritable: set[Path] = set()  # those already complained about
        self._bar = self._wandb = None
        self._first: tuple[float, int] | None = None  # time and step of the first progress, compiling past
        self._line_at = -math.inf
        if main:
            if start_step:
                _drop_after(self._metrics_path, start_step, owed)
            elif self._metrics_path.exists() and self._metrics_path.stat().st_size:
                os.replace(self._metrics_path, old := f'{self._metrics_path}.old')
                self.print(f'there is a record, but nothing to go on from: begun anew; the record is now {old}')
            if wandb_project:
                self._start_wandb(wandb_project, out, config)

    def log(self, step: int, **metrics: Any) -> None:
        """Appends one line to metrics.jsonl, and sends it to wandb. Numbers that are not finite become null."""
        if not self.main:
            return
        line = {name: _plain(value) for name, value in {'step': step, **metrics}.items()}
        self._append(self._metrics_path, json.dumps(line, allow_nan=False, default=str) + '\n')
        if self._wandb is not None:
            try:
                self._wandb.log(line)
            except Exception as e:  # whatever happens to wandb, the run goes on and metrics.jsonl has it all
                self._wandb = None
                self.print(f'wandb failed, so this run goes on without it: {e}')

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run's folder, on host 0."""
        if self.main:
            path = self._log_path.parent / name
            try:
                path.parent.mkdir(exist_ok=True)
                part = path.with_name(f'{path.name}.tmp')
                part.write_text(text, encoding='utf-8', errors='replace')
                part.replace(path)
            except OSError as e:
                self.print(f'WARNING: {path} cannot be written ({e.strerror}): training goes on without it')

    def progress(self, step: int, loss: float, per_s: float) -> None:
        """Moves the bar to `step`; without a terminal, a line each PLAIN_EVERY_S seconds at most, and at the end."""
        if not self.main:
            return
        now = time.monotonic()
        self._first = self._first or (now, step)
        if self._bar is None and sys.stderr is not None and sys.stderr.isatty():
            import tqdm
            tqdm.tqdm.monitor_interval = 0  # no thread of its own
            sized = min(os.get_terminal_size(sys.stderr.fileno())) > 0  # some containers' terminals have no size
            self._bar = tqdm.tqdm(total=self.total_steps, initial=step, unit='step', dynamic_ncols=sized,
                                  ncols=None if sized else 100, nrows=None if sized else 20)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(f'loss {loss:.4f}, {_short(per_s)} {self.unit}/s', refresh=False)
                self._bar.update(step - self._bar.n)
        if now - self._line_at >= PLAIN_EVERY_S or step >= self.total_steps:
            self._line_at = now
            time_0, step_0 = self._first
            left = (self.total_steps - step) * (now - time_0) / (step - step_0) if step > step_0 else math.nan
            self._say(f'step {step}/{self.total_steps}  loss {loss:.4f}  {_short(per_s)} {self.unit}/s  '
                      f'{_clock(left)} left', terminal=self._bar is None)

    def print(self, *values: Any) -> None:
        """As print() does, above the bar, on host 0; and on every host, with the time, into its log file."""
        self._say(' '.join(map(str, values)), terminal=self.main)

    def close(self) -> None:
        """Ends the bar and wandb's run. May be called twice."""
        bar, run, self._bar, self._wandb = self._bar, self._wandb, None, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.close()
        if run is not None:
            with contextlib.suppress(Exception):
                run.finish()

    def _say(self, text: str, terminal: bool) -> None:
        self._append(self._log_path, f'{time.strftime("%Y-%m-%d %H:%M:%S")} {text}\n')
        if terminal:
            with contextlib.suppress(OSError):  # a closed pipe or terminal, or a full disk behind stdout
                if self._bar is not None:
                    self._bar.write(text, file=sys.stdout)
                else:
                    print(text)
                sys.stdout.flush()

    def _append(self, path: Path, text: str) -> None:
        """Adds the whole text or nothing, so that no later line is glued to half a line."""
        data = text.encode('utf-8', 'replace')
        try:
            with open(path, 'ab', buffering=0) as f:
                size = f.tell()
                try:
                    if f.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    f.truncate(size)
                    raise
        except OSError as e:
            if path not in self._unwritable:
                self._unwritable.add(path)  # first, as the log file may be the one
                self.print(f'WARNING: {path} cannot be written ({e.strerror}): training goes on, its lines are lost')

    def _start_wandb(self, project: str, out: Path, config: dict[str, Any] | None) -> None:
        try:
            import wandb
            mode = os.environ.get('WANDB_MODE')
            if not mode and not wandb.login(prompt=False, verify=False):
                mode = 'offline'
                self.print(f'wandb: no API key (WANDB_API_KEY), so the run stays offline in {out / "wandb"}')
            known = out / 'wandb_id.txt'  # a resumed run goes on in the wandb run that it began
            if not known.exists():
                known.write_text(secrets.token_hex(4))
            self._wandb = wandb.init(project=project, name=out.name, id=known.read_text(), resume='allow', mode=mode,
                                     dir=str(out), config=config,
                                     settings=wandb.Settings(console='off', silent=True))
            self._wandb.define_metric('*', step_metric='step')  # wandb's own counter cannot go back; a resumed run does
            if self._wandb.url:
                self.print(f'wandb: {self._wandb.url}')
        except Exception as e:
            self.print(f'wandb did not start, so this run goes on without it: {e}')


class Meter:
    """Steps per second of the training alone: without compiling, evaluating, sampling and saving."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        """Measures from here on: `step` has just ended."""
        self._step, self._time, self._paused = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def pause(self):
        """What happens inside does not count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def rate(self, step: int) -> float:
        """Steps per second since the last restart, nan before the first step after it."""
        seconds = time.perf_counter() - self._time - self._paused
        return (step - self._step) / seconds if step > self._step and seconds > 0 else math.nan


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, 'item') else value  # numpy's and torch's scalars
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(n: float) -> str:
    if math.isnan(n):
        return '?'
    return next((f'{n / 10**e:.3g}{letter}' for e, letter in ((9, 'G'), (6, 'M'), (3, 'k')) if n >= 10**e), f'{n:.3g}')


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return '?'
    minutes, s = divmod(round(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{s:02}' if minutes >= 60 else f'{minutes}:{s:02}'


def _drop_after(path: Path, step: int, owed: bool) -> None:
    """Rewrites metrics.jsonl without the lines beyond `step` and without a line that a crash cut off."""
    if not path.exists():
        return
    tmp = path.with_suffix('.tmp')
    with open(path, 'rb') as old, open(tmp, 'wb') as new:
        for line in old:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                entry = json.loads(line)
                again = owed and entry.get('step') == step and 'val_loss' in entry
                if entry.get('step', 0) <= step and line.endswith(b'\n') and not again:
                    new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(tmp, path)
