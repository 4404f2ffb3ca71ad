"""KDA on a GPU through the tests of the CPU (mirror.py): the float64 oracle with its tolerances, the bitwise invariants, the public faults.

Calls are exact unless a test says otherwise; what the faster ring form may do is tested against the oracle too."""

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import kda_cases  # noqa: E402
import mirror  # noqa: E402
import test_kda  # noqa: E402
import test_kda_faults  # noqa: E402
import test_kda_names  # noqa: E402

import specstate.kda as kda  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def calls_run_on_the_gpu():
    with pytest.MonkeyPatch.context() as patch:
        for name in mirror.FUNCTIONS:
            patch.setattr(kda, name, mirror.mirrored(getattr(kda, name), mirror.Torch(), exact=True))
        yield


@pytest.mark.parametrize("dtype", [kda_cases.F32, kda_cases.BF16], ids=str)
@pytest.mark.parametrize("shape", test_kda.SHAPES + [dict(K=128, V=128), dict(K=128, V=128, lens=[16, 3, 9], N=3)], ids=str)
def test_fast_ring_form_against_oracle(shape, dtype):
    """Section 4 (b) for the form without `exact`: outputs from the q, k, v that were used, within one unit in a thousandth of the elements."""
    p = kda_cases.case(1, **shape)
    a = kda_cases.act(p, dtype)
    a |= {x: np.ascontiguousarray(a[x].swapaxes(1, 2)).swapaxes(1, 2) for x in ("cs_q", "cs_k", "cs_v")}
    rings, _, conv = kda_cases.buffers(a)
    conv = {k: np.full((*v.shape[:2], 3, v.shape[2]), np.nan, v.dtype).swapaxes(2, 3) for k, v in conv.items()}
    out = kda_cases.call(a, rings=rings, exact=False, **conv)
    want, _ = kda_cases.fed_oracle(p, *kda_cases.used_channels(a), quant=dtype == kda_cases.BF16)
    if dtype == kda_cases.BF16:
        off = kda_cases.ulps(out, want.astype(kda_cases.BF16))
        assert off.max(initial=0) <= 1 and (off > 0).mean() <= 1e-3
    else:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max()


globals().update(mirror.taken([test_kda, test_kda_faults, test_kda_names]))
