"""The folder of the toy model."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage.toy import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("toy"))
