"""The default model's tokenizer, loaded once."""

import pytest

from cluster.models import DEFAULT_MODEL, resolve
from router.gateway.text import Text


@pytest.fixture(scope="session")
def text() -> Text:
    return Text(resolve(DEFAULT_MODEL))
