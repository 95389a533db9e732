"""nano/plan/hlo.py: counts and times from a scheduled program, against brute force and against programs whose cost is known."""
import itertools
import random

import pytest

from nano import UserError
from nano.chips import CHIPS
from nano.plan import hlo

CHIP = CHIPS['v5e']


def program(text: str, coords=((0, 0), (1, 0), (0, 1), (1, 1)), wrap=(False, False), **more) -> hlo.Program:
    return hlo.Program(text, CHIP, hlo.Network(list(coords), wrap, 45., **more))


def cost(text: str, **more) -> tuple[hlo.Cost, hlo.Program]:
    p = program(text, **more)
    return p.cost(lambda i, flops, computation: 'matmul' if flops else 'other'), p


def test_flops_of_windows_are_the_multiply_adds_that_do_not_meet_padding(seed):
    random_ = random.Random(seed)
    for _ in range(200):
        n_in, size = random_.randint(1, 6), random_.randint(1, 4)
        stride, low, high, dilate_in, dilate = (random_.randint(1, 3), random_.randint(0, 3), random_.randint(0, 3),
                                                random_.randint(1, 3), random_.randint(1, 2))
        wide = (n_in - 1) * dilate_in + 1 + low + high
        if wide < (size - 1) * dilate + 1:
            continue
        n_out = (wide - (size - 1) * dilate - 1) // stride + 1
        b, i, o = (random_.randint(1, 4) for _ in range(3))
        # Brute force: the padded, dilated input with 1 where there are data.
        row = [0] * low + [int(k % dilate_in == 0) for k in range((n_in - 1) * dilate_in + 1)] + [0] * high
        hits = sum(row[at * stride + k * dilate] for at in range(n_out) for k in range(size))
        text = f'''HloModule m
ENTRY %main (a: f32[{b},{n_in},{i}], w: f32[{size},{i},{o}]) -> f32[{b},{n_out},{o}] {{
  %a = f32[{b},{n_in},{i}]{{2,1,0:T(8,128)}} parameter(0)
  %w = f32[{size},{i},{o}]{{2,1,0:T(8,128)}} parameter(1)
  ROOT %c = f32[{b},{n_out},{o}]{{2,1,0:T(8,128)}} convolution(%a, %w), window={{size={size} stride={stride} pad={low}_{high} lhs_dilate={dilate_in} rhs_dilate={dilate}}}, dim_labels=b0f_0io->b0f
}}
'''
        assert cost(text)[0].flops == 2 * hits * b * i * o


LOOP = '''HloModule m
%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%s), index=1
  %step = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%k, %step)
  %y = f32[8,128]{1,0:T(8,128)} negate(%x), backend_config={"window_config":{"estimated_cycles":"1500"}}
  ROOT %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%next, %y)
}
%until (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%k, %n), direction=LT
}
ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %from = s32[]{:T(128)} constant(START)
  %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%from, %a)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%t), condition=%until, body=%body
  ROOT %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
'''


def test_loops_run_as_often_as_they_count(seed):
    random_ = random.Random(seed)
    for _ in range(50):
        start, step = random_.randint(0, 9), random_.randint(1, 4)
        limit = start + random_.randint(1, 40)
        text = LOOP.replace('STEP', str(step)).replace('LIMIT', str(limit)).replace('START', str(start))
        found, _ = cost(text)
        # 1,500 cycles at 1.5 GHz are a microsecond; each pass also counts the addition of the counter, with no cycles.
        assert found.compiler['other'] == pytest.approx(len(range(start, limit, step)) * 1e-6, rel=1e-3)


def test_a_loop_that_is_not_understood_is_refused():
    with pytest.raises(UserError, match='loop'):
        cost(LOOP.replace('direction=LT', 'direction=NE').replace('STEP', '1').replace('LIMIT', '3').replace('START', '0'))


def test_what_a_loop_carries_may_come_from_elsewhere():
    text = LOOP.replace('= (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%from, %a)',
                        '= (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) custom-call(%from, %a)')
    found, _ = cost(text.replace('STEP', '1').replace('LIMIT', '3').replace('START', '0'))
    assert found.compiler['other'] >= 3e-6


def test_of_a_conditional_the_longest_branch_counts():
    branch = '''%NAME (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %y = f32[8,128]{1,0:T(8,128)} negate(%x), backend_config={"window_config":{"estimated_cycles":"CYCLES"}}
}
'''
    for how in ('branch_computations={%short, %long}', 'true_computation=%short, false_computation=%long'):
        found, _ = cost('HloModule m\n' + branch.replace('NAME', 'short').replace('CYCLES', '1500') +
                        branch.replace('NAME', 'long').replace('CYCLES', '3000').replace('negate', 'sqrt').replace(
                            '8,128', '16,128') + f'''ENTRY %main (a: f32[8,128], p: s32[]) -> f32[8,128] {{
  %a = f32[8,128]{{1,0:T(8,128)}} parameter(0)
  %p = s32[] parameter(1)
  ROOT %c = f32[8,128]{{1,0:T(8,128)}} conditional(%p, %a, %a), {how}
}}
''')
        assert found.compiler['other'] == pytest.approx(2e-6)


def test_all_to_all_passes_the_links_between(seed):
    """Against every pair's way through the torus, dimension by dimension, ties both ways."""
    random_ = random.Random(seed)
    for _ in range(30):
        shape = tuple(random_.choice((1, 2, 4, 8)) for _ in range(random_.choice((2, 3))))
        wrap = tuple(random_.random() < .5 and n > 2 for n in shape)
        coords = list(itertools.product(*map(range, shape)))
        if len(coords) == 1:
            continue
        load = {}
        for a, b in itertools.product(coords, coords):
            at = list(a)
            for d, n in enumerate(shape):
                ways = [(b[d] - a[d], 1.)]
                if wrap[d]:
                    up = (b[d] - a[d]) % n
                    ways = [(up, .5), (up - n, .5)] if 2 * up == n else [(up if 2 * up < n else up - n, 1.)]
                for steps, share in ways:
                    way = 1 if steps > 0 else -1
                    for k in range(abs(steps)):
                        link = (*at[:d], (at[d] + way * k) % n, *at[d + 1:], d, way)
                        load[link] = load.get(link, 0) + share / len(coords)  # of what a chip has
                at[d] = b[d]
        network = hlo.Network(coords, wrap, 45.)
        assert network.seconds('all-to-all', 1e9, list(range(len(coords)))) == pytest.approx(
            max(load.values()) / (hlo.LINK_SHARE * 45))


NESTED = '''HloModule m
%inner (p: bf16[12,1024,512], i: s32[]) -> bf16[1,1024,512] {
  %p = bf16[12,1024,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %part = bf16[1,1024,512]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,1024,512}
}
%outer (q: bf16[12,1024,512], j: s32[]) -> bf16[1,1024,512] {
  %q = bf16[12,1024,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %j = s32[]{:T(128)} parameter(1)
  %f = bf16[1,1024,512]{2,1,0:T(8,128)(2,1)} fusion(%q, %j), kind=kLoop, calls=%inner
  ROOT %y = bf16[1,1024,512]{2,1,0:T(8,128)(2,1)} negate(%f)
}
ENTRY %main (a: bf16[12,1024,512], k: s32[]) -> bf16[1,1024,512] {
  %a = bf16[12,1024,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %k = s32[]{:T(128)} parameter(1)
  ROOT %g = bf16[1,1024,512]{2,1,0:T(8,128)(2,1)} fusion(%a, %k), kind=kLoop, calls=%outer
}
'''


def test_of_what_a_fusion_within_a_fusion_slices_the_slice_is_read():
    found, _ = cost(NESTED)
    assert found.hbm_bytes == pytest.approx(2 * 1024 * 512 * 2, rel=1e-3)


OVERLAP = '''HloModule m
ENTRY %main (a: bf16[1024,1024]) -> bf16[4096,1024] {
  %a = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[1024,1024]{1,0:T(8,128)(2,1)}, bf16[4096,1024]{1,0:T(8,128)(2,1)}) all-gather-start(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %y = bf16[ROWS,128]{1,0:T(8,128)(2,1)} broadcast(%a)
  ROOT %d = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather-done(%s)
}
'''


@pytest.mark.parametrize('rows', [8, 100_000, 10_000_000])
def test_a_collective_is_hidden_behind_what_runs_beside_it(rows):
    found, p = cost(OVERLAP.replace('ROWS', str(rows)))
    beside = (1024 * 1024 + rows * 128) * 2 / (hlo.HBM_SHARE * 819e9)  # what is read and what is written
    (gather,) = p.collectives
    assert gather.n_bytes == 3 / 4 * 4096 * 1024 * 2
    # Four chips in a square: a link in each of two dimensions.
    assert gather.seconds == pytest.approx(gather.n_bytes / (hlo.LINK_SHARE * 2 * 45e9))
    assert found.seconds['other'] == pytest.approx(beside)
    assert found.waits.get('links', 0) == pytest.approx(max(0, gather.seconds - beside))
    assert p.links_seconds() == gather.seconds and found.total == pytest.approx(max(beside, gather.seconds))


PERMUTES = '''HloModule m
ENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[1024,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) collective-permute-start(%a), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %t = (bf16[1024,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) collective-permute-start(%a), channel_id=2, source_target_pairs=SECOND
  %x = bf16[1024,1024]{1,0:T(8,128)(2,1)} collective-permute-done(%s)
  ROOT %y = bf16[1024,1024]{1,0:T(8,128)(2,1)} collective-permute-done(%t)
}
'''


def test_permutes_to_the_left_and_to_the_right_pass_by_each_other():
    one = 1024 * 1024 * 2 / (hlo.LINK_SHARE * 45e9)
    same, p = cost(PERMUTES.replace('SECOND', '{{0,1},{1,2},{2,3},{3,0}}'))
    assert same.total == pytest.approx(2 * one) and p.links_seconds() == pytest.approx(2 * one)
    other, p = cost(PERMUTES.replace('SECOND', '{{0,3},{1,0},{2,1},{3,2}}'))
    assert other.total == pytest.approx(one) and p.links_seconds() == pytest.approx(one)


def matmul(m, k, n):
    return f'''HloModule m
ENTRY %main (a: bf16[{m},{k}], w: bf16[{k},{n}]) -> bf16[{m},{n}] {{
  %a = bf16[{m},{k}]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %w = bf16[{k},{n}]{{1,0:T(8,128)(2,1)S(1)}} parameter(1)
  ROOT %c = bf16[{m},{n}]{{1,0:T(8,128)(2,1)S(1)}} convolution(%a, %w), dim_labels=bf_io->bf
}}
'''


def test_matmuls_that_do_not_fill_the_matrix_unit_take_as_long_as_if_they_did():
    """v5e's is 128 wide; of the three dimensions one may be any, it only takes time."""
    full = cost(matmul(1024, 1024, 1024))[0].total
    assert full == pytest.approx(2 * 1024**3 / (hlo.MXU_SHARE * 197e12))
    for shape in (1024, 961, 1024), (1024, 900, 1024):
        assert cost(matmul(*shape))[0].total == pytest.approx(full, rel=1e-3), shape
    assert cost(matmul(1024, 64, 1024))[0].total == pytest.approx(full / 8)
    assert cost(matmul(8, 1024, 1024))[0].total == pytest.approx(full / 128)
    assert cost(matmul(1024, 1024, 8))[0].total == pytest.approx(full / 128)  # they change places
    assert cost(matmul(8, 1024, 8))[0].total == pytest.approx(full / 128 / 8)  # one of them has to fill 128


def test_bytes_that_each_chip_sends(seed):
    """By playing the ring algorithms, with a whole of n parts."""
    for n in (2, 3, 4, 8):
        parts = n * 7
        sent = sum(7 for _ in range(n - 1))  # all-gather: in each of n-1 rounds one part goes on to the neighbor
        assert hlo.moved('all-gather', parts, n) == sent == hlo.moved('reduce-scatter', parts, n)
        assert hlo.moved('all-reduce', parts, n) == 2 * sent
    assert hlo.moved('collective-permute', 5, 4) == 5


def test_groups_in_both_notations():
    assert hlo.groups('replica_groups={{0,2},{1,3}}, x') == [[0, 2], [1, 3]]
    assert hlo.groups('replica_groups=[2,4]<=[8], x') == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # As XLA's documentation of iota tiles has it: reshape to [4,2], transpose, reshape to [2,4].
    assert hlo.groups('replica_groups=[2,4]<=[4,2]T(1,0), x') == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_links_that_a_group_can_use():
    square = list(itertools.product(range(4), range(4)))
    open_, ring = hlo.Network(square, (False, False), 45.), hlo.Network(square, (True, True), 45.)
    row, all_ = list(range(4)), list(range(16))
    assert (open_.links(row), open_.links(all_), ring.links(row), ring.links(all_)) == (1, 2, 2, 4)


def test_only_slices_of_large_arrays_are_counted_as_read():
    text = '''HloModule m
%fused (x: f32[16,1024,128], k: s32[]) -> f32[1,1024,128] {
  %x = f32[16,1024,128]{2,1,0:T(8,128)} parameter(0)
  %k = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %s = f32[1,1024,128]{2,1,0:T(8,128)} dynamic-slice(%x, %k, %zero, %zero), dynamic_slice_sizes={1,1024,128}
}
ENTRY %main (x: f32[16,1024,128], k: s32[]) -> f32[1,1024,128] {
  %x = f32[16,1024,128]{2,1,0:T(8,128)} parameter(0)
  %k = s32[]{:T(128)} parameter(1)
  ROOT %y = f32[1,1024,128]{2,1,0:T(8,128)S(1)} fusion(%x, %k), kind=kLoop, calls=%fused
}
'''
    found, _ = cost(text)
    assert found.hbm_bytes == 4 * 1024 * 128 + 4  # what is written stays in VMEM, S(1)


def test_a_kernel_without_a_rule_is_named():
    text = '''HloModule m
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %my_kernel = f32[8,128]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/my_kernel"}
}
'''
    found, p = cost(text)
    assert p.uncosted == ['my_kernel'] and found.total == 0


def test_attention_kernels_do_the_blocks_that_the_mask_leaves(seed):
    random_ = random.Random(seed)
    for _ in range(30):
        a, b, n, H, C = (random_.choice(x) for x in ((128, 256, 512), (128, 256, 512), (1, 2, 4), (1, 3), (64, 128)))
        T = 512 * n
        backward = random_.random() < .5
        kind, suffix = ('dkv', '_dkv') if backward else ('fwd_residuals', '')
        B = random_.choice((1, 2))
        q = f'bf16[2,{H},{T},{C}]{{3,2,1,0:T(8,128)(2,1)}}' if B > 1 else f'bf16[{H},{T},{C}]{{2,1,0:T(8,128)(2,1)}}'
        text = f'''HloModule m
ENTRY %main (q: bf16[{T}]) -> ({q}, {q}, {q}) {{
  %q = {q} parameter(0)
  %mask = s8[1,2,2]{{2,1,0:T(4,128)(4,1)}} constant({{...}})
  ROOT %splash_mha_{kind}_block_kv{suffix}_{b}_block_q{suffix}_{a}_use.1 = ({", ".join([q] * (3 if backward else 1))}) custom-call(%mask, %q, %q, %q), custom_call_target="tpu_custom_call"
}}
'''
        # Brute force: a block of queries meets a block of keys if its last query sees the first key.
        blocks = sum(row + a - 1 >= column for row in range(0, T, a) for column in range(0, T, b))
        found, p = cost(text)
        assert found.flops == B * H * blocks * (5 if backward else 2) * 2 * a * b * C and not p.uncosted
        share = hlo.KERNEL_SHARE['backward' if backward else 'forward'] * C / 128
        assert found.total == pytest.approx(found.flops / (share * 197e12) + B * H * blocks * hlo.KERNEL_STEP_S)


def test_the_short_attention_kernel_counts_what_it_says_of_itself():
    """By hand: 8 images of 196 patches, two heads; the most of arithmetic, schedule and traffic."""
    x = 'bf16[1568,128]{1,0:T(8,128)(2,1)}'
    text = f'''HloModule m
ENTRY %main (q: bf16[1568]) -> {x} {{
  %q = {x} parameter(0)
  ROOT %attend_forward_block_784x128.1 = {x} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", backend_config={{"cost_estimate":{{"flops":"FLOPS","transcendentals":"SCORES","bytes_accessed":"1"}}}}
}}
'''
    for flops, n_scores, seconds in ((10**12, 1, 1 / .78 / 197), (1, 1024 * 10**6, 6.1e6 / 1.5e9),
                                     (1, 1, 4 * 2 * 1568 * 128 / (.65 * 819e9))):
        found, p = cost(text.replace('FLOPS', str(flops)).replace('SCORES', str(n_scores)))
        assert found.flops == flops and not p.uncosted
        assert found.total == pytest.approx(seconds + 2 * hlo.KERNEL_STEP_S)


@pytest.mark.parametrize('kind,n_slices,bytes_', [
    ('ALL_GATHER', 2, 1), ('ALL_GATHER', 4, 3), ('ALL_REDUCE', 2, 1), ('ALL_REDUCE', 4, 1.5)])
def test_between_slices(kind, n_slices, bytes_):
    """Of each byte that lies on a chip, what it sends: to all others when they gather, by rings when they reduce."""
    text = '''HloModule m
ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %k = token[] after-all()
  %s = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) send(%a, %k), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="r",_xla_megascale_transfer_type="KIND"}
  %r = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) recv(%k), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r"}
  ROOT %d = (f32[1024,1024]{1,0:T(8,128)}, token[]) recv-done(%r), channel_id=2
}
'''.replace('KIND', kind)
    found, p = cost(text, n_slices=n_slices, dcn_gbs=3.125)
    assert p.collectives[0].n_bytes == bytes_ * 4 * 1024**2
    assert found.waits == {'slices': pytest.approx(bytes_ * 4 * 1024**2 / 3.125e9)} and p.links_seconds() == 0
