"""Function: an operation with a forward and a backward of one's own.

    class Square(Function):
        @staticmethod
        def forward(ctx, x):              # arrays come in place of Tensors
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):          # one gradient for each output
            (x,) = ctx.saved
            return 2 * x * grad           # one (or None) for each positional argument

    y = Square.apply(x)

A Function with `collective = True` communicates in backward: while gradients are on it is recorded
whatever its inputs want, and every backward runs it, so that no rank waits for another in vain.
"""

from typing import Any, ClassVar

import numpy as np

from mpipar.arrays import Array, is_device
from mpipar.autograd.record import outputs_of, wrap
from mpipar.autograd.tape import Node, Source, state
from mpipar.autograd.tensor import Tensor, is_float, source_of
from mpipar.errors import GraphError, explain


class Context:
    """What forward leaves for backward; any attribute may be set.

    saved: what `save_for_backward` kept; `saved_tensors`, PyTorch's name, is the same.
    needs_input_grad: for each positional argument, whether its gradient is wanted.
    """

    saved: tuple[Array, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *arrays: Array) -> None:
        """Keep arrays until backward, as `ctx.saved`."""
        self.saved = arrays

    @property
    def saved_tensors(self) -> tuple[Array, ...]:
        """PyTorch's name of `saved`: the arrays that were kept."""
        return self.saved


class Function:
    """Base of operations written by hand; see the module's docstring for an example.

    collective: backward communicates, so it runs on every rank in every backward.
    """

    collective: ClassVar[bool] = False

    @staticmethod
    def forward(ctx: Any, *args: Any, **options: Any) -> Any:
        """Return an array or a tuple of arrays; Tensor arguments arrive as arrays."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return one gradient (an array or None) for each positional argument of forward.

        grads: one array for each output, zeros where no gradient arrived.  They and what is
        returned are not written to by the engine.
        """
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any, **options: Any) -> Any:
        """Run forward and record the node; returns a Tensor, or a tuple of Tensors.

        Raises GraphError if a keyword argument wants a gradient: only positional ones get one.
        """
        for name, option in options.items():
            if isinstance(option, Tensor):
                if option.requires_grad:
                    rule = "an argument that wants a gradient must be positional"
                    raise GraphError(
                        explain(name, cls.__name__, rule, "Pass it by position, or detach it")
                    )
                options[name] = option.data
        ctx = Context()
        sources = tuple([source_of(arg) for arg in args])
        ctx.needs_input_grad = tuple([source is not None for source in sources])
        if cls.collective:
            state.collective_calls += 1
        result = cls.forward(
            ctx, *[a.data if isinstance(a, Tensor) else a for a in args], **options
        )
        single = not isinstance(result, tuple)
        datas = tuple([_array(data) for data in ((result,) if single else result)])
        outputs = cls._record(ctx, args, sources, datas)
        return outputs[0] if single else outputs

    @classmethod
    def _record(
        cls, ctx: Context, args: tuple[Any, ...], sources: tuple[Source, ...],
        datas: tuple[Array, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the outputs, with a node if there is anything to differentiate."""
        wanted = cls.collective or any(ctx.needs_input_grad)
        if not (state.enabled and wanted and any(is_float(data.dtype) for data in datas)):
            return tuple([wrap(data) for data in datas])
        expected = [(a.data.shape, a.data.dtype) if isinstance(a, Tensor) else None for a in args]
        node = Node(sources, lambda *grads: cls._vjp(ctx, sources, expected, grads))
        if cls.collective:
            node.collective = True
            state.tape.add(node)
        return outputs_of(node, datas)

    @classmethod
    def _vjp(
        cls, ctx: Context, sources: tuple[Source, ...], expected: list[Any],
        grads: tuple[Array, ...],
    ) -> list[Any]:  # fmt: skip
        """Run backward and check what it returns."""
        result = cls.backward(ctx, *grads)
        news = list(result) if isinstance(result, tuple | list) else [result]
        if len(news) != len(sources):
            rule = f"one (or None) must come for each of the {len(sources)} positional arguments"
            raise GraphError(
                explain(f"{cls.__name__}.backward", f"{len(news)} results", rule, "Return a tuple")
            )
        for i, new in enumerate(news):
            if sources[i] is None or new is None:
                news[i] = None
                continue
            new = _array(new.data if isinstance(new, Tensor) else new)
            shape, dtype = expected[i]
            if new.shape != shape:
                raise GraphError(
                    explain(f"{cls.__name__}.backward, result {i}", new.shape,
                            f"it must have the argument's shape, {shape}", "Return that shape")
                )  # fmt: skip
            # A view is never written to: backward may return what others hold.
            news[i] = new.view() if new.dtype == dtype else new.astype(dtype)
        return news


def _array(data: Any) -> Array:
    return data if type(data) is np.ndarray or is_device(data) else np.asarray(data)
