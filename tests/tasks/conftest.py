"""Rows of data files, read in the process of the test."""

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO

import pytest

from ftis_node.errors import TaskError
from ftis_node.tasks import dataset_rows


@pytest.fixture
def rows_in_this_process(monkeypatch):
    """Read rows without a child process, which takes a third of a second."""

    def read(source, limit_s, instead):
        with redirect_stdout(StringIO()) as rows, redirect_stderr(StringIO()) as errors:
            code = dataset_rows._run(json.dumps(asdict(source)))
        if code:
            raise TaskError(errors.getvalue().strip())
        return rows.getvalue().encode()

    monkeypatch.setattr(dataset_rows, "_output_of_child", read)
