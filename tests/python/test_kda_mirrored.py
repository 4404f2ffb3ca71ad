"""tests/gpu/mirror.py where there is no GPU: the tests that it takes to one, their calls run on copies in the host's memory."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import mirror  # noqa: E402
import test_kda  # noqa: E402
import test_kda_faults  # noqa: E402
import test_kda_names  # noqa: E402

import specstate.kda as kda  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def calls_run_elsewhere():
    with pytest.MonkeyPatch.context() as patch:
        for name in mirror.FUNCTIONS:
            patch.setattr(kda, name, mirror.mirrored(getattr(kda, name), mirror.Host(), exact=True))
        yield


TESTS = mirror.taken([test_kda, test_kda_faults, test_kda_names])
globals().update(TESTS)


def test_every_name_is_taken():
    for module, names in mirror.TAKEN.items():
        for name in names.split():
            assert any(t.startswith("test_" + name) for t in TESTS), (module, name)
