"""The command line in the test's own process, and files for it."""

from __future__ import annotations

import json

import numpy as np
from click.testing import CliRunner

from cupyflash.cli import main


def run(*words, code=0):
    """The output of a command that ends with that exit code, without a traceback."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def report(*words, code=0):
    return json.loads(run(*words, "--json", code=code))


def load(path):
    with np.load(path) as archive:
        return dict(archive)
