"""The hooks by which hpcdist sees modules, backwards and steps, and what tells which code of torch is running.

All that hpcdist uses of torch's internals is here, in `loader_hooks.py` and in `tensor_internals.py`.

A parameter's hooks hold the objects that they call, so that a model keeps summing for as long as it lives. Hooks around
steps hold them weakly, so that a strategy whose models are gone is freed.
"""

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import unserializable_hook


class Handle(Protocol):
    """The object that torch returns for a registered hook."""

    def remove(self) -> None:
        """Take the hook out again."""


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method for as long as its object lives, and returns None afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        if alive is None:
            return None
        return alive(*args)

    return call


def on_module_built(see: Callable[[nn.Module], None]) -> list[Handle]:
    """Call see(module) whenever any module gets a parameter, a buffer or a child that is not None.

    Deep-copied children have no parameter registered through the hook: walk from the module that holds them.
    """

    def registered(module: nn.Module, name: str, value: Any) -> None:
        if value is not None:  # as a loss without class weights registers
            see(module)

    return [
        module_hooks.register_module_parameter_registration_hook(registered),
        module_hooks.register_module_buffer_registration_hook(registered),
        module_hooks.register_module_module_registration_hook(registered),
    ]


def on_buffer_registered(see: Callable[[nn.Module, str], None]) -> Handle:
    """Call the method see(module, name) whenever any module gets a buffer, unless the method's object is gone."""
    weak = weakref.WeakMethod(see)

    def registered(module: nn.Module, name: str, value: Any) -> None:
        method = weak()
        if method is not None and value is not None:
            method(module, name)

    handle: Handle = module_hooks.register_module_buffer_registration_hook(registered)
    return handle


@contextmanager
def on_built(
    see_module: Callable[[nn.Module], None],
    see_parameter: Callable[[nn.Parameter], None],
    see_optimizer: Callable[[Optimizer], None],
) -> Iterator[None]:
    """Call see_module, see_parameter or see_optimizer for each object that is built, copied or loaded in the block.

    A module may be seen several times: whenever it gets a parameter, a buffer or a child.
    """
    handles = on_module_built(see_module)
    try:
        with (
            _on_copied(see_module),
            _on_parameter_made(see_parameter),
            on_optimizer_built(see_optimizer),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _on_copied(see: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `see` for every deep-copied or unpickled module of the block.

    torch has no hook for these modules, so the method that sets their state is wrapped during the block.
    """
    set_state = nn.Module.__setstate__

    def wrapped(module: nn.Module, state: Any) -> None:
        set_state(module, state)  # type: ignore[no-untyped-call]
        see(module)

    nn.Module.__setstate__ = wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]


@contextmanager
def _on_parameter_made(see: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `see` for every parameter that is made in the block. torch's method is wrapped for this."""
    make = nn.Parameter.__new__

    def wrapped(
        cls: type[nn.Parameter],
        *args: Any,
        **kwargs: Any,
    ) -> nn.Parameter:
        parameter = make(cls, *args, **kwargs)
        see(parameter)
        return parameter

    nn.Parameter.__new__ = staticmethod(wrapped)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = staticmethod(make)  # type: ignore[method-assign]


@contextmanager
def on_optimizer_built(see: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call `see` for every optimizer that is built in the block or gets another group. torch's method is wrapped."""
    add_group = Optimizer.add_param_group

    def wrapped(
        optimizer: Optimizer,
        param_group: dict[str, Any],
    ) -> None:
        add_group(optimizer, param_group)
        if optimizer not in _parts:
            see(optimizer)

    Optimizer.add_param_group = wrapped  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Optimizer.add_param_group = add_group  # type: ignore[method-assign]


#: A function that sees the call of a module: the module, and its positional arguments.
SeeCall = Callable[[nn.Module, tuple[Any, ...]], None]
#: Functions that see the calls of modules, by number. torch has one function that calls modules.
_watchers: dict[int, SeeCall] = {}
_watcher_numbers = itertools.count()
_module_call = nn.Module.__call__
#: Whether `_module_call` is torch's own function, and no other library's.
_is_torchs_call = _module_call is nn.Module._wrapped_call_impl
#: Shows a call to the watchers; torch.compile leaves it alone.
_show: SeeCall | None = None


class _Watcher:
    """Removes a watcher of calls."""

    def __init__(self, number: int) -> None:
        self._number = number

    def remove(self) -> None:
        """Stop watching. Without the last watcher, modules are called by torch's own function again."""
        _watchers.pop(self._number, None)
        _outer_watchers.pop(self._number, None)
        _choose_call()


def before_any_forward(see: SeeCall) -> Handle:
    """Call see(module, args) before the call of every module; of a compiled one, with the module that was compiled.

    torch's hook for all modules is not used: torch.compile traces it, and it does not fire for modules that
    `Module.compile` has changed. Watching slows every call: remove the handle soon.
    """
    global _show
    if _show is None:
        _show = torch.compiler.disable(_show_call)  # type: ignore[no-untyped-call]
    number = next(_watcher_numbers)
    _watchers[number] = see
    _choose_call()
    return _Watcher(number)


def _is_exporting() -> bool:
    """Return whether torch.export traces the call that is running; torch before 2.7 cannot tell."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return is_exporting is not None and bool(is_exporting())


def _choose_call() -> None:
    """Choose the function that modules are called by: for the watchers, or torch's own if there are none.

    A function that another library has set is left alone.
    """
    if nn.Module.__call__ not in (_module_call, _watched_call, _outer_watched_call):
        return
    if _watchers:
        nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    elif _outer_watchers:
        nn.Module.__call__ = _outer_watched_call  # type: ignore[method-assign]
    else:
        nn.Module.__call__ = _module_call  # type: ignore[method-assign]


def _show_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    for see in list(_watchers.values()):
        see(getattr(module, "_orig_mod", module), args)


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _show is not None and not _is_exporting():
        _show(module, args)
    return _outer_watched_call(module, *args, **kwargs)


def _outer_watched_call(
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _outer_call.is_running and _is_torchs_call and module._compiled_call_impl is None:
        # as torch's own call does, with one frame less
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling() or _outer_call.is_running or not _outer_watchers:
        return _module_call(module, *args, **kwargs)
    _keep_uncompiled()
    return _call_shown(module, args, kwargs)


def _keep_uncompiled() -> None:
    """Let torch.compile, once it is used, skip `_outer_watched_call` and compile the functions that it calls."""
    if not _outer_call.is_kept_uncompiled and "torch._dynamo.eval_frame" in sys.modules:
        sys.modules["torch._dynamo.eval_frame"].skip_code(_outer_watched_call.__code__)
        _outer_call.is_kept_uncompiled = True


class _OuterCall(threading.local):
    """Whether this thread is in the call of a module, so that calls inside it are not shown."""

    is_running = False
    is_kept_uncompiled = False


class OuterWatcher(Protocol):
    """Sees the outermost calls of modules, not the calls that a module makes of its children."""

    def before_call(self, module: nn.Module, inputs: Any) -> Any:
        """Return an object for `after_call`. `inputs` are the positional and the keyword arguments of the call."""

    def after_call(
        self,
        module: nn.Module,
        before: Any,
        output: Any,
    ) -> None:
        """See the output of the module. `before` is the object that `before_call` has returned."""


#: The call that a thread is in, for all watchers.
_outer_call = _OuterCall()
#: Watchers that see the outermost calls, by number. They show themselves in the same function of torch.
_outer_watchers: "dict[int, weakref.ref[OuterWatcher]]" = {}


def around_outer_calls(watcher: OuterWatcher) -> Handle:
    """Show the outermost calls of modules to a watcher, which is held weakly. Calls inside torch.compile are not seen.

    Cost: about 0.2 us for the call of each module inside.
    """
    number = next(_watcher_numbers)
    _outer_watchers[number] = weakref.ref(watcher)
    _choose_call()
    return _Watcher(number)


def _call_shown(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    inner_module = getattr(module, "_orig_mod", module)
    inputs = (args, kwargs)
    seen_before: list[tuple[OuterWatcher, Any]] = []
    for reference in list(_outer_watchers.values()):
        watcher = reference()
        if watcher is not None:
            seen_before.append((watcher, watcher.before_call(inner_module, inputs)))
    _outer_call.is_running = True
    try:
        output = _module_call(module, *args, **kwargs)
    finally:
        _outer_call.is_running = False
    for watcher, before in seen_before:
        watcher.after_call(inner_module, before, output)
    return output


class BackwardWatcher(Protocol):
    """Sees the backwards of the process begin and end, in the thread that calls them."""

    def begin_backward(self, creates_graph: bool) -> None:
        """See that a backward is about to begin. `creates_graph` says whether gradients will have graphs."""

    def end_backward(self, is_whole: bool) -> None:
        """See that the backward has ended. `is_whole` says whether it has returned, and has not raised."""


#: Watchers that see backwards, by number. The first ones follow the program's loop; the others, nearer to the backward,
#: sum gradients. torch has one function that all backwards go through.
_loop_watchers: "dict[int, weakref.ref[BackwardWatcher]]" = {}
_gradient_watchers: "dict[int, weakref.ref[BackwardWatcher]]" = {}
#: Name, in torch.autograd, of the function that all calls of autograd from Python go through.
_ENGINE = "_engine_run_backward"
_run_backward = torch.autograd.graph._engine_run_backward


def around_any_backward(watcher: BackwardWatcher) -> None:
    """Show each `backward` to a watcher, which is held weakly; not torch.autograd.grad, which writes no gradients.

    torch has no hook for backwards, so the function that all calls of autograd from Python go through is wrapped.
    """
    _loop_watchers[next(_watcher_numbers)] = weakref.ref(watcher)
    vars(torch.autograd)[_ENGINE] = _watched_backward


def around_gradients(watcher: BackwardWatcher) -> None:
    """Show each `backward` to a watcher that begins after those of `around_any_backward`, and ends before them."""
    number = next(_watcher_numbers)

    def forget(_: object) -> None:
        _gradient_watchers.pop(number, None)

    _gradient_watchers[number] = weakref.ref(watcher, forget)
    vars(torch.autograd)[_ENGINE] = _watched_backward


def _watched_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("accumulate_grad"):
        return _run_backward(roots, *args, **kwargs)
    outer_watchers = _alive(_loop_watchers)
    creates_graph = bool(args[2])
    for watcher in outer_watchers:
        watcher.begin_backward(creates_graph)
    is_whole = False
    try:
        result = _run_summed(creates_graph, roots, args, kwargs)
        is_whole = True
    finally:
        for watcher in outer_watchers:
            watcher.end_backward(is_whole)
    return result


def _run_summed(
    creates_graph: bool,
    roots: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    started_watchers: list[BackwardWatcher] = []
    try:
        for watcher in _alive(_gradient_watchers):
            watcher.begin_backward(creates_graph)
            started_watchers.append(watcher)
        result = _run_backward(roots, *args, **kwargs)
    except BaseException:
        for watcher in started_watchers:
            watcher.end_backward(is_whole=False)
        raise
    for watcher in started_watchers:
        watcher.end_backward(is_whole=True)
    return result


def _alive(watchers: "dict[int, weakref.ref[BackwardWatcher]]") -> list[BackwardWatcher]:
    alive: list[BackwardWatcher] = []
    for reference in list(watchers.values()):
        watcher = reference()
        if watcher is not None:
            alive.append(watcher)
    return alive


def call_at_gradient_of(
    tensor: Tensor,
    call: Callable[[], None],
) -> None:
    """Call a function when a backward reaches a tensor. The tensor holds the function."""
    tensor.register_hook(unserializable_hook(lambda gradient: call()))  # type: ignore[no-untyped-call]


def is_transforming() -> bool:
    """Return whether torch.func, such as vmap or jacrev, or jit.trace makes the call that is running."""
    if torch._C._get_tracing_state() is not None:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


_call_of_module = nn.Module._call_impl.__code__


def is_in_forward() -> bool:
    """Return whether a module is being called by the code that is running. Cost: a walk over its frames."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _call_of_module:
        frame = frame.f_back
    return frame is not None


@contextmanager
def as_plain_code() -> Iterator[None]:
    """Run the block as if no transform, trace or mode of torch were active, such as vmap, jit.trace or a fake mode."""
    trace = torch._C._get_tracing_state()
    with torch._C._DisableFuncTorch(), _disable_current_modes(), torch._C.DisableTorchFunction():
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


def at_gradient_of(tensor: Tensor, see: Callable[[], None]) -> None:
    """Call the method `see` when a backward reaches a tensor such as a loss, unless the method's object is gone."""
    weak = weakref.WeakMethod(see)

    def call(gradient: Tensor) -> None:
        method = weak()
        if method is not None:
            method()

    tensor.register_hook(unserializable_hook(call))  # type: ignore[no-untyped-call]


def after_accumulation(
    parameter: nn.Parameter,
    see: Callable[[Any], None],
) -> None:
    """Call see(parameter) when a backward has written `parameter.grad`; the parameter holds the function."""
    parameter.register_post_accumulate_grad_hook(see)  # type: ignore[no-untyped-call]


def is_watched(parameter: nn.Parameter) -> bool:
    """Return whether a hook of `after_accumulation` takes part in the backwards that reach a parameter."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_in_backward() -> bool:
    """Return whether a backward makes the call that is running, also in autograd's threads for devices."""
    return int(torch._C._current_graph_task_id()) != -1


def is_step_of_scaler() -> bool:
    """Return whether an enabled GradScaler makes the step that is running. It skips steps whose gradients overflow."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


_compiler_of_frames: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def is_compiled() -> bool:
    """Return whether the function that runs this backward was given to torch.compile, which would trace hooks too."""
    return _compiler_of_frames() not in (None, False)


def note_step(optimizer: Optimizer) -> None:
    """Let torch's learning rate schedules know that an optimizer steps elsewhere: they warn if one never steps."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


#: The optional argument of a step: it computes a loss and its gradients, and returns the loss.
Closure = Callable[[], Any]
#: A function that sees the closure of an optimizer's step, and may return another closure.
SeeStep = Callable[[Optimizer, Closure | None], Closure | None]


#: Functions that see the steps of all optimizers, before and after them, by number. torch gets one hook for each of the
#: two tables, once and for all: strategies may be freed while torch runs its hooks, whose list must not change then.
_before_steps: dict[int, SeeStep] = {}
_after_steps: dict[int, Callable[[Optimizer], None]] = {}
_step_numbers = itertools.count()


class _StepHandle:
    """Removes a function that sees steps."""

    def __init__(self, table: dict[int, Any], number: int) -> None:
        self._table = table
        self._number = number

    def remove(self) -> None:
        """Stop showing steps to the function."""
        self._table.pop(self._number, None)


#: Optimizers that are a part of another optimizer: no strategy sees how they are built, nor their steps.
_parts: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def make_part(
    kind: type[Optimizer],
    parameters: Any,
    **options: Any,
) -> Optimizer:
    """Return an optimizer that no strategy sees."""
    part_optimizer = kind.__new__(kind)
    _parts.add(part_optimizer)
    kind.__init__(part_optimizer, parameters, **options)
    return part_optimizer


def bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of a class as it is written, without the hooks and the profiler's range that torch adds."""
    step: Callable[[Optimizer], Any] = kind.step
    if hasattr(step, "hooked"):
        step = getattr(step, "__wrapped__", step)
    return step


def before_any_step(see: SeeStep) -> Handle:
    """Call the method see(optimizer, closure) before the step of every optimizer of the process.

    The step is made with the closure that the method returns. If it returns None, the step keeps its closure.
    """
    return _register(_before_steps, _weakly(see))


def after_any_step(see: Callable[[Optimizer], None]) -> Handle:
    """Call the method see(optimizer) after the step of every optimizer of the process."""
    return _register(_after_steps, _weakly(see))


def _register(
    table: dict[int, Any],
    see: Callable[..., Any],
) -> _StepHandle:
    number = next(_step_numbers)
    table[number] = see
    return _StepHandle(table, number)


def _show_before_step(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the step's arguments with another closure; None to leave them as they are."""
    # a part's step may call its base class's, which is hooked; the step of the whole optimizer is shown already
    if optimizer in _parts:
        return None
    positional_closure = args[1] if len(args) > 1 else None
    original_closure = kwargs.get("closure", positional_closure)
    closure = original_closure
    for see in list(_before_steps.values()):
        replacement = see(optimizer, closure)
        if replacement is not None:
            closure = replacement
    if closure is original_closure:
        return None
    return args[:1], {**kwargs, "closure": closure}


def _show_after_step(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
) -> None:
    if optimizer in _parts:
        return
    for see in list(_after_steps.values()):
        see(optimizer)


register_optimizer_step_pre_hook(_show_before_step)
register_optimizer_step_post_hook(_show_after_step)
