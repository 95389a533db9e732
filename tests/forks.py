"""Processes that have imported torch_xla already, forked from one that has: the import takes 10 s of every start. What
begins with the start itself, as users make it, is tested in test_runs.py and test_readme.py."""
import multiprocessing
import os
import signal
import sys
import threading

SERVER = multiprocessing.get_context('forkserver')
SERVER.set_forkserver_preload(['torch_xla.distributed.spmd', 'torch_xla.distributed.xla_backend',
                               'torch_xla.experimental.scan', 'torch_xla.experimental.distributed_checkpoint',
                               'torch.distributed.checkpoint'])


class Fork:
    """A process that calls do(*args), a function of a module. `said` is what it has written so far."""

    def __init__(self, do, *args, cwd, **env):
        # What a run in this process has set is not for others.
        env = {k: v for k, v in os.environ.items() if k != 'XLA_USE_SPMD'} | env
        out, theirs = SERVER.Pipe(duplex=False)  # no file: limits on the size of files spare it
        self.said, self._process = '', SERVER.Process(target=_call, args=(theirs, str(cwd), env, do, args))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(out,))
        self._reader.start()

    def _read(self, out):
        with out, open(out.fileno(), closefd=False, errors='replace') as lines:
            for line in lines:
                self.said += line

    def runs(self):
        return self._process.exitcode is None

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def kill(self):
        self._process.kill()

    def end(self):
        """The exit code; minus the number of a signal that killed it."""
        self._process.join(300)
        if self.runs():
            self.kill()
            raise TimeoutError(f'after 5 minutes it had not ended\n{self.said}')
        self._reader.join()
        return self._process.exitcode


def _call(out, cwd, env, do, args):
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    do(*args)


def run_script(name, *options):
    """The main function of a script of this folder's parent."""
    import importlib
    sys.argv = [f'{name}.py', *options]
    importlib.import_module(name).main(list(options))
