#!/usr/bin/env python
"""A small matrix of calls for compute-sanitizer, forward and backward, in order and in any order.

``compute-sanitizer --tool racecheck python scripts/sanitizer_cases.py``; ``CUPYFLASH_FAMILY`` picks a family and
``--dtype`` some of the dtypes. CONTRIBUTING.md says which reports of racecheck are known.
"""

import click
import cupy
import ml_dtypes
import numpy as np

import cupyflash

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
# Queries, keys, head dim.
SHAPES = ((1, 700, 128), (70, 90, 64), (200, 300, 128), (300, 330, 64), (200, 300, 256))


def options(rng, queries, keys):
    """Calls that between them take every path of a kernel."""
    yield {"causal": "bottom_right"}
    yield {
        "bias": rng.standard_normal((2, queries, keys), dtype=np.float32),
        "softcap": 9.0,
        "dropout_p": 0.2,
        "dropout_seed": 3,
    }
    yield {
        "mask": rng.random((queries, keys)) < 0.7,
        "alibi_slopes": cupy.asarray([0.1, 0.2], dtype=np.float32),
        "kv_lengths": keys - 13,
        "query_offset": 0,
    }


@click.command(help=__doc__)
@click.option("--dtype", "names", type=click.Choice(list(DTYPES)), multiple=True, help="all, by default")
def main(names):
    rng = cupy.random.default_rng(1)
    for name in names or DTYPES:
        for queries, keys, head_dim in SHAPES:
            shapes = ((1, 2, queries, head_dim), (1, 1, keys, head_dim), (1, 1, keys, head_dim))
            q, k, v = (rng.standard_normal(shape, np.float32).astype(DTYPES[name]) for shape in shapes)
            for option in options(rng, queries, keys):
                for deterministic in (True, False):
                    out, vjp = cupyflash.attention_vjp(q, k, v, deterministic=deterministic, **option)
                    vjp(cupy.ones_like(out))
                    cupy.cuda.Device().synchronize()
            click.echo(f"{name} {queries} x {keys} x {head_dim}")


if __name__ == "__main__":
    main()
