"""TPUs and GPUs by name, and how fast they talk to each other."""

import types

import pytest

from mod_jax.errors import UserError
from mod_jax.prove import slices


def test_a_slice_by_its_name():
  (found,) = slices.parse('v5p:4x4x8')
  assert (found.kind, found.sizes, found.num_chips) == ('v5p', (4, 4, 8), 128)
  assert found.name == 'v5p:4x4x8'
  # Not on offer as such, but a part of what is.
  assert slices.parse('v5p:2x2x4')[0].num_chips == 16
  assert slices.parse('h100:8')[0].num_chips == 8


@pytest.mark.parametrize('kind', slices.CHIPS)
def test_a_kind_stands_for_all_its_slices_from_the_smallest(kind):
  found = slices.parse(kind)
  sizes = [x.num_chips for x in found]
  assert sizes == sorted(set(sizes))
  assert [x.name for x in found] == [
    f'{kind}:{name}' for name in slices.CHIPS[kind].slices
  ]


@pytest.mark.parametrize(
  ('topology', 'words'),
  [
    ('v9:4x4', ['v9:4x4', 'v4, v5e, v5p, v6e, h100']),
    ('v5', ["'v5'", "Did you mean 'v5p'?"]),
    ('v5e:4x4x4', ['v5e:4x4x4', 'v5e:1x1, v5e:2x2', 'v5e:16x16']),
    ('h100:16', ['h100:16', 'h100:4, h100:8']),
    ('v5e:4,4', ['v5e:4,4', "Did you mean 'v5e:4x4'?"]),
  ],
)
def test_an_unknown_slice_is_refused_with_those_that_are_known(topology, words):
  with pytest.raises(UserError) as error:
    slices.parse(topology)
  assert all(word in str(error.value) for word in words), error.value
  assert '\n' not in str(error.value)


def grid(rows, columns):
  return [(i, j, 0) for i in rows for j in columns]


@pytest.mark.parametrize(
  ('topology', 'group', 'links'),
  [
    ('v5e:4x4', grid([1], range(4)), 1),  # A line: around it one way.
    ('v5e:4x4', grid(range(4), range(4)), 2),
    ('v5e:16x16', grid([1], range(16)), 2),  # A ring: both ways.
    ('v5e:16x16', grid([1], range(4)), 1),  # A part of one.
    ('v5e:16x16', grid(range(16), range(2)), 3),
    ('v5p:4x4x4', grid(range(4), range(4)), 4),
    ('v5p:4x4x4', [(0, 0, 0), (0, 0, 1)], 1),
    ('h100:8', [None] * 4, 1),  # Through switches.
  ],
)
def test_links_that_a_group_of_chips_uses(topology, group, links):
  (found,) = slices.parse(topology)
  group = [types.SimpleNamespace(coords=coords) for coords in group]
  assert found.bandwidth(group) == links * found.chip.link
