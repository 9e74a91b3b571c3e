"""The OpenAPI document is true: whatever it allows is answered as it says, whatever it does not is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from rekindle.engine.fake import FakeEngine
from rekindle.server.openapi import openapi_document
from rekindle.server.routes import ENDPOINTS
from rekindle.server.serve import Server
from rekindle.session.session import Session
from rekindle.settings import ServerSettings
from tests.server.soak import tiny_embedder

pytestmark = pytest.mark.exhaustive

ENDLESS = "/v1/rekindle/live"
schema = schemathesis.openapi.from_dict(openapi_document(ENDPOINTS)).exclude(path=ENDLESS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model knows one name: what is generated seldom hits it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_HOME", str(tmp_path_factory.mktemp("home")))
        embedder = tiny_embedder(tmp_path_factory.mktemp("embedder"))
        session = Session(FakeEngine(), cache=tmp_path_factory.mktemp("cache"), parallel=4, embedder=embedder)
        session.ingest(documents=["A lamp is lit at dusk.", {"text": "Tea is brewed at five.", "source": "tea"}])
        with Server(session, ServerSettings(port=0, max_reply=2)).running() as url:
            yield url


@schema.parametrize()
@settings(
    max_examples=15,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_answers_as_it_is_described(case: schemathesis.Case, url: str) -> None:
    """All checks of the library but one: not everything of the right form makes sense."""
    case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance], timeout=60)
