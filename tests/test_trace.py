"""nano/trace.py: what is traced once computes what plain PyTorch does, at every call, on 8 devices; what is drawn at
random is new in each call and in each turn of a loop."""
import pytest
import torch

from nano import runtime
from nano.trace import Loop, Once, scan


@pytest.fixture(scope='module')
def mesh():
    runtime.start('cpu')
    return runtime.make_mesh('1,8,1', 8)


def placed(t, mesh, spec):
    import torch_xla
    import torch_xla.distributed.spmd as xs
    t = t.to(torch_xla.device())
    xs.mark_sharding(t, mesh, spec)
    return t


def test_once_runs_the_function_once_and_changes_in_place(mesh, seed):
    import torch_xla
    torch.manual_seed(seed)
    calls = []

    def f(weights, state, x):
        calls.append(1)
        w = weights['w']
        loss = (x @ w).square().mean()
        grad, = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.copy_(w - 0.1 * grad)
            state['n'].add_(3)
        return {'loss': loss, 'unchanged': x}

    weights, state = {'w': torch.nn.Parameter(torch.randn(16, 8))}, {'n': torch.tensor(4)}
    on_device = {'w': torch.nn.Parameter(placed(weights['w'].detach(), mesh, ('fsdp', None)))}
    n = {'n': state['n'].to(torch_xla.device())}
    import torch_xla.distributed.spmd as xs
    xs.mark_sharding(on_device['w'], mesh, ('fsdp', None))
    once = Once(f, changes=2)
    for rows in (8, 8, 8, 16, 8):  # another shape is traced anew
        x = torch.randn(rows, 16)
        expected = f(weights, state, x)
        found = once(on_device, n, placed(x, mesh, ('fsdp', None)))
        torch_xla.sync()
        for name in expected:
            torch.testing.assert_close(found[name].cpu(), expected[name].detach(), rtol=1e-5, atol=1e-6)
    assert len(calls) == 5 + 2
    torch.testing.assert_close(on_device['w'].detach().cpu(), weights['w'].detach(), rtol=1e-5, atol=1e-6)
    assert n['n'].item() == state['n'].item() == 19
    assert not found['loss'].requires_grad and on_device['w'].requires_grad


def test_what_changes_keeps_its_sharding_and_compiles_once(mesh):
    import torch_xla
    once = Once(lambda a, b: a['x'].add_(b), changes=1)
    a = {'x': placed(torch.zeros(16, 4), mesh, ('fsdp', None))}
    before = torch_xla._XLAC._get_xla_sharding_spec(a['x'])
    compiled = runtime.n_compiles()
    for _ in range(3):
        once(a, placed(torch.ones(16, 4), mesh, (None, None)))
        torch_xla.sync()
    assert 'devices=[8,1]' in before and torch_xla._XLAC._get_xla_sharding_spec(a['x']) == before
    assert runtime.n_compiles() <= compiled + 1


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('n', [1, 5])
def test_a_loop_is_pythons(mesh, seed, reverse, n):
    import torch_xla
    torch.manual_seed(seed)
    carry = [torch.randn(3), {'sum': torch.tensor(0.5), 'none': None}]
    xs = {'a': torch.randn(n, 3), 'b': torch.randint(9, (n, 2), dtype=torch.int32), 'none': None}

    def body(carry, x):
        v, rest = carry
        v = torch.tanh(v + x['a']) * 0.7
        return [v, {'sum': rest['sum'] + v.sum(), 'none': None}], (v * 2, None, x['b'] + 1)

    expected, results = carry, []
    for i in reversed(range(n)) if reverse else range(n):
        expected, one = body(expected, {'a': xs['a'][i], 'b': xs['b'][i]})
        results.append(one)
    results = results[::-1] if reverse else results
    device = torch_xla.device()
    loop = Loop(body, reverse)
    for _ in range(2):
        (v, rest), (twice, none, b) = loop([carry[0].to(device), {'sum': carry[1]['sum'].to(device), 'none': None}],
                                           {'a': xs['a'].to(device), 'b': xs['b'].to(device), 'none': None})
        torch_xla.sync()
        torch.testing.assert_close(v.cpu(), expected[0])
        torch.testing.assert_close(rest['sum'].cpu(), expected[1]['sum'])
        torch.testing.assert_close(twice.cpu(), torch.stack([r[0] for r in results]))
        assert torch.equal(b.cpu(), torch.stack([r[2] for r in results])) and none is rest['none'] is None


def test_a_carry_that_changes_its_shape_is_refused(mesh):
    import torch_xla
    with pytest.raises(TypeError, match=r'begins as torch.float32 \[3\] and goes on as torch.float32 \[4\]'):
        Loop(lambda c, x: (torch.cat([c, x]), None))(*(torch.zeros(s, device=torch_xla.device()) for s in (3, (2, 1))))


def test_random_numbers(mesh):
    """Drawn before, in and after a loop, and in a loop within it: all differ, and all depend on the seed alone."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    device = torch_xla.device()

    def draw():
        return torch.rand(4, device=device)

    def f(xs):
        def turn(carry, x):
            _, inner = Loop(lambda c, y: (c + y, draw()))(x, xs[:2])
            return carry + x, (draw(), inner)
        before = draw()
        _, (outer, inner) = Loop(turn)(torch.zeros(3, device=device), xs)
        return before, outer, inner, draw()

    once, xs, found = Once(f), torch.ones(3, 3, device=device), []
    for seed in (5, 6, 5, 6):
        xm.set_rng_state(seed)
        drawn = once(xs)
        torch_xla.sync()
        found.append(torch.cat([t.cpu().flatten() for t in drawn]))
    a, b, again, b_again = found
    assert torch.equal(a, again) and torch.equal(b, b_again)
    assert len(a) == 4 * (1 + 3 + 6 + 1) and len(set(torch.cat([a, b]).tolist())) > 2 * len(a) - 3
    assert ((0 <= a) & (a < 1)).all() and 0.3 < a.mean() < 0.7


def test_the_state_of_the_random_numbers_is_left_alone(mesh):
    import torch_xla
    import torch_xla.core.xla_model as xm
    xm.set_rng_state(11)
    expected = torch.rand(3, device=torch_xla.device()).cpu()
    xm.set_rng_state(11)
    Once(lambda x: x + 1)(torch.zeros(3, device=torch_xla.device()))  # draws nothing
    assert torch.equal(torch.rand(3, device=torch_xla.device()).cpu(), expected)


def test_a_layer_that_draws_is_refused(mesh):
    import torch_xla
    device = torch_xla.device()
    with pytest.raises(RuntimeError, match='draws random numbers'):
        scan(lambda x, w: x * w['w'] + torch.rand(3, device=device), torch.zeros(3, device=device).requires_grad_(),
             {'w': torch.ones(4, 3, device=device).requires_grad_()})
