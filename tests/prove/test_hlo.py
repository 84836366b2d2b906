"""Reading compiled programs: programs made by hand, and XLA's own for a CPU."""

# ruff: noqa: E501 (a line of a compiled program cannot be broken)

import jax
import jax.numpy as jnp
import pytest

from mod_jax import parallel
from mod_jax.prove import hlo


def cost_of(function, *args):
  return hlo.cost(jax.jit(function).lower(*args).compile().as_text())


def test_a_product_counts_as_often_as_the_loops_around_it_run():
  def outer(x_BIJ, w_NJJ):
    def inner(x_BIJ, w_JJ):
      return jnp.tanh(x_BIJ @ w_JJ) * 2, None

    return jax.lax.scan(inner, x_BIJ, w_NJJ)[0], None

  def loops(x_BIJ, w_MNJJ):
    return jax.lax.scan(outer, x_BIJ, w_MNJJ)[0]

  x_BIJ, w_MNJJ = jnp.ones((2, 3, 4)), jnp.ones((5, 6, 4, 4))
  once = 2 * 2 * 3 * 4 * 4
  found = cost_of(loops, x_BIJ, w_MNJJ)
  assert found.flops == 5 * 6 * once
  assert not found.endless
  # Backward, a product for the input and one for the weights.
  gradient = jax.grad(lambda *args: loops(*args).sum(), argnums=(0, 1))
  assert cost_of(gradient, x_BIJ, w_MNJJ).flops == 3 * 5 * 6 * once


@pytest.mark.parametrize(
  ('strides', 'padding', 'options'),
  [
    ((2, 3), ((3, 0), (5, 5)), {}),
    ((1, 2), 'VALID', {'rhs_dilation': (2, 1)}),
    ((1, 1), ((2, 2), (1, 0)), {'lhs_dilation': (2, 3)}),
    ((1, 1), 'SAME', {'feature_group_count': 2}),
  ],
)
def test_convolutions_without_their_padding(strides, padding, options):
  def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, strides, padding, **options)

  channels = 6 // options.get('feature_group_count', 1)
  image, kernel = jnp.ones((4, 6, 9, 7)), jnp.ones((8, channels, 3, 2))
  compiled = jax.jit(convolve).lower(image, kernel).compile()
  # No loop here, so XLA's count is right.
  assert hlo.cost(compiled.as_text()).flops == pytest.approx(
    compiled.cost_analysis()['flops'], rel=1e-6
  )


def test_a_convolution_in_groups_of_the_batch():
  """Compilers for CPUs make others of them, so this one is written by hand."""
  program = """HloModule one

ENTRY %main (x: f32[4,6], w: f32[8,6]) -> f32[2,8] {
  %x = f32[4,6]{1,0} parameter(0)
  %w = f32[8,6]{1,0} parameter(1)
  ROOT %y = f32[2,8]{1,0} convolution(%x, %w), dim_labels=bf_oi->bf, batch_group_count=2
}
"""
  # Each of 2 x 8 sums is over the 6 features of one of the groups.
  assert hlo.cost(program).flops == 2 * (2 * 8) * 6


def test_convolutions_by_cudnn():
  """As compiled for a GPU: forward and both gradients, of equal FLOPs."""
  program = """HloModule one

ENTRY %main (x: bf16[8,33,33,64], w: bf16[128,3,3,64]) -> bf16[8,33,33,64] {
  %x = bf16[8,33,33,64]{3,2,1,0} parameter(0)
  %w = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %out = (bf16[8,16,16,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[8,16,16,128]{3,2,1,0} get-tuple-element(%out), index=0
  %dw = (bf16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx = (bf16[8,33,33,64]{3,2,1,0}, u8[0]{0}) custom-call(%y, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  ROOT %result = bf16[8,33,33,64]{3,2,1,0} get-tuple-element(%dx), index=0
}
"""
  one = 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)
  assert [x.flops for x in hlo.cost(program).products] == 3 * [one]


def test_what_a_backward_pass_computes_again_is_told_apart():
  @jax.checkpoint
  def block(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)

  def loss(x, w, v):
    return block(x, w, v).sum()

  args = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))
  one = 2 * 4 * 8 * 16
  found = cost_of(jax.value_and_grad(loss, (0, 1, 2)), *args)
  # tanh needs its result for its derivative, the last one too.
  assert found.again == 2 * one
  assert found.flops == (2 + 4) * one + found.again


def test_communication_in_a_loop():
  mesh = parallel.make_mesh(parallel.MeshConfig(data=2, fsdp=4))
  spec = jax.sharding.PartitionSpec('fsdp')

  def part(x_D):
    def step(_, x_D):
      return x_D + jax.lax.psum(x_D, 'data')

    x_D = jax.lax.fori_loop(0, 3, step, x_D)
    return jax.lax.all_gather(x_D, 'fsdp', tiled=True)

  run = jax.shard_map(
    part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  found = cost_of(run, jnp.ones(64))
  gather, reduce = sorted(found.collectives, key=lambda x: x.kind)
  assert (gather.kind, gather.count, gather.payload) == ('all-gather', 1, 256)
  assert gather.group == (0, 1, 2, 3)
  assert gather.sent == 256 * 3 / 4
  assert (reduce.kind, reduce.count, reduce.payload) == ('all-reduce', 3, 64)
  assert reduce.group == (0, 4)
  assert reduce.sent == 3 * 64


# As TPUs' compilers write: what a CPU's does not.
PROGRAM = """\
HloModule jit_step, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: f32[8,2]) -> f32[2,2] {
  %p = f32[8,2]{1,0:T(8,128)} parameter(0)
  %r = f32[8,2]{1,0:T(8,128)} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %slice = f32[2,2]{1,0:T(8,128)} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={2,2}
}

%windowed (state: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %state = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[4,4]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %start = (f32[4,4]{1,0}, f32[4,4]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %done = f32[4,4]{1,0} collective-permute-done(%start)
  %product = f32[4,4]{1,0} dot(%x, %done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %again = f32[4,4]{1,0} convolution(%product, %x), dim_labels=bf_io->bf, metadata={op_name="rematted_computation/dot"}
  %copied = s32[]{:T(128)} copy(%i)
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%copied, %two)
  ROOT %out = (s32[]{:T(128)}, f32[4,4]{1,0:T(8,128)}) tuple(%next, %product)
}

%more (state.1: (s32[], f32[4,4])) -> pred[] {
  %end = s32[] constant(7)
  %state.1 = (s32[], f32[4,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %lt = pred[] compare(%i.1, %end), direction=LT
}

%until (state.2: (s32[], f32[4,4])) -> pred[] {
  %state.2 = (s32[], f32[4,4]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  ROOT %ne = pred[] compare(%i.2, %i.2), direction=NE
}, execution_thread="sparsecore"

%sending (s: bf16[3]) -> bf16[3] {
  %s = bf16[3]{0} parameter(0)
  ROOT %exchanged = bf16[3]{0} all-to-all(%s), replica_groups={{0,1,2}}, dimensions={0}
}

ENTRY %main (x.1: f32[4,4], y: f32[8,2], z: bf16[3]) -> f32[4,4] {
  %x.1 = f32[4,4]{1,0} parameter(0)
  %y = f32[8,2]{1,0} parameter(1)
  %z = bf16[3]{0} parameter(2)
  %one = s32[] constant(1)
  %begin = s32[] copy(%one)
  %first = (s32[], /*index=1*/f32[4,4]{1,0}) tuple(%begin, %x.1)
  %loop = (s32[], f32[4,4]{1,0}) while(%first), condition=%more, body=%windowed
  %search = (s32[], f32[4,4]{1,0}) while(%first), condition=%until, body=%windowed
  %scattered = f32[2,2]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="gradient"}
  %gather = bf16[12]{0} all-gather(%z), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}
  %wide = bf16[6]{0} all-gather(%z), replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}, dimensions={0}
  %iota = bf16[3]{0} all-reduce(%z), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
  %all = (bf16[3]{0}, f32[4,4]{1,0}) all-reduce(%z, %x.1), replica_groups={}, to_apply=%sum
  %sent = ((bf16[3]{0}), bf16[3]{0}, u32[]) async-start(%z), calls=%sending
  %called = bf16[3]{0} async-done(%sent)
  %kernel.7 = f32[4,4]{1,0} custom-call(%x.1, %y), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": 4
}}, metadata={op_name="kernel"}
  ROOT %result = f32[4,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_programs_of_tpus():
  found = hlo.cost(PROGRAM)
  once = 2 * 4 * 4 * 4
  # i = 1, 3, 5 in the loop that counts; the other one counts once.
  assert found.flops == (3 + 1) * 2 * once
  assert found.again == (3 + 1) * once
  assert found.endless == ('search',)
  arrays = ('f32', (4, 4)), ('f32', (8, 2))
  assert found.kernels == (hlo.Kernel('kernel', arrays),)
  seen = [(x.kind, x.payload, x.group, x.count) for x in found.collectives]
  assert seen == [
    ('collective-permute', 64, (0, 1), 3),
    ('collective-permute', 64, (0, 1), 1),
    ('reduce-scatter', 64, (0, 1, 2, 3), 1),
    ('all-gather', 24, (0, 1, 2, 3), 1),
    # The middle one of the three factors (2, 2, 2) of the axis.
    ('all-gather', 12, (0, 2), 1),
    ('all-reduce', 6, (0, 4), 1),
    ('all-reduce', 70, tuple(range(8)), 1),
    ('all-to-all', 6, (0, 1, 2), 1),
  ]
  assert found.collectives[0].sent == 3 * 64
  assert found.collectives[2].sent == 64 * 3 / 4
  assert found.collectives[2].source == 'gradient'
  assert found.collectives[6].sent == 2 * 70 * 7 / 8


def test_what_a_gpu_launches_and_moves():
  program = """HloModule one

%add_a_row (cache: f32[8,4], row: f32[1,4], at: s32[]) -> f32[8,4] {
  %cache = f32[8,4]{1,0} parameter(0)
  %row = f32[1,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %same = f32[8,4]{1,0} bitcast(%cache)
  ROOT %update = f32[8,4]{1,0} dynamic-update-slice(%same, %row, %at, %zero)
}

%read_a_row (cache.1: f32[8,4], at.1: s32[]) -> f32[1,4] {
  %cache.1 = f32[8,4]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %part = f32[1,4]{1,0} dynamic-slice(%cache.1, %at.1, %zero.1), dynamic_slice_sizes={1,4}
  ROOT %twice = f32[1,4]{1,0} add(%part, %part)
}

ENTRY %main (cache.2: f32[8,4], at.2: s32[]) -> f32[8,4] {
  %cache.2 = f32[8,4]{1,0} parameter(0)
  %at.2 = s32[] parameter(1)
  %row.2 = f32[1,4]{1,0} fusion(%cache.2, %at.2), kind=kLoop, calls=%read_a_row
  %bits = f32[1,4]{1,0} bitcast(%row.2)
  %whole = f32[8,4]{1,0} fusion(%cache.2, %bits, %at.2), kind=kLoop, calls=%add_a_row
  %begun = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%whole), replica_groups={{0,1}}, to_apply=%sum
  ROOT %reduced = f32[8,4]{1,0} all-reduce-done(%begun)
}
"""
  row, number = 4 * 4, 4
  assert [(x.name, x.bytes, x.count) for x in hlo.launches(program)] == [
    # A row is read and one is written.
    ('row.2', 2 * row + number, 1),
    ('whole', 2 * row + number, 1),
    # All rows are, by one launch.
    ('begun', 2 * 8 * row, 1),
  ]
