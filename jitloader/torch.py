"""The door to PyTorch: batches as tensors over the same memory, a Loader as a DataLoader, torch's data sets as arrays."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils import data as _data
except ImportError as problem:
    raise ImportError("jitloader.torch needs PyTorch: pip install torch") from problem

from .dataset import Dataset
from .loader import Loader
from .writing import default_names

ITEMS = 1 << 16  # rows by which arrays grow where a data set does not say how many it has


# -- batches as tensors ------------------------------------------------------------------------------------------------


def tensor(array: np.ndarray) -> torch.Tensor:
    """Give an array as a tensor over the same memory: (...) of a dtype to (...) of torch's dtype of the same bits.

    bfloat16 of ml_dtypes is torch's. The tensor keeps the array's memory for as long as it lives. Raises TypeError for
    a dtype that torch does not have.

    >>> import numpy as np
    >>> tensor(np.arange(3))
    tensor([0, 1, 2])
    """
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _converted(value: Any) -> Any:
    """Give a batch with its arrays as tensors; what is no array stays."""
    if isinstance(value, np.ndarray):
        return tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_converted(v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_converted(v) for v in value)
    if isinstance(value, Mapping):
        return {name: _converted(v) for name, v in value.items()}
    return value


def _moved(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v, device, non_blocking) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device, non_blocking) for v in value)
    if isinstance(value, Mapping):
        return {name: _moved(v, device, non_blocking) for name, v in value.items()}
    return value


def _check_dtypes(data: Any) -> None:
    """Refuse, before any batch, a field whose dtype torch does not have."""
    for name, spec in data.spec.items():
        if spec.dtype.name == "bfloat16":
            continue
        try:
            torch.from_numpy(np.zeros(1, spec.dtype))
        except (TypeError, ValueError):
            hint = "jl.cast to a native one" if spec.dtype.kind in "biufc" else f"leave it out: data.drop({name!r})"
            raise TypeError(f"field {name!r} is {spec.dtype}, which torch does not have: {hint}") from None


def _check_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(found)!r}, but this torch sees no CUDA: leave device out, or give 'cpu'")
    return found


class Tensors:
    """A Loader whose batches are NamedTuples of tensors; see `tensors`."""

    def __init__(self, loader: Loader, device: torch.device | None, pin_memory: bool, non_blocking: bool) -> None:
        self.loader, self.device, self.non_blocking = loader, device, non_blocking
        if pin_memory:
            loader.allocate_with(_pinned)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self.device is None or self.device.type == "cpu":
            return map(_converted, batches)
        return self._on_device(batches)

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copy each batch to the device; its own memory is kept until the copy is over."""
        assert self.device is not None
        cuda = self.device.type == "cuda"
        beside = self.non_blocking and cuda  # on others there is no event by which to know when a copy is over
        copying: deque[tuple[Any, Any]] = deque()
        try:
            for batch in batches:
                moved = _moved(_converted(batch), self.device, beside)
                if cuda:
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(self.device))  # its own device's, not the current one's
                    copying.append((event, batch))
                    del batch
                    while copying and copying[0][0].query():
                        copying.popleft()
                yield moved
        finally:  # of a loop that was left as well: the next epoch takes these buffers
            for event, _ in copying:
                event.synchronize()

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives."""
        self.loader.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Give where the user is, as `Loader.state_dict` does."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, as `Loader.load_state_dict` does."""
        self.loader.load_state_dict(state)


def tensors(loader: Loader, device: Any = None, pin_memory: bool = False, non_blocking: bool = True) -> Tensors:
    """Give a loader whose batches are NamedTuples of tensors, (batch, *shape) each, of the same dtypes.

    On the CPU nothing is copied: a tensor lies over the batch's own memory, is writable, and keeps it for as long as it
    lives. With `device`, batches are copied there, while the next ones are filled; `pin_memory` makes the loader's own
    buffers page-locked, so that with `non_blocking` the copy runs beside the consumer; a buffer is not used again before
    its copy is over. Ragged fields come as Ragged(values, offsets), the parts of `torch.nested.nested_tensor_from_jagged`.

    It has `len`, `set_epoch`, `state_dict` and `load_state_dict`. Raises TypeError for a field of a dtype that torch
    does not have, RuntimeError for a device that is not there. The path over CUDA has not been run on hardware here.

    >>> import numpy as np, jitloader as jl, jitloader.torch
    >>> loader = jl.Loader(jl.Dataset(x=np.arange(4.0), y=np.arange(4)), 2)
    >>> [int(y.sum()) for x, y in jl.torch.tensors(loader)]
    [1, 5]
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"tensors takes a jl.Loader, got {type(loader).__name__}")
    if not loader.data.applies:
        _check_dtypes(loader.data)
    if pin_memory and not torch.cuda.is_available():
        raise RuntimeError("pin_memory=True, but this torch sees no CUDA: leave it out")
    return Tensors(loader, _check_device(device), pin_memory, non_blocking)


def _pinned(nbytes: int) -> np.ndarray:
    """Give page-locked memory as an array of bytes."""
    found: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found


# -- a loader where torch wants its own --------------------------------------------------------------------------------


class IterableBatches(_data.IterableDataset):  # type: ignore
    """A torch data set whose items are whole batches of a Loader; see `as_iterable_dataset`."""

    def __init__(self, loader: Loader, owned: bool = False, dicts: bool = False) -> None:
        self.loader, self._dicts = loader, dicts
        self._owned = owned  # by a BatchLoader, which reads the loader itself
        self._told: int | None = None  # the epoch, where somebody told it

    def __iter__(self) -> Iterator[Any]:
        if self._owned and self.loader.world_size > 1:
            raise RuntimeError(
                f"rank {self.loader.rank} of {self.loader.world_size} of this Loader was taken out of its DataLoader to be "
                "parted between processes again, and rows would be lost: make the Loader with rank=0, world_size=1, or "
                "do not hand it to accelerator.prepare"
            )
        worker = _data.get_worker_info()
        if worker is None:
            return self.batches()
        if self._told is None:
            raise RuntimeError(
                "a Loader in worker processes cannot tell epochs apart: call set_epoch(epoch) on this data set before "
                "each, or leave num_workers=0, since batches are filled by threads already"
            )
        self.loader.epoch = self._told
        return (self._given(self.loader[k]) for k in range(worker.id, len(self.loader), worker.num_workers))

    def batches(self) -> Iterator[Any]:
        """Give an epoch in this process."""
        return map(self._given, iter(self.loader))

    def _given(self, batch: Any) -> Any:
        if self._dicts and hasattr(batch, "_asdict"):
            data = self.loader.data  # whose names are as they are; those of a batch are Python's, `_0` where one cannot be
            own = type(batch) is data.batch_type
            batch = dict(zip(data.fields, batch, strict=True)) if own else batch._asdict()
        return _converted(batch)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives, in worker processes as well."""
        self.loader.epoch = self._told = epoch


def as_iterable_dataset(loader: Loader) -> IterableBatches:
    """Give a loader as a torch IterableDataset whose items are its batches: for `DataLoader(..., batch_size=None)`.

    In worker processes each batch comes from one of them and their order is that without workers, provided that
    `set_epoch` was called before the epoch: a worker cannot tell which epoch it is. Raises what `tensors` raises.

    >>> import numpy as np, torch, jitloader as jl, jitloader.torch
    >>> data = jl.torch.as_iterable_dataset(jl.Loader(jl.Dataset(x=np.arange(6)), 4))
    >>> [batch.x.tolist() for batch in torch.utils.data.DataLoader(data, batch_size=None)]
    [[0, 1, 2, 3], [4, 5]]
    """
    return IterableBatches(tensors(loader).loader)


class BatchLoader(_data.DataLoader):  # type: ignore
    """A torch DataLoader that hands on the batches of a Loader; see `as_dataloader`."""

    def __init__(self, dataset: IterableBatches, **settings: Any) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=_as_it_is)

    def __iter__(self) -> Any:
        return self.dataset.batches()  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives."""
        self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Give where the user is, as `Loader.state_dict` does."""
        return self.dataset.loader.state_dict()  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, as `Loader.load_state_dict` does."""
        self.dataset.loader.load_state_dict(state)  # type: ignore[attr-defined]


def _as_it_is(batch: Any) -> Any:
    return batch


def as_dataloader(loader: Loader, dicts: bool = False) -> BatchLoader:
    """Give a loader as a torch DataLoader, for what insists on one: Lightning, Hugging Face's Trainer, accelerate.

    Its batches are those of `tensors(loader)`, or with `dicts` a dict of a field's name to its tensor each, as Hugging
    Face's Trainer wants them for `model(**batch)` (give it from `get_train_dataloader`); filled by threads of this process: it has no workers, and the order,
    the batch size and the rank are the loader's. `accelerator.prepare`, and so Hugging Face's Trainer, parts batches
    between processes by itself: there the Loader is made with rank=0, world_size=1, and any other is a RuntimeError in
    the first epoch, for rows would be lost. Lightning saves and restores its state with a checkpoint, by
    `state_dict` and `load_state_dict`, and `set_epoch` is there for loops that call it.

    >>> import numpy as np, jitloader as jl, jitloader.torch
    >>> batches = jl.torch.as_dataloader(jl.Loader(jl.Dataset(x=np.arange(6)), 4, shuffle=True))
    >>> len(batches), sum(int(batch.x.sum()) for batch in batches)
    (2, 15)
    """
    return BatchLoader(IterableBatches(tensors(loader).loader, owned=True, dicts=dicts))


# -- torch's data sets as arrays ---------------------------------------------------------------------------------------


def from_torch(
    dataset: Any, names: Sequence[str] | None = None, *, rows: int | None = None, progress: bool = False
) -> Dataset:
    """Give a torch data set as a jl.Dataset: one field for each part of an item.

    Taken apart without copying: TensorDataset, and Subset, ConcatDataset, StackDataset and random_split of such; and
    torchvision's that hold `data` and `targets` and have no transform. Any other map-style data set is read once, item
    by item, into arrays, in the calling thread (`progress` shows a bar where tqdm is installed); so is an
    IterableDataset, of which `rows` says how many to take at most. Items are tensors, arrays, numbers, images of PIL, or
    tuples or dicts of those; each part keeps one shape and dtype.

    names : the fields; of a dict its keys where left out, else x, or x and y, or x0, x1, ...

    Raises TypeError for what is no data set, for parts that are not numbers, and for an IterableDataset without `rows`;
    ValueError for items that differ in shape, naming the item.

    >>> import torch, jitloader as jl, jitloader.torch
    >>> pairs = torch.utils.data.TensorDataset(torch.arange(6).reshape(3, 2), torch.arange(3))
    >>> jl.torch.from_torch(pairs, ["image", "label"])[1].image
    array([2, 3])
    """
    fields = _taken_apart(dataset, rows, progress)
    given = _renamed(fields, names)
    if isinstance(fields, Dataset):
        return fields if given is None else _with_names(fields, given)
    return Dataset(fields if given is None else dict(zip(given, fields.values(), strict=True)))


def _with_names(data: Dataset, names: Sequence[str]) -> Dataset:
    return Dataset(dict(zip(names, data.sources.values(), strict=True)))


def _renamed(found: Any, names: Sequence[str] | None) -> Sequence[str] | None:
    """Check names against the parts found."""
    parts = found.fields if isinstance(found, Dataset) else tuple(found)
    if names is None:
        return None
    if isinstance(names, str) or len(names) != len(parts):
        raise ValueError(f"names: an item has {len(parts)} part(s), got {names!r}")
    return list(names)


def _taken_apart(dataset: Any, rows: int | None, progress: bool) -> Any:
    """Give the fields of a data set, as arrays by name or as a Dataset of them."""
    if isinstance(dataset, _data.TensorDataset):
        return dict(zip(default_names(len(dataset.tensors)), map(_array, dataset.tensors), strict=True))
    if isinstance(dataset, _data.Subset):
        return from_torch(dataset.dataset, progress=progress).select(np.asarray(dataset.indices, np.int64))
    if isinstance(dataset, _data.ConcatDataset):
        whole, *others = [from_torch(part, progress=progress) for part in dataset.datasets]
        for other in others:
            whole = whole.concat(other)
        return whole
    if isinstance(dataset, _data.StackDataset):
        return _stacked(dataset, progress)
    held, wanted = getattr(dataset, "data", None), getattr(dataset, "targets", None)
    if held is not None and wanted is not None and hasattr(dataset, "transform"):
        if getattr(dataset, "transform", None) or getattr(dataset, "target_transform", None):
            raise TypeError(
                f"{type(dataset).__name__} has a transform, which is Python a row: make it without, and link stages by map"
            )
        return {"x": _array(held), "y": _array(wanted)}
    if isinstance(dataset, _data.IterableDataset):
        if rows is None:
            raise TypeError("an IterableDataset has no end that can be seen: say rows=, how many to take at most")
        return _read(iter(dataset), rows, None, progress)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(f"from_torch takes a torch data set, got {type(dataset).__name__}")
    count = len(dataset) if rows is None else min(rows, len(dataset))
    return _read((dataset[k] for k in range(count)), count, count, progress)


def _stacked(dataset: Any, progress: bool) -> Dataset:
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, Mapping) else list(default_names(len(parts)))
    found: Dataset | None = None
    for name, part in zip(names, parts.values() if isinstance(parts, Mapping) else parts, strict=True):
        if isinstance(part, (torch.Tensor, np.ndarray, list)):
            data = Dataset({name: _array(part)})
        else:
            data = from_torch(part, progress=progress)
            few = len(data.fields) == 1
            data = _with_names(data, [name] if few else [f"{name}_{field}" for field in data.fields])
        found = data if found is None else found.zip(data)
    assert found is not None
    return found


def _array(value: Any) -> np.ndarray:
    """Give a tensor, an array or a list of numbers as an array, by reference where there is memory to refer to."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            try:
                import ml_dtypes
            except ImportError:
                raise TypeError("bfloat16 needs ml_dtypes: pip install ml_dtypes, or give tensor.float()") from None
            return np.asarray(value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(value.resolve_conj().resolve_neg().numpy())
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind in "USO":
        raise TypeError(f"an item holds {type(value).__name__}, which is no number, array or tensor of numbers")
    return array


def _parts(item: Any) -> dict[str, np.ndarray]:
    """Give the parts of an item by name."""
    if isinstance(item, Mapping):
        return {str(name): _array(value) for name, value in item.items()}
    if isinstance(item, (tuple, list)):
        return dict(zip(default_names(len(item)), map(_array, item), strict=True))
    return {"x": _array(item)}


def _read(items: Iterator[Any], most: int, count: int | None, progress: bool) -> dict[str, np.ndarray]:
    """Read items into arrays, of `count` rows or growing up to `most`."""
    arrays: dict[str, np.ndarray] = {}
    done = 0
    for item in _shown(items, count) if progress else items:
        if done == most:
            break
        parts = _parts(item)
        if not arrays:
            arrays = {k: np.empty((count or min(most, ITEMS), *v.shape), v.dtype) for k, v in parts.items()}
        if done == len(next(iter(arrays.values()))):
            size = min(most, 2 * done)
            arrays = {k: np.concatenate([v, np.empty((size - done, *v.shape[1:]), v.dtype)]) for k, v in arrays.items()}
        if parts.keys() != arrays.keys():
            raise ValueError(f"item {done} has the parts {', '.join(parts)}, those before had {', '.join(arrays)}")
        for name, value in parts.items():
            array = arrays[name]
            if value.shape != array.shape[1:] or not np.can_cast(value.dtype, array.dtype, "safe"):
                raise ValueError(
                    f"item {done}: {name!r} is {value.dtype} {value.shape}, those before were {array.dtype} "
                    f"{array.shape[1:]}: give rows of one shape, or jl.ragged(list of arrays)"
                )
            array[done] = value
        done += 1
    if not done:
        raise ValueError("the data set has no items")
    return {name: array[:done] for name, array in arrays.items()}


def _shown(items: Iterator[Any], count: int | None) -> Iterator[Any]:
    """Show a bar where tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        warnings.warn("progress=True shows a bar where tqdm is installed: pip install tqdm", stacklevel=5)
        return items
    shown: Callable[..., Any] = tqdm
    return iter(shown(items, total=count, desc="reading", unit=" items"))
