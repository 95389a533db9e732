"""What the scripts share and nobody needs to read twice: options, devices, shards, checkpoints, the record of a run."""
import contextlib


class UserError(Exception):
    """Something that the user can mend: one line that says what is wrong, where, and what to do. Scripts print it and
    exit with 2."""


def say(text: str):
    """print(), but a closed pipe or a full disk behind stdout ends no run."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
