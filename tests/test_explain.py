"""What `explain` tells: bytes, which stages fused into which loop, scratch, and where the kernel is."""

import numpy as np

import jitloader as jl


def noise(src, dst, key):
    for i in range(src.shape[0]):
        dst[i] = src[i] + 0.0 * jl.uniform(key, 0)


def test_a_chain_is_told_loop_by_loop(tmp_path, monkeypatch):
    """Neighbours in one loop nest, a whole-sample stage in a pass of its own, and the kernel's way from nowhere to here."""
    monkeypatch.setenv("JITLOADER_CACHE_DIR", str(tmp_path))
    data = jl.Dataset(image=np.zeros((50, 8, 8, 3), "uint8"), series=np.zeros((50, 6)), unused=np.zeros(50))
    data = data.map("image", jl.random_crop(8, padding=1), jl.normalize(0.123, 4.5), jl.channels_first())
    data = data.map("series", jl.clip(-7.25, 7.25), noise, jl.cast("float32")).keep("image", "series")
    lines = data.explain().splitlines()
    assert lines[3:-2] == [
        "  in: image 192 bytes, series 48 bytes a row",
        "  out: image 768 bytes, series 24 bytes a row",
        "  loop: clip(-7.25, 7.25): one loop nest over 6, into scratch",
        "  loop: noise: one pass over the sample",
        "  loop: random_crop(8) + normalize + channels_first: one loop nest over 3 x 8 x 8",
        "  loop: cast(float32): one loop nest over 6",
    ]
    assert lines[-2].startswith("  scratch: ") and lines[-1] == "  kernel: not compiled yet"

    next(iter(jl.Loader(data, 10, shuffle=True)))
    assert data.explain().splitlines()[-1] == "  kernel: ready (compiled by this process)"


def test_rows_that_vary_are_told():
    """Their bytes are no number."""
    data = jl.Dataset(x=jl.ragged(np.arange(10), [0, 3, 10])).map("x", jl.pad_to_longest())
    assert "  in: x varies a row" in data.explain() and "  out: x varies a row" in data.explain()
