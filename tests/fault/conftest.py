"""What the tests of losses share."""

from __future__ import annotations

import pytest

from tests.support import campaign


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> campaign.Undisturbed:
    """The run that all runs of `campaign.train` must have come to, up to 400 steps."""
    return campaign.undisturbed(tmp_path_factory.mktemp("undisturbed"), steps=400)
