"""nano/config.py: what a user types, what a script gets, and what stands in --help."""
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pytest

from nano.config import parse, save_config

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Config:
    # the size to start from
    # (see the presets)
    preset: str = 'nano'
    steps: int = 100  # optimizer steps
    lr: float = 3e-4  # peak learning rate, 100% of it
                      # after the warm-up
    out: str = ''  # run folder; '# not a comment' stays text
    strict: bool = False  # fail on a late compile

    # Data
    tokens: int = (1 <<
                   10)  # tokens in all
    bare: float = 1.0


PRESETS = {'nano': {}, '124m': {'steps': 5000, 'lr': 6e-4, 'strict': True}}


def get(*argv):
    return parse(Config, PRESETS, argv)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        get(*argv)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == ''
    assert err.startswith('error: ') and err.count('\n') == 1, err
    return err


def test_defaults_presets_and_options_in_that_order():
    assert get() == Config()
    assert get('--preset', '124m') == Config(preset='124m', steps=5000, lr=6e-4, strict=True)
    for argv in (['--preset', '124m', '--steps', '7'], ['--steps', '7', '--preset=124m']):  # in whatever order typed
        assert get(*argv) == Config(preset='124m', steps=7, lr=6e-4, strict=True)
    assert get('--preset', '124m', '--strict', 'false').strict is False
    assert get('--steps', '1', '--steps', '2').steps == 2


@pytest.mark.parametrize('text,value', [
    ('64', 64), ('1e6', 10**6), ('2**10', 1024), ('50_000', 50_000), ('-3', -3), ('0', 0), ('1.5e3', 1500),
    ('2**62', 2**62), ('9007199254740993', 2**53 + 1), ('1e3**2', 10**6)])
def test_whole_numbers(text, value):
    for argv in (['--steps', text], [f'--steps={text}']):
        got = get(*argv).steps
        assert got == value and type(got) is int


@pytest.mark.parametrize('text', ['', 'ten', '1.5', '1e-3', 'nan', 'inf', '2**64', '2**-1', '2**9999999', '2**', '**2',
                                  '1e30', '0x10', '3,000', 'true'])
def test_what_is_no_whole_number(capsys, text):
    err = refused(capsys, f'--steps={text}')
    assert '--steps' in err and repr(text) in err and 'whole number' in err


def test_floats_bools_and_text(capsys):
    assert get('--lr', '3e-4').lr == 3e-4 and get('--lr', '1').lr == 1.0 and type(get('--lr', '1').lr) is float
    for text in ('nan', 'inf', 'fast', '', '1e999'):
        assert 'expected a number' in refused(capsys, '--lr', text)
    assert get('--strict').strict is True and get('--strict', '--steps', '2') == Config(strict=True, steps=2)
    assert get('--strict', 'FALSE').strict is False and get('--strict=true').strict is True
    assert "'maybe': expected true or false" in refused(capsys, '--strict=maybe')
    for text in ('', 'a b', '$HOME "x" \'y\'\n', '-x', 'a=b'):
        assert get('--out', text).out == text and get(f'--out={text}').out == text
    assert get('--out=--strict').out == '--strict'


def test_unknown_options_name_the_closest(capsys):
    assert 'did you mean --steps?' in refused(capsys, '--step', '3')
    assert 'did you mean --strict?' in refused(capsys, '--stricct=true')
    assert 'did you mean' not in refused(capsys, '--zzzzzz', '3')
    assert "no preset '124'; did you mean 124m?" in refused(capsys, '--preset', '124')
    assert 'There are: nano, 124m' in refused(capsys, '--preset', 'zzz')
    assert '--name value' in refused(capsys, 'steps=3')
    assert '--name value' in refused(capsys, '-steps', '3')
    assert '--name value' in refused(capsys, '--')
    assert '--steps needs a value: a whole number' in refused(capsys, '--steps')
    assert '--steps needs a value' in refused(capsys, '--steps', '--lr', '1')
    assert '--name value' in refused(capsys, '--strict', 'maybe')


def test_help_lists_each_field_comment_default_and_preset(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    with pytest.raises(SystemExit) as e:
        parse(Config, PRESETS, ['--preset', 'wrong', '--help'], doc='Trains 100%.\n\n    python x.py')
    out, err = capsys.readouterr()
    assert e.value.code == 0 and err == ''
    lines = [' '.join(line.split()) for line in out.splitlines()]
    assert lines[0] == 'Trains 100%.'
    assert "--preset str the size to start from (see the presets) (default 'nano')" in lines
    assert '--lr float peak learning rate, 100% of it after the warm-up (default 0.0003)' in lines
    assert "--out str run folder; '# not a comment' stays text (default '')" in lines
    assert '--strict bool fail on a late compile (default false)' in lines
    assert '--tokens int tokens in all (default 1024)' in lines
    assert '--bare float (default 1.0)' in lines  # "Data" is not its comment
    assert '124m steps 5000, lr 0.0006, strict True' in lines and 'nano the defaults' in lines
    for f in fields(Config):
        assert sum(line.startswith(f'--{f.name} ') for line in lines) == 1
    monkeypatch.setenv('COLUMNS', '60')
    with pytest.raises(SystemExit):
        get('-h')
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_as_a_script(tmp_path):
    """No argv given, annotations as text, a class without source."""
    script = tmp_path / 'train.py'
    script.write_text('from __future__ import annotations\nfrom dataclasses import dataclass\n'
                      'from nano.config import parse\n\n\n@dataclass\nclass Config:\n'
                      '    steps: int = 3  # how many\n    on: bool = False  # or off\n\n\n'
                      'print(parse(Config, {}))\n')
    def run(*args):
        return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, env={'PYTHONPATH': str(ROOT)})
    assert run('--steps', '1e3', '--on').stdout == 'Config(steps=1000, on=True)\n'
    assert run('--help').stdout.split()[-3:] == ['off', '(default', 'false)']
    wrong = run('--stepz', '1')
    assert (wrong.returncode, wrong.stdout) == (2, '') and wrong.stderr.count('\n') == 1
    code = ('from dataclasses import make_dataclass\nfrom nano.config import parse\n'
            'parse(make_dataclass("C", [("n", int, 1)]), {}, ["--help"])')
    bad = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 0 and '--n int' in bad.stdout  # no source to read comments from


def test_a_preset_with_a_wrong_field_is_the_scripts_fault():
    with pytest.raises(AssertionError, match='stepz'):
        parse(Config, {'x': {'stepz': 1}}, [])


def test_save_config(tmp_path, monkeypatch):
    path = tmp_path / 'config.json'
    save_config(Config(out='ü'), path)
    assert json.loads(path.read_text(encoding='utf-8')) == asdict(Config(out='ü'))
    monkeypatch.setattr('os.fsync', lambda fd: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(OSError):
        save_config(Config(steps=1), path)
    assert json.loads(path.read_text(encoding='utf-8'))['steps'] == 100  # the old file is whole
