"""Slow, plain twins of the stages, from first principles with NumPy: `twin(x, key)` over one sample.

Twins give what a stage means before it is rounded to the dtype of the result (float64 where the stage computes).
`key` is the key of the row and the stage, and draws are those that a stage documents.
"""

import math

import numpy as np

from jitloader import rng


def spatial(shape):
    """The axes of height and width."""
    return (1, 2) if len(shape) == 3 and shape[2] > 4 else (0, 1)


def moved(x, ndim, axes):
    """An image as (H, W, all else)."""
    return np.moveaxis(x, axes, (0, 1)).reshape(*(x.shape[a] for a in axes), -1)


def back(y, shape, axes):
    """The inverse of `moved`, for an image of another size."""
    rest = [n for k, n in enumerate(shape) if k not in axes]
    return np.moveaxis(y.reshape(*y.shape[:2], *rest), (0, 1), axes)


def window(x, key, size, padding, fill):
    y, w = spatial(x.shape)
    around = [(padding, padding) if k in (y, w) else (0, 0) for k in range(x.ndim)]
    x = np.pad(x, around, constant_values=fill)
    top = rng.randint(key, 0, x.shape[y] - size + 1)
    left = rng.randint(key, 1, x.shape[w] - size + 1)
    return x.take(range(top, top + size), y).take(range(left, left + size), w)


def center(x, key, size):
    for axis in spatial(x.shape):
        start = (x.shape[axis] - size) // 2
        x = x.take(range(start, start + size), axis)
    return x


def flip(x, key, p, axis):
    return np.flip(x, axis) if rng.uniform(key, 0) < p else x


def shift(x, key, most, axis, fill):
    by = rng.randint(key, 0, 2 * most + 1) - most  # out[i] = in[i + by]
    at = np.arange(x.shape[axis]) + by
    inside = (at >= 0) & (at < x.shape[axis])
    shape = [-1 if k == axis else 1 for k in range(x.ndim)]
    return np.where(inside.reshape(shape), x.take(at.clip(0, x.shape[axis] - 1), axis), x.dtype.type(fill))


def mask(x, key, most, count, axis, fill):
    x = np.moveaxis(x.copy(), axis, 0)
    for m in range(count):
        length = rng.randint(key, 3 * m + 1, most + 1)
        start = rng.randint(key, 3 * m + 2, len(x) - length + 1)
        x[start : start + length] = fill
    return np.moveaxis(x, 0, axis)


def turn(x, k):
    return np.rot90(x, k, spatial(x.shape))


def triangles(n, m, antialias):
    """The matrix (m, n) that resizes n pixels to m."""
    scale = n / m
    reach = max(scale, 1.0) if antialias else 1.0
    centres, pixels = (np.arange(m) + 0.5) * scale, np.arange(n) + 0.5
    weights = np.clip(1 - np.abs(pixels[None] - centres[:, None]) / reach, 0, None)
    return weights / weights.sum(1, keepdims=True)


def resize(x, size, mode="bilinear", antialias=True, axes=None):
    axes = axes or spatial(x.shape)
    image = moved(x, x.ndim, axes)
    if mode == "nearest":
        rows, columns = (np.floor((np.arange(m) + 0.5) * n / m).astype(int) for n, m in zip(image.shape, size, strict=False))
        return back(image[rows][:, columns], x.shape, axes)
    down, across = (triangles(n, m, antialias) for n, m in zip(image.shape, size, strict=False))
    return back(np.einsum("ij,jkc,lk->ilc", down, image.astype(np.float64), across), x.shape, axes)


def box(key, height, width, scale, ratio):
    """The window of random_resized_crop: torchvision's get_params on our draws."""
    for k in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.uniform(key, 4 * k))
        low, high = np.log(ratio)
        aspect = math.exp(low + (high - low) * rng.uniform(key, 4 * k + 1))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(key, 4 * k + 2, height - h + 1), rng.randint(key, 4 * k + 3, width - w + 1), h, w
    h, w = height, width
    if width / height < min(ratio):
        h = max(round(w / min(ratio)), 1)
    elif width / height > max(ratio):
        w = max(round(h * max(ratio)), 1)
    return (height - h) // 2, (width - w) // 2, h, w


def resized_crop(x, key, size, scale, ratio, mode):
    axes = spatial(x.shape)
    top, left, h, w = box(key, *(x.shape[a] for a in axes), scale, ratio)
    x = x.take(range(top, top + h), axes[0]).take(range(left, left + w), axes[1])
    return resize(x, size, mode, axes=axes)


def erase(x, key, p, scale, ratio, values):
    axes = spatial(x.shape)
    image = moved(x, x.ndim, axes).copy()
    height, width, channels = image.shape
    if rng.uniform(key, 0) >= p:
        return x
    for k in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.uniform(key, 4 * k + 1))
        low, high = np.log(ratio)
        aspect = math.exp(low + (high - low) * rng.uniform(key, 4 * k + 2))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            top, left = rng.randint(key, 4 * k + 3, height - h + 1), rng.randint(key, 4 * k + 4, width - w + 1)
            image[top : top + h, left : left + w] = np.resize(values, channels)
            break
    return back(image, x.shape, axes)


def top(dtype):
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def brightness(x, key, low, high):
    return (x.astype(np.float64) * (low + (high - low) * rng.uniform(key, 0))).clip(0, top(x.dtype))


def contrast(x, key, low, high):
    image = moved(x.astype(np.float64), x.ndim, spatial(x.shape))
    channels = image.mean((0, 1))
    grey = channels @ [0.2989, 0.587, 0.114] if len(channels) == 3 else channels.mean()
    factor = low + (high - low) * rng.uniform(key, 0)
    return (factor * x.astype(np.float64) + (1 - factor) * grey).clip(0, top(x.dtype))


def standardize(x, key, axis, eps):
    wide = x.astype(np.longdouble)
    std = np.maximum(wide.std(axis, keepdims=True), eps)
    constant = (x == x.min(axis, keepdims=True)).all(axis, keepdims=True)
    return np.where(constant, 0.0, (wide - wide.mean(axis, keepdims=True)) / np.where(constant, 1.0, std))


def picked(key, weights):
    """Which of several a choice takes, and that one's own key."""
    share = np.cumsum(np.asarray(weights) / sum(weights))
    k = int(np.searchsorted(share[:-1], rng.uniform(key, 0), side="right"))
    return k, rng.subkey(key, k)
