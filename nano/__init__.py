"""What the scripts share and nobody needs to read twice: options, devices, shards, checkpoints, the record of a run."""


class UserError(Exception):
    """Something that the user can mend: one line that says what is wrong, where, and what to do. Scripts print it and
    exit with 2."""
