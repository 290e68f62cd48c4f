"""A forward without its modules: what it calls is recorded once, and from then on called in a row.

At one token a step of a small model is bound by Python: modules that call modules, keyword arguments, checks, hooks.
What they do with tensors is the same in each step. `tape` watches two forwards and writes down which functions of torch
they called, `program` makes one function of both, in which only the numbers of tokens and of logits vary, and
`replayed` proves it against the model before anything uses it. What cannot be proved (control flow that looks at
values, random numbers, shapes that depend on values) is run by the modules as before. On a CPU, `patterns` and `chains`
make fewer and longer calls of a program.
"""
