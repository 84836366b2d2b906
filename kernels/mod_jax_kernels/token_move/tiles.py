"""Block sizes of the moves, by device; none has been measured yet."""

# Rows and features of a program.
TILES = {'triton': {'': {'rows': 4, 'block_d': 1024, 'num_warps': 4}}}
