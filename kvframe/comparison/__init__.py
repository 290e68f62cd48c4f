"""Caches and transformers baselines on one model and one workload: `kvframe compare` without its command line.

settings.py   the keys of the command
plain.py      the model's weights as transformers would run them
baselines.py  what transformers does without kvframe (`conf/baseline/*.yaml`): generate(), with a cache or without
continuous.py its continuous batching
watch.py      what a baseline costs, in the words of the engine's meter
candidates.py the lineup, looked at once before the work: what can be built, what is exact, who is the reference
measure.py    one run of one candidate, and the figures of it
quality.py    KL to the reference by teacher forcing; token match
memory.py     one large step under watch: weights, keys and values, activations
timeline.py   one request alone, token by token: the bytes that it holds
summary.py    rows from runs: medians, spread, the best, the Pareto front
store.py      the folder of results: written after every run, read again by `resume=true`
skeleton.py   results.json before the first run
compare.py    the loop over all of it
pictures.py   the pictures, and html.py the report, both from results.json alone

# The folder of results

`out=results/` holds `results.json` (all there is to know) and `results.csv` (its `rows`). `results.json` is rewritten,
whole or not at all, after every run. Numbers are plain (bytes, seconds, tokens, shares from 0 to 1, nats); what is not
known is null, and so are NaN and infinities. Texts are in the words of a user.

    schema      2
    complete    false until everything was measured
    model       name, dtype, device, layers, kv_heads, vocab_size, max_len (tokens, or null),
                weights_bytes (parameters and buffers, shared ones once),
                packed_bytes (copies of weights in the form that this machine multiplies fastest; 0: none)
    workload    name (of its class), config (its keys), what (one sentence), rounds, requests, prompt_tokens,
                output_tokens, longest (tokens of the longest request, prompt and output), digest (of all prompts)
    settings    repeat, quality_tokens (null: see conf/compare.yaml), text (of the quality), timeline ({prompt, output}
                in tokens, or null), max_len (of the engines), clock ("wall", or "virtual": TTFT and ITL of caches are
                simulated then)
    machine     cores, threads (of torch), memory_bytes, gpu (name or null)
    reference   name of the candidate that the others are held against
    candidates  a list, in the order of the table. Each:
        name        as the user wrote it; it is the key of everything below
        kind        "cache" or "baseline"
        exact       does it keep keys and values as they are?
        reference   is it the reference?
        config      cache, engine and kernel of it (kind "cache"), or its baseline
        fingerprint of config, model and workload: results with another one are not mixed
        kernels     kernel name -> layers that it serves; {} for a baseline
        notes       a list of texts: what a reader must know, e.g. that only some of the requests were run
    rows        a list, one per candidate that has at least one run, flat (also results.csv), made of the rest. Each:
        cache, kind, exact, reference, runs (how many), note (all notes in one text, or ""), pareto (on the front of
        memory, throughput and quality?), best (names of the columns where it is the best, one text, comma-separated)
        and the median over the runs of every figure below. Those under `spread` have NAME_min and NAME_max beside them.
    runs        a list, one per candidate and repetition, in the order of time. Each: cache, repetition (from 0),
                fingerprint, tokens_hash (of all output tokens: the same tokens have the same one), and the figures
    quality     name -> kl_mean, kl_p99, kl_max (nats per token), top1, perplexity, positions (and whatever else
                kvframe.evaluation says); {} when quality_tokens=0
    timeline    name -> columns of one request alone: tokens, and bytes reserved (blocks), used, tail (beside reserved);
                lists of equal length, at most 2,048 points; a candidate that has no such thing is not in it
    memory      name -> bytes, from the tensors that exist: weights and kv_allocated (dtype -> bytes), weight_copies (in
                the form that this machine multiplies fastest), activations_peak in a step of activations_tokens tokens,
                total; on CUDA allocator (its own counters); {} when profile=false, and not for baselines
    outputs     name -> of its first run, a list of {id, prompt (a short hash of the prompt's tokens), tokens}
    columns     figure -> {title, unit, best ("min", "max" or null), spread (true or false), what}
    skipped     name -> reason, of presets that cannot be built here (only when all presets were asked for), and of
                candidates that failed; what they had done before is there
    notes       a list of texts about the whole
    config      the command's own config; versions: of the packages

The figures of a run, and of a row:

    output_tokens_per_s     output tokens by the real seconds from the first request to the last token (spread)
    seconds                 those seconds (spread)
    ttft_s_p50, ttft_s_p99  seconds from a request's arrival to its first token (spread)
    itl_s_p50, itl_s_p99    seconds between two tokens of a request (spread)
    kv_bytes_peak           most bytes that requests held at a time: whole blocks, and tails
    kv_bytes_reserved       bytes of the blocks that they held, mean over time
    kv_bytes_used           bytes of live tokens in them, shared ones once, mean over time
    kv_bytes_tail           bytes of full-precision tails of codecs that seal groups, beside reserved, mean over time
    kv_bytes_pool           bytes of the tensors that were allocated for all of it
    bytes_per_token         bytes of one token over all layers
    utilization, waste      live bytes / bytes of held blocks and tails, mean over time; and 1 - that
    hit_rate                prompt tokens that needed no compute / prompt tokens
    prompt_tokens, output_tokens, computed_tokens, cached_tokens, steps, requests, refused, preemptions, evictions,
    copies                  counts
    weights_bytes           of the model

Rows only (measured once per candidate):

    kl_mean, kl_p99, top1   as in `quality`
    token_match             share of each request's output tokens before the first that differs from the reference's,
                            mean over requests
"""

from __future__ import annotations
