"""What torch can make of a tensor that DLPack does not show: the tests of the CPU with this machine's torch, and the negative bit on the GPU."""

import conftest
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import gpu_calls  # noqa: E402
import torch  # noqa: E402
from calls import operation, replace  # noqa: E402
from test_torch_tensors import *  # noqa: E402, F403

import specstate  # noqa: E402
from specstate import draft_kv  # noqa: E402


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_the_negative_bit_is_refused_on_the_gpu(name):
    call = gpu_calls.on_gpu(name)
    operation(name)(**call)
    for path, x in gpu_calls.tensors(call):
        if x.is_floating_point() and x.numel():
            wrong = replace(call, path, torch.complex(x, -x).conj().imag)
            can, why = specstate.supports(name, **wrong)
            assert not can and "negative bit" in why
            with pytest.raises(ValueError) as caught:
                operation(name)(**wrong)
            assert str(caught.value) == why


def test_weights_with_the_negative_bit_are_refused():
    with pytest.raises(ValueError, match="KvProjection: kv_weight: .* negative bit"):
        draft_kv.KvProjection(torch._neg_view(torch.ones(1, 16, 16, device="cuda")))
