"""Rekindle in LlamaIndex: its library as a retriever, its model as an LLM, in the same process.

    session = Session("smollm2")
    Settings.llm = RekindleLLM(session=session, max_tokens=128)
    engine = RetrieverQueryEngine.from_args(RekindleNodeRetriever(session, top_k=3))
    print(engine.query("What does the ferry cost?"))

The caller closes the session.
"""

from llama_index_rekindle.llms import RekindleLLM
from llama_index_rekindle.retrievers import RekindleNodeRetriever

__all__ = ["RekindleLLM", "RekindleNodeRetriever"]
