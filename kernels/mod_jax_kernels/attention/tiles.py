"""Block sizes of splash attention, by device; none has been measured yet."""

# Queries and keys of a step, at most.
TILES = {'pallas': {'': {'block_q': 512, 'block_k': 512}}}
