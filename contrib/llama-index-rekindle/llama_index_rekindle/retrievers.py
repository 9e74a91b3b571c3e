"""A session's library as a retriever of LlamaIndex."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from rekindle import Session
from rekindle.core.document import title_above
from rekindle.knowledge.retrieve import Hit, Retrieval, check_retrieval

# Metadata that a model is not shown: it means nothing to it, and would cost tokens.
_HIDDEN = ["source", "document", "chunk"]


class RekindleNodeRetriever(BaseRetriever):
    """Passages of a session's library, the best first, as nodes with scores.

    Their metadata has source, title, document (the name to `forget` it by) and chunk; a model is shown the title only.
    """

    def __init__(
        self,
        session: Session,
        *,
        top_k: int = 5,
        retrieval: Retrieval = "fused",
        tenant: str | None = None,
        cache_salt: str | None = None,
        **base: Any,
    ) -> None:
        """Retrieve `top_k` passages by BM25 and embeddings (fused), weighted, bm25 or embedding, from the session's
        own library unless a tenant or salt is given. `base` goes to LlamaIndex's BaseRetriever.

        Raises `InvalidSetting`; retrieving raises `NothingKnown` if nothing was ingested.
        """
        check_retrieval(top_k, retrieval)
        super().__init__(**base)
        self._session = session
        self._top_k = top_k
        self._retrieval = retrieval
        self._tenant, self._cache_salt = tenant, cache_salt

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._session.knowledge.search(
            query_bundle.query_str, self._top_k, self._retrieval, tenant=self._tenant, cache_salt=self._cache_salt
        )
        return [NodeWithScore(node=_node(hit), score=hit.score) for hit in found.hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _node(hit: Hit) -> TextNode:
    chunk = hit.chunk
    hidden = [*_HIDDEN] if title_above(chunk.title, chunk.passage.shown) else [*_HIDDEN, "title"]
    return TextNode(
        id_=f"{chunk.name}:{chunk.place}",  # stable while the document does not change
        text=chunk.passage.shown,
        metadata={"source": chunk.source, "title": chunk.title, "document": chunk.name, "chunk": chunk.id},
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
    )
