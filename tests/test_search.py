"""nano/plan/search.py against brute force, on a planner whose figures are a formula in place of a compile."""
import dataclasses
import itertools
import json
import math
import random
import shlex
import signal
import types

import pytest

from nano import UserError, chips, config, plan
from nano.plan import report, search as search_module
from nano.plan.search import SMALL, Variant, advice, command, meshes, micro_batches, search

REMATS = ['none', 'dots', 'attn', 'block']
VARY = {'remat': REMATS}


@pytest.fixture(autouse=True)
def argv(monkeypatch, tmp_path):
    monkeypatch.setattr('sys.argv', ['train.py'])
    monkeypatch.chdir(tmp_path)


@dataclasses.dataclass
class Config:
    preset: str = ''  #
    device: str = 'tpu'  #
    prompt: str = ''  #
    strict: bool = False  #
    mesh: str = '1,-1,1'  #
    global_batch: int = 64  #
    accumulate: int = 1  #
    remat: str = 'none'  #


class Fake:
    """Compiles nothing. Memory and time are random, and ordered as those of a real step."""

    def __init__(self, name, rng=None, **given):
        rng = rng or random.Random(0)
        self.slice = chips.find_slice(name)
        self.limit = self.slice.chip.usable_gib * 2**30
        whole = self.limit * self.slice.n_chips
        self.state = whole * 10 ** rng.uniform(-4, .05)  # weights and optimizer, of all
        self.grads = rng.uniform(.1, .4)  # of what weights and optimizer take
        self.kept = sorted((whole * 10 ** rng.uniform(-3, 1.5) for _ in REMATS), reverse=True)  # of the global batch
        self.work = sorted(rng.uniform(1, 2) for _ in REMATS)
        self.gather, self.slower = 10 ** rng.uniform(-3, 0), rng.random()  # by micro-batch
        self.heads = rng.choice((1, 2, 4, 8))
        self.fails = lambda cfg: False
        self.strain = 1.  # what fits, but takes more than this of the memory, the compiler has to compute in part again
        self.reserved, self.compiled, self.interrupt_at = 2**28, [], math.inf
        self.__dict__.update(given)

    def trace(self, cfg):
        data, fsdp, tensor = map(int, cfg.mesh.split(','))
        assert data * fsdp * tensor == self.slice.n_chips
        if cfg.global_batch % (data * fsdp * cfg.accumulate):
            raise UserError('the batch does not divide')
        if self.heads % tensor:
            raise UserError('the heads do not divide')
        held = self.state / (fsdp * tensor)
        return types.SimpleNamespace(local_bytes=dict(weights=dict(w=held / 3), state=dict(m=held / 3, v=held / 3),
                                                      batch=dict(ids=1000)))

    def plan(self, cfg, traced, what):
        if len(self.compiled) == self.interrupt_at:
            raise KeyboardInterrupt
        self.compiled.append((cfg.mesh, cfg.accumulate, getattr(cfg, 'remat', '')))
        if self.fails(cfg):
            raise UserError('the TPU compiler failed: it is a test\nsecond line')
        return self.figures(cfg)

    def figures(self, cfg):
        data, fsdp, tensor = map(int, cfg.mesh.split(','))
        level, held = REMATS.index(cfg.remat), self.state / (fsdp * tensor)
        program = held * self.grads + self.kept[level] / self.slice.n_chips / cfg.accumulate
        memory = dict(weights=held / 3, optimizer=held * 2 / 3, batch=1000, reserved=self.reserved, limit=self.limit,
                      total=held + 1000 + self.reserved + program)
        # The order of meshes is a hash's, so that any may be the fastest.
        step_s = self.work[level] + cfg.accumulate * self.gather + random.Random(cfg.mesh).random() * self.slower
        fits = memory['total'] <= self.limit
        strained = fits and memory['total'] > self.strain * self.limit
        memory['rematerialized_by_compiler'] = [2e10, 1e10] if strained else [0, 0]
        step_s *= 2 if strained else 1
        times = dict(step_s=step_s, device_s=step_s, host_trace_s=0, mfu=.5 / step_s, units_per_s=1000 / step_s)
        return dict(fits=fits, memory=memory, unit='tokens', slice=self.slice.name,
                    mesh=dict(data=data, fsdp=fsdp, tensor=tensor), **(times if fits else {}))

    def brute_force(self, cfg):
        """The time of the fastest of all variants that make sense, or None."""
        best = None
        n = range(1, self.slice.n_chips + 1)
        for data, fsdp, tensor in itertools.product(n, n, (1, 2, 4, 8)):
            in_slice = self.slice.chips_per_slice // tensor
            if (data * fsdp * tensor != self.slice.n_chips or self.slice.chips_per_slice % tensor or
                    fsdp not in (in_slice, self.slice.shape[-1], 1) or in_slice % fsdp):
                continue
            if data > self.slice.n_slices and self.state / (fsdp * tensor) > SMALL * self.limit:
                continue
            for a, remat in itertools.product((2**i for i in range(10)), REMATS):
                one = dataclasses.replace(cfg, mesh=f'{data},{fsdp},{tensor}', accumulate=a, remat=remat)
                try:
                    self.trace(one)
                except UserError:
                    continue
                p = self.figures(one)
                if p['fits'] and not self.fails(one):
                    best = min(best or math.inf, p['step_s'])
        own = self.own(cfg)
        try:
            self.trace(own)
        except UserError:
            return best
        p = self.figures(own)
        return min(best or math.inf, p['step_s']) if p['fits'] and not self.fails(own) else best

    def own(self, cfg):
        shape = search_module.runtime.mesh_shape(cfg.mesh, self.slice.n_chips)
        return dataclasses.replace(cfg, mesh=','.join(map(str, shape)))


def random_case(rng, **given):
    name = rng.choice(('v5e-1', 'v5e-4', 'v5e-8', 'v5e-16', '2xv5e-4', 'v4-8', 'v5p-32', '2xv6e-16'))
    return Fake(name, rng, **given), Config(global_batch=2 ** rng.randint(0, 8))


def compiles_of(fake, cfg):
    return 1 + sum(len(REMATS) + len(micro_batches(cfg, mesh)) for mesh in meshes(fake.slice))


def variants_of(fake, cfg):
    all_of_them = {(mesh, n, level) for mesh in meshes(fake.slice) for n in micro_batches(cfg, mesh)
                   for level in range(len(REMATS))}
    own = fake.own(cfg)
    return len(all_of_them | {(tuple(map(int, own.mesh.split(','))), own.accumulate, REMATS.index(own.remat))})


def test_finds_the_best_of_brute_force_in_few_compiles(seed, capsys):
    rng = random.Random(seed)
    outcomes, n, brute = set(), 0, 0
    for _ in range(100):
        fake, cfg = random_case(rng, strain=rng.choice((1., .8)))
        if rng.random() < .5:  # the user's own is tried too, first, whatever it is
            cfg = dataclasses.replace(cfg, mesh=rng.choice(('-1,1,1', '1,-1,1', '1,1,-1')), remat=rng.choice(REMATS),
                                      accumulate=rng.choice((1, 3, 4)))
        found, best = search(fake, cfg, VARY, math.inf), fake.brute_force(cfg)
        got = found['best'] and found['best']['figures']['step_s']
        assert got == best or best <= got <= 1.01 * best and found['best']['options'] == dict(
            mesh=fake.own(cfg).mesh, accumulate=cfg.accumulate, remat=cfg.remat)
        strained = sum('figures' in row and row['figures']['memory']['rematerialized_by_compiler'][0] > 0
                       for row in found['search'])
        assert len(set(fake.compiled)) == len(fake.compiled) <= compiles_of(fake, cfg) + strained
        own = fake.own(cfg)
        assert (own.mesh, own.accumulate, own.remat) not in fake.compiled[1:]
        assert found['untried'] == 0 and len(found['search']) == len(fake.compiled)
        variants = variants_of(fake, cfg)
        assert found['ruled_out'] + found['refused'] + len(found['search']) == variants and found['ruled_out'] >= 0
        json.dumps(found)
        out = capsys.readouterr().out
        assert ('PREDICTED' in out) == bool(fake.compiled) and ('The fastest of these' in out) == (best is not None)
        outcomes.add(best is None)
        n, brute = n + len(fake.compiled), brute + variants
    assert outcomes == {True, False}
    assert n < brute / 3


def test_failures_of_the_compiler_are_rows_and_lose_nothing_else(seed, capsys):
    rng = random.Random(seed)
    failed = 0
    for _ in range(50):
        broken = rng.randrange(2**32)
        fake, cfg = random_case(rng, fails=lambda c: random.Random(f'{broken} {c}').random() < .3)
        found = search(fake, cfg, VARY, math.inf)
        got, best = found['best'] and found['best']['figures']['step_s'], fake.brute_force(cfg)
        assert got == best or best <= got <= 1.01 * best
        rows = [row for row in found['search'] if 'error' in row]
        assert all(row['error'] == 'the TPU compiler failed: it is a test' for row in rows)
        assert rows == found['search'][len(found['search']) - len(rows):]  # the last of the table
        # As progress, and in the table.
        assert capsys.readouterr().out.count('compiler failed: it is a test\n') == 2 * len(rows)
        failed += len(rows)
    assert failed


def test_other_exceptions_are_rows_too(capsys):
    fake, trace = Fake('v5e-4', heads=8, state=1e9, kept=[1e9] * 4), Fake.trace

    def raises(cfg):
        if cfg.mesh == '1,4,1':
            raise ValueError('axis sizes\n* more')
        return trace(fake, cfg)
    fake.trace = raises
    found = search(fake, Config(), VARY, math.inf)
    assert found['best'] and found['search'][-1]['error'] == 'failed, ValueError: axis sizes'


def test_the_budget_ends_it_after_an_attempt(seed, capsys, monkeypatch):
    rng, now = random.Random(seed), [0.0]
    monkeypatch.setattr(search_module.time, 'perf_counter', lambda: now[0])
    for _ in range(50):
        fake, cfg = random_case(rng)
        plan_ = fake.plan

        def slow(*args):
            now[0] += 60
            return plan_(*args)
        fake.plan = slow
        search(fake, cfg, VARY, math.inf)
        all_of_them, budget = list(fake.compiled), rng.choice((0, 30, 90, 200, 1000))
        fake.compiled.clear()
        capsys.readouterr()
        found = search(fake, cfg, VARY, budget)
        out = capsys.readouterr().out
        assert fake.compiled == all_of_them[:max(1, math.ceil(budget / 60))]  # 0: exactly the first
        assert (found['untried'] > 0) == ('left untried' in out)
        if len(fake.compiled) < len(all_of_them):
            assert f'stopped after --search_minutes: {found["untried"]} left untried' in out


def test_ctrl_c_prints_what_there_is(seed, capsys):
    rng = random.Random(seed)
    for _ in range(50):
        fake, cfg = random_case(rng, interrupt_at=rng.randrange(4))
        found = search(fake, cfg, VARY, math.inf)
        out = capsys.readouterr().out
        if len(fake.compiled) == fake.interrupt_at and 'by Ctrl-C' in out:
            assert found['untried'] > 0
        times = [row['figures']['step_s'] for row in found['search'] if row['figures']['fits']]
        assert (found['best'] is None) == (not times)
        if times:
            assert found['best']['figures']['step_s'] <= 1.01 * min(times) and found['best']['command'] in out


def test_order():
    """The least work first; if it fits, a level more; else from the most rematerialization along the border."""
    fake = Fake('v5e-4', state=1e9, kept=[1e9] * 4, heads=2)
    search(fake, Config(), VARY, math.inf)
    assert fake.compiled == [(mesh, 1, remat) for mesh in ('1,4,1', '2,2,1', '4,1,1', '1,2,2', '2,1,2')
                             for remat in ('none', 'dots')]
    # Rematerialization that saves more time than it takes is followed to where it does not.
    fake = Fake('v5e-1', state=1e9, kept=[1e9] * 4)
    fake.work = [1., .8, .7, .9]
    found = search(fake, Config(), VARY, math.inf)
    assert [row[2] for row in fake.compiled] == ['none', 'dots', 'attn', 'block']
    assert found['best']['options']['remat'] == 'attn'
    gib = 4 * 2**30  # on each of 4 chips
    fake = Fake('v5e-4', state=1e3, kept=[25 * gib, 20 * gib, 18 * gib, 15 * gib], heads=1)
    search(fake, Config(), VARY, math.inf)
    assert [row[1:] for row in fake.compiled if row[0] == '1,4,1'] == [
        (1, 'none'), (1, 'block'), (1, 'attn'), (2, 'attn'), (2, 'dots'), (2, 'none')]
    # What is far too much is not halved again and again.
    fake = Fake('v5e-4', state=1e3, kept=[950 * gib, 950 * gib, 950 * gib, 100 * gib], heads=1)
    search(fake, Config(global_batch=1024), VARY, math.inf)
    assert [row[1:] for row in fake.compiled if row[0] == '1,4,1'] == [
        (1, 'none'), (1, 'block'), (8, 'block'), (8, 'attn'), (64, 'attn'), (64, 'dots'), (64, 'none')]


def test_meshes_and_micro_batches():
    assert meshes(chips.find_slice('v5e-1')) == [(1, 1, 1)]
    assert meshes(chips.find_slice('v5e-64')) == [
        (1, 64, 1), (8, 8, 1), (64, 1, 1), (1, 32, 2), (4, 8, 2), (32, 1, 2), (1, 16, 4), (2, 8, 4), (16, 1, 4),
        (1, 8, 8), (8, 1, 8)]
    assert meshes(chips.find_slice('2xv5e-4'))[:3] == [(2, 4, 1), (4, 2, 1), (8, 1, 1)]
    for name in chips.SLICES:
        for times in (1, 3):
            slice_ = chips.find_slice(f'{times}x{name}')
            found = meshes(slice_)
            assert len(set(found)) == len(found) and found[0] == (times, slice_.chips_per_slice, 1)
            assert all(math.prod(mesh) == slice_.n_chips and mesh[0] % times == 0 for mesh in found)
    assert micro_batches(Config(global_batch=60), (1, 2, 1)) == [1, 2, 5, 10, 30]
    assert micro_batches(Config(global_batch=512), (1, 64, 1)) == [1, 2, 4, 8]
    assert micro_batches(Config(global_batch=512), (1, 16, 2), 4) == [4, 8, 16, 32]
    assert micro_batches(Config(global_batch=4), (1, 64, 1)) == [1]


def test_nothing_fits(capsys):
    fake = Fake('v5e-4', state=1e9, kept=[1e15] * 4, heads=1)
    found = search(fake, Config(global_batch=4), VARY, math.inf)
    out = capsys.readouterr().out
    assert found['best'] is None and found['search']
    closest = min(row['figures']['memory']['total'] for row in found['search']) - fake.limit
    assert f'does not fit, {report.gib(closest)} too much. Weights and optimizer alone take 0.23 GiB' in out
    # Weights too large for all chips together: nothing is compiled.
    fake = Fake('v5e-4', state=100 * 2**30, heads=1)
    assert search(fake, Config(), VARY, math.inf)['best'] is None and not fake.compiled
    assert "alone take 25.00 GiB of a chip's 15.75 GiB: they need 7 chips at least" in capsys.readouterr().out
    # All refused.
    found = search(Fake('v5e-4', heads=1), Config(global_batch=1, mesh='1,4,1'), VARY, math.inf)
    assert found['best'] is None and found['refused'] == sum(len(REMATS) for _ in meshes(chips.find_slice('v5e-4')))
    assert 'Nothing could be planned for v5e-4: the ' in capsys.readouterr().out


def test_a_script_without_rematerialization(capsys):
    @dataclasses.dataclass
    class Images:
        mesh: str = '1,-1,1'  #
        global_batch: int = 64  #
        accumulate: int = 1  #
    fake = Fake('v5e-4', state=1e9, kept=[8e10] * 4, heads=1)
    figures = fake.figures
    fake.figures = lambda cfg: figures(Config(**dataclasses.asdict(cfg)))
    found = search(fake, Images(), {}, math.inf)
    assert found['best']['options'].keys() == {'mesh', 'accumulate'} and found['best']['options']['accumulate'] == 2


def test_the_command_parses_back_to_what_was_found(seed, capsys, monkeypatch):
    rng = random.Random(seed)
    presets = {'big': dict(accumulate=4, remat='dots', global_batch=256)}
    texts = ['a b', "it's", '"quoted"', '$HOME `x` \\', '', '*', 'ROMEO:\nO', 'true', 'ü']
    for _ in range(100):
        fake = random_case(rng)[0]
        words = rng.choice((['--preset', 'big'], ['--preset=big'], []))
        words += rng.choice(([], ['--prompt', rng.choice(texts)], ['--prompt=' + rng.choice([*texts, '--x'])]))
        words += rng.choice(([], ['--strict'], ['--strict', 'false'], ['--strict=true']))
        words += rng.choice(([], ['--mesh', '1,1,-1'], ['--mesh=-1,1,1'], ['--mesh', '7,1,1']))
        words += rng.choice(([], ['--accumulate', '2'], ['--accumulate=1']))
        words += rng.choice(([], ['--global-batch', '2**6'], ['--global_batch=64']))
        words += rng.choice(([], ['--remat', 'block'])) + rng.choice(([], ['--device', 'cpu']))
        words += ['--plan', fake.slice.name, '--search']
        words += rng.choice(([], ['--plan_json', 'a b.json'], ['--plan-json=x']))
        words += rng.choice(([], ['--search_minutes', '3'])) + rng.choice(([], ['--tokens=1e9', '--price', '2']))
        # In any order: --search true, say, is not torn apart.
        starts = [i for i, w in enumerate(words) if w.startswith('--')] + [len(words)]
        groups = [words[a:b] for a, b in zip(starts, starts[1:])]
        rng.shuffle(groups)
        words = [w for group in groups for w in group]
        monkeypatch.setattr('sys.argv', ['a dir/train.py', *words])
        cfg, planning = config.parse(Config, presets, None, beside=plan.Options)
        assert planning.search
        cfg.device = 'tpu'
        best = search(fake, cfg, VARY, math.inf)['best']
        if best is None:
            continue
        python, script, *args = shlex.split(best['command'])
        assert (python, script) == ('python', 'a dir/train.py')
        again, planning = config.parse(Config, presets, args, beside=plan.Options)
        assert planning == plan.Options()
        resolved = ','.join(map(str, search_module.runtime.mesh_shape(again.mesh, fake.slice.n_chips)))
        assert dataclasses.replace(again, mesh=resolved) == dataclasses.replace(cfg, **best['options'])
    capsys.readouterr()


def test_the_command_replaces_what_was_given(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train_gpt.py', '--mesh=1,2,2', '--prompt', 'to be', '--plan', 'v5e-4', '--search',
                                     '--remat', 'attn'])
    fake, cfg = Fake('v5e-4'), Config(mesh='1,2,2', prompt='to be', remat='attn')
    assert command(fake, cfg, dict(mesh='1,4,1', accumulate=2, remat='attn')) == \
        "python train_gpt.py --prompt 'to be' --remat attn --mesh 1,4,1 --accumulate 2"
    assert command(fake, dataclasses.replace(cfg, mesh='-1,2,2'), dict(mesh='1,2,2', accumulate=1, remat='none')) == \
        "python train_gpt.py --mesh=1,2,2 --prompt 'to be' --remat none"


def test_the_command_is_launch_shs_where_there_is_one(monkeypatch, tmp_path):
    (tmp_path / 'launch.sh').touch()
    assert command(Fake('v5e-4'), Config(), dict(mesh='1,4,1', accumulate=2)) == 'bash launch.sh train.py --accumulate 2'


def test_exit_codes_and_the_json_file(tmp_path, capsys, monkeypatch):
    for name, value in (('aot.start', lambda n: None), ('runtime.check_versions', lambda: ''), ('as_text', lambda p: '')):
        monkeypatch.setattr(f'nano.plan.{name}', value)
    file = tmp_path / 'plan.json'

    def run(fake, **options):
        monkeypatch.setattr(plan, 'Planner', lambda *_: fake)
        plan.run(plan.Options(plan='v5e-4', plan_json=str(file), **options), Config(), None, VARY)
        return json.loads(file.read_text())

    fits = run(Fake('v5e-4', state=1e9, kept=[1e9] * 4), search=True)
    assert fits['best'] in fits['search'] and fits['best']['options']['remat'] == 'none' and fits['best']['command']
    with pytest.raises(SystemExit) as e:
        run(Fake('v5e-4', state=1e9, kept=[1e15] * 4), search=True)
    assert e.value.code == 1 and json.loads(file.read_text())['best'] is None
    fake = Fake('v5e-4', state=1e9, kept=[1e15] * 4)
    fake.plan = lambda cfg, *_: fake.figures(dataclasses.replace(cfg, mesh='1,4,1'))
    assert run(fake, search_minutes=0.)['fits'] is False  # an answer: no error
    assert 'Tried 0 changes: none of them makes it fit, 5 are untried' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['nowhere/x.json', 'folder/', 'folder', 'ä' * 190])
def test_a_json_file_that_cannot_be_written_is_refused_first(name, tmp_path, monkeypatch):
    (tmp_path / 'folder').mkdir()
    monkeypatch.setattr('nano.plan.aot.start', lambda n: pytest.fail('too late'))
    with pytest.raises(UserError, match='--plan_json'):
        plan.run(plan.Options(plan='v5e-4', plan_json=name), Config(), None, VARY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['folder']


@pytest.mark.parametrize('signum, raised', [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_that_a_callback_swallowed_ends_the_plan_after_tracing(signum, raised, monkeypatch):
    monkeypatch.setattr(plan, '_asked_to_end', 0)
    monkeypatch.setattr('nano.runtime.make_mesh', lambda *_: None)

    def trace(make, n):
        with pytest.raises(raised):  # as the garbage collector does, see nano/plan/__init__.py
            plan._signaled(signum, None)
    monkeypatch.setattr('nano.plan.aot.trace', trace)
    planner = plan.Planner(chips.find_slice('v5e-4'), None, plan.Options())
    with pytest.raises(raised):
        planner.trace(Config())
    with pytest.raises(raised), plan._Progress('compiling') as progress:
        progress.tick()


def test_a_best_row_tells_time_and_cost():
    p = dict(unit='tokens', budget=dict(units=5.24e10, hours=64.8, usd=1226.4))
    assert search_module.cost(p) == ', 2.7 days and $1,226 for 5.24e+10 tokens' and search_module.cost({}) == ''


def test_the_users_own_options_stay_among_ties(capsys):
    fake = Fake('v5e-1', state=1e9, kept=[1e9] * 4, work=[1., .995, 1.5, 1.5])
    assert search(fake, Config(), VARY, math.inf)['best']['options']['remat'] == 'none'
    fake.work = [1., .9, 1.5, 1.5]
    assert search(fake, Config(), VARY, math.inf)['best']['options']['remat'] == 'dots'


def test_the_script_refuses_what_a_search_may_ask():
    import train_gpt
    mesh = types.SimpleNamespace(mesh_shape=(1, 2, 2))
    cfg = dataclasses.replace(train_gpt.Config(), heads=4, kv_heads=2)
    assert train_gpt.check_mesh(cfg, mesh) == 2
    assert train_gpt.check_mesh(dataclasses.replace(cfg, kv_heads=1, device='cpu'), mesh) == 2  # plain attention
    for wrong in (dict(kv_heads=1), dict(heads=3), dict(accumulate=3)):
        with pytest.raises(UserError):
            train_gpt.check_mesh(dataclasses.replace(cfg, **wrong), mesh)
    with pytest.raises(UserError, match='without --scan'):  # rematerialization is scan's
        train_gpt.step_to_plan(dataclasses.replace(cfg, scan=False, remat='dots'), mesh, None)


# ---- advice ----

def advise(fake, cfg, budget=math.inf):
    shape = search_module.runtime.mesh_shape(cfg.mesh, fake.slice.n_chips)
    found = fake.figures(dataclasses.replace(cfg, mesh=','.join(map(str, shape))))
    assert not found['fits']
    text, rows = advice(fake, cfg, VARY, found, budget)
    assert len(rows) == len(fake.compiled)
    return text


def test_advice_takes_the_first_change_that_fits(capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['train.py', '--plan', 'v5e-4'])
    gib = 4 * 2**30  # on each of 4 chips
    kept = dict(state=1e3, heads=1)
    fake = Fake('v5e-4', kept=[20 * gib, 19 * gib, 3 * gib, 2 * gib], **kept)
    text = advise(fake, Config())
    assert [row[1:] for row in fake.compiled] == [(1, 'dots'), (1, 'attn')]
    step_s = fake.figures(Config(mesh='1,4,1', remat='attn'))['step_s']
    assert 'python train.py --remat attn\n' in text
    assert f'it fits, 3.25 GiB of 15.75 GiB, step {step_s * 1e3:,.1f} ms' in text
    # Smaller micro-batches, when rematerialization does not help.
    fake = Fake('v5e-4', kept=[20 * gib] * 4, **kept)
    assert 'python train.py --accumulate 2\n' in advise(fake, Config())
    assert [row[1:] for row in fake.compiled] == [(1, 'dots'), (1, 'attn'), (1, 'block'), (2, 'none')]
    # Both, and far too much: the strongest is tried first, each attempt takes minutes.
    fake = Fake('v5e-4', kept=[1000 * gib, 1000 * gib, 1000 * gib, 30 * gib], **kept)
    assert 'python train.py --accumulate 2 --remat block\n' in advise(fake, Config())
    assert [row[1:] for row in fake.compiled] == [(1, 'block'), (2, 'block')]
    # All fsdp: the weights are too many for a copy in each half, which is seen without a compile.
    fake = Fake('v5e-4', state=40 * 2**30, kept=[gib / 8] * 4, grads=.1, heads=1)
    assert 'python train.py --mesh 1,4,1\n' in advise(fake, Config(mesh='2,2,1'))
    assert fake.compiled == [('1,4,1', 1, 'none')]


def test_advice_of_random_cases(seed, capsys):
    """It is right, it is in the order that it says, and it finds one if there is one."""
    rng, outcomes = random.Random(seed), set()
    for _ in range(400):
        fake, cfg = random_case(rng)
        mesh = rng.choice(meshes(fake.slice))
        cfg = dataclasses.replace(cfg, mesh=','.join(map(str, mesh)), remat=rng.choice(REMATS))
        try:
            fake.trace(cfg)
        except UserError:
            continue
        if fake.figures(cfg)['fits']:
            continue
        text, level = advise(fake, cfg), REMATS.index(cfg.remat)
        held = fake.state / (mesh[1] * mesh[2]) + 1000 + fake.reserved
        total = fake.figures(cfg)['memory']['total']
        far = total - held > 2 * (fake.limit - held) > 0
        order = []
        for there in dict.fromkeys((mesh, meshes(fake.slice)[0])):
            smaller = [a for a in micro_batches(cfg, there) if a > 1]
            order += [Variant(there, 1, at) for at in range(3 if far else level, 4)]
            order += [Variant(there, a, level) for a in smaller if not far] + [Variant(there, a, 3) for a in smaller]
        wanted = None
        for v in order:
            one = dataclasses.replace(cfg, mesh=','.join(map(str, v.mesh)), accumulate=v.accumulate,
                                      remat=REMATS[v.level])
            if cfg.global_batch % (v.mesh[0] * v.mesh[1] * v.accumulate) == 0 and fake.figures(one)['fits']:
                wanted = one
                break
        outcomes.add(wanted is None)
        if wanted is None:
            assert 'none of them makes it fit' in text and 'Weights and optimizer alone take' in text
        else:
            assert f'step {fake.figures(wanted)["step_s"] * 1e3:,.1f} ms' in text
            assert fake.compiled[-1] == (wanted.mesh, wanted.accumulate, wanted.remat)
    assert outcomes == {True, False}


def test_advice_is_ended_by_its_budget_and_by_ctrl_c():
    fake = Fake('v5e-4', state=1e9, kept=[1e13] * 4, heads=1)
    assert 'Tried 0 changes: none of them makes it fit, 5 are untried. Weights' in advise(fake, Config(), 0)
    assert not fake.compiled
    fake.interrupt_at = 1
    text = advise(fake, Config())
    assert '\nTried 1 change: none' in text and 'The closest: --mesh 1,4,1 --accumulate 1 --remat block does' in text
    assert len(fake.compiled) == 1
    gib = 4 * 2**30
    fake = Fake('v5e-4', state=1e3, kept=[20 * gib, 19 * gib, 18 * gib, 17 * gib], heads=1, interrupt_at=1)
    assert '\nStopped. Tried 1 change: none of them' in advise(fake, Config())
