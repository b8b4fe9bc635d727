"""The Hopper forward on its GPU: the softmax without a maximum where it could break, tiles' edges, many tiles."""

from __future__ import annotations

import numpy as np
import pytest
from support import DTYPES, NEG_INF, assert_same, check, host, normal, qkv, wide

import cupyflash
from cupyflash.cuda import calls, configs, module

pytestmark = pytest.mark.gpu

BFLOAT16 = DTYPES[1]
DIMS = (64, 128, 256)
KEYS = 1170  # of every row, nine tiles and some


@pytest.fixture(autouse=True)
def hopper(cupy):
    if cupyflash.cuda.device.compute_capability(cupy.cuda.runtime.getDevice()) != 90:
        pytest.skip("needs compute capability 9.0")


def row_of(d):
    """The row of a plain call."""
    return configs.choose("sm90", "forward", "bfloat16", d, d, (False,) * 3, 90).geometry


def tile_of(d):
    return row_of(d).block_kv


def scored(cupy, keys, d, dtype, rows=90):  # fewer rows would go to the family that cuts keys into runs
    """q, k, v whose scores at scale 1 are +, 0 and - times the given numbers, row by row, without rounding."""
    q, k = np.zeros((1, 2, rows, d)), np.zeros((1, 2, len(keys), d))
    q[..., 0] = np.resize([1, 0, -1], rows)
    k[..., 0] = keys
    return (
        cupy.asarray(q.astype(dtype)),
        cupy.asarray(k.astype(dtype)),
        normal(cupy, (1, 2, len(keys), d), dtype, 3),
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("top", [0, 4, 8, 12, 14, 15, 16, 20, 30, 40])
def test_scores_that_rise_and_fall_from_tile_to_tile(cupy, dtype, d, top):
    if dtype == np.float16 and top > 15:
        pytest.skip("float16 holds no such key")
    steps = (KEYS - np.arange(KEYS)) // tile_of(d)  # keys are walked downward
    keys = 2.0 ** np.rint(top * steps / steps.max())
    check(*scored(cupy, keys, d, dtype), scale=1.0, backward=False)
    check(*scored(cupy, keys[::-1], d, dtype), scale=1.0, backward=False)


@pytest.mark.parametrize("d", DIMS)
def test_float16_weights_stay_in_range(cupy, d):
    """Scores just below and above what makes a thread's sum leave its range: 15 powers of two."""
    for power in (9.0, 10.0, 10.5, 11.0, 15.5, 16.5):
        keys = np.where(np.arange(KEYS) < KEYS // 2, power * np.log(2), 0.0)
        check(*scored(cupy, keys, d, np.float16), scale=1.0, backward=False)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_keys_that_are_no_numbers_reach_only_the_rows_that_see_them(cupy, d, value):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    clean = host(cupyflash.attention(q, k, v, causal="top_left", return_lse=True))
    k[:, :, 150] = value
    out, lse = host(cupyflash.attention(q, k, v, causal="top_left", return_lse=True))
    assert_same(out[:, :, :150], clean[0][:, :, :150], "out of rows that do not see the key")
    assert_same(lse[:, :, :150], clean[1][:, :, :150], "lse of rows that do not see the key")
    assert not np.isfinite(wide(lse[:, :, 150:])).any()


def test_a_score_of_infinity_makes_lse_infinite_and_its_row_alone_nan(cupy):
    keys = np.zeros(KEYS)
    keys[400] = np.inf
    q, k, v = scored(cupy, keys, 64, BFLOAT16)
    q[0, 0, 1] = 1.0  # a row that is not zero where the key is infinite
    out, lse = host(cupyflash.attention(q, k, v, scale=1.0, return_lse=True))
    assert (lse[0, 1, ::3] == np.inf).all()
    assert np.isnan(wide(out[0, 1, ::3])).all()
    assert np.isfinite(lse[0, 1, 2::3]).all()  # -1 times infinity is a key that the row does not see
    assert np.isfinite(wide(out[0, 1, 2::3])).all()


@pytest.mark.parametrize("d", DIMS)
def test_H01_equal_scores_of_1e11_cancel(cupy, d):
    x = cupy.full((1, 1, 300, d), 133120.0, np.float32).astype(BFLOAT16)
    v = normal(cupy, (1, 1, 300, d), BFLOAT16, 5)
    out, lse = host(cupyflash.attention(x, x, v, return_lse=True))
    np.testing.assert_allclose(wide(out[0, 0]), np.broadcast_to(wide(v)[0, 0].mean(0), (300, d)), atol=2e-3)
    np.testing.assert_allclose(lse, 133120.0**2 * np.sqrt(d), rtol=1e-6)


@pytest.mark.parametrize("d", DIMS)
def test_tiles_of_minus_infinity_come_first(cupy, d):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    bias = cupy.zeros((200, KEYS), np.float32)
    bias[:, 3 * tile_of(d) :] = NEG_INF
    bias[3] = NEG_INF
    out, lse, _ = check(q, k, v, bias=bias, backward=False)
    assert (lse[:, :, 3] == NEG_INF).all()
    assert (wide(out)[:, :, 3] == 0).all()


@pytest.fixture
def marked(monkeypatch):
    """Kernels that give 12345 for the lse of rows whose warp has taken the slow path."""
    plain = configs.Config.source

    def source(config, *, emulate=False):
        text = plain(config, emulate=emulate)
        for old, new in (
            (
                "float m[2], l[2], fast[2], rescale[2];",
                "float m[2], l[2], fast[2], rescale[2]; bool slow = false;",
            ),
            (
                "look_again(const float (&top)[2], const float (&sums)[2], float unit) {",
                "look_again(const float (&top)[2], const float (&sums)[2], float unit) { slow = true;",
            ),
            ("lse = seen ? own : -infinity;", "lse = slow ? 12345.0f : seen ? own : -infinity;"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(configs.Config, "source", source)
    monkeypatch.setattr(module, "_loaded", {})
    calls.clear()
    yield
    calls.clear()


@pytest.mark.parametrize("d", [64, 128])
def test_the_slow_path_is_taken_where_it_must_be_and_only_there(cupy, marked, d):
    q, k, v = qkv(cupy, 1, 1, 96, KEYS, d, dtype=BFLOAT16)
    _, ordinary = host(cupyflash.attention(q, k, v, return_lse=True))
    assert (ordinary != 12345).all()
    keys = np.where(np.arange(KEYS) < 3 * tile_of(d), 100.0, 0.0)  # seen last
    _, rising = host(cupyflash.attention(*scored(cupy, keys, d, BFLOAT16), scale=1.0, return_lse=True))
    assert (rising == 12345).all()
    q, k, v = scored(cupy, -keys, d, BFLOAT16)
    q[..., 0] = 1.0
    _, falling = host(cupyflash.attention(q, k, v, scale=1.0, return_lse=True))
    assert (falling != 12345).all()


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("row", [0, 17, 40, 63, 64, 89])
def test_one_warp_alone_forms_its_scores_again(cupy, d, row):
    keys = np.where(np.arange(KEYS) < KEYS - 2 * tile_of(d), 100.0, 0.0)
    q, k, v = scored(cupy, keys, d, BFLOAT16)
    q[..., 0] = 0
    q[:, :, row, 0] = 1
    check(q, k, v, scale=1.0, backward=False)
    check(q, k, v, scale=1.0, dropout_p=0.3, dropout_seed=1, backward=False)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("softcap", [None, 8.0, 64.0, 65.0])
@pytest.mark.parametrize("offset", [-400, 0, 3, 500, 2000])
def test_softcap_and_alibi_on_either_side_of_the_diagonal(cupy, d, softcap, offset):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    slopes = cupy.asarray(np.float32([0.3, -0.01]))
    check(q, k, v, softcap=softcap, alibi_slopes=slopes, query_offset=offset, backward=False)
    check(8 * q, k, v, softcap=softcap, backward=False)


@pytest.mark.parametrize("d", DIMS)
def test_lengths_around_the_edges_of_tiles(cupy, d):
    tile, rows = tile_of(d), row_of(d).block_q
    edges = sorted({n + step for n in (1, 16, 64, tile, 2 * tile, 3 * tile) for step in (-1, 0, 1)} - {0})
    for n in edges:
        check(*qkv(cupy, 1, 2, 100, n, d, dtype=BFLOAT16, seed=n), causal="bottom_right", backward=False)
    for m in (1, 63, 64, 65, rows - 1, rows, rows + 1):
        check(*qkv(cupy, 1, 2, m, 150, d, dtype=BFLOAT16, seed=m), backward=False)


@pytest.mark.parametrize(
    "form", [{}, {"causal": "bottom_right"}, {"window": (60, 20), "query_offset": 3}], ids=str
)
@pytest.mark.parametrize("d", DIMS)
def test_more_tiles_than_blocks_and_an_odd_number(cupy, d, form):
    q, k, v = qkv(cupy, 3, 91, 130, 150, d, heads_kv=13, dtype=BFLOAT16)
    assert 3 * 91 * -(-130 // 192) > 2 * 132
    check(q, k, v, backward=False, **form)


def test_items_of_many_lengths_and_of_none(cupy):
    q, k, v = qkv(cupy, 5, 4, 300, 500, 64, heads_kv=2, dtype=BFLOAT16)
    lengths = [500, 0, 1, 97, 400]
    for item, length in enumerate(lengths):
        k[item, :, length:] = np.nan
        v[item, :, length:] = np.nan
    check(q, k, v, kv_lengths=cupy.asarray(lengths), causal="bottom_right", backward=False)
    check(q, k, v, kv_lengths=lengths, q_lengths=[0, 300, 17, 200, 64], backward=False)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("p", [2.0**-16, 0.1, 0.4999, 0.5, 0.5001, 0.9, 1 - 2.0**-16, 1.0])
def test_dropout_on_either_side_of_a_half(cupy, d, p):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    for origin in ((0, 0, 0), (1, 16, 32), (0, 3, 0), (0, 0, 5)):
        options = {"dropout_p": p, "dropout_seed": 7, "dropout_origin": origin, "causal": "bottom_right"}
        check(q, k, v, **options, backward=False)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("n", [15, 16, 17, 100, 128, 129, KEYS])
def test_masks_of_any_width_layout_and_byte(cupy, d, n):
    q, k, v = qkv(cupy, 2, 3, 150, n, d, dtype=BFLOAT16)
    bits = np.random.default_rng(n).random((2, 3, 150, n)) < 0.6
    bits[0, 1, 7] = False
    k[0, 0, -1] = v[0, 0, -1] = np.nan
    bits[0, 0, :, -1] = False
    v[0, 0, -1] = 0
    mask = cupy.asarray(bits)
    check(q, k, v, mask=mask, backward=False)
    plain = cupyflash.attention(q, k, v, mask=mask)
    wider = cupy.zeros((2, 3, 150, n + 35), bool)
    wider[..., 3 : 3 + n] = mask
    as_bytes = cupy.asarray(np.where(bits, 128, 0).astype(np.uint8)).view(bool)
    columns_first = cupy.asarray(np.ascontiguousarray(bits.swapaxes(2, 3))).swapaxes(2, 3)
    for same in (wider[..., 3 : 3 + n], as_bytes, columns_first):
        assert_same(cupyflash.attention(q, k, v, mask=same), plain, "out")
    for part in (mask[:, :, :1], mask[:1, :1], mask[..., :1], mask[0, 0, 0]):
        check(q[1:], k[1:], v[1:], mask=part[-1:] if part.ndim == 4 else part, backward=False)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("softcap", [2.0, 30.0, 100.0])
def test_scores_near_the_softcap_in_some_rows_alone(cupy, d, softcap):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    q[:, :, 40] *= 40
    q[:, 1, 100:120] *= softcap / 4
    check(q, k, v, softcap=softcap, backward=False)
    check(q, k, v, softcap=softcap, scale=-0.2, causal="bottom_right", backward=False)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("slope", [2.0**-8, 0.25, 1.0, 3.0, -0.01, -0.7])
@pytest.mark.parametrize("offset", [-100, 0, 600, 1500])
def test_alibi_that_rises_from_tile_to_tile(cupy, d, slope, offset):
    """Also where products fall as it rises, so that a reference that went with it would be far too large."""
    slopes = cupy.asarray(np.float32([slope, slope / 2]))
    q, k, v = qkv(cupy, 1, 2, 90, KEYS, d, dtype=BFLOAT16)
    check(q, k, v, alibi_slopes=slopes, query_offset=offset, backward=False)
    far = np.where(np.arange(KEYS) > KEYS - 200, 300.0, 0.0)
    for keys in (far, far[::-1], -far, np.linspace(0, 300, KEYS), np.linspace(300, 0, KEYS)):
        q, k, v = scored(cupy, keys, d, BFLOAT16)
        check(q, k, v, scale=1.0, alibi_slopes=slopes, query_offset=offset, backward=False)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("n", [15, 17, 100, 128, KEYS])
def test_biases_of_any_width_layout_and_dtype(cupy, d, n):
    q, k, v = qkv(cupy, 2, 3, 150, n, d, dtype=BFLOAT16)
    values = np.random.default_rng(n).standard_normal((2, 3, 150, n))
    values[np.random.default_rng(n).random(values.shape) < 0.2] = NEG_INF
    values[0, 1, 7] = NEG_INF
    for dtype in (BFLOAT16, np.dtype(np.float32), np.dtype(np.float16)):
        bias = cupy.asarray(values.astype(dtype))
        check(q, k, v, bias=bias, backward=False)
        plain = cupyflash.attention(q, k, v, bias=bias)
        wider = cupy.zeros((2, 3, 150, n + 35), dtype)
        wider[..., 3 : 3 + n] = bias
        for same in (wider[..., 3 : 3 + n], cupy.asarray(bias.swapaxes(2, 3).copy()).swapaxes(2, 3)):
            assert_same(cupyflash.attention(q, k, v, bias=same), plain, "out")
        for part in (bias[:, :, :1], bias[:1, :1], bias[..., :1]):
            check(q[1:], k[1:], v[1:], bias=part[-1:], mask=cupy.isfinite(bias[1:]), backward=False)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_that_a_mask_or_bias_hides_may_be_anything(cupy, d):
    """Also in tiles that all rows see, where the steps without a maximum are."""
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    hidden = np.random.default_rng(d).random(KEYS) < 0.1
    for bad in (np.nan, np.inf, 1e30):
        dirty = k.copy()
        dirty[:, :, hidden] = bad
        mask = cupy.asarray(np.broadcast_to(~hidden, (200, KEYS)))
        bias = cupy.where(mask, 0.5, NEG_INF)
        for dtype in (BFLOAT16, np.float32):
            check(q, dirty, v, bias=bias.astype(dtype), backward=False)
        check(q, dirty, v, mask=mask.copy(), backward=False)


@pytest.mark.parametrize("d", DIMS)
def test_queries_past_their_length_change_no_bit_of_the_others(cupy, d):
    q, k, v = qkv(cupy, 1, 2, 200, KEYS, d, dtype=BFLOAT16)
    mask = cupy.asarray(np.random.default_rng(d).random((200, KEYS)) < 0.9)
    bias = normal(cupy, (200, KEYS), BFLOAT16, 7)
    slopes = cupy.asarray(np.float32([0.5, 0.01]))
    dirty = q.copy()
    dirty[:, :, 150:] = 1e4
    dirty[:, :, 170:] = np.nan
    for options in (
        {},
        {"softcap": 30.0},
        {"alibi_slopes": slopes, "query_offset": 0},
        {"mask": mask},
        {"bias": bias},
        {"dropout_p": 0.3, "dropout_seed": 5},
        {"mask": mask, "bias": bias, "softcap": 20.0},
    ):
        assert_same(
            cupyflash.attention(dirty, k, v, q_lengths=150, **options),
            cupyflash.attention(q, k, v, q_lengths=150, **options),
            f"out with {sorted(options)}",
        )
