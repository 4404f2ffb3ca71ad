"""Runs sglang's own kernel tests against the replacement: ``pytest -p specstate.sglang.pytest_plugin test_hisparse.py``.

Installs before collection, since the tests import the functions by name; ``SPECSTATE_SGLANG=hisparse`` restricts it as in a server.
"""

import os

from . import install, installed, uninstall


def pytest_configure(config):
    wanted = os.environ.get("SPECSTATE_SGLANG", "1").strip()
    if wanted != "0":
        install(None if wanted in ("", "1") else wanted)


def pytest_report_header(config):
    return "specstate in the place of sglang: " + (", ".join(installed()) or "nothing")


def pytest_unconfigure(config):
    uninstall()
