"""Reuse between sampling steps: neighbouring steps compute nearly the same, so some of it is kept instead of recomputed.

    cache = build_step_cache({"type": "pab"}, model)
    with cache.sampling(timesteps):
        for index in range(len(timesteps)):
            cache.step(index)
            ...                     # the step's calls of the model

`pab` keeps the outputs of attention and MLP layers, `teacache` skips all blocks of a step. Both are put around a model's
blocks from outside, change its results slightly, and do nothing outside `sampling`.
"""
