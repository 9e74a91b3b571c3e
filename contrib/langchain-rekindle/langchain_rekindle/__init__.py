"""Rekindle in LangChain: its library as a retriever, its model as a chat model, in the same process.

    session = Session("smollm2")
    retriever = RekindleRetriever(session=session, top_k=3)          Documents, the best first
    chat = ChatRekindle(session=session, max_tokens=128)
    chat.invoke(question, documents=retriever.invoke(question))      quoted as `Session.ask` does

The caller closes the session.
"""

from langchain_rekindle.chat_models import ChatRekindle
from langchain_rekindle.retrievers import RekindleRetriever

__all__ = ["ChatRekindle", "RekindleRetriever"]
