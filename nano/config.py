"""A script's configuration: one dataclass, every field an option on the command line.

A field carries a type (int, float, str or bool), a default, and one comment, which is its help text:

    @dataclass
    class Config:
        lr: float = 3e-4  # peak learning rate

The comment stands at the end of the field's line, or alone on the lines above it. A value comes from the command line,
else from `--preset NAME`, else from the default.
"""
import ast
import dataclasses
import difflib
import inspect
import io
import json
import math
import os
import shutil
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence, TypeVar, get_type_hints

T = TypeVar('T')
EXPECTED = {int: 'a whole number such as 64, 1e6, 2**20 or 50_000', float: 'a number such as 3e-4',
            bool: 'true or false', str: 'text'}
BOOLS = {'true': True, 'yes': True, '1': True, 'false': False, 'no': False, '0': False}


def parse(cls: type[T], presets: dict[str, dict[str, Any]], argv: Sequence[str] | None = None,
          doc: str | None = None, more: Callable[[dict[str, Any]], dict[str, Any]] = lambda chosen: {},
          paths: Sequence[str] = (), beside: type | None = None) -> Any:
    """Fills the dataclass `cls` from argv (None: the command line); `doc` heads the --help text. `more` is called with
    all values and returns some that win over defaults and preset, but not over the command line. In `paths` a leading
    ~ is the home folder, which no shell replaces in --out=~/x. `beside` is a dataclass with options of another purpose,
    which presets do not set: then both are returned.

    An unknown option or a value of the wrong type ends the program: one line on stderr, exit code 2.
    """
    mine, others = get_type_hints(cls), get_type_hints(beside) if beside else {}
    for name, preset in presets.items():  # a slip in the script itself, no user's error
        assert preset.keys() <= mine.keys(), f'preset {name} names no field: {sorted(preset.keys() - mine.keys())}'
    assert not mine.keys() & others.keys(), f'options twice: {sorted(mine.keys() & others.keys())}'
    types = mine | others
    args = list(sys.argv[1:] if argv is None else argv)
    if '-h' in args or '--help' in args:
        print(_help([cls, beside] if beside else [cls], presets, doc))
        sys.exit(0)

    given: dict[str, Any] = {}
    while args:
        word = args.pop(0)
        name, equals, text = word.removeprefix('--').partition('=')
        name = name.replace('-', '_')
        if not word.startswith('--') or not name:
            _fail(f'{word!r} is no option: write --name value, or see --help')
        if name not in types:
            _fail(f'no option --{name}{_nearest(name, types, "; did you mean --{}?", "")} (--help lists all)')
        if not equals and types[name] is bool:  # `--strict` alone is true, `--strict false` is read too
            text = args.pop(0) if args and args[0].lower() in BOOLS else 'true'
        elif not equals:
            if not args or args[0].startswith('--'):  # a value that begins with -- is written --name=--value
                _fail(f'--{name} needs a value: {EXPECTED[types[name]]}')
            text = args.pop(0)
        try:
            given[name] = _convert(types[name], text)
        except (ValueError, KeyError, OverflowError):
            _fail(f'--{name} {text!r}: expected {EXPECTED[types[name]]}')

    chosen = given.get('preset', getattr(cls, 'preset', ''))
    if chosen and chosen not in presets:
        close = _nearest(chosen, presets, '; did you mean {}?', ';')
        _fail(f'no preset {chosen!r}{close} There are: {", ".join(presets)}')
    if empty := [name for name in paths if given.get(name) == '']:  # a variable of the shell that is not set
        _fail(f'--{empty[0]} needs a folder')
    given |= {name: os.path.expanduser(given[name].removeprefix('file://')) for name in paths if name in given}
    aside = {name: given.pop(name) for name in others if name in given}
    values = {**dataclasses.asdict(cls()), **presets.get(chosen, {})}
    filled = cls(**{**values, **more({**values, **given}), **given})
    return (filled, beside(**aside)) if beside else filled


def save_config(cfg: Any, path: str | Path) -> None:
    """Writes the config as JSON: a reader of `path` finds the old file or the new one, never a part of it."""
    tmp = f'{path}.tmp'
    with open(tmp, 'w', encoding='utf-8') as f:
        f.write(json.dumps(dataclasses.asdict(cfg), indent=2) + '\n')
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)


def _fail(message: str) -> NoReturn:
    print(f'error: {message}', file=sys.stderr)
    sys.exit(2)


def _nearest(name: str, names: Any, form: str, otherwise: str) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return form.format(close[0]) if close else otherwise


def _convert(kind: type, text: str) -> Any:
    """text as a value of that kind; ValueError, KeyError or OverflowError if it is none."""
    if kind is bool:
        return BOOLS[text.lower()]
    if kind is int:
        base, power, exponent = text.partition('**')
        if power and not 0 <= int(exponent) < 64:
            raise ValueError
        value = _whole(base) ** int(exponent) if power else _whole(text)
        if not -2**63 <= value < 2**63:  # the arrays and files that sizes end up in
            raise ValueError
        return value
    value = kind(text)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def _whole(text: str) -> int:
    try:
        return int(text)  # exact where a float is not; takes 50_000 too
    except ValueError:
        value = float(text)
        if value != int(value):
            raise
        return int(value)


def _comments(cls: type) -> dict[str, str]:
    """Field name -> its comment in the source; empty where there is no source (an interactive session)."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    notes = {}  # line -> (column, text, whether the line holds nothing else)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            notes[line] = (column, token.string.lstrip('# ').rstrip(), not token.line[:column].strip())
    found = {}
    for field in ast.parse(source).body[0].body:
        if not isinstance(field, ast.AnnAssign):
            continue
        line, words = field.end_lineno, []
        if line in notes:
            column = notes[line][0]
            while line in notes and notes[line][0] == column and (line == field.end_lineno or notes[line][2]):
                words.append(notes[line][1])  # it may go on below, in the same column
                line += 1
        else:
            line = field.lineno - 1
            while notes.get(line, (None,))[0] == field.col_offset:
                words.insert(0, notes[line][1])
                line -= 1
        found[field.target.id] = ' '.join(words)
    return found


def _help(classes: list[type], presets: dict[str, dict[str, Any]], doc: str | None) -> str:
    fields = [(f, get_type_hints(cls)[f.name], _comments(cls).get(f.name, '')) for cls in classes
              for f in dataclasses.fields(cls)]
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    indent = 6 + max(len(f'{f.name} {kind.__name__}') for f, kind, _ in fields)

    def entry(head: str, text: str) -> str:
        return textwrap.fill(text, width, initial_indent=f'  {head}'.ljust(indent), subsequent_indent=' ' * indent,
                             break_on_hyphens=False, break_long_words=False)

    lines = [inspect.cleandoc(doc), ''] if doc else []
    lines.append('Options, as --name value or --name=value:')
    for f, kind, comment in fields:
        default = str(f.default).lower() if kind is bool else repr(f.default)
        lines.append(entry(f'--{f.name} {kind.__name__}', f'{comment} (default {default})'))
    if presets:
        lines += ['', 'Presets (options given beside one win):']
        for name, preset in presets.items():
            lines.append(entry(name, ', '.join(f'{k} {v!r}' for k, v in preset.items()) or 'the defaults'))
    return '\n'.join(lines)
