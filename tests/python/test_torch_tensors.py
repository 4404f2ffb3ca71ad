"""What torch can make of a tensor that DLPack does not show: each kind is refused by name or read as torch reads it, however it crosses."""

import numpy as np
import pytest
from calls import CALLS, leaves, operation, replace

import specstate

torch = pytest.importorskip("torch", reason="needs-torch: torch is no requirement")


def in_torch(name):
    call = CALLS[name]()
    for path, x in leaves(call):
        call = replace(call, path, torch.from_numpy(x))
    return call


def tensors(call):
    found = [((n, None), x) for n, x in call.items()] + [((n, i), part) for n, x in call.items() if isinstance(x, tuple) for i, part in enumerate(x)]
    return [(path, x) for path, x in found if isinstance(x, torch.Tensor)]


def imaginary(x):
    """x as the imaginary part of a conjugate: torch's way to the negative bit."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


class Derived(torch.Tensor):
    pass


class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        return False if function is torch.Tensor.is_neg else super().__torch_function__(function, types, arguments, keywords or {})


@pytest.mark.parametrize("kind", ["imaginary", "flat", "parameter", "derived", "liar"])
@pytest.mark.parametrize("name", CALLS)
def test_the_negative_bit_is_refused(name, kind):
    """At once or the long way (a NumPy array beside it), what is read and what is written, and nothing is written then."""
    make = {
        "imaginary": imaginary,
        "flat": lambda x: imaginary(x.flatten())[None][..., ::1].view(x.shape),  # other views of it
        "parameter": lambda x: torch.nn.Parameter(imaginary(x), requires_grad=False),
        "derived": lambda x: imaginary(x).as_subclass(Derived),
        "liar": lambda x: imaginary(x).as_subclass(Liar),
    }[kind]
    operation(name)(**in_torch(name))  # its types are known from here on
    call = in_torch(name)
    asked = 0
    for path, x in tensors(call):
        if not x.is_floating_point() or x.numel() == 0:
            continue
        asked += 1
        wrong = replace(call, path, make(x))
        before = {p: t.clone() for p, t in tensors(call)}
        called = path[0] if path[1] is None else f"{path[0]}.{type(call[path[0]])._fields[path[1]]}" if hasattr(call[path[0]], "_fields") else path[0]
        can, why = specstate.supports(name, **wrong)
        assert not can and why.startswith(f"{name}: {called}: expected ") and "negative bit" in why, (path, can, why)
        other = next(p for p, t in tensors(call) if p != path)
        for crossing in (wrong, replace(wrong, other, dict(tensors(wrong))[other].numpy())):
            with pytest.raises(ValueError) as caught:
                operation(name)(**crossing)
            assert str(caught.value) == why
        for p, t in tensors(call):
            assert torch.equal(t, before[p]), p
    floats = [x for _, x in leaves(CALLS[name]()) if x.dtype.kind == "f" and x.size]
    assert asked == len(floats)


@pytest.mark.parametrize("name", CALLS)
def test_the_bit_by_hand_is_refused_on_the_long_way(name):
    """`torch._neg_view`, which torch offers to itself alone, of any dtype."""
    call = in_torch(name)
    for path, x in tensors(call):
        if x.dtype == torch.bool or x.numel() == 0:
            continue
        can, why = specstate.supports(name, **replace(call, path, torch._neg_view(-x)))
        assert not can and (path[0] in why or path[0] == "out") and "negative bit" in why


@pytest.mark.parametrize("name", ["decode", "plan_verify_lengths"])
def test_the_negative_bit_of_one_number(name):
    """Strides of one element say nothing."""
    call = {"decode": lambda: CALLS["decode"](n=1, t=1), "plan_verify_lengths": lambda: CALLS["plan_verify_lengths"](b=1, g=1)}[name]()
    for path, x in leaves(call):
        call = replace(call, path, torch.from_numpy(x))
    call = {**call, **({"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)} if name == "decode" else {})}
    operation(name)(**call)
    ones = [(path, x) for path, x in tensors(call) if x.is_floating_point() and x.numel() == 1]
    assert ones
    for path, x in ones:
        for wrong in (imaginary(x), imaginary(x.reshape(())).reshape(x.shape)):
            with pytest.raises(ValueError, match=f"^{name}: {path[0]}: expected .* negative bit"):
                operation(name)(**replace(call, path, wrong))


@pytest.mark.parametrize("name", CALLS)
def test_requires_grad_is_not_looked_at(name):
    """Of leaves and of results, read and written: the numbers are the same, and nothing becomes part of a graph."""
    want, call = in_torch(name), in_torch(name)
    operation(name)(**want)
    for path, x in tensors(call):
        if x.is_floating_point():
            call = replace(call, path, x.requires_grad_())
    result = operation(name)(**call)
    for (path, x), (_, y) in zip(tensors(want), tensors(call), strict=True):
        assert torch.equal(x, y.detach()) and y.is_leaf, path
    for x in result if isinstance(result, tuple) else [result]:
        assert x is None or x.grad_fn is None


# kind -> a tensor of x's shape that has no memory with its numbers
def without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.masked import masked_tensor

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_, **__):
            raise NotImplementedError

    def emptied(x):
        x = x.clone()
        x.untyped_storage().resize_(0)
        return x

    return {
        "meta": lambda x: x.to("meta"),
        "sparse": lambda x: x.to_sparse(),
        "compressed": lambda x: x.to_sparse_csr(),
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": lambda x: torch.nested.nested_tensor(list(x)),
        "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "masked": lambda x: masked_tensor(x, x > 0.5),
        "fake": lambda x: FakeTensorMode().from_tensor(x),
        "functional": torch._to_functional_tensor,
        "zero": lambda x: torch._efficientzerotensor(x.shape),
        "wrapper": Wrapper,
        "emptied": emptied,
        "complex": lambda x: torch.complex(x, x),
        "conjugate": lambda x: torch.complex(x, x).conj(),
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of its prototypes
@pytest.mark.parametrize("kind", without_memory())
@pytest.mark.parametrize("argument", ["confidences", "lagged_confidences"])
def test_what_has_no_memory_is_refused(kind, argument):
    from specstate import accept

    call = in_torch("plan_verify_lengths")
    call["lagged_confidences"] = call["confidences"].clone()
    accept.plan_verify_lengths(**call)
    wrong = {**call, argument: without_memory()[kind](call[argument].clone())}
    for crossing in (wrong, {**wrong, "max_lens": np.ones(2, np.int32)}):
        with pytest.raises(ValueError, match=f"^plan_verify_lengths: {argument}: expected "):
            accept.plan_verify_lengths(**crossing)


def test_what_is_written_where_several_names_share_memory():
    from specstate import accept

    call = in_torch("plan_verify_lengths")
    want = accept.plan_verify_lengths(**call).clone()
    origin = torch.full((2,), -7, dtype=torch.int32)
    lazy = torch._lazy_clone(origin)  # copied when somebody writes: so now
    assert torch.equal(accept.plan_verify_lengths(**{**call, "out": lazy}), want) and origin.tolist() == [-7, -7]
    with pytest.raises(ValueError, match="plan_verify_lengths: out: expected elements that do not share memory, got stride 0"):
        accept.plan_verify_lengths(**{**call, "out": torch.zeros(1, dtype=torch.int32).expand(2)})


class Hostile(torch.Tensor):
    """Whatever is asked of it, its class says something else."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        raise LookupError(f"asked for {function}")


@pytest.mark.parametrize("name", CALLS)
def test_the_memory_is_taken_whatever_torch_function_says(name):
    """All of a call's tensors, also where results are made like them, or the shape and the stream are read from them; and NumPy beside them."""
    want, call = in_torch(name), in_torch(name)
    results = operation(name)(**want)
    for path, x in tensors(call):
        call = replace(call, path, x.as_subclass(Hostile))
    got = operation(name)(**call)
    with torch._C.DisableTorchFunctionSubclass():
        for (path, x), (_, y) in zip(tensors(want), tensors(call), strict=True):
            assert torch.equal(x, y), path
    assert specstate.supports(name, **call) == (True, "")
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, got)), strict=True):
        if isinstance(x, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                assert torch.equal(x, y), name


@pytest.mark.filterwarnings("ignore")
def test_positions_of_the_helper():
    from test_draft_kv_helper import Rope, make_layers

    from specstate.draft_kv import FusedKVMaterializeHelper

    rope = Rope()
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    good = torch.arange(1, 4)
    for hidden in (torch.zeros((3, 24), dtype=torch.bfloat16), torch.zeros((0, 24), dtype=torch.bfloat16)):
        for wrong in (good.float(), good.bool(), good.to(torch.complex64), good.to("meta"), good.to_sparse(), good.float().as_subclass(Hostile)):
            with pytest.raises((TypeError, ValueError), match="^FusedKVMaterializeHelper: positions: expected "):
                helper.materialize(hidden, wrong, print)
