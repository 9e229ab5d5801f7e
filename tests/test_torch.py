"""The door to PyTorch: batches as tensors, a Loader as a DataLoader, torch's data sets as arrays."""

import copy
import doctest
import gc
import json
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest

import jitloader as jl

torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

import jitloader.torch as door  # noqa: E402


def data_of(n=100):
    x = np.arange(n * 3, dtype="f4").reshape(n, 3)
    return jl.Dataset(x=x, y=np.arange(n))


def loader_of(n=100, batch=16, **settings):
    return jl.Loader(data_of(n), batch, shuffle=True, seed=3, **settings)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_importing_the_library_leaves_torch_alone():
    """Neither `import jitloader` nor loading a batch imports torch."""
    code = "import sys, numpy as np, jitloader as jl; next(iter(jl.Loader(jl.Dataset(x=np.arange(9)), 4))); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tensors_are_the_batches():
    """The same values, dtypes and order, as a NamedTuple with the fields' names; length and state are the loader's."""
    plain, wrapped = loader_of(), door.tensors(loader_of())
    assert len(wrapped) == len(plain) == 7
    for want, got in zip(plain, wrapped, strict=True):
        assert got._fields == ("x", "y") and got.x.dtype == torch.float32 and got.y.dtype == torch.int64
        assert np.array_equal(got.x.numpy(), want.x) and np.array_equal(got.y.numpy(), want.y)


def test_a_tensor_lies_over_the_batch():
    """Nothing is copied on the CPU: the tensor's memory is the pool's, aligned, and may be written to."""
    loader = loader_of()
    batch = next(iter(door.tensors(loader)))
    slots = loader._pool._slots
    assert batch.x.data_ptr() in [address for slot in slots for address in slot.addresses]
    assert batch.x.data_ptr() % 64 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch.x.add_(1)


def test_held_tensors_are_never_written_over():
    """A tensor, or a view of one, keeps its memory, whatever is loaded meanwhile."""
    loader = loader_of(4_000, 8)
    loader.warmup()
    held = []
    for epoch in range(2):
        for k, batch in enumerate(door.tensors(loader)):
            if k % 7 == epoch:
                held.append((batch.y[2:5], batch.y[2:5].clone()))
            del batch
    gc.collect()
    assert len(held) > 100 and all(torch.equal(view, was) for view, was in held)


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
def test_every_dtype_that_torch_has(dtype):
    """Bits come through as they are."""
    values = np.arange(10).astype(dtype)
    (batch,) = door.tensors(jl.Loader(jl.Dataset(x=values), 10))
    assert np.array_equal(batch.x.numpy(), values) and batch.x.numpy().dtype == values.dtype


def test_bfloat16():
    """ml_dtypes' bfloat16 becomes torch's, bit by bit, and back."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, -2.5, 3e38, np.inf]).astype(ml_dtypes.bfloat16)
    (batch,) = door.tensors(jl.Loader(jl.Dataset(x=values), 4))
    assert batch.x.dtype == torch.bfloat16 and batch.x.tolist() == values.astype(float).tolist()
    back = door.from_torch(TensorDataset(batch.x))
    assert back.spec["x"].dtype == ml_dtypes.bfloat16 and np.array_equal(back[:].x, values)


@pytest.mark.parametrize(
    "array, text",
    [
        (
            np.zeros(3, "M8[s]"),
            "field 'when' is datetime64[s], which torch does not have: leave it out: data.drop('when')",
        ),
        (np.zeros(3, "S4"), "field 'when' is |S4, which torch does not have: leave it out: data.drop('when')"),
        (np.zeros(3, ">f4"), "field 'when' is >f4, which torch does not have: jl.cast to a native one"),
    ],
)
def test_dtypes_that_torch_has_not(array, text):
    """They are refused before any batch."""
    with pytest.raises(TypeError) as error:
        door.tensors(jl.Loader(jl.Dataset(when=array), 2))
    assert str(error.value) == text


def test_what_is_asked_without_cuda():
    """A device that is not there, and pinned memory without CUDA, are told at once."""
    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(
        RuntimeError, match=r"^device='cuda', but this torch sees no CUDA: leave device out, or give 'cpu'$"
    ):
        door.tensors(loader_of(), device="cuda")
    with pytest.raises(RuntimeError, match=r"^pin_memory=True, but this torch sees no CUDA: leave it out$"):
        door.tensors(loader_of(), pin_memory=True)
    with pytest.raises(TypeError, match=r"^tensors takes a jl.Loader, got Dataset$"):
        door.tensors(data_of())


def test_batches_go_to_a_device():
    """With a device each field is moved; torch's meta device stands for one here."""
    (first, *_) = door.tensors(loader_of(), device="meta")
    assert first.x.device.type == "meta" and first.x.shape == (16, 3)
    assert torch.equal(next(iter(door.tensors(loader_of(), device="cpu"))).y, next(iter(door.tensors(loader_of()))).y)


def test_whatever_a_batch_is_made_of_is_moved():
    """Tuples, lists, dicts and NamedTuples inside a batch of a function keep their form; what is no tensor stays."""
    data = data_of(4).apply(lambda b: [b.y, {"x": b.x, "more": (b.y, "name")}])
    (made,) = door.tensors(jl.Loader(data, 4), device="meta")
    assert isinstance(made, list) and made[0].device.type == "meta"
    assert made[1]["x"].device.type == "meta" and made[1]["x"].shape == (4, 3)
    assert (
        isinstance(made[1]["more"], tuple) and made[1]["more"][0].device.type == "meta" and made[1]["more"][1] == "name"
    )


def test_state_and_epoch_are_the_loaders():
    """Both go through the wrapper: the rest of the epoch after a resume, and the epoch that was chosen."""
    wrapped = door.tensors(loader_of())
    batches = iter(wrapped)
    next(batches)
    state = json.loads(json.dumps(wrapped.state_dict()))
    rest = rows_of(batches)
    again = door.tensors(loader_of())
    again.load_state_dict(state)
    assert rows_of(again) == rest
    again.set_epoch(0)
    assert rows_of(again)[1:] == rest


def test_a_buffer_waits_for_its_copy(monkeypatch):
    """On a CUDA device a batch is held until the event after its copy has come, and no longer (a device of air)."""
    events = []

    class Event:
        def __init__(self):
            self.over = False
            events.append(self)

        def record(self, stream):
            streams.append(stream)

        def query(self):
            return self.over

        def synchronize(self):
            self.over = True

    def moved(value, device, non_blocking):
        hosts.append(weakref.ref(value.x))
        return [array.copy() for array in value]

    hosts, streams = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(door, "_moved", moved)
    monkeypatch.setattr(door, "_converted", lambda batch: batch)
    monkeypatch.setattr(jl.loader, "UNIT", 1)  # arrays of batches that share a buffer are let go together
    wrapped = door.Tensors(jl.Loader(data_of(5_000), 1_000), torch.device("cuda:1"), False, True)
    batches = iter(wrapped)
    next(batches), next(batches)
    gc.collect()
    assert len(events) == 2 and all(host() is not None for host in hosts)
    events[0].over = events[1].over = True
    next(batches)
    gc.collect()
    assert [host() is not None for host in hosts] == [False, False, True]
    assert len(list(batches)) == 2 and all(event.over for event in events)
    assert set(streams) == {"stream of cuda:1"}
    batches = iter(wrapped)
    next(batches)
    assert not events[-1].over
    batches.close()  # a loop that was left
    assert events[-1].over


def test_buffers_from_an_allocator():
    """The pool's memory comes from what the loader is told to use, and is used again."""
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    loader = loader_of(50_000, 64)
    loader.allocate_with(allocate)
    for _ in range(3):
        for _ in loader:
            pass
    assert 2 <= len(asked) <= 2 * 5


def test_ragged_and_applied_batches():
    """Ragged fields come as tensors of values and offsets; what apply gives is converted where it holds arrays."""
    rows = jl.Dataset(x=jl.ragged([[1, 2], [3], [4, 5, 6]]), y=np.arange(3))
    (batch,) = door.tensors(jl.Loader(rows, 3))
    assert batch.x.values.tolist() == [1, 2, 3, 4, 5, 6] and batch.x.offsets.tolist() == [0, 2, 3, 6]
    (made,) = door.tensors(jl.Loader(data_of(4).apply(lambda b: {"twice": b.y * 2, "name": "n"}), 4))
    assert made.twice.tolist() == [0, 2, 4, 6] and made.name == "n"


# -- a loader where torch wants its own --------------------------------------------------------------------------------


def rows_of(batches):
    return [batch.y.tolist() for batch in batches]


def test_a_dataloader_gives_the_same_batches():
    """An instance of torch's class, with the loader's length, order and epochs."""
    wanted = [rows_of(loader) for loader in [loader_of()] for _ in range(3)]
    loader = loader_of()
    batches = door.as_dataloader(loader)
    assert isinstance(batches, DataLoader) and len(batches) == 7 and batches.num_workers == 0
    assert rows_of(batches) == wanted[0]
    batches.set_epoch(2)
    assert rows_of(batches) == rows_of(jl_epoch(2))


def jl_epoch(epoch):
    loader = loader_of()
    loader.epoch = epoch
    return loader


def test_a_dataloader_resumes():
    """Its state is the loader's: JSON, and exact in the middle of an epoch."""
    batches = door.as_dataloader(loader_of())
    running = iter(batches)
    next(running), next(running)
    saved = json.dumps(batches.state_dict())
    rest = rows_of(running)
    again = door.as_dataloader(loader_of())
    again.load_state_dict(json.loads(saved))
    assert rows_of(again) == rest


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes(workers):
    """In forked workers each batch comes once, in the order without workers, in every epoch that was told."""
    data = door.as_iterable_dataset(loader_of(60, 7))
    for epoch in range(2):
        data.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: fork beside threads
            got = rows_of(DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context="fork"))
        loader = loader_of(60, 7)
        loader.epoch = epoch
        assert got == rows_of(loader)


def test_worker_processes_must_be_told_the_epoch():
    """Without set_epoch every epoch would be the same one: refused, with the remedy."""
    data = door.as_iterable_dataset(loader_of())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(RuntimeError, match="call set_epoch\\(epoch\\) on this data set"):
            list(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))


def test_training_reaches_the_same_weights():
    """A small training over the door ends where one over NumPy batches does."""

    def train(batches):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        step = torch.optim.SGD(model.parameters(), 1e-5)
        for _ in range(3):
            for x, y in batches():
                loss = torch.nn.functional.mse_loss(model(x)[:, 0], y.float())
                step.zero_grad()
                loss.backward()
                step.step()
        return [p.detach().clone() for p in model.parameters()]

    loader, batches = loader_of(), door.as_dataloader(loader_of())
    over_numpy = train(lambda: ((torch.tensor(b.x), torch.tensor(b.y)) for b in loader))
    assert all(torch.equal(a, b) for a, b in zip(over_numpy, train(lambda: batches), strict=True))


def test_lightning_trains_and_resumes(tmp_path):
    """Lightning's Trainer takes it where it wants a DataLoader, one batch each step."""
    lightning = pytest.importorskip("lightning.pytorch")
    seen = []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(3, 1)

        def training_step(self, batch, index):
            seen.append(batch.y.tolist())
            return torch.nn.functional.mse_loss(self.line(batch.x)[:, 0], batch.y.float())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-6)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Model(), door.as_dataloader(loader_of()))
    loader = loader_of()
    assert seen == rows_of(loader) + rows_of(loader)


def test_accelerate_prepares_it():
    """accelerate takes it as a DataLoader, and gives every batch once."""
    accelerate = pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = accelerate.Accelerator(cpu=True).prepare(door.as_dataloader(loader_of()))
        got = rows_of(prepared)
    assert got == rows_of(loader_of())


def test_parting_twice_is_refused():
    """What takes the data set out of the DataLoader to part it again, as accelerate does, would lose rows."""
    loader = loader_of(96, rank=1, world_size=2)
    batches = door.as_dataloader(loader)
    assert len(list(batches)) == 3
    with pytest.raises(RuntimeError) as error:
        next(iter(DataLoader(batches.dataset, batch_size=None)))
    assert str(error.value) == (
        "rank 1 of 2 of this Loader was taken out of its DataLoader to be parted between processes again, and rows would "
        "be lost: make the Loader with rank=0, world_size=1, or do not hand it to accelerator.prepare"
    )


def test_batches_as_dicts():
    """For what calls model(**batch)."""
    (first, *_) = door.as_dataloader(loader_of(), dicts=True)
    assert list(first) == ["x", "y"] and torch.equal(first["y"], next(iter(door.tensors(loader_of()))).y)


@pytest.mark.nightly
def test_hugging_face_trains(tmp_path):
    """The Trainer takes every batch once an epoch."""
    transformers = pytest.importorskip("transformers")
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, x, y):
            seen.append(y.tolist())
            return {"loss": ((self.linear(x)[:, 0] - y) ** 2).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(door.as_dataloader(loader_of(96), dicts=True))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        assert Trainer(Model(), settings).train().global_step == 6
    assert seen == rows_of(loader_of(96))


# -- torch's data sets as arrays ---------------------------------------------------------------------------------------


def test_tensor_datasets_are_taken_apart():
    """Without copying: the arrays are the tensors' own memory."""
    x, y = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    data = door.from_torch(TensorDataset(x, y))
    assert data.fields == ("x", "y") and data.sources["x"].parts[0].array.ctypes.data == x.data_ptr()
    assert np.array_equal(data[:].x, x.numpy())
    named = door.from_torch(TensorDataset(x, y), ["image", "label"])
    assert named.fields == ("image", "label")


def test_subsets_and_concatenations():
    """Subset, ConcatDataset and random_split keep their rows, by reference."""
    x, y = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    whole = TensorDataset(x, y)
    assert door.from_torch(Subset(whole, [3, 1]))[:].y.tolist() == [3, 1]
    assert door.from_torch(ConcatDataset([whole, Subset(whole, [2])]))[:].y.tolist() == [0, 1, 2, 3, 2]
    parts = torch.utils.data.random_split(whole, [3, 1], generator=torch.Generator().manual_seed(0))
    rows = [door.from_torch(part)[:].y.tolist() for part in parts]
    assert rows == [[int(part[k][1]) for k in range(len(part))] for part in parts]
    assert door.from_torch(Subset(whole, [0, 2]), ["a", "b"]).fields == ("a", "b")


def test_stacks():
    """StackDataset gives a field for each of its data sets."""
    x, y = torch.arange(4.0), torch.arange(4)
    stack = StackDataset(image=TensorDataset(x), label=TensorDataset(y))
    data = door.from_torch(stack)
    assert data.fields == ("image", "label") and data[2].label == 2
    assert door.from_torch(StackDataset(TensorDataset(x, y), TensorDataset(x)))[:].y.tolist() == x.tolist()


class Rows(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stream(IterableDataset):
    def __iter__(self):
        return ((np.full(2, k, "f4"), k) for k in range(7))


def test_other_data_sets_are_read_once():
    """Items of tuples, dicts, tensors, numbers and arrays; an IterableDataset as far as it is told to."""
    pairs = door.from_torch(Rows([(torch.full((2,), k), k) for k in range(5)]))
    assert pairs.fields == ("x", "y") and pairs[:].x.tolist() == [[k, k] for k in range(5)]
    named = door.from_torch(Rows([{"a": np.float32(k), "b": [k, k + 1]} for k in range(5)]))
    assert named.fields == ("a", "b") and named.spec["a"].dtype == np.float32 and named[3].b.tolist() == [3, 4]
    assert door.from_torch(Rows([torch.tensor(k) for k in range(5)]))[:].x.tolist() == list(range(5))
    assert door.from_torch(Stream(), rows=100)[:].y.tolist() == list(range(7))
    assert door.from_torch(Stream(), ["v", "k"], rows=3)[:].k.tolist() == [0, 1, 2]
    assert len(door.from_torch(Rows(list(range(9))), rows=4)) == 4


def test_growing_past_the_first_arrays(monkeypatch):
    """A stream longer than the first arrays keeps every row."""
    monkeypatch.setattr(door, "ITEMS", 2)
    assert door.from_torch(Stream(), rows=100)[:].y.tolist() == list(range(7))


def test_data_and_targets():
    """What torchvision's data sets hold is taken as it is; a transform is Python, and refused with the remedy."""

    class Held(Dataset):
        def __init__(self, transform=None):
            self.data, self.targets, self.transform = np.zeros((3, 2, 2), "u1"), [2, 1, 0], transform

    data = door.from_torch(Held(), ["image", "label"])
    assert data.spec["image"].shape == (2, 2) and data[:].label.tolist() == [2, 1, 0]
    with pytest.raises(TypeError) as error:
        door.from_torch(Held(lambda x: x))
    assert str(error.value) == ("Held has a transform, which is Python a row: make it without, and link stages by map")


@pytest.mark.parametrize(
    "make, kind, text",
    [
        (lambda: door.from_torch(5), TypeError, "from_torch takes a torch data set, got int"),
        (
            lambda: door.from_torch(Stream()),
            TypeError,
            "an IterableDataset has no end that can be seen: say rows=, how many to take at most",
        ),
        (lambda: door.from_torch(Rows([])), ValueError, "the data set has no items"),
        (
            lambda: door.from_torch(Rows([np.zeros(2), np.zeros(3)])),
            ValueError,
            "item 1: 'x' is float64 (3,), those before were float64 (2,): give rows of one shape, or jl.ragged(list of arrays)",
        ),
        (
            lambda: door.from_torch(Rows([{"a": 1}, {"b": 1}])),
            ValueError,
            "item 1 has the parts b, those before had a",
        ),
        (
            lambda: door.from_torch(Rows(["text"])),
            TypeError,
            "an item holds str, which is no number, array or tensor of numbers",
        ),
        (
            lambda: door.from_torch(TensorDataset(torch.arange(3)), ["a", "b"]),
            ValueError,
            "names: an item has 1 part(s), got ['a', 'b']",
        ),
    ],
)
def test_what_is_no_data_set(make, kind, text):
    """Bad input is told in one line."""
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == text


def test_two_threads_over_one_door():
    """Several iterators of one door are independent, in threads too."""
    wrapped, found = door.tensors(loader_of(2_000, 10)), []

    def go():
        found.append(sorted(sum(rows_of(wrapped), [])))

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(2_000))] * 4


def test_a_copy_of_a_door():
    """deepcopy gives a door of its own, where the first one was."""
    batches = door.as_dataloader(loader_of())
    next(iter(batches))
    assert rows_of(copy.deepcopy(batches))


def test_docstring_examples_run():
    """The examples in the door's docstrings."""
    assert doctest.testmod(door).failed == 0


def test_a_closed_loader():
    """A door to a loader that was closed says so."""
    loader = loader_of()
    batches = door.as_dataloader(loader)
    loader.close()
    with pytest.raises(ValueError, match="^this loader is closed$"):
        list(batches)


def test_dicts_have_the_names_of_fields_as_they_are():
    """Those of a batch are Python's, `_0` where a name cannot be one."""
    data = jl.Dataset({"class": np.arange(3), "y": np.arange(3)})
    (batch,) = door.as_dataloader(jl.Loader(data, 3), dicts=True)
    assert list(batch) == ["class", "y"]
