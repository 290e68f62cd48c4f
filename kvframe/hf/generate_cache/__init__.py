"""The rooms behind kvframe.hf.KVFrameCache, which is the front door (kvframe.hf.kvcache).

    building    a composition and a model -> a cache, and what has to be refused
    listening   which layer of transformers' cache is which attention layer
    hooks       what a model is given, seen before it runs
    columns     which columns are tokens
    row, rows   the rows of a batch as requests of the cache: columns, lengths, forks
    layer       one layer, for those who look at `cache.layers`
    plain       transformers attends; we store, and give back what is stored
    packed      kvframe attends; the real tokens of a batch side by side
"""
