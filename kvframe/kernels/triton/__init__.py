"""The CUDA kernels, written in Triton: one family for contiguous, paged and radix caches, codes, groups and windows.

    sides.py     what has to be known of a codec: how K or V is read and written     (no triton here)
    layer.py     one layer as the kernels see it, and the sizes of their tiles        (no triton here)
    work.py      who of a step decodes and who prefills                               (no triton here)
    bits.py      float8 bits to numbers and back
    ranged.py    numbers as steps of a range, several codes in a byte, and back
    load.py      how a tile of K or V becomes numbers
    tile.py      one tile of keys under the running softmax
    open_tile.py the same where a group is open: codes for some queries, full precision for others
    store.py, seal.py, decode.py, reduce.py, prefill.py     the kernels, each beside its plain twin
    launch.py    starting a kernel, or compiling it for a device that is not there
    kernel.py    TritonKernel, which puts them together

A twin has the signature of its kernel, is plain torch, and reads like the definition; tests hold the two together.
Nothing imports triton before a kernel is started. With `TRITON_INTERPRET=1` in the environment before that, kernels run
in Triton's interpreter, on the CPU.
"""
