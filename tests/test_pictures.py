"""jl.show: what is drawn as what, on which scale, and what is said where nothing can be."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import jitloader as jl
from jitloader.pictures import LINE, kind_of, lines, pixels, words


def shown(*args, **options):
    """Draw; give the figure, rendered, so that what only a renderer finds is found."""
    pytest.importorskip("matplotlib")
    made = jl.show(*args, **options)
    assert made._repr_png_()[:4] == b"\x89PNG"
    return made


def drawn(made):
    return [axes for axes in made.axes if axes.images or axes.lines or axes.texts]


RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (20, 8, 9, 3)).astype("uint8")


@pytest.mark.parametrize(
    "array", [IMAGES, IMAGES[..., :1], IMAGES.transpose(0, 3, 1, 2), IMAGES[..., 0], IMAGES / 255.0, IMAGES > 100]
)
def test_images_are_a_grid(array: np.ndarray) -> None:
    """Any layout and dtype, labels above, at most n."""
    made = drawn(shown({"image": array, "label": np.arange(20)}, 6))

    assert [axes.get_title() for axes in made] == [f"label {k}" for k in range(6)]
    assert all(axes.images[0].get_array().shape == (8, 9, 3) for axes in made)


def test_pixels_are_those_of_the_batch() -> None:
    """uint8 as it is; [0, 1] times 255; other numbers from least to greatest over all rows; NaN in magenta."""
    assert all((a == b).all() for a, b in zip(pixels(list(IMAGES)), IMAGES, strict=True))
    assert (pixels(list(IMAGES.transpose(0, 3, 1, 2)))[3] == IMAGES[3]).all()
    assert (pixels([IMAGES[0] / 255.0])[0] == IMAGES[0]).all()
    assert pixels([np.array([[False, True]])])[0][0].tolist() == [[0] * 3, [255] * 3]
    two = pixels([np.array([[-2.0, np.nan]]), np.array([[0.0, 8.0]])])
    assert two[0][0].tolist() == [[0, 0, 0], [204, 0, 204]]
    assert two[1][0].tolist() == [[51] * 3, [255] * 3]
    assert pixels([np.array([[-np.inf, 3.0, np.inf, 5.0]])])[0][0, :, 0].tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (np.zeros((28, 28)), "image"), (np.zeros((60, 3)), "series"), (np.zeros((100, 12)), "series"),
        (np.zeros((3, 8, 8)), "image"), (np.zeros((8, 8, 4)), "image"), (np.zeros((8, 8, 5)), None),
        (np.zeros(8), "series"), (np.zeros(8, "uint16"), "text"), (np.zeros((2, 2, 2, 2)), None),
    ],
)  # fmt: skip
def test_kinds(row: np.ndarray, kind: str | None) -> None:
    """What rows are drawn as where nobody said."""
    assert kind_of([row]) == kind


def test_series_are_curves() -> None:
    """A curve a column, the fields of a window side by side, all rows of a field on one scale."""
    series = RANDOM.standard_normal((100, 2))
    made = drawn(shown(jl.Dataset(jl.windows(series, past=slice(0, 20), next=slice(20, 25))), 3))

    assert len(made) == 6
    assert [len(axes.lines) for axes in made] == [2] * 6
    assert (made[0].lines[1].get_ydata() == series[:20, 1]).all()
    assert len({axes.get_ylim() for axes in made[::2]}) == 1
    assert {axes.get_title() for axes in made} == {"past", "next", ""}
    assert made[-1].get_xlabel() == "position"


def test_tokens_are_text() -> None:
    """Ragged rows and bytes; decode turns numbers into words."""
    data = jl.Dataset(words=jl.ragged(np.arange(18, dtype="uint16"), np.cumsum([0, 3, 9, 1, 5])))
    texts = [text.get_text() for text in shown(next(iter(jl.Loader(data, 4)))).axes[0].texts]
    assert texts[:3] == ["words", "0", "0 1 2"] and "13 14 15 16 17" in texts
    decoded = shown(data.map("words", jl.pad_rows(9)), decode=lambda ids: "-".join(map(str, ids)))
    assert "0-1-2-0-0-0-0-0-0" in [text.get_text() for text in decoded.axes[0].texts]
    assert words(np.frombuffer(b"to be", "uint8"), None) == "to be"
    assert words(np.array([1, 2], "uint8"), None) == "1 2"


def test_lines_keep_to_their_width() -> None:
    """Whatever the text, lines are short enough, and nothing but the end is left out."""
    for text in ("", "a" * 500, "word " * 200, "a bb ccc " * 9 + "d" * 70):
        made = lines(text)
        assert all(len(line) <= LINE for line in made)
        assert "".join(text.split()).startswith("".join(made).replace(" ", "").removesuffix("…"))


def test_what_can_be_shown() -> None:
    """A loader's next batch (which stays to come), a data set, tuples, arrays, torch tensors, numbers alone."""
    loader = jl.Loader(jl.Dataset(image=IMAGES, label=np.arange(20)), 4, shuffle=True)
    first = [axes.get_title() for axes in drawn(shown(loader))]
    assert first == [f"label {k}" for k in next(iter(loader)).label]
    assert len(drawn(shown(loader.data, 3))) == 3
    assert len(drawn(shown((IMAGES, np.arange(20)), 2))) == 2
    assert len(drawn(shown(IMAGES, 5))) == 5
    numbers = drawn(shown({"a": np.arange(5.0), "b": np.arange(5)}))
    assert [axes.get_xlabel() for axes in numbers] == ["row", "row"]
    assert len(drawn(shown(loader.data, 3, fields="image"))) == 3
    assert len(drawn(shown({"x": np.zeros((2, 30, 30))}, kind="series"))) == 2
    torch = pytest.importorskip("torch")
    assert len(drawn(shown(torch.zeros(3, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)))) == 3


def test_mixed_fields_stand_side_by_side() -> None:
    """An image, its mask and a caption: three cells a row."""
    made = shown({"image": IMAGES, "mask": IMAGES[..., 0] > 9, "caption": np.arange(60).reshape(20, 3)}, 2)

    assert len(made.axes) == 6
    assert [axes.get_title() for axes in made.axes[:3]] == ["image", "mask", "caption"]


def test_what_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal says what came and what is taken."""
    batch = {"cube": np.zeros((2, 3, 3, 3, 3))}
    cases = [
        ({"batch": batch}, ValueError, "nothing to draw as image, series or text: 'cube' has rows float64 (3, 3, 3, 3)"),
        ({"batch": IMAGES, "kind": "text"}, ValueError, "nothing to draw as text: 'x' has rows uint8 (8, 9, 3)"),
        ({"batch": IMAGES, "kind": "graph"}, ValueError, "kind is 'image', 'series' or 'text', got 'graph'"),
        ({"batch": IMAGES, "n": 0}, ValueError, "show takes a number of rows of at least 1, got n=0"),
        ({"batch": IMAGES, "n": True}, ValueError, "show takes a number of rows of at least 1, got n=True"),
        ({"batch": IMAGES[:0]}, ValueError, "there is no row to show"),
        ({"batch": batch, "fields": "label"}, KeyError, "'no field \\'label\\': there are cube'"),
        ({"batch": np.array(["a"])}, TypeError, "show takes arrays of numbers with a row axis, got <U1 of shape (1,)"),
        ({"batch": 3.5}, TypeError, "show takes arrays of numbers with a row axis, got float64 of shape ()"),
    ]  # fmt: skip
    for given, kind, text in cases:
        with pytest.raises(kind) as raised:
            jl.show(**given)
        assert str(raised.value).replace('"', "'") == text.replace("\\'", "'")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^pictures need matplotlib: pip install 'jitloader\[plot\]'$"):
        jl.show(IMAGES)
