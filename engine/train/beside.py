"""Run work in threads while a run continues: fresh weights, the hashes of its models and files, and reading large
checkpoints back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.formats.safetensors import tensors_sha256
from engine.log.events import ModelReady
from engine.train.to_events import Log

T = TypeVar("T")


class Beside(Generic[T]):
    """A function that runs in a daemon thread."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._answer: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> T:
        """Wait for the function and return its result. Raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]


class _GivenUp(Exception):
    pass


class _Watched(Mapping[str, Tensor]):
    """Tensors whose reading raises once `stop` is set."""

    def __init__(self, tensors: Mapping[str, Tensor], stop: threading.Event) -> None:
        self._tensors, self._stop = tensors, stop

    def __getitem__(self, name: str) -> Tensor:
        if self._stop.is_set():
            raise _GivenUp
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class ModelHash:
    """The sha256 of a model's tensors, which must not change before `result`: 7B weights take a processor 12 s."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Beside[str],
        ready: Callable[[str], ModelReady],
        log: Log,
    ) -> None:
        """`tensors` may be what already computes their hash. `ready` makes the line that is logged once it is known."""
        self._stop = threading.Event()
        # One stream for all tensors: torch has 32 of them, and taking one for each would also take that in which a
        # graph is captured. It waits for what was launched so far; a wait within a capture would end it.
        stream: torch.cuda.Stream | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
        computed = (
            tensors.result
            if isinstance(tensors, Beside)
            else partial(tensors_sha256, _Watched(tensors, self._stop))
        )

        def work() -> str:
            with torch.cuda.stream(stream):
                sha256 = computed()
            if self._stop.is_set():
                raise _GivenUp
            log(ready(sha256))
            return sha256

        self._work = Beside(work, "hash of a model")

    def result(self) -> str:
        """Wait for the hash, which is logged then, and return it."""
        return self._work.result()

    def give_up(self) -> None:
        """Stop computing the hash; it is not logged. For a run that ends."""
        self._stop.set()
        self._work.wait()
