"""A session's library as a retriever of LangChain."""

from __future__ import annotations

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from rekindle import Session
from rekindle.knowledge.retrieve import Retrieval


class RekindleRetriever(BaseRetriever):
    """Passages of a session's library, the best first, as Documents.

    session    whose library is searched
    top_k      number of passages
    retrieval  how they are found: fused (BM25 and embeddings), weighted, bm25, embedding
    tenant, cache_salt   of the library; default: the session's own

    Their metadata has source, title, document (the name to `forget` it by), chunk and score. Raises `NothingKnown`
    if nothing was ingested.
    """

    session: Session = Field(exclude=True, repr=False)
    top_k: int = 5
    retrieval: Retrieval = "fused"
    tenant: str | None = None
    cache_salt: str | None = None

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002  (LangChain gives it; its async variant runs this in a thread)
    ) -> list[Document]:
        found = self.session.knowledge.search(
            query, self.top_k, self.retrieval, tenant=self.tenant, cache_salt=self.cache_salt
        )
        return [
            Document(
                id=f"{hit.chunk.name}:{hit.chunk.place}",  # stable while the document does not change
                page_content=hit.chunk.passage.shown,
                metadata={
                    "source": hit.chunk.source,
                    "title": hit.chunk.title,
                    "document": hit.chunk.name,
                    "chunk": hit.chunk.id,
                    "score": hit.score,
                },
            )
            for hit in found.hits
        ]
