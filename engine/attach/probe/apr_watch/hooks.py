"""Install hooks in torch: optimizers, `backward`, gradient clipping, gradient scaler and data loader.

Each wrapper returns the original's result and passes on its exceptions. While `torch.compile` traces, a wrapper only
calls the original function, so that no probe code enters a graph. Probe functions called at a graph break are marked so
that the compiler skips them.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from . import settings
from .progress import steps_left_of_lightning, steps_left_of_trainer
from .step import Steps
from .writer import NotTheWriter


class Hooks:
    """Hooks installed in this process, and their removal."""

    def __init__(self, torch: Any, folder: str) -> None:
        self._torch = torch
        self._steps = Steps(torch, folder)
        self._on = False
        self._undo: list[Callable[[], None]] = []
        self._step_code: CodeType | None = None
        self._frameworks_hooked = False
        compiler = getattr(torch, "compiler", None)
        self._is_compiling: Callable[[], bool] = getattr(compiler, "is_compiling", lambda: False)

    def install(self) -> None:
        optimizers = sys.modules.get("torch.optim.optimizer")
        if not hasattr(optimizers, "register_optimizer_step_post_hook"):
            return  # older versions of torch have no global step hooks
        steps, after, self._on = self._steps, self._after, True
        clipping = getattr(sys.modules.get("torch.nn.utils.clip_grad"), "clip_grad_norm_", None)
        clipped = after(steps.clipped)(clipping)
        iterator = "torch.utils.data.dataloader", "_BaseDataLoaderIter"
        scaler = "torch.amp.grad_scaler", "GradScaler"
        try:
            for module, owner, name, wrap in (
                ("torch.optim.optimizer", "Optimizer", "__init__", after(steps.optimizer_created)),
                (
                    "torch.optim.lr_scheduler",
                    "LRScheduler",
                    "__init__",
                    after(steps.schedule_created),
                ),
                # `Tensor.backward` calls `torch.autograd.backward`.
                ("torch.autograd", "", "backward", self._wrap_backward),
                ("torch.nn.utils.clip_grad", "", "clip_grad_norm_", lambda _: clipped),
                ("torch.nn.utils", "", "clip_grad_norm_", lambda _: clipped),
                (*iterator, "__next__", self._wrap_next),
                (*iterator, "_next_index", after(steps.indices_drawn)),
                (*scaler, "scale", after(steps.scaled)),
                (*scaler, "update", after(steps.scaler_updated)),
            ):
                self._replace(module, owner, name, wrap)
            self._hook_steps(optimizers)
            _skip_when_compiling(self._torch)
        except BaseException:
            self._on = False
            self.remove()
            raise
        os.register_at_fork(after_in_child=lambda: self._guarded(self._steps.forked))
        atexit.register(self._finish)
        self._change_settings()

    def call_steps(self, method: str, *arguments: Any) -> None:
        """Call a method of `Steps` by its name."""
        self._guarded(getattr(self._steps, method), *arguments)

    def stop(self, error: BaseException | None) -> None:
        """Stop watching the process; `error`: the exception that ended the watched block, if any."""
        self._on = False
        self.remove()
        atexit.unregister(self._finish)
        self._finish(error)
        if self._steps.log is not None:
            self._steps.log.close()

    def _change_settings(self) -> None:
        """Apply the settings of an experiment. If torch refuses one, log that and let the script continue."""
        try:
            settings.apply(self._torch, functools.partial(self.call_steps, "log_event"))
        except Exception as error:  # noqa: BLE001  the script's own import of torch has succeeded
            self.call_steps("noted", "error", f"--set failed: {type(error).__name__}: {error}")

    def remove(self) -> None:
        """Restore the original functions. A wrapper that the script has wrapped stays and only calls the original."""
        # During a step torch iterates over its hooks, which must not change then.
        if not _is_below(sys._getframe(1), self._step_code):
            while self._undo:
                self._undo.pop()()

    def _replace(self, module: str, class_name: str, name: str, wrap: Callable[[Any], Any]) -> None:
        """Wrap a function of a module, or a method of its class `class_name`, if the module is imported."""
        owner = sys.modules.get(module)
        owner = getattr(owner, class_name, None) if class_name else owner
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = wrap(original)
        setattr(owner, name, wrapper)

        def restore() -> None:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)

        self._undo.append(restore)

    def _hook_steps(self, optimizers: Any) -> None:
        is_compiling = self._is_compiling

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._guarded(
                    self._before_step, sys._getframe(1), optimizer, (*args[1:], *kwargs.values())
                )

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._guarded(self._after_step, sys._getframe(1), optimizer)
                if self._on and self._steps.has_reached_limit:
                    # Exit by an exception: the script's finally blocks and exit handlers run, the exit code is 0.
                    sys.exit(0)

        self._undo += [
            optimizers.register_optimizer_step_pre_hook(before_step).remove,
            optimizers.register_optimizer_step_post_hook(after_step).remove,
        ]

    def _before_step(self, caller: FrameType, optimizer: Any, arguments: tuple[Any, ...]) -> None:
        self._step_code = caller.f_code
        if not _is_below(caller.f_back, self._step_code):
            self._steps.optimizer_begins()
        self._steps.identities.step_begins(optimizer, arguments)

    def _after_step(self, caller: FrameType, optimizer: Any) -> None:
        self._steps.identities.step_ends(optimizer)
        # A step that calls the step of another optimizer or of its parent class counts as one step.
        if not _is_below(caller.f_back, caller.f_code):
            self._steps.optimizer_ends(optimizer)
            if not self._frameworks_hooked:
                self._frameworks_hooked = True
                self._hook_frameworks()

    def _hook_frameworks(self) -> None:
        """Hook the frameworks that are imported by the first step: they know the planned number of steps."""
        begun, called = self._after(self._begun_by_trainer), self._after(self._called_by_lightning)
        handler = "transformers.trainer_callback", "CallbackHandler"
        self._replace(*handler, "on_step_begin", begun)
        for name in ("lightning.pytorch", "pytorch_lightning"):
            self._replace(f"{name}.trainer.call", "", "_call_callback_hooks", called)

    def _begun_by_trainer(
        self, _: Any, handler: Any, args: Any, state: Any, *more: Any, **others: Any
    ) -> None:
        self._steps.planned(steps_left_of_trainer(state))

    def _called_by_lightning(
        self, _: Any, trainer: Any, hook_name: str, *more: Any, **others: Any
    ) -> None:
        if hook_name == "on_train_batch_start":
            self._steps.planned(steps_left_of_lightning(trainer))

    def _after(self, then: Callable[..., None]) -> Callable[[Any], Any]:
        """Return a decorator that calls `then` after a function, with the function's result and arguments."""
        is_compiling = self._is_compiling

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                is_on = not is_compiling() and (self._on or self._is_on())
                result = original(*args, **kwargs)
                if is_on:
                    self._guarded(then, result, *args, **kwargs)
                return result

            return wrapper

        return wrap

    def _wrap_backward(self, original: Any) -> Any:
        is_compiling, steps = self._is_compiling, self._steps

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not (self._on or self._is_on()):
                return original(*args, **kwargs)
            tensors = args[0] if args else kwargs.get("tensors", ())
            if not self._guarded(steps.backward_begins, tensors):
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._guarded(steps.backward_failed)
                raise
            self._guarded(steps.backward_ends)
            return result

        return backward

    def _wrap_next(self, original: Any) -> Any:
        is_compiling, steps = self._is_compiling, self._steps

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if is_compiling() or not (self._on or self._is_on()):
                return original(iterator)
            timed = self._guarded(steps.data_begins, iterator)
            try:
                batch = original(iterator)
            except BaseException as error:
                if timed:
                    self._guarded(steps.data_ends)
                self._guarded(steps.no_batch, iterator, error)
                raise
            self._guarded(steps.batch_fetched, iterator, batch, timed)
            return batch

        return __next__

    def _is_on(self) -> bool:
        if not self._on and self._undo:
            self.remove()
        return self._on

    def _guarded(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function of the probe. If it raises, remove the probe, do not disturb the script and return None."""
        if not self._on:
            return None
        try:
            return function(*arguments, **named)
        except NotTheWriter:
            self._on = False
        except Exception as error:
            if _is_of_a_signal_handler(error):
                raise
            self._on = False
            self._log_failure(error)
        if not self._on:
            self.remove()
        return None

    def _finish(self, error: BaseException | None = None) -> None:
        # Finish after a failure too: steps whose values are pending are valid.
        try:
            self._steps.finish(error)
        except Exception:  # noqa: BLE001  the probe must not change the script's exit code
            pass

    def _log_failure(self, error: Exception) -> None:
        try:
            log = self._steps.log
            if log is not None:
                text = f"the probe removed itself, the run goes on: {type(error).__name__}: {error}"
                log.write("note", level="warning", text=text)
        except Exception:  # noqa: BLE001  there is nowhere else to report it
            pass


def _is_below(frame: FrameType | None, code: CodeType | None) -> bool:
    """Return whether `frame` or one of its callers runs this code."""
    while frame is not None and code is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _is_of_a_signal_handler(error: Exception) -> bool:
    """Return whether a signal handler of the script raised this exception while the probe ran."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _skip_when_compiling(torch: Any) -> None:
    """Make the compiler skip the probe's frames at graph breaks, so that the script's graphs do not change. The
    original functions that the wrappers call are compiled or skipped as without the probe."""
    compiler = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        frame = compiler._FrameExecStrategy(skip, default)
        all_below = compiler._FrameExecStrategy(skip, skip)

        def skip_code_of(code: CodeType, and_below: bool) -> None:
            compiler.set_code_exec_strategy(code, all_below if and_below else frame)

    elif hasattr(compiler, "skip_code"):

        def skip_code_of(code: CodeType, and_below: bool) -> None:
            compiler.skip_code(code)

    else:
        return
    for code in _codes(Hooks, _is_below):
        skip_code_of(code, code.co_name == "_guarded")
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
    for module in modules:
        for code in _codes(*vars(module).values()) if module.__name__ != __name__ else ():
            skip_code_of(code, True)


def _codes(*objects: Any) -> set[CodeType]:
    """Return the code objects of the probe's functions and methods, and of functions nested in them."""
    codes: set[CodeType] = set()
    for member in objects:
        if not getattr(member, "__module__", "").startswith(__package__ or ""):
            continue
        if isinstance(member, type):
            codes |= _codes(*vars(member).values())
        elif isinstance(member, FunctionType):
            pending = [member.__code__]
            while pending:
                code = pending.pop()
                codes.add(code)
                pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes
