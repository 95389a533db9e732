"""Folders and files that may lie in a bucket: fsspec, and what its errors say."""
from pathlib import Path

from nano import UserError


def file_system(path: str | Path):
    """fsspec's file system of a path or an address. Raises UserError naming the package that it lacks."""
    import fsspec
    try:
        return fsspec.core.url_to_fs(str(path))[0]
    except (ImportError, ValueError) as e:
        more = ': python -m pip install gcsfs==2026.10.1' if str(path).startswith(('gs://', 'gcs://')) else ''
        raise UserError(f'{path}: {e}{more}') from e


def cause(e: BaseException) -> str:
    """One line: the first failure within torch's CheckpointException, which by itself says only that there are some."""
    for inner, _ in getattr(e, 'failures', {}).values():
        return cause(inner)
    return f'{type(e).__name__}: {e}'.splitlines()[0]
