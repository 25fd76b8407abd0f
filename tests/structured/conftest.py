"""What these tests share: the default model's vocabulary, and both engines over it."""

import pytest
from benchmarks.json_schema_suite import vocabulary as of_the_default_model

from quire.messages import Vocabulary
from quire.structured.running.trial import Setup, Trial


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return of_the_default_model()[1]


@pytest.fixture(scope="session")
def trial(vocabulary) -> Trial:
    return Trial(Setup("auto", vocabulary, timeout_s=10.0))
