"""Run work in background threads while a run continues: initialising weights, hashing models and files, and reading
large checkpoints back from disk."""

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


class Background(Generic[T]):
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
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
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


class _Cancelled(Exception):
    pass


class _Cancellable(Mapping[str, Tensor]):
    """A mapping of tensors whose lookup raises _Cancelled once `stop` is set."""

    def __init__(self, tensors: Mapping[str, Tensor], stop: threading.Event) -> None:
        self._tensors, self._stop = tensors, stop

    def __getitem__(self, name: str) -> Tensor:
        if self._stop.is_set():
            raise _Cancelled
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class ModelHash:
    """The sha256 of a model's tensors, computed in a thread, because it takes 12 s for 7B weights. The tensors must not
    change before `result` returns."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Background[str],
        ready: Callable[[str], ModelReady],
        log: Log,
    ) -> None:
        """`tensors` may be a thread that already computes their hash. `ready` returns the event to log for a hash."""
        self._stop = threading.Event()
        # One stream for all tensors: torch hands out 32 streams in turn, so with a stream for each tensor one of them
        # would be the stream in which a CUDA graph is captured. The stream waits here for the work launched so far,
        # because a wait during a capture would invalidate the capture.
        stream: torch.cuda.Stream | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
        computed = (
            tensors.result
            if isinstance(tensors, Background)
            else partial(tensors_sha256, _Cancellable(tensors, self._stop))
        )

        def work() -> str:
            with torch.cuda.stream(stream):
                sha256 = computed()
            if self._stop.is_set():
                raise _Cancelled
            log(ready(sha256))
            return sha256

        self._work = Background(work, "hash of a model")

    def result(self) -> str:
        """Wait until the hash is logged, and return it."""
        return self._work.result()

    def cancel(self) -> None:
        """Stop computing the hash, without logging it, when a run ends early."""
        self._stop.set()
        self._work.wait()
